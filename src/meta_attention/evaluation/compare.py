"""An adapted model beside its base: losses by length and position, counted FLOPs, and answers.

Both are one model: the base is what it does with its own attention and without what was added. A
text is run once, at the longest length: what follows a token changes nothing about it, so the first
tokens of a run are the run of a shorter text.

Shapes: N sequences, B of a batch, T their length, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from meta_attention.adapt.attention import IMPLEMENTATIONS
from meta_attention.adapt.lora import without_lora
from meta_attention.adapt.router import collect_routing, routers_of
from meta_attention.errors import ConfigError, DataError
from meta_attention.evaluation.adapted_flops import AdaptedFlops, count_adapted, executed_routes
from meta_attention.evaluation.perplexity import Advance, evaluating
from meta_attention.evaluation.tasks.facts import FactResult, FactTask, measure_facts
from meta_attention.evaluation.windows import tokenize

# tokens whose logits are in float32 at a time
CHUNK = 1024
# of a position, where losses are told apart by it
FIRST_EDGE = 256


@contextmanager
def as_base(model: nn.Module) -> Iterator[None]:
    """The base model: its attention as it was loaded, no routers, no LoRA; then as before."""
    routers_of(model)  # raises unless there are some
    pretrained = next(m for m in model.modules() if isinstance(m, PreTrainedModel))
    name = pretrained.config._attn_implementation
    below = {ours: theirs for theirs, ours in IMPLEMENTATIONS.items()}[name]
    pretrained.set_attn_implementation(below)
    try:
        with without_lora(pretrained):
            yield
    finally:
        pretrained.set_attn_implementation(name)


def token_losses(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Loss of every token but the first ``[B, T - 1]`` in nats, float32."""
    logits = model(input_ids=ids, use_cache=False).logits
    losses = [
        F.cross_entropy(
            logits[:, at : at + CHUNK][:, : ids.shape[1] - 1 - at].flatten(0, 1).float(),
            ids[:, at + 1 : at + 1 + CHUNK].flatten(),
            reduction="none",
        ).view(len(ids), -1)
        for at in range(0, ids.shape[1] - 1, CHUNK)
    ]
    return torch.cat(losses, dim=1)


