"""What an attention expert is, and the names by which a config asks for one.

An expert turns heads into rows: queries, keys and values in, one row per query and head out.
Projections, rotary positions, routing, caching and merging belong to the layer.

There are two kinds. An :class:`Expert` looks at the keys and values of all tokens so far; a
:class:`RecurrentExpert` carries a state in their place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from torch import Tensor, nn

from meta_attention.config import MetaAttentionConfig
from meta_attention.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Heads:
    """Projected tokens, as every expert receives them."""

    query: Tensor  # [B, T, H, P], the last T of S positions
    key: Tensor  # [B, S, K, P], K key-value heads
    value: Tensor  # [B, S, K, P]


class Expert(nn.Module):
    """One attention algorithm. Subclasses give ``forward`` and ``flops``.

    Args:
        config: Model configuration.
    """

    uses_rope: ClassVar[bool] = True
    """Whether queries and keys arrive rotated by their position."""

    paper_cost: ClassVar[float | None] = None
    """Cost under ``expert_costs="paper"``, for the experts the paper gives one."""

    keeps_documents_apart: ClassVar[bool] = False
    """Whether it accepts masks that number the documents packed into a row."""

    def __init__(self, config: MetaAttentionConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.causal = config.causal
        self.impl = config.impl

    @property
    def reach(self) -> int | None:
        """How many tokens before its own a row depends on; None: all of them."""
        return None

    def forward(self, heads: Heads, x: Tensor, mask: Tensor | None) -> Tensor:
        """Rows ``[B, T, H, P]``, zero for padding.

        Args:
            heads: Queries of T tokens; keys and values of these and of all before them.
            x: Layer input ``[B, T, D]``, for what depends on more than the heads.
            mask: ``[B, S]`` boolean, False for padding, or None; document numbers, 0 for padding,
                where ``keeps_documents_apart``.
        """
        raise NotImplementedError

    def flops(self, length: int) -> float:
        """Floating-point operations per token and layer, mean over a sequence of ``length``.

        Projections are left out: every expert needs them.
        """
        raise NotImplementedError

    def cost(self, length: int) -> float:
        """``flops`` relative to full attention, at most 1.

        Some experts cost more than full attention on short sequences; the prior has no use for
        the difference.
        """
        full = self.attention_flops(visible_keys(length, length, causal=self.causal))
        return min(1.0, self.flops(length) / full)

    def attention_flops(self, keys: float) -> float:
        """Operations of one token's softmax attention over ``keys`` keys: scores and values."""
        return 4.0 * self.num_heads * self.head_dim * keys


class RecurrentExpert(Expert):
    """An expert that needs of the past only a state, updated by every token."""

    def forward(  # type: ignore[override]  # a state in, a state out
        self, heads: Heads, x: Tensor, mask: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Rows ``[B, T, H, P]``, zero for padding, and the state after the last token.

        Args:
            heads: Queries, keys and values of T tokens (S = T).
            x: Layer input ``[B, T, D]``.
            mask: As for :class:`Expert`, of these T tokens.
            state: What an earlier call returned ``[B, ...]``; None at the start.
        """
        raise NotImplementedError


def visible_keys(length: int, window: int, *, causal: bool) -> float:
    """Keys a token sees within ``window``, itself included, mean over a sequence."""
    w = min(window, length - 1)
    # the first w tokens see fewer than w before them
    before = w - w * (w + 1) / (2 * length)
    return 1.0 + before * (1 if causal else 2)


_REGISTRY: dict[str, type[Expert]] = {}

ExpertType = TypeVar("ExpertType", bound=type[Expert])


def register_expert(name: str) -> Callable[[ExpertType], ExpertType]:
    """Make an expert known to configs as ``name``; a class decorator.

    A taken name is refused, unless it is the same class defined anew, as happens in notebooks.
    """

    def register(cls: ExpertType) -> ExpertType:
        known = _REGISTRY.get(name, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ConfigError(
                f"expert name {name!r} is taken by {known.__module__}.{known.__qualname__}; "
                "choose another"
            )
        _REGISTRY[name] = cls
        return cls

    return register


def known_experts() -> tuple[str, ...]:
    """Names a config may use."""
    return tuple(sorted(_REGISTRY))


def build_experts(config: MetaAttentionConfig, layer_idx: int) -> dict[str, Expert]:
    """The experts of one layer by name, in the order of its routing weights."""
    names = config.experts_of(layer_idx)
    for name in names:
        if name not in _REGISTRY:
            raise ConfigError(
                f"unknown expert {name!r}; known are {', '.join(known_experts())}, and "
                "register_expert adds your own"
            )
    return {name: _REGISTRY[name](config) for name in names}


def expert_costs(config: MetaAttentionConfig, experts: dict[str, Expert]) -> Sequence[float]:
    """Cost of each expert relative to full attention, as the config asks."""
    if config.expert_costs == "flops":
        length = config.cost_length or config.max_position_embeddings
        return [expert.cost(length) for expert in experts.values()]
    costs: list[float] = []
    for name, expert in experts.items():
        if isinstance(config.expert_costs, str):
            source, cost = "the paper", expert.paper_cost
        else:
            given = dict(zip(config.experts, config.expert_costs, strict=True))
            source, cost = "expert_costs", given.get(name)
        if cost is None:
            raise ConfigError(
                f"{source} gives no cost for expert {name!r}; use expert_costs='flops' or one "
                "number for each name in experts"
            )
        costs.append(cost)
    return costs
