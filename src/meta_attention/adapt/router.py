"""What is new in an adapted attention module: the controller, the experts, and how they are run.

The base model projects, normalises and rotates queries and keys, and writes its cache; the router
says which of them each token reads. ``forward`` is the pipeline of our own layer, without
projections.

Shapes: B batch, T new tokens, S tokens so far, D width, H heads, K key-value heads, P head width.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from meta_attention.adapt.adaptation import Adaptation, Layout, Record, Routing, Way
from meta_attention.adapt.memory import BaseMemory
from meta_attention.config import RoutingName
from meta_attention.controller import Posterior, ValueController, build_controller
from meta_attention.errors import ConfigError
from meta_attention.experts import (
    Heads,
    RecurrentExpert,
    SoftmaxExpert,
    build_experts,
    expert_costs,
)
from meta_attention.layers import LayerOutput
from meta_attention.layers.execution import ExpertExecution, HeadsByKind, HeadsKind
from meta_attention.ops.rotary import rotate
from meta_attention.routing import Routes, can_route_directly, choose_routes, route_directly

Rotation = tuple[Tensor, Tensor]  # cosines and sines, [B, T, P] each


@dataclass(frozen=True, slots=True)
class Inputs:
    """What an attention module was called with, and its attention function is not told."""

    x: Tensor  # [B, T, D]
    cache: Cache | None
    rotation: Rotation | None


class Router(nn.Module):
    """Chooses an expert for every token of an attention module of another model.

    Args:
        adaptation: What all routers of the model share.
        layer_idx: Index of the layer in its model.
    """

    def __init__(self, adaptation: Adaptation, layer_idx: int) -> None:
        super().__init__()
        config = adaptation.config
        self.adaptation = adaptation
        self.layer_idx = layer_idx
        experts = build_experts(config, layer_idx)
        self.expert_names = tuple(experts)
        start = config.start_expert
        self.controller = build_controller(
            config,
            expert_costs(config, experts),
            None if start not in experts else self.expert_names.index(start),
            layer_idx=layer_idx,
        )
        if isinstance(self.controller, ValueController):
            self.controller.set_routed_layers(len(adaptation.layers))
        self.experts = nn.ModuleList(experts.values())
        self.execution = ExpertExecution(config, self.expert_names, self.experts)
        self.has_states = any(isinstance(e, RecurrentExpert) for e in self.experts)
        self._scores: tuple[float | None, float | None] | None = None  # as last set

    @property
    def is_bypassed(self) -> bool:
        """Whether the layer runs as the base model has it."""
        return self.adaptation.routing_of(self.layer_idx) == "full"

    @property
    def can_be_captured(self) -> bool:
        """Whether a step with a static cache asks the device nothing."""
        return not self.has_states and self.execution.knows_newest

    def forward(
        self,
        inputs: Inputs,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        scale: float | None,
        softcap: float | None,
    ) -> Tensor:
        """Route and attend.

        Args:
            inputs: Of the attention module.
            query: ``[B, H, T, P]``, as the base model hands it to attention.
            key: ``[B, K, S, P]``, the tokens before these included.
            value: Likewise.
            mask: ``[B, S]``, False for padding, or None.
            scale: Factor of the scores; None: 1 / sqrt(P).
            softcap: Of the scores, where the base has one.

        Returns:
            ``[B, T, H, P]``, zero for padding.
        """
        _, _, T, P = query.shape
        if inputs.cache is None and key.shape[2] != T:
            raise ConfigError(
                f"{key.shape[2]} keys came for {T} tokens without a cache of Transformers; this "
                "family keeps them where its router does not see"
            )
        device = query.device.type
        if torch.is_autocast_enabled(device):
            # rotation and caches may have left them in another precision
            dtype = torch.get_autocast_dtype(device)
            query, key, value = (x.to(dtype) for x in (query, key, value))
        self._set_scores(None if scale == P**-0.5 else scale, softcap)
        kept = None if inputs.cache is None else inputs.cache.layers[self.layer_idx]
        run = self.execution
        is_step = T == 1 and run.can_run_newest(query, key, value)
        layout, S = self._read(kept, query, key, mask, is_step)
        if key.shape[2] > S:
            # a static cache has room for more
            key, value = key[:, :, :S], value[:, :, :S]
        x = inputs.x.to(query.device)
        step, is_padding = layout.step if is_step else None, layout.is_padding
        if step is not None and not run.has_finish and not self.has_states:
            is_padding = None  # nobody reads what these rows hold, and theirs are zero
        if is_padding is not None:
            # padding may hold anything, also what 0 * x would not remove
            x = x.masked_fill(is_padding.unsqueeze(-1), 0.0)

        # tokens -> posterior -> routes; in one where nobody asks for the posterior
        weights, routing = self._route(x, layout)

        # routes -> plan -> experts -> merge; for the newest tokens alone, all in one
        if step is not None and not self.has_states:
            rows = run.attend_newest(query.squeeze(2), key, value, x, weights, step).unsqueeze(1)
        else:
            heads = self._heads(query, key, value, inputs.rotation)
            memory = None if kept is None else BaseMemory(kept, key, value, T, self.has_states)
            if step is not None and memory is not None:
                merged = run.on_newest(heads, x, weights, step, memory)
            else:
                plan = run.plan(weights, is_padding, routing)
                if plan is None:
                    parts = run.on_all(heads, x, layout.mask, memory)
                else:
                    parts = run.on_listed(heads, x, layout.mask, memory, plan)
                merged = run.merge(parts, weights, plan)
            rows = merged.unflatten(-1, (-1, P))
        if is_padding is not None:
            rows = rows.masked_fill(is_padding[..., None, None], 0.0)
        self.adaptation.finish(self.layer_idx)
        return rows

    def _read(
        self, kept: Any, query: Tensor, key: Tensor, mask: Tensor | None, is_step: bool
    ) -> tuple[Layout, int]:
        """Where tokens are, and how many keys to look at.

        A step with a static cache looks at all there is room for: how many are filled is known to
        the device, and only kernels ask for it.
        """
        B, _, T, _ = query.shape
        S = key.shape[2] if mask is None else mask.shape[1]
        length: int | Tensor | None = None
        if kept is not None and kept.is_compileable and T == 1 and key.shape[2] == S:
            length = kept.get_seq_length()
        if mask is None or not isinstance(length, Tensor):
            layout = self.adaptation.layout(mask, B, T, S, query.device)
            if kept is not None and T > 1:
                # a step that is compiled cannot see it
                kept.ends_in_padding = layout.ends_in_padding
            return layout, S
        if self.has_states or not is_step:
            S = self.adaptation.count_filled(mask, length)
            return self.adaptation.layout(mask, B, T, S, query.device), S
        known = getattr(kept, "ends_in_padding", False)
        layout = self.adaptation.layout(mask, B, T, S, query.device, length, known)
        if layout.ends_in_padding != known:
            # a prompt of one token, say, in a cache that was used before
            kept.ends_in_padding = layout.ends_in_padding
        return layout, S

    def _set_scores(self, scale: float | None, softcap: float | None) -> None:
        if (scale, softcap) == self._scores:
            return
        for expert in self.experts:
            if isinstance(expert, SoftmaxExpert):
                expert.scale, expert.softcap = scale, softcap
        self._scores = (scale, softcap)

    def _route(self, x: Tensor, layout: Layout) -> tuple[Tensor, RoutingName]:
        """Weights of the tokens on the experts, and what kind of routes these are."""
        is_hard = self.adaptation.routing_of(self.layer_idx) == "hard" and not self.training
        is_asked = self.adaptation.record is not None
        if is_hard and not is_asked and can_route_directly(self.controller, x):
            return route_directly(self.controller, x, layout.position_ids), "hard"
        posterior = self.controller(self.controller.view_of(x), layout.position_ids)
        routes, routing = self._choose(posterior)
        self._record(x, posterior, routes, layout.is_padding)
        return routes.weights, routing

    def _choose(self, posterior: Posterior) -> tuple[Routes, RoutingName]:
        """Routes, and their kind: hard where one expert is forced on all tokens."""
        config = self.adaptation.config
        routing = self.adaptation.routing_of(self.layer_idx)
        if not isinstance(routing, str) or routing in self.expert_names:
            weights = torch.zeros_like(posterior.mean)
            if isinstance(routing, str):
                weights[..., self.expert_names.index(routing)] = 1.0
            else:
                for head, name in enumerate(routing):
                    weights[..., head, self.expert_names.index(name)] = 1.0
            return Routes(weights, torch.ones_like(weights[..., 0], dtype=torch.bool)), "hard"
        kind: RoutingName = routing  # type: ignore[assignment]
        routes = choose_routes(
            posterior,
            routing=kind,
            draw=config.training_weights if self.training else "mean",
            gradient=config.route_gradient,
            signal=config.uncertainty_signal,
            threshold=self.controller.uncertainty_threshold,
        )
        return routes, kind

    def _heads(
        self, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation | None
    ) -> HeadsByKind:
        """Heads of the new tokens as the base has them, and as they were before rotation."""
        past = key.shape[2] - query.shape[2]
        new = (query, key[:, :, past:], value[:, :, past:])
        own = Heads(*(x.transpose(1, 2) for x in new))  # [B, T, heads, P]
        use_rope = self.adaptation.config.use_rope
        heads = {HeadsKind(0, use_rope): own}
        if use_rope and self.has_states:
            if rotation is None:
                raise ConfigError(
                    "recurrent experts see heads before rotation, which takes the "
                    "position_embeddings that this module was not called with; leave them out of "
                    "experts, or register the family with use_rope=False"
                )
            plain = (unrotate(own.query, *rotation), unrotate(own.key, *rotation))
            heads[HeadsKind(0, False)] = Heads(*plain, own.value)
        return heads

    def _record(
        self, x: Tensor, posterior: Posterior, routes: Routes, is_padding: Tensor | None
    ) -> None:
        record = self.adaptation.record
        if record is not None:
            record.layers[self.layer_idx] = LayerOutput(
                x.new_empty(0),  # the base makes its own of it
                posterior,
                routes,
                self.controller.prior_concentration,
                self.controller.costs,
                is_padding,
                teaches_belief=self.adaptation.config.route_gradient == "chosen",
            )

    def extra_repr(self) -> str:
        return f"experts={', '.join(self.expert_names)}"


def unrotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [B, T, heads, P] as they were before their rotation; cos and sin [B, T, <= P].

    Where only the first channels are rotated, the others are as they were. Tables may be scaled.
    """
    width = cos.shape[-1]
    # rounded tables are no rotation; undone as they are, in more precision than they have
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(x.device, wide), sin.to(x.device, wide)
    size = cos.square() + sin.square()
    plain = rotate(x[..., :width], cos / size, -sin / size, impl="reference")
    return plain if width == x.shape[-1] else torch.cat([plain, x[..., width:]], dim=-1)


