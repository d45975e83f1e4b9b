"""Perplexity of a text of any length, by windows that slide over it; see ``windows``.

Shapes: B windows of a batch, T their length, M tokens scored in a batch, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from meta_attention.evaluation.windows import (
    WindowBatch,
    choose_windows,
    num_targets,
    tokenize_documents,
    window_batches,
)

Advance = Callable[[int, int], None]
"""Told how much is done and how much there is to do, for a progress bar."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Totals, and what follows from them."""

    nats: float = 0.0
    num_tokens: int = 0
    num_bytes: int = 0

    def __add__(self, other: "Perplexity") -> "Perplexity":
        return Perplexity(
            self.nats + other.nats,
            self.num_tokens + other.num_tokens,
            self.num_bytes + other.num_bytes,
        )

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.num_tokens

    @property
    def perplexity(self) -> float:
        """Per token."""
        # a float ends where exp(709.8) would be
        return math.exp(min(self.loss, 709.0))

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of the scored text in UTF-8."""
        return self.nats / math.log(2.0) / self.num_bytes

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
        }


@dataclass(frozen=True, slots=True)
class Scores:
    """What a model makes of the targets of a batch, row after row."""

    loss: Tensor  # [M] float32 nats
    confidence: Tensor  # [M] float32, probability of the most probable token
    is_correct: Tensor  # [M] bool: that token is the target
    num_bytes: int
    output: Any  # the model's, with logits from the first predicting position on

    @property
    def total(self) -> Perplexity:
        # on the CPU: some devices have no float64
        return Perplexity(self.loss.cpu().double().sum().item(), len(self.loss), self.num_bytes)


def measure_perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Sequence[str],
    *,
    length: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    max_tokens: int | None = None,
    advance: Advance = lambda done, total: None,
) -> Perplexity:
    """Score a text under a causal language model, routed or any other of Transformers.

    Args:
        model: The model, on the device and in the dtype to measure.
        tokenizer: Its tokenizer, a fast one.
        text: One document or several; documents do not see each other.
        length: Tokens in a window; default 1024, or what the model can take if that is less.
        stride: How much further each window reaches; default half of ``length``.
        batch_size: Windows in one call of the model.
        max_tokens: Stop after this many tokens of text.
        advance: Called with the tokens scored so far and in all.
    """
    length, stride = choose_windows(model, length, stride)
    documents = tokenize_documents(model, tokenizer, text, max_tokens=max_tokens)
    result = Perplexity()
    with evaluating(model):
        for batch in window_batches(documents, length, stride, batch_size, model.device):
            result += score_batch(model, batch).total
            advance(result.num_tokens, num_targets(documents))
    return result


def score_batch(model: PreTrainedModel, batch: WindowBatch, **kwargs: Any) -> Scores:
    """Run the model once; ``kwargs`` are its own."""
    is_predictor = batch.is_predictor
    # logits take more memory than all else: none before the first that predicts a target
    first = int(is_predictor.any(dim=0).int().argmax())
    output = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        use_cache=False,
        logits_to_keep=is_predictor.shape[1] - first,
        **kwargs,
    )
    losses, confidences, hits = [], [], []
    # row by row, so that only one row is ever there in float32
    for row, ids in enumerate(batch.input_ids):
        logits = output.logits[row, is_predictor[row, first:]].float()  # [targets of the row, V]
        targets = ids[batch.is_target[row]]
        norm = logits.logsumexp(dim=-1)
        top, best = logits.max(dim=-1)
        losses.append(norm - logits.gather(-1, targets[:, None]).squeeze(-1))
        confidences.append((top - norm).exp())
        hits.append(best == targets)
    return Scores(
        torch.cat(losses), torch.cat(confidences), torch.cat(hits), batch.num_bytes, output
    )


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards the mode the model had."""
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(was_training)
