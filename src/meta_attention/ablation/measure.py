"""Every figure of a model over the blocks of a text, with its routes taken softly, hard or gated.

The blocks are those the model's training was evaluated on: every token but the first of a block is
scored, given the tokens of the block before it.

Shapes: N blocks, B of a batch, T their length, M = B * (T - 1) tokens scored, E experts.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from meta_attention.config import MetaAttentionConfig, RoutingName
from meta_attention.controller import PointPosterior, RoutingPosterior
from meta_attention.evaluation.calibration import CalibrationTally
from meta_attention.evaluation.evaluate import expected_weights
from meta_attention.evaluation.flops import Flops, count_full, count_model
from meta_attention.evaluation.forcing import RouteJudge, attention_layers
from meta_attention.evaluation.inspect import DIRICHLET_SIGNALS, POINT_SIGNALS
from meta_attention.evaluation.perplexity import evaluating
from meta_attention.evaluation.routing import RoutingTally, routed_as
from meta_attention.experts import build_experts
from meta_attention.layers import LayerOutput
from meta_attention.models import MetaAttentionForCausalLM
from meta_attention.routing import uncertainty_of

# of a histogram of uncertainties
NUM_BINS = 24
# shares of the tokens of routed layers that a gate makes hard; the first and the last are soft and
# hard routing
GATE_SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
# a gate is tried at many thresholds, so on fewer blocks
GATE_BLOCKS = 64

# blocks in one call of the model: small models are bound by the number of calls
BATCH_SIZE = 128

Figures = dict[str, Any]


def measure(
    model: MetaAttentionForCausalLM,
    blocks: Tensor,
    routing: RoutingName,
    *,
    batch_size: int = BATCH_SIZE,
    forced: bool = False,
) -> Figures:
    """Loss, calibration, routes and their operations.

    Args:
        model: The model, on its device.
        blocks: Token ids ``[N, T]``.
        routing: How routes are taken, whatever the model was trained with.
        batch_size: Blocks in one call of the model.
        forced: Judge the routes by forcing each expert of each routed layer in turn.
    """
    config: MetaAttentionConfig = model.config
    has_choice = any(len(layer.expert_names) > 1 for layer in attention_layers(model))
    judge = RouteJudge(model) if forced and has_choice else None
    tally, calibration = RoutingTally.of(model), CalibrationTally()
    # whatever costs a variant was trained with, one column has one meaning
    tally.costs = paper_costs(model)
    uncertainty = UncertaintyTally()
    executed, nats = Flops(), 0.0
    with routed_as(model, routing), evaluating(model):
        for ids in blocks.split(batch_size):
            ids = ids.to(model.device)
            out = model(ids, use_cache=False, output_routing=True)
            losses = _losses(out.logits, ids)  # [M]
            nats += losses.double().sum().item()
            confidence, best = out.logits[:, :-1].float().softmax(dim=-1).max(dim=-1)
            calibration.add(confidence, best == ids[:, 1:])
            tally.add(out.routing_weights, None, out.concentrations)
            executed += count_model(config, out.routing_weights)
            uncertainty.add(out.routing_weights, out.concentrations)
            if judge is not None:
                beliefs = [
                    expected_weights(weights, concentration)[:, :-1].flatten(0, 1)
                    for weights, concentration in zip(
                        out.routing_weights, out.concentrations, strict=True
                    )
                ]
                judge.add(losses, beliefs, partial(_score, model, ids))
    num_tokens = blocks.shape[0] * (blocks.shape[1] - 1)
    loss = nats / num_tokens
    figures = {
        **tally.summary().to_dict(),
        "routing": routing,
        "loss": loss,
        # a loss this high is no language model, and JSON has no infinity
        "perplexity": math.exp(min(loss, 700.0)),
        "num_tokens": num_tokens,
        "ece": calibration.error,
        "calibration": [asdict(one) for one in calibration.bins],
        "flops": relative_flops(config, executed, len(blocks), blocks.shape[1]),
        "uncertainty": uncertainty.means(),
    }
    if judge is not None:
        is_known = routing == "soft" or config.controller == "bayesian"
        figures["forced"] = _verdict(judge, is_known)
    return figures


def _verdict(judge: RouteJudge, is_belief_known: bool) -> Figures:
    """As a dictionary, with what a reliability diagram shows.

    A hard route of a controller without a posterior does not say how sure it was.
    """
    verdict = judge.verdict().to_dict()
    if not is_belief_known:
        verdict["routing_ece"] = None
    for layer in verdict["layers"]:
        if not is_belief_known:
            layer["routing_ece"] = None
            continue
        layer["calibration"] = [asdict(one) for one in judge.calibration[layer["layer"]].bins]
    return verdict


def relative_flops(
    config: MetaAttentionConfig, executed: Flops, num_blocks: int, length: int
) -> dict[str, float]:
    """Operations per token, and as shares of a plain model with full attention in every layer."""
    one = count_full(config, length)
    parts = ("attention", "layer", "model")
    per_token = {
        f"{part}_per_token": getattr(executed, part) / (num_blocks * length) for part in parts
    }
    return per_token | {
        part: getattr(executed, part) / (num_blocks * getattr(one, part)) for part in parts
    }


def paper_costs(model: MetaAttentionForCausalLM) -> list[list[float]]:
    """Cost of each expert of each layer as the paper has it, where it gives none as counted."""
    config: MetaAttentionConfig = model.config
    length = config.cost_length or config.max_position_embeddings
    return [
        [
            expert.cost(length) if expert.paper_cost is None else expert.paper_cost
            for expert in build_experts(config, layer.layer_idx).values()
        ]
        for layer in attention_layers(model)
    ]


class UncertaintyTally:
    """Uncertainty of every token of every routed layer, by every signal there is.

    Of tokens that enter the layer's block, where others pass it by.
    """

    def __init__(self) -> None:
        self.values: dict[int, dict[str, list[Tensor]]] = {}

    def add(self, weights: Sequence[Tensor], concentrations: Sequence[Tensor | None]) -> None:
        """Count a batch: ``[B, T, E]`` per layer, None without a prior."""
        for index, (weight, concentration) in enumerate(zip(weights, concentrations, strict=True)):
            has_entered = weight.sum(dim=-1) > 0.0
            if weight.shape[-1] == 1 or not has_entered.any():
                continue
            posterior, names = (
                (PointPosterior(weight), POINT_SIGNALS)
                if concentration is None
                else (RoutingPosterior(concentration), DIRICHLET_SIGNALS)
            )
            layer = self.values.setdefault(index, {})
            for name in names:
                values = uncertainty_of(posterior, name)[has_entered]
                layer.setdefault(name, []).append(values.cpu())

    def of(self, layer: int, signal: str) -> Tensor:
        """All values of a layer."""
        return torch.cat(self.values[layer][signal])

    @property
    def signals(self) -> list[str]:
        return list(dict.fromkeys(name for layer in self.values.values() for name in layer))

    def means(self) -> dict[str, dict[str, float]]:
        """Mean of each signal over tokens, by layer."""
        return {
            signal: {str(layer): self.of(layer, signal).mean().item() for layer in self.values}
            for signal in self.signals
        }

    def histograms(self) -> dict[str, Figures]:
        """For each signal its edges, the same for all layers, and the share of tokens between."""
        found: dict[str, Figures] = {}
        for signal in self.signals:
            layers = {layer: self.of(layer, signal).double() for layer in self.values}
            low = min(values.min().item() for values in layers.values())
            high = max(values.max().item() for values in layers.values())
            # rounding alone may tell tokens of a collapsed layer apart
            high = max(high, low + 1e-6 * max(1.0, abs(low)))
            counts = {
                str(layer): (torch.histc(values, NUM_BINS, low, high) / len(values)).tolist()
                for layer, values in layers.items()
            }
            found[signal] = {"low": low, "high": high, "shares": counts}
        return found

    def quantile(self, signal: str, share: float) -> float:
        """What this share of the tokens of all routed layers is below."""
        values = torch.cat([self.of(layer, signal) for layer in self.values]).sort().values
        rank = min(len(values) - 1, round(share * len(values)))
        return values[rank].item()


def measure_uncertainty(
    model: MetaAttentionForCausalLM, blocks: Tensor, *, batch_size: int = BATCH_SIZE
) -> UncertaintyTally:
    """Uncertainty of every token, the routes taken softly, as beliefs are then seen whole."""
    tally = UncertaintyTally()
    with routed_as(model, "soft"), evaluating(model):
        for ids in blocks.split(batch_size):
            out = model(ids.to(model.device), use_cache=False, output_routing=True)
            tally.add(out.routing_weights, out.concentrations)
    return tally


def measure_gates(
    model: MetaAttentionForCausalLM,
    blocks: Tensor,
    uncertainty: UncertaintyTally,
    *,
    batch_size: int = BATCH_SIZE,
) -> dict[str, list[Figures]]:
    """Quality and operations of gated routing as the threshold rises, for each signal.

    Thresholds are where they make these shares of the tokens hard, so that signals of different
    units can be compared.
    """
    blocks = blocks[:GATE_BLOCKS]
    found: dict[str, list[Figures]] = {}
    for signal in uncertainty.signals:
        points = found[signal] = []
        for share in GATE_SHARES:
            value = uncertainty.quantile(signal, share)
            # tokens below it are hard: the last threshold must be above all of them
            value = value + max(1.0, abs(value)) if share == 1.0 else value
            with gated_by(model, signal, value):
                point = _score_gated(model, blocks, batch_size)
            points.append({"share_asked": share, "threshold": value} | point)
    return found


def _score_gated(
    model: MetaAttentionForCausalLM, blocks: Tensor, batch_size: int
) -> dict[str, float]:
    nats, executed = 0.0, Flops()
    with evaluating(model), counting_hard(model) as routes:
        for ids in blocks.split(batch_size):
            ids = ids.to(model.device)
            out = model(ids, use_cache=False, output_routing=True)
            nats += _losses(out.logits, ids).double().sum().item()
            executed += count_model(model.config, out.routing_weights)
    N, T = blocks.shape
    return {
        "hard_share": routes["hard"] / max(routes.total(), 1),
        "loss": nats / (N * (T - 1)),
        "attention_flops": relative_flops(model.config, executed, N, T)["attention"],
    }


def read_passage(
    model: MetaAttentionForCausalLM, tokenizer: PreTrainedTokenizerBase, blocks: Tensor
) -> Figures:
    """A text, character by character or token by token, and the top expert of each by layer."""
    with routed_as(model, "soft"), evaluating(model):
        out = model(blocks.to(model.device), use_cache=False, output_routing=True)
    layers = []
    for layer, weights in zip(attention_layers(model), out.routing_weights, strict=True):
        top, expert = weights.flatten(0, 1).max(dim=-1)
        layers.append(
            {
                "experts": list(layer.expert_names),
                "expert": expert.tolist(),
                "weight": [round(value, 3) for value in top.tolist()],
            }
        )
    tokens = [tokenizer.decode([token]) for token in blocks.flatten().tolist()]
    return {"tokens": tokens, "layers": layers}


@contextmanager
def counting_hard(model: MetaAttentionForCausalLM) -> Iterator[Counter[str]]:
    """Routes of layers that have a choice, as ``"hard"`` and ``"soft"``; filled as it runs.

    Weights do not tell: that of a soft route may round to one.
    """
    routes: Counter[str] = Counter()

    def count(layer: nn.Module, inputs: Any, out: LayerOutput) -> None:
        is_hard = out.routes.hard if out.is_padding is None else out.routes.hard[~out.is_padding]
        hard = int(is_hard.sum())
        routes.update(hard=hard, soft=is_hard.numel() - hard)

    layers = [layer for layer in attention_layers(model) if len(layer.expert_names) > 1]
    handles = [layer.register_forward_hook(count) for layer in layers]
    try:
        yield routes
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def gated_by(model: MetaAttentionForCausalLM, signal: str, threshold: float) -> Iterator[None]:
    """Gate by a signal at a threshold; afterwards the model is as before."""
    config: Any = model.config
    before = (config.uncertainty_signal, config.uncertainty_threshold)
    with routed_as(model, "gated"):
        try:
            config.uncertainty_signal = signal
            model.set_uncertainty_threshold(threshold)
            yield
        finally:
            config.uncertainty_signal, config.uncertainty_threshold = before
            for layer in attention_layers(model):
                layer.controller.reset_buffers()


def _score(model: MetaAttentionForCausalLM, ids: Tensor) -> Tensor:
    return _losses(model(ids, use_cache=False).logits, ids)


def _losses(logits: Tensor, ids: Tensor) -> Tensor:
    """Nats of every token but the first of each block [M]."""
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none"
    )
