"""What all routers of a model share: settings, the padding of a call, and what was routed.

Shapes: B batch, T new tokens, S tokens so far.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meta_attention.adapt.config import AdaptConfig
from meta_attention.adapt.families import Family
from meta_attention.config import MetaAttentionConfig
from meta_attention.errors import CacheError, ConfigError
from meta_attention.layers import LayerOutput
from meta_attention.layers.cache import DecodeStep, Padding
from meta_attention.layers.projections import positions_of
from meta_attention.objective import mean_over_tokens

Way = str | tuple[str, ...]
"""A kind of routing, the name of an expert for all tokens, or such names by key-value head."""
Routing = str | Mapping[int, Way]
"""For all layers, or by the index of a layer."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Which of the positions hold tokens: the same for all layers of a call."""

    mask: Tensor | None  # [B, S] boolean; None without padding
    is_padding: Tensor | None  # [B, T]
    position_ids: Tensor  # [B, T], from each row's first token
    step: DecodeStep | None  # where one token follows a cache

    @staticmethod
    def of(mask: Tensor | None, B: int, T: int, S: int, device: torch.device) -> "Layout":
        """Read a mask ``[B, S]``. Waits for the device where there is one."""
        past = S - T
        padding = None if mask is None else Padding.of(mask.bool())
        if padding is not None and padding.has_gaps and past > 0:
            raise CacheError(
                "a row must not go on after padding: windows count positions; pad prompts on the "
                "left"
            )
        known = None if padding is None else padding.is_token
        step = None
        if T == 1 and past > 0:
            position = torch.full((1,), past, device=device)
            start = None if padding is None else padding.start
            is_token = None if known is None else known[:, -1]
            step = DecodeStep(position, position + 1, start, is_token)
        return Layout(
            known,
            None if known is None else ~known[:, past:],
            positions_of(known, B, T, past, device),
            step,
        )


@dataclass
class Record:
    """Routing of the last call, layer by layer, and what the objective makes of it."""

    layers: dict[int, LayerOutput] = field(default_factory=dict)

    @property
    def kl(self) -> Tensor:
        """Of posteriors to the prior [] in nats, mean over adapted layers and tokens."""
        return self._mean([out.kl for out in self._outputs()])

    @property
    def projected_cost(self) -> Tensor:
        """Weight times cost of the experts [], mean over adapted layers and tokens."""
        return self._mean([out.projected_cost for out in self._outputs()])

    @property
    def routed_cost(self) -> Tensor:
        """Cost of the experts most believed in [], mean over adapted layers and tokens."""
        return self._mean([out.evaluated_cost for out in self._outputs()])

    @property
    def routing_entropy(self) -> Tensor:
        """Of expected weights, as a share of ln E [], mean over adapted layers and tokens."""
        return self._mean([out.routing_entropy for out in self._outputs()])

    def _outputs(self) -> list[LayerOutput]:
        if not self.layers:
            raise ConfigError("nothing was routed while this was recorded; call the model first")
        return [self.layers[index] for index in sorted(self.layers)]

    def _mean(self, values: list[Tensor]) -> Tensor:
        is_padding = self._outputs()[0].is_padding
        # layers may lie on several devices
        stacked = torch.stack([value.to(values[0].device) for value in values])
        return mean_over_tokens(stacked.mean(dim=0), None if is_padding is None else ~is_padding)


@dataclass
class Adaptation:
    """What all routers of a model share."""

    family: Family
    settings: AdaptConfig
    config: MetaAttentionConfig
    layers: tuple[int, ...]  # those that are adapted
    routing: Routing = ""  # in force instead of the config's
    record: Record | None = None
    _layout: tuple[object, ...] | None = field(default=None, repr=False)

    def routing_of(self, layer_idx: int) -> Way:
        """How a layer is routed now."""
        if isinstance(self.routing, str):
            return self.routing or self.config.routing
        return self.routing.get(layer_idx, self.config.routing)

    def layout(self, mask: Tensor | None, B: int, T: int, S: int, device: torch.device) -> Layout:
        """Read a mask once for all layers of a call, which are given the same object."""
        key = (mask, B, T, S, device, torch.is_inference_mode_enabled())
        if (
            self._layout is None
            or self._layout[0] is not mask
            or self._layout[1 : len(key)] != key[1:]
        ):
            self._layout = (*key, Layout.of(mask, B, T, S, device))
        layout: Layout = self._layout[-1]  # type: ignore[assignment]
        return layout
