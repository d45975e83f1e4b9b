"""What an attention expert is, and the names by which a config asks for one.

An expert turns heads into rows: queries, keys and values in, one row per query and head out.
Projections, rotary positions, routing, caching and merging belong to the layer.

There are three kinds. An :class:`Expert` looks at the keys and values of all tokens so far; a
:class:`SoftmaxExpert` does so by softmax attention within a window, which the layer runs itself; a
:class:`RecurrentExpert` carries a state in place of keys and values.

Under hard routing an expert works on a list of tokens. One that only gives ``forward`` still
works: its rows are computed for all tokens, and those of the list are kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from meta_attention.config import MetaAttentionConfig
from meta_attention.errors import ConfigError
from meta_attention.ops.route_plan import QueryList


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

    takes_window: ClassVar[bool] = False
    """Whether a config may give it a window of its own, as in ``"local:256"``."""

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

    def attend(
        self, heads: Heads, x: Tensor, mask: Tensor | None, queries: QueryList, rows: Tensor
    ) -> Tensor:
        """``rows`` ``[B, T, H, P]`` with those of the listed tokens written; others as they are.

        Where every key-value head has its own list, a token may be listed for some heads only:
        ``queries.is_listed`` has an axis for them.
        """
        return keep_listed(queries, self(heads, x, mask), rows)

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


class SoftmaxExpert(Expert):
    """Softmax attention within a window. Those of a layer run together, in one kernel.

    The attributes below may be set on an expert, as the model it stands in for has them.
    """

    num_sinks: int = 0
    """How many first tokens of its row a token sees beside those in the window."""

    scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(P)."""

    softcap: float | None = None
    """Scores become ``softcap * tanh(score / softcap)``; None: as they are."""

    @property
    def window(self) -> int | None:
        """How many positions a token sees on each allowed side of it; None: all."""
        return None

    @property
    def reach(self) -> int | None:
        return None if self.num_sinks > 0 else self.window

    def finish(self, rows: Tensor, x: Tensor) -> Tensor:
        """What becomes of the rows ``[B, T, H, P]`` of attention; x is the layer's input."""
        return rows

    @property
    def has_finish(self) -> bool:
        return type(self).finish is not SoftmaxExpert.finish

    def flops(self, length: int) -> float:
        window = length if self.window is None else self.window
        keys = visible_keys(length, window, causal=self.causal, num_sinks=self.num_sinks)
        return self.attention_flops(keys)


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

    def attend(  # type: ignore[override]  # a state in, a state out
        self,
        heads: Heads,
        x: Tensor,
        mask: Tensor | None,
        state: Tensor | None,
        queries: QueryList,
        rows: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`Expert.attend`, and the state after the last token, listed or not."""
        own, state = self(heads, x, mask, state)
        return keep_listed(queries, own, rows), state


def keep_listed(queries: QueryList, own: Tensor, rows: Tensor) -> Tensor:
    """``rows`` [B, T, H, P] with those of the list taken from ``own``."""
    T, H = rows.shape[1:3]
    listed = queries.is_listed(T)  # [B, T, G]
    listed = listed.repeat_interleave(H // listed.shape[2], dim=2)
    return torch.where(listed.unsqueeze(-1), own, rows)


def visible_keys(length: int, window: int, *, causal: bool, num_sinks: int = 0) -> float:
    """Keys a token sees within ``window``, itself included, or as sinks, mean over a sequence."""
    w = min(window, length - 1)
    # the first w tokens see fewer than w before them
    before = w - w * (w + 1) / (2 * length)
    # token w + 1 has one position before its window, the next one two
    farthest = length - 1 - w
    n = min(num_sinks, farthest)
    sinks = n * (n + 1) / 2 + (farthest - n) * n
    if not causal:
        # and the first tokens have sinks after theirs
        n = max(min(num_sinks, length) - w - 1, 0)
        sinks += n * (n + 1) / 2
    return 1.0 + before * (1 if causal else 2) + sinks / length


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
    return {name: _build_expert(config, name) for name in config.experts_of(layer_idx)}


def _build_expert(config: MetaAttentionConfig, name: str) -> Expert:
    """``"local"``, or ``"local:256"`` with a window of its own."""
    base, has_window, window = name.partition(":")
    if base not in _REGISTRY:
        raise ConfigError(
            f"unknown expert {name!r}; known are {', '.join(known_experts())}, and "
            "register_expert adds your own"
        )
    expert = _REGISTRY[base]
    if not has_window:
        return expert(config)
    if not expert.takes_window:
        raise ConfigError(
            f"expert {base!r} has no window, so it must be named without, got {name!r}"
        )
    if not window.isdecimal() or int(window) < 1:
        raise ConfigError(f"the window of an expert must be a number >= 1, got {name!r}")
    return expert(config, window_size=int(window))  # type: ignore[call-arg]


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
