"""What the paper says of its ablation, next to what our runs say.

Every claim is one number with a sign: what the paper gives, what we measure, and its 95% interval
over seeds. Differences between two variants are taken seed by seed.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from meta_attention.evaluation.statistics import Figure
from meta_attention.report.ablation.read import Ablation, Row
from meta_attention.report.ablation.summary import largest_drop, paired

Verdict = Literal["reproduced", "not reproduced", "opposite", "not measured"]

# an effect within this factor of the paper's, either way, counts as of its size
FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence of the paper, and its number.

    Args:
        text: What the paper says.
        measure: What is compared, in words.
        paper: Its number; 0 stands for no effect.
        unit: Of both numbers.
        ours: What we measure.
        verdict: What follows.
        comment: What the verdict means, or why there is none.
    """

    text: str
    measure: str
    paper: float
    unit: str
    ours: Figure | None
    verdict: Verdict
    comment: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge(ours: Figure | None, paper: float, *, is_gain: bool = False) -> Verdict:
    """Compare an effect with the paper's.

    Reproduced: of the same sign, and the paper's number is in our interval or within ``FACTOR`` of
    our mean. Opposite: of the other sign, 0 not in the interval. Anything else is not reproduced.
    Of a single seed the mean alone counts.

    Args:
        ours: What we measure.
        paper: What the paper gives.
        is_gain: What the paper claims is a gain, so a larger one reproduces it as well.
    """
    if ours is None:
        return "not measured"
    same_sign = ours.mean * paper > 0.0
    is_clear = ours.low > 0.0 or ours.high < 0.0
    if not same_sign:
        return "opposite" if is_clear and ours.mean else "not reproduced"
    ratio = ours.mean / paper
    is_near = 1.0 / FACTOR <= ratio <= FACTOR or ours.low <= paper <= ours.high
    is_near |= is_gain and ratio > 1.0
    return "reproduced" if is_clear and is_near else "not reproduced"


def has_claims(ablation: Ablation) -> bool:
    """Whether the two variants that the paper compares have runs."""
    return {"bayesian", "prior-free"} <= set(ablation.variants_of("ablation"))


def paper_claims(ablation: Ablation) -> list[Claim]:
    """Every sentence of the paper's table and its analysis that has a number or a direction."""
    compare = _Comparison(ablation, "bayesian", "prior-free")
    return [
        compare.claim(
            "A modest 6.3% relative perplexity increase",
            "perplexity of the Bayesian variant over prior-free, minus 1",
            6.3,
            "%",
            lambda a, b: 100.0 * (a["perplexity"] / b["perplexity"] - 1.0),
        ),
        compare.claim(
            "Lower routing entropy, 43.3% against 55.8%: more committed routing",
            "routing entropy, Bayesian minus prior-free",
            -12.5,
            "pp",
            lambda a, b: a["routing_entropy"] - b["routing_entropy"],
            "Where the adaptivity is 0 it is the entropy of one set of weights for every token, "
            "which is no commitment of tokens.",
            is_gain=True,
        ),
        compare.claim(
            "Projected FLOP cost 25.1% against 59.3%",
            "projected cost, Bayesian minus prior-free",
            -34.2,
            "pp",
            lambda a, b: 100.0 * (a["projected_cost"] - b["projected_cost"]),
            "The mean of the prior alone, with nothing learnt, costs 22.3%.",
            is_gain=True,
        ),
        _single(
            ablation,
            "prior-free",
            "The prior-free model is near-uniform or biased to full attention, at 59.3%",
            "projected cost of prior-free, minus the 48.3% of uniform weights",
            11.0,
            "pp",
            lambda r: 100.0 * r["soft"]["projected_cost"] - 48.333,
        ),
        compare.claim(
            "The prior prevents routing collapse",
            "layers that send 95% of tokens to one expert or do not tell tokens apart, Bayesian "
            "minus prior-free",
            -1.0,
            "layers",
            lambda a, b: _collapsed(a) - _collapsed(b),
            "The paper gives no number: one layer stands for any gain.",
            is_gain=True,
        ),
        compare.claim(
            "Per-token posteriors are more concentrated",
            "adaptivity, what a token tells about its route: Bayesian minus prior-free",
            0.01,
            "nats",
            lambda a, b: a["adaptivity"] - b["adaptivity"],
            "The paper gives no number: 0.01 nats stands for any gain, and is what tells a layer "
            "from a collapsed one.",
            is_gain=True,
        ),
        _single(
            ablation,
            "bayesian",
            "Low entropy is what hard routing needs: the posterior can be made hard",
            "perplexity of the Bayesian variant routed hard over soft, minus 1",
            0.0,
            "%",
            lambda r: 100.0 * (r["hard"]["perplexity"] / r["soft"]["perplexity"] - 1.0),
            "A rise means that weights trained soft were not ready for hard routes.",
            wants_none=2.0,
        ),
        _single(
            ablation,
            "bayesian",
            "Under hard routing the FLOP ratio would approach 0.36, a cut of 64%",
            "cut in projected cost under hard routes of the Bayesian variant",
            64.0,
            "%",
            lambda r: 100.0 * (1.0 - r["hard"]["projected_cost"]),
        ),
        _single(
            ablation,
            "bayesian",
            "Actual FLOPs exceed the threshold of a 30% cut",
            "cut in counted attention FLOPs under hard routes, at this length",
            30.0,
            "%",
            lambda r: 100.0 * (1.0 - r["hard"]["flops"]["attention"]),
            "Scores, values and the linear state that every token updates; projections left out.",
            is_at_least=True,
        ),
        _single(
            ablation,
            "bayesian",
            "Routing commits in a sharp phase transition",
            "largest drop of routing entropy between two of twenty moments of training, as a share "
            "of its whole fall",
            100.0,
            "%",
            None,
            "Measured on held-out text; a gradual fall would be near 5%.",
            of_curve=_share_of_largest_drop,
        ),
    ]


