"""What an adapted model is told: plain data, as an adapter's JSON holds it."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from meta_attention.config import (
    ControllerName,
    Impl,
    MetaAttentionConfig,
    RouteGradient,
    RouteGranularity,
    RoutingName,
    Signal,
    TrainingWeights,
)
from meta_attention.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shape:
    """What the router must know of a base model, and cannot choose."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class AdaptConfig:
    """How a pretrained model is routed.

    Fields that :class:`~meta_attention.MetaAttentionConfig` has, too, mean what they mean there.

    Args:
        experts: Names of the experts of every adapted layer.
        window_size: Of the local expert.
        num_sinks: The local expert also sees this many first tokens of the text. Pretrained models
            rest attention there that has nowhere to go: a window without them costs much more.
        layers: Layers to adapt, by index; default: all that see everything. Layers with a window
            of their own are left as they are.
        routing: ``"hard"``, ``"soft"`` or ``"gated"``.
        training_weights: Default: ``"one_hot"``, or ``"mean"`` where routing is soft, or
            ``"explore"`` of ``controller="value"``.
        expert_costs: ``"flops"`` counts at ``cost_length``.
        cost_length: Default: the longest length of the base.
        start_expert: Expert that a new router believes in for every token; None: none.
        price: See :func:`~meta_attention.adapt.set_price`.
        value_scale: Of ``controller="value"``; others have none.
    """

    experts: Sequence[str] = ("full", "local")
    window_size: int = 256
    num_sinks: int = 4
    layers: Sequence[int] | None = None
    route_granularity: RouteGranularity = "token"
    routing: RoutingName = "hard"
    training_weights: TrainingWeights | None = None
    route_gradient: RouteGradient = "all"
    controller: ControllerName = "bayesian"
    controller_hidden_size: int = 64
    start_expert: str | None = "full"
    expert_costs: str | Sequence[float] = "flops"
    cost_length: int | None = None
    prior_strength: float | Sequence[float] = 1.0
    prior_floor: float = 0.01
    price: float = 0.0
    value_scale: float | None = 0.01
    uncertainty_signal: Signal = "mutual_information"
    uncertainty_threshold: float | None = None
    impl: Impl = "auto"

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """From keywords or JSON; a misspelt name is refused."""
        known = [field.name for field in fields(cls)]
        for name in settings:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
                raise ConfigError(f"unknown setting of adapt {name!r}{hint}")
        return cls(**settings)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        plain = asdict(self)
        return {name: list(x) if isinstance(x, tuple) else x for name, x in plain.items()}

    def for_base(self, shape: Shape, *, causal: bool, use_rope: bool) -> MetaAttentionConfig:
        """The configuration that controllers and experts are built from."""
        settings = asdict(self)
        del settings["layers"]
        if self.training_weights is None:
            drawn = "explore" if self.controller == "value" else "one_hot"
            settings["training_weights"] = "mean" if self.routing == "soft" else drawn
        if self.controller != "value":
            settings["value_scale"] = None
        # what are no experts at all is refused below
        is_known = not isinstance(self.experts, Sequence) or self.start_expert in self.experts
        if self.start_expert is not None and not is_known:
            raise ConfigError(
                f"start_expert must be one of experts {list(self.experts)}, got "
                f"{self.start_expert!r}; name another, or None"
            )
        return MetaAttentionConfig(**asdict(shape), causal=causal, use_rope=use_rope, **settings)