def cut_sequences(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    *,
    length: int,
    count: int,
) -> Tensor:
    """``count`` sequences ``[N, T]`` of long documents, from as many of these as there are.

    Args:
        model: The model that will read them.
        tokenizer: Its tokenizer.
        documents: Those shorter than ``length`` tokens are left out, unless all are: then they
            are read as one.
        length: Tokens of a sequence, T.
        count: Sequences, at most; fewer where the text has no more.
    """
    pieces: list[list[Tensor]] = []
    rest: list[Tensor] = []
    for text in documents:
        # what begins a document is enough of it: a token has more than two characters on average
        ids = tokenize(model, tokenizer, text[: 8 * length * count]).ids
        if len(ids) >= length:
            pieces.append(list(ids[: len(ids) // length * length].split(length)))
        else:
            rest.append(ids)
        if len(pieces) >= count:
            break
    if not pieces and sum(map(len, rest)) >= length:
        whole = torch.cat(rest)
        pieces = [list(whole[: len(whole) // length * length].split(length))]
    if not pieces:
        raise DataError(
            f"the text must have >= {length} tokens, got {sum(map(len, rest))}; add text or lower "
            "the lengths"
        )
    # the first of every document before the second of any
    rounds = max(map(len, pieces))
    chosen = [rows[turn] for turn in range(rounds) for rows in pieces if turn < len(rows)]
    return torch.stack(chosen[:count])


@dataclass(frozen=True, slots=True)
class LengthRow:
    """Base and adapted model on the first ``length`` tokens of every sequence."""

    length: int
    base_loss: float
    """Nats per token."""
    adapted_loss: float
    flops: AdaptedFlops

    @property
    def loss_increase(self) -> float:
        return self.adapted_loss - self.base_loss

    def to_dict(self) -> dict[str, Any]:
        per_token = {
            f"{name}_attention_gflop_per_token": getattr(self.flops, kind).attention / 1e9
            for name, kind in (("base", "base"), ("adapted", "routed"))
        }
        return {
            "length": self.length,
            "base_loss": self.base_loss,
            "adapted_loss": self.adapted_loss,
            "loss_increase": self.loss_increase,
            "attention_share": self.flops.attention_share,
            "attention_share_by_layer": list(self.flops.share_by_layer),
            "controller_share": self.flops.routed.controller / self.flops.base.attention,
            **per_token,
        }


@dataclass(frozen=True, slots=True)
class PositionRow:
    """Loss of the tokens from position ``begin`` to before ``end``, nats."""

    begin: int
    end: int
    base_loss: float
    adapted_loss: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"loss_increase": self.adapted_loss - self.base_loss}


@dataclass(frozen=True, slots=True)
class TextComparison:
    """Losses and counted operations, on how much text."""

    lengths: list[LengthRow]
    positions: list[PositionRow]
    num_sequences: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "num_sequences": self.num_sequences,
            "lengths": [row.to_dict() for row in self.lengths],
            "positions": [row.to_dict() for row in self.positions],
        }


def compare_text(
    model: PreTrainedModel,
    sequences: Tensor,
    lengths: Sequence[int],
    *,
    batch_size: int = 1,
    advance: Advance = lambda done, total: None,
) -> TextComparison:
    """Losses of an adapted model and of its base on the same text, and what attention costs.

    Args:
        model: The adapted model, on the device and in the dtype to measure.
        sequences: ``[N, T]``, as :func:`cut_sequences` gives them.
        lengths: At most T each.
        batch_size: Sequences in one call.
        advance: Called with the sequences done so far and in all.
    """
    N, T = sequences.shape
    check_lengths(model, lengths, T)
    base_sum, adapted_sum = (torch.zeros(T - 1, dtype=torch.float64) for _ in range(2))
    flops: dict[int, AdaptedFlops] = {}
    with evaluating(model):
        for start in range(0, N, batch_size):
            ids = sequences[start : start + batch_size].to(model.device)
            with as_base(model):
                base_sum += token_losses(model, ids).sum(dim=0).cpu().double()
            with collect_routing(model) as record:
                adapted_sum += token_losses(model, ids).sum(dim=0).cpu().double()
            for length in lengths:
                routes = executed_routes(record, length)
                counted = count_adapted(model, routes, batch=len(ids), length=length)
                flops[length] = flops[length] + counted if length in flops else counted
            advance(min(start + batch_size, N), N)

    def mean(sums: Tensor, begin: int, end: int) -> float:
        # the token at position t is that of loss t - 1
        return sums[max(begin - 1, 0) : end - 1].mean().item() / N

    edges = position_edges(T)
    return TextComparison(
        [
            LengthRow(
                length,
                mean(base_sum, 0, length),
                mean(adapted_sum, 0, length),
                _per_token(flops[length], N * length),
            )
            for length in lengths
        ],
        [
            PositionRow(begin, end, mean(base_sum, begin, end), mean(adapted_sum, begin, end))
            for begin, end in pairwise(edges)
        ],
        N,
    )


def check_lengths(model: PreTrainedModel, lengths: Sequence[int], longest: int) -> None:
    """Raise unless the model can take texts of these lengths, and there is one of each."""
    positions = getattr(model.config, "max_position_embeddings", None) or longest
    most = min(longest, positions)
    if not lengths or not all(2 <= length <= most for length in lengths):
        raise ConfigError(
            f"lengths must be between 2 and {most}, the tokens of a sequence or the model's "
            f"positions, got {', '.join(map(str, lengths)) or 'none'}"
        )


def position_edges(length: int) -> list[int]:
    """Where stretches of positions begin, each as long as all before it; and the end."""
    edges = [0]
    while max(edges[-1] * 2, FIRST_EDGE) < length:
        edges.append(max(edges[-1] * 2, FIRST_EDGE))
    return [*edges, length]


def compare_facts(
    model: PreTrainedModel, tasks: Sequence[FactTask], **options: Any
) -> list[dict[str, Any]]:
    """Answers of an adapted model and of its base to the same questions, a row per task.

    Args:
        model: The adapted model.
        tasks: What is asked, of several lengths say.
        options: For :func:`measure_facts`.
    """
    rows = []
    for task in tasks:
        with as_base(model):
            base = measure_facts(model, task, **options)
        rows.append(_compared(task.length, base, measure_facts(model, task, **options)))
    return rows


def _compared(length: int, base: FactResult, adapted: FactResult) -> dict[str, Any]:
    return {"length": length, "base": base.to_dict(), "adapted": adapted.to_dict()}


def _per_token(flops: AdaptedFlops, tokens: int) -> AdaptedFlops:
    def scale(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(value / tokens for value in values)

    return AdaptedFlops(
        flops.routed.per(tokens),
        flops.base.per(tokens),
        scale(flops.routed_by_layer),
        scale(flops.base_by_layer),
    )
