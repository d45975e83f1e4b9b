"""The paper's correctness table: is the Bayesian machinery wired as printed?

A layer of the paper's size with random weights, over many seeds, next to the values the paper
gives for one. Structural rows must hold. Value rows say whether the paper's number lies within
the range of our seeds, and if not, what would give it.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from meta_attention.config import MetaAttentionConfig
from meta_attention.controller import RoutingPosterior
from meta_attention.layers import BayesianMetaAttentionLayer, LayerOutput

B, T, D = 2, 64, 128
PAPER_WEIGHTS = {"full": 0.209, "linear": 0.406, "local": 0.385}
PAPER_ENTROPY = 1.06  # nats
PAPER_KL = 3.42  # nats

Measure = Callable[[RoutingPosterior], torch.Tensor]


@dataclass(frozen=True, slots=True)
class StructuralRow:
    """Something that must hold for every seed."""

    name: str
    expected: str
    holds: bool
    seen: str


@dataclass(frozen=True, slots=True)
class ValueRow:
    """A number of ours over the seeds, next to the paper's."""

    name: str
    paper: float
    mean: float
    std: float
    low: float
    high: float
    note: str

    @property
    def agrees(self) -> bool:
        """The paper's number is among the values our seeds take, as far as it is printed."""
        digits = len(f"{self.paper}".partition(".")[2])
        return round(self.low, digits) <= self.paper <= round(self.high, digits)


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The whole table."""

    seeds: int
    structure: list[StructuralRow]
    values: list[ValueRow]

    @property
    def passed(self) -> bool:
        return all(row.holds for row in self.structure)

    def to_dict(self) -> dict[str, Any]:
        return {
            "seeds": self.seeds,
            "passed": self.passed,
            "structure": [asdict(row) for row in self.structure],
            "values": [asdict(row) | {"agrees": row.agrees} for row in self.values],
        }


def paper_config() -> MetaAttentionConfig:
    """The layer of the paper's correctness table: own projections, prior [0.01, 0.86, 0.71]."""
    return MetaAttentionConfig(
        hidden_size=D,
        num_attention_heads=4,
        max_position_embeddings=T,
        window_size=16,
        shared_projections=False,
    )


def run_check(seeds: int = 20, advance: Callable[[], None] = lambda: None) -> CheckReport:
    """Build and run the layer once per seed.

    Args:
        seeds: How many random initialisations.
        advance: Called after each seed, for a progress bar.
    """
    config = paper_config()
    outputs = []
    for seed in range(seeds):
        outputs.append(_forward(config, seed))
        advance()
    prior = BayesianMetaAttentionLayer(config).controller.prior_concentration
    return CheckReport(
        seeds,
        list(_structure(outputs, prior)),
        list(_values(outputs, prior, config.experts_of(0))),
    )


def _forward(config: MetaAttentionConfig, seed: int) -> LayerOutput:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        layer = BayesianMetaAttentionLayer(config).eval()
        return layer(F.rms_norm(torch.randn(B, T, config.hidden_size), (config.hidden_size,)))


def _structure(outputs: list[LayerOutput], prior: torch.Tensor) -> Iterator[StructuralRow]:
    shapes = {tuple(out.output.shape) for out in outputs}
    expected = (B, T, D)
    yield StructuralRow(
        "output shape",
        str(expected),
        shapes == {expected},
        ", ".join(str(shape) for shape in sorted(shapes)),
    )
    bad = sum(
        (~tensor.isfinite()).sum().item()
        for out in outputs
        for tensor in (out.output, out.kl, out.posterior.mean)
    )
    yield StructuralRow("NaN / Inf", "none", bad == 0, f"{bad:.0f} values")
    log_beta = (prior.double().lgamma().sum() - prior.double().sum().lgamma()).item()
    yield StructuralRow(
        "log B(prior) finite",
        "yes, every concentration > 0",
        bool(torch.tensor(log_beta).isfinite()) and bool((prior > 0).all()),
        f"{log_beta:.3f}, prior {[round(c, 2) for c in prior.tolist()]}",
    )
    error = max((out.posterior.mean.sum(dim=-1) - 1.0).abs().max().item() for out in outputs)
    yield StructuralRow("weights sum to one", "1.000", error < 1e-5, f"off by at most {error:.1e}")


def _values(
    outputs: list[LayerOutput], prior: torch.Tensor, experts: tuple[str, ...]
) -> Iterator[ValueRow]:
    weights = torch.stack([out.posterior.mean.mean(dim=(0, 1)) for out in outputs])  # [seeds, E]
    kl = torch.stack([out.kl.mean() for out in outputs])
    evidence = sum(_evidence(out, prior) for out in outputs) / len(outputs)

    for index, name in enumerate(experts):
        yield _value_row(
            f"mean weight: {name}",
            PAPER_WEIGHTS[name],
            weights[:, index],
            evidence,
            _evidence_for(PAPER_WEIGHTS[name], prior, _weight_of(index)),
        )
    yield _value_row(
        "entropy of the mean (nats)",
        PAPER_ENTROPY,
        torch.special.entr(weights).sum(dim=-1),
        evidence,
        _evidence_for(PAPER_ENTROPY, prior, lambda q: q.mean_entropy),
    )
    yield _value_row(
        "KL to the prior (nats)",
        PAPER_KL,
        kl,
        evidence,
        _evidence_for(PAPER_KL, prior, lambda q: q.kl_to(prior)),
    )


def _evidence(out: LayerOutput, prior: torch.Tensor) -> float:
    """Evidence per expert, mean over tokens and experts."""
    assert isinstance(out.posterior, RoutingPosterior)
    return (out.posterior.concentration - prior).mean().item()


def _weight_of(index: int) -> Measure:
    return lambda posterior: posterior.mean[index]


def _evidence_for(value: float, prior: torch.Tensor, measure: Measure) -> float | None:
    """Equal evidence for every expert at which ``measure`` takes ``value``, by bisection."""

    def at(evidence: float) -> float:
        return measure(RoutingPosterior(prior + evidence)).item()

    low, high = 0.0, 10.0
    if not min(at(low), at(high)) <= value <= max(at(low), at(high)):
        return None
    rising = at(high) > at(low)
    for _ in range(60):
        middle = (low + high) / 2
        if (at(middle) < value) == rising:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _value_row(
    name: str, paper: float, ours: torch.Tensor, evidence: float, needed: float | None
) -> ValueRow:
    row = ValueRow(
        name,
        paper,
        mean=ours.mean().item(),
        std=ours.std(correction=min(1, len(ours) - 1)).item(),
        low=ours.min().item(),
        high=ours.max().item(),
        note="",
    )
    if row.agrees:
        return row
    note = f"our weights start at evidence {evidence:.2f} on average, softplus(0) = 0.69"
    if needed is not None:
        note += (
            f"; evidence {needed:.2f} would give the paper's value, which is of one seed with an "
            "initialisation it does not state"
        )
    return replace(row, note=note)
