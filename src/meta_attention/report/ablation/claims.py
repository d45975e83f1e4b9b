"""What the paper says of its ablation, next to what our runs say.

Every claim is one number: what we measure, with its 95% interval over seeds, against what the paper
prints. Where it prints none, a bar of ours stands in, and the comment says which. Differences
between two variants are taken seed by seed.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from meta_attention.evaluation.routing import PRIOR_COLLAPSE
from meta_attention.evaluation.statistics import Figure
from meta_attention.report.ablation.read import Ablation, Row
from meta_attention.report.ablation.summary import largest_drop, paired

Verdict = Literal["reproduced", "not reproduced", "opposite", "not measured"]

# an effect within this factor of the paper's, either way, counts as of its size
FACTOR = 2.0
# of the paper's criterion of success
CUT, NATS = 30.0, 0.5


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence of the paper, and its number.

    Args:
        text: What the paper says.
        measure: What is compared, in words.
        printed: The paper's number, or its word for one.
        unit: Of our number.
        ours: What we measure.
        verdict: What follows.
        comment: What there is to know of it.
    """

    text: str
    measure: str
    printed: str
    unit: str
    ours: Figure | None
    verdict: Verdict
    comment: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Answer:
    """A question of ours, and the difference that answers it."""

    question: str
    measure: str
    difference: Figure  # nats
    answer: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge(ours: Figure | None, paper: float, *, is_gain: bool = False) -> Verdict:
    """Compare an effect with the paper's.

    Reproduced: of the same sign, and the paper's number is in our interval or within ``FACTOR`` of
    our mean. Opposite: of the other sign, 0 not in the interval. Anything else is not reproduced.
    Of a single seed the mean alone counts.

    Args:
        ours: What we measure.
        paper: What the paper gives, or the least that counts as the effect it names.
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


def holds(ours: Figure | None, *, least: float | None = None, most: float | None = None) -> Verdict:
    """Whether all of an interval keeps a bound."""
    if ours is None:
        return "not measured"
    keeps = (least is None or ours.low >= least) and (most is None or ours.high <= most)
    return "reproduced" if keeps else "not reproduced"


def has_claims(ablation: Ablation) -> bool:
    """Whether the two variants that the paper compares have runs."""
    return {"bayesian", "prior-free"} <= set(ablation.variants_of("ablation"))


def paper_claims(ablation: Ablation) -> list[Claim]:
    """Every sentence of the paper's table and its analysis that has a number or a direction."""
    return [
        *_differences(ablation),
        *_of_prior_free(ablation),
        *_of_hard_routes(ablation),
        _of_the_transition(ablation),
    ]


def _differences(ablation: Ablation) -> list[Claim]:
    """Bayesian minus prior-free, both routed softly, as they were trained."""

    def difference(read: Callable[[Row, Row], float]) -> Figure | None:
        both = paired(ablation, "bayesian", "prior-free")
        return Figure.of([read(a["soft"], b["soft"]) for a, b in both])

    perplexity = difference(lambda a, b: 100.0 * (a["perplexity"] / b["perplexity"] - 1.0))
    entropy = difference(lambda a, b: a["routing_entropy"] - b["routing_entropy"])
    cost = difference(lambda a, b: 100.0 * (a["projected_cost"] - b["projected_cost"]))
    collapsed = difference(lambda a, b: _collapsed(a) - _collapsed(b))
    adaptivity = difference(lambda a, b: a["adaptivity"] - b["adaptivity"])
    return [
        Claim(
            "A modest 6.3% relative perplexity increase",
            "perplexity of the Bayesian variant over prior-free, minus 1",
            "+6.3%",
            "%",
            perplexity,
            judge(perplexity, 6.3),
        ),
        Claim(
            "Lower routing entropy, 43.3% against 55.8%: more committed routing",
            "routing entropy, Bayesian minus prior-free",
            "-12.5 pp",
            "pp",
            entropy,
            judge(entropy, -12.5, is_gain=True),
            "Where the adaptivity is 0 it is the entropy of one set of weights for every token, "
            "which is no commitment of tokens.",
        ),
        Claim(
            "Projected FLOP cost 25.1% against 59.3%",
            "projected cost, Bayesian minus prior-free",
            "-34.2 pp",
            "pp",
            cost,
            judge(cost, -34.2, is_gain=True),
            "The mean of the prior alone, with nothing learnt, costs 22.3%.",
        ),
        Claim(
            "The prior prevents routing collapse",
            "layers that send 95% of tokens to one expert or do not tell tokens apart, Bayesian "
            "minus prior-free",
            "fewer",
            "layers",
            collapsed,
            judge(collapsed, -1.0, is_gain=True),
            "The paper gives no number; half a layer fewer would do.",
        ),
        Claim(
            "Per-token posteriors are more concentrated",
            "adaptivity, what a token tells about its route: Bayesian minus prior-free",
            "more",
            "nats",
            adaptivity,
            judge(adaptivity, 2.0 * PRIOR_COLLAPSE, is_gain=True),
            "The paper gives no number; 0.01 nats more, which tell a layer from a collapsed one, "
            "would do.",
        ),
    ]


