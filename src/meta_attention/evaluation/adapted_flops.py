"""Operations of an adapted model for the routes it executed, beside those of its base.

Counted as in ``flops``: attention to the key, sinks included, projections and controllers apart.
The base has full attention, but for layers with a window of their own, which are counted as what
they are, adapted or not. Feed-forward layers and the head, the same in both, are left out.

Shapes: B batch, T sequence, S = past + T, G route groups, E experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from meta_attention.adapt.adaptation import Record
from meta_attention.adapt.router import Router, routers_of
from meta_attention.errors import ConfigError, ShapeError
from meta_attention.evaluation.flops import (
    Flops,
    controller_flops,
    count_attention,
    keys_in_sight,
    plan_of,
    projection_flops,
)
from meta_attention.ops.heads import check_mask
from meta_attention.ops.route_plan import RoutePlan

Executed = Mapping[int, RoutePlan | Tensor]
"""By index of the layer: query lists, or weights ``[B, T, E]`` or ``[B, T, G, E]``."""


@dataclass(frozen=True, slots=True)
class AdaptedFlops:
    """Operations summed over the batch, of the adapted model and of its base."""

    routed: Flops
    base: Flops
    routed_by_layer: tuple[float, ...]
    """Attention of every layer of the model."""
    base_by_layer: tuple[float, ...]

    @property
    def attention_share(self) -> float:
        """Attention of the adapted model, as a share of the base's."""
        return self.routed.attention / self.base.attention

    @property
    def share_by_layer(self) -> tuple[float, ...]:
        """The same of every layer."""
        pairs = zip(self.routed_by_layer, self.base_by_layer, strict=True)
        return tuple(routed / base for routed, base in pairs)

    def __add__(self, other: "AdaptedFlops") -> "AdaptedFlops":
        def add(a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(x + y for x, y in zip(a, b, strict=True))

        return AdaptedFlops(
            self.routed + other.routed,
            self.base + other.base,
            add(self.routed_by_layer, other.routed_by_layer),
            add(self.base_by_layer, other.base_by_layer),
        )


def count_adapted(
    model: nn.Module,
    executed: Executed,
    *,
    batch: int,
    length: int,
    mask: Tensor | None = None,
    past: int = 0,
) -> AdaptedFlops:
    """Operations of one forward of an adapted model.

    Args:
        model: An adapted model.
        executed: What the routers executed; a layer that is not there ran as the base has it. See
            :func:`executed_routes`.
        batch: Rows, B.
        length: Tokens of each, T.
        mask: ``[B, S]`` boolean, False for padding.
        past: Cached tokens before these.
    """
    routers = {router.layer_idx: router for router in routers_of(model)}
    unknown = sorted(set(executed) - set(routers))
    if unknown:
        raise ConfigError(
            f"executed must be of the adapted layers {sorted(routers)}, got {unknown[0]}"
        )
    check_mask(mask, batch, past + length)
    marks = torch.ones(batch, past + length, dtype=torch.bool) if mask is None else mask
    config = next(iter(routers.values())).adaptation.config
    width = 4.0 * config.num_attention_heads * config.head_dim  # scores and values of a key
    base_by_layer, routed_by_layer = [], []
    seen: dict[int | None, float] = {}  # keys, by window
    for layer_idx, window in enumerate(base_windows(model)):
        if window not in seen:
            keys = keys_in_sight(marks, window, 0, causal=config.causal)
            seen[window] = (keys * (marks != 0))[:, past:].sum().item()
        base = width * seen[window]
        base_by_layer.append(base)
        lists = executed.get(layer_idx)
        routed_by_layer.append(
            base if lists is None else _routed(routers[layer_idx], lists, marks, past)
        )
    tokens = batch * length
    projections = tokens * sum(projection_flops(config, i) for i in range(len(base_by_layer)))
    # a layer that runs as the base has it does not ask its controller
    controllers = tokens * sum(controller_flops(config, i) for i in executed)
    return AdaptedFlops(
        Flops(sum(routed_by_layer), projections, controllers),
        Flops(sum(base_by_layer), projections),
        tuple(routed_by_layer),
        tuple(base_by_layer),
    )


def executed_routes(record: Record, length: int | None = None) -> dict[int, Tensor]:
    """Weights of the layers that were routed in a recorded call, of the first ``length`` tokens."""
    return {index: out.routes.weights[:, :length] for index, out in record.layers.items()}


def base_windows(model: nn.Module) -> list[int | None]:
    """For every layer of the base, how many positions before its own a token sees; None: all."""
    adaptation = routers_of(model)[0].adaptation
    pretrained = next(m for m in model.modules() if isinstance(m, PreTrainedModel))
    config = pretrained.config
    layers = range(adaptation.config.num_hidden_layers)
    # Transformers counts the token itself
    return [
        config.sliding_window - 1 if adaptation.family.has_window(config, i) else None
        for i in layers
    ]


def _routed(router: Router, lists: RoutePlan | Tensor, marks: Tensor, past: int) -> float:
    if isinstance(lists, Tensor):
        (B, T), E, device = lists.shape[:2], lists.shape[-1], lists.device
    else:
        (B, _, E, T), device = lists.positions.shape, lists.positions.device
    if (B, past + T) != tuple(marks.shape) or len(router.experts) != E:
        raise ShapeError(
            f"layer {router.layer_idx} must have lists of {len(router.experts)} experts for "
            f"[{marks.shape[0]}, {marks.shape[1] - past}] tokens, got {E} for [{B}, {T}]"
        )
    marks, experts = marks.to(device), list(router.experts)
    return count_attention(experts, plan_of(lists, marks, past), marks)  # type: ignore[arg-type]
