"""Every figure of a model over a text, from one pass over its windows.

Each token counts once: its loss in the window that scores it, its routes in the first window that
holds it. With ``forced``, every batch is run again with each expert of each routed layer forced.

Shapes: B windows, T their length, E experts, M tokens scored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from meta_attention.controller import RoutingPosterior
from meta_attention.evaluation.calibration import CalibrationBin, CalibrationTally
from meta_attention.evaluation.forcing import RouteJudge, RouteVerdict
from meta_attention.evaluation.perplexity import (
    Advance,
    Perplexity,
    Scores,
    evaluating,
    score_batch,
)
from meta_attention.evaluation.routing import (
    RoutedLayer,
    RoutingSummary,
    RoutingTally,
    reading_routing,
)
from meta_attention.evaluation.windows import (
    WindowBatch,
    choose_windows,
    num_targets,
    tokenize_documents,
    window_batches,
)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was measured, and how."""

    text: Perplexity
    routing: RoutingSummary
    calibration: list[CalibrationBin]
    ece: float
    """Expected calibration error of next-token prediction."""
    forced: RouteVerdict | None
    num_documents: int
    length: int
    stride: int
    device: str
    dtype: str

    def to_dict(self) -> dict[str, Any]:
        """One level of figures, and under ``layers`` those of each layer."""
        routing = self.routing.to_dict()
        # every token is routed, but the first of a document is not scored
        del routing["num_tokens"]
        layers = routing.pop("layers")
        forced = {} if self.forced is None else self.forced.to_dict()
        for verdict in forced.pop("layers", []):
            layers[verdict.pop("layer")] |= verdict
        return {
            **self.text.to_dict(),
            "ece": self.ece,
            **routing,
            **forced,
            "num_documents": self.num_documents,
            "length": self.length,
            "stride": self.stride,
            "device": self.device,
            "dtype": self.dtype,
            "layers": layers,
        }


def evaluate_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Sequence[str],
    *,
    length: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    max_tokens: int | None = None,
    forced: bool = False,
    advance: Advance = lambda done, total: None,
) -> Evaluation:
    """Measure a routed model, ours or adapted, on a text.

    Args:
        model: The model, on the device and in the dtype to measure.
        tokenizer: Its tokenizer, a fast one.
        text: One document or several; documents do not see each other.
        length: Tokens in a window; default 1024, or what the model can take if that is less.
        stride: How much further each window reaches; default half of ``length``.
        batch_size: Windows in one call of the model.
        max_tokens: Stop after this many tokens of text.
        forced: Also judge the routes by forcing each expert in turn: one more pass for each
            expert of each routed layer.
        advance: Called with the tokens scored so far and in all; every pass scores them anew.
    """
    length, stride = choose_windows(model, length, stride)
    documents = tokenize_documents(model, tokenizer, text, max_tokens=max_tokens)
    routing = RoutingTally.of(model)
    calibration = CalibrationTally()
    judge = RouteJudge(model) if forced else None

    done, total = 0, num_targets(documents) * (1 + (judge.num_passes if judge else 0))

    def score(batch: WindowBatch, **kwargs: Any) -> Scores:
        nonlocal done
        scores = score_batch(model, batch, **kwargs)
        done += len(scores.loss)
        advance(done, total)
        return scores

    def loss_of(batch: WindowBatch) -> Tensor:
        return score(batch).loss

    result = Perplexity()
    with evaluating(model):
        for batch in window_batches(documents, length, stride, batch_size, model.device):
            with reading_routing(model) as reader:
                scores = score(batch, **reader.options)
                weights, concentrations = reader.read(scores.output)
            result += scores.total
            calibration.add(scores.confidence, scores.is_correct)
            routing.add(weights, batch.is_new, concentrations)
            if judge is not None:
                beliefs = map(expected_weights, weights, concentrations)
                judge.add(
                    scores.loss, [b[batch.is_predictor] for b in beliefs], partial(loss_of, batch)
                )
    return Evaluation(
        text=result,
        routing=routing.summary(),
        calibration=calibration.bins,
        ece=calibration.error,
        forced=None if judge is None else judge.verdict(),
        num_documents=len(documents),
        length=length,
        stride=stride,
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
    )


def expected_weights(weights: Tensor, concentration: Tensor | None) -> Tensor:
    """Expected weights: how sure a controller is of a route, also where it takes one expert only.

    Without a posterior the weights themselves, which say nothing of a hard route. Zero, as the
    weights are, of a token that passed the block by.
    """
    if concentration is None:
        return weights
    has_passed = weights.sum(dim=-1, keepdim=True) == 0.0
    return RoutingPosterior(concentration).mean.masked_fill(has_passed, 0.0)


def layer_kl(layer: RoutedLayer, concentration: Tensor | None) -> Tensor | None:
    """KL to the prior of each token ``[B, T]`` in nats; None without a prior or a choice.

    The mean over its key-value heads where these have routes of their own.
    """
    if concentration is None or len(layer.expert_names) == 1:
        return None
    kl = RoutingPosterior(concentration).kl_to(layer.controller.prior_concentration)
    return kl.mean(dim=2) if kl.dim() == 3 else kl