def own_questions(ablation: Ablation) -> list[Claim]:
    """What the paper did not ask: differences of losses under hard routes, in nats."""
    texts = {
        ("recommended", "prior-free-cost"): (
            "Does a prior do better than a cost penalty at the same cost?"
        ),
        ("recommended", "bayesian"): "Does our recipe do better than the paper's, routed hard?",
        ("recommended", "hybrid"): "Does routing do better than a static hybrid?",
        ("recommended", "full"): "What does routing lose against full attention?",
        ("recommended", "local"): "Is routing worth more than local attention alone?",
    }
    found = []
    for (name, other), text in texts.items():
        both = [(a["hard"], b["hard"]) for a, b in paired(ablation, name, other)]
        ours = Figure.of([a["loss"] - b["loss"] for a, b in both])
        cost, other_cost = (Figure.of([_attention(pair[i]) for pair in both]) for i in range(2))
        if ours is None or cost is None or other_cost is None:
            continue
        is_clear = ours.low > 0.0 or ours.high < 0.0
        answer = "no clear difference"
        if is_clear:
            answer = f"{name} is better" if ours.mean < 0.0 else f"{other} is better"
        if ours.n == 1:
            answer += ", by one seed"
        found.append(
            Claim(
                text,
                f"hard loss of {name} minus that of {other}",
                0.0,
                "nats",
                ours,
                "not measured",
                f"{answer}; counted attention FLOPs {cost.show('.0f')}% and "
                f"{other_cost.show('.0f')}% of full attention's",
            )
        )
    return found


class _Comparison:
    """Two variants, as they were trained to be used: softly."""

    def __init__(self, ablation: Ablation, name: str, other: str) -> None:
        self.ablation, self.name, self.other = ablation, name, other

    def claim(
        self,
        text: str,
        measure: str,
        paper: float,
        unit: str,
        difference: Callable[[Row, Row], float],
        comment: str = "",
        *,
        is_gain: bool = False,
    ) -> Claim:
        both = paired(self.ablation, self.name, self.other)
        ours = Figure.of([difference(a["soft"], b["soft"]) for a, b in both])
        verdict = judge(ours, paper, is_gain=is_gain)
        return Claim(text, measure, paper, unit, ours, verdict, comment)


def _single(
    ablation: Ablation,
    name: str,
    text: str,
    measure: str,
    paper: float,
    unit: str,
    read: Callable[[Row], float] | None,
    comment: str = "",
    *,
    is_at_least: bool = False,
    wants_none: float | None = None,
    of_curve: Callable[[Sequence[Row]], float | None] | None = None,
) -> Claim:
    """A claim about one variant.

    Args:
        is_at_least: The paper gives a bound from below.
        wants_none: The paper says there is no effect; up to this much counts as none.
        of_curve: Reads the figure from the rows of a run's training in place of its result.
    """
    runs = ablation.by_variant.get(name, [])
    values = [of_curve(run.curve) if of_curve else read(run.result) for run in runs]  # type: ignore[misc]
    ours = Figure.of(values)
    verdict = judge(ours, paper)
    if ours is not None and is_at_least:
        verdict = "reproduced" if ours.low >= paper else "not reproduced"
    if ours is not None and wants_none is not None:
        verdict = "reproduced" if ours.high <= wants_none else "not reproduced"
    return Claim(text, measure, paper, unit, ours, verdict, comment)


def _collapsed(figures: Row) -> float:
    """Layers with a collapse of either kind."""
    layers = figures["collapsed_layers"]
    return float(len({*layers["expert"], *layers["prior"]}))


def _attention(figures: Row) -> float:
    return 100.0 * figures["flops"]["attention"]


def _share_of_largest_drop(curve: Sequence[Row]) -> float | None:
    drop = largest_drop(curve)
    return None if drop is None else drop.share