def _of_prior_free(ablation: Ablation) -> list[Claim]:
    cost = _of_runs(
        ablation, "prior-free", lambda r: 100.0 * r["soft"]["projected_cost"] - 100.0 * 1.45 / 3.0
    )
    return [
        Claim(
            "Without a prior, routing defaults to full attention, at 59.3%",
            "projected cost of prior-free, minus the 48.3% of equal weights",
            "+11.0 pp",
            "pp",
            cost,
            judge(cost, 11.0, is_gain=True),
        )
    ]


def _of_hard_routes(ablation: Ablation) -> list[Claim]:
    """What becomes of the Bayesian variant when each token takes one expert."""
    rise = _of_runs(
        ablation,
        "bayesian",
        lambda r: 100.0 * (r["hard"]["perplexity"] / r["soft"]["perplexity"] - 1.0),
    )
    cost_cut = _of_runs(ablation, "bayesian", lambda r: 100.0 * (1.0 - r["hard"]["projected_cost"]))
    cut = _of_runs(ablation, "bayesian", lambda r: 100.0 - _attention(r["hard"]))
    both = paired(ablation, "bayesian", "full")
    lost = Figure.of([a["hard"]["loss"] - b["hard"]["loss"] for a, b in both])
    criterion = holds(cut, least=CUT)
    if lost is None:
        criterion, loss = "not measured", "Full attention was not run."
    else:
        loss = f"Its loss is {lost.show('.3f', sign='+')} nats from that of full attention."
        if holds(lost, most=NATS) != "reproduced":
            criterion = "not reproduced"
    return [
        Claim(
            "Committed posteriors are what hard routing needs",
            "perplexity of the Bayesian variant routed hard over soft, minus 1",
            "ready",
            "%",
            rise,
            holds(rise, most=2.0),
            "The paper gives no number; a rise of up to 2% would do.",
        ),
        Claim(
            "Under hard routing the FLOP ratio would approach 0.36, a cut of 64%",
            "cut in projected cost under hard routes of the Bayesian variant",
            "64%",
            "%",
            cost_cut,
            judge(cost_cut, 64.0, is_gain=True),
            "The cost alone; what it does to quality is the claim before this one.",
        ),
        Claim(
            "At least 30% fewer FLOPs under hard routing, within 0.5 nats",
            "cut in counted attention FLOPs under hard routes of the Bayesian variant",
            "30% or more",
            "%",
            cut,
            criterion,
            f"{loss} The paper's criterion is for 4k tokens; this is the length it was trained at. "
            "Scores, values and the linear state that every token updates count, projections do "
            "not.",
        ),
    ]


def _of_the_transition(ablation: Ablation) -> Claim:
    shares = [_sharpness(run.curve) for run in ablation.by_variant.get("bayesian", [])]
    ours = Figure.of(shares)
    return Claim(
        "Routing commits in a sharp phase transition",
        "largest drop of the Bayesian variant's routing entropy between two of twenty moments of "
        "training, as a share of its whole fall",
        "sharp",
        "%",
        ours,
        holds(ours, least=50.0),
        "The paper gives no number; half of the fall at once would do, where a gradual one is near "
        "5%. A fall that ends with the same weights for every token (adaptivity below 0.01 nats) "
        "is a collapse, not a commitment, and counts as 0.",
    )


def own_questions(ablation: Ablation) -> list[Answer]:
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
        answer = "no clear difference"
        if ours.low > 0.0 or ours.high < 0.0:
            answer = f"{name} is better" if ours.mean < 0.0 else f"{other} is better"
        answer += (
            f"{', by one seed' if ours.n == 1 else ''}; counted attention FLOPs "
            f"{cost.show('.0f')}% and {other_cost.show('.0f')}% of full attention's"
        )
        found.append(Answer(text, f"hard loss of {name} minus that of {other}", ours, answer))
    return found


def _of_runs(ablation: Ablation, name: str, read: Callable[[Row], float]) -> Figure | None:
    return Figure.of([read(run.result) for run in ablation.by_variant.get(name, [])])


def _collapsed(figures: Row) -> float:
    """Layers with a collapse of either kind."""
    layers = figures["collapsed_layers"]
    return float(len({*layers["expert"], *layers["prior"]}))


def _attention(figures: Row) -> float:
    return 100.0 * figures["flops"]["attention"]


def _sharpness(curve: Sequence[Row]) -> float | None:
    drop = largest_drop(curve)
    if drop is None:
        return None
    has_collapsed = curve[-1]["soft"]["adaptivity"] < PRIOR_COLLAPSE
    return 0.0 if has_collapsed else drop.share