def routers_of(model: nn.Module) -> list[Router]:
    """The routers of an adapted model, also one that others have wrapped; raise without any."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    if not routers:
        raise ConfigError("the model is not adapted; call adapt(model) or load_adapter first")
    return routers


@contextmanager
def collect_routing(model: nn.Module) -> Iterator[Record]:
    """Keep the routing of the model's last call, for the objective or to look at.

    Args:
        model: An adapted model.
    """
    adaptation = routers_of(model)[0].adaptation
    before, adaptation.record = adaptation.record, Record()
    try:
        yield adaptation.record
    finally:
        adaptation.record = before


@contextmanager
def routed_as(model: nn.Module, routing: str | Mapping[int, str | Sequence[str]]) -> Iterator[None]:
    """Route otherwise for a while.

    Args:
        model: An adapted model.
        routing: ``"full"``: as the base model, by its own attention. ``"soft"``, ``"hard"``,
            ``"gated"``: as configs have it. The name of an expert: that one for all tokens. Or
            these for some layers by their index; others stay as the config has them. Of a layer,
            also the names of experts for each of its key-value heads, where these have routes.
    """
    adaptation = routers_of(model)[0].adaptation
    before, adaptation.routing = adaptation.routing, check_routing(model, routing)
    try:
        yield
    finally:
        adaptation.routing = before


def check_routing(model: nn.Module, routing: str | Mapping[int, str | Sequence[str]]) -> Routing:
    """Raise unless a model can be routed like this."""
    routers = routers_of(model)
    adaptation, experts = routers[0].adaptation, routers[0].expert_names
    known = {"full", *get_args(RoutingName), *experts}
    if isinstance(routing, str):
        _check_way(adaptation, known, routing)
        return routing
    found: dict[int, Way] = {}
    for layer_idx, way in routing.items():
        if layer_idx not in adaptation.layers:
            raise ConfigError(
                f"layers must be among the adapted {list(adaptation.layers)}, got {layer_idx}"
            )
        if isinstance(way, str):
            _check_way(adaptation, known, way)
            found[layer_idx] = way
            continue
        num_heads = adaptation.config.num_key_value_heads
        if adaptation.config.route_granularity != "kv_head" or len(way) != num_heads:
            raise ConfigError(
                f"names by head must be {num_heads}, of a model adapted with "
                f"route_granularity='kv_head', got {len(way)} and "
                f"{adaptation.config.route_granularity!r}"
            )
        for name in way:
            _check_way(adaptation, set(experts), name)
        # heads that are all alike are a layer's one way
        found[layer_idx] = tuple(way) if len(set(way)) > 1 else way[0]
    return found


def _check_way(adaptation: Adaptation, known: set[str], name: str) -> None:
    if name not in known:
        raise ConfigError(f"routing must be one of {', '.join(sorted(known))}, got {name!r}")
    if name == "gated" and adaptation.config.uncertainty_threshold is None:
        raise ConfigError("routing='gated' takes an adapted uncertainty_threshold; give one")
