"""Figures of an ablation: small ones, each with one message, that fit on a phone.

Needs matplotlib, and nothing else that the figures themselves do not have.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meta_attention.report.ablation.drawing import (
    EXPERTS,
    MEANINGS,
    SIGNALS,
    Panel,
    add_legend,
    check_matplotlib,
    colour_of,
    draw_curve,
    make_axes,
    marker_of,
    patch_of,
    style,
)
from meta_attention.report.ablation.experiment_figures import (
    draw_gates,
    draw_gradients,
    draw_repetition,
    draw_sweep,
)
from meta_attention.report.ablation.frontiers import draw_frontiers
from meta_attention.report.ablation.read import Ablation, Row, Run
from meta_attention.report.ablation.summary import mean_curve, summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# routes that differ most, where all would be too many
SHOWN = ("bayesian", "prior-free", "recommended")


@dataclass(frozen=True)
class Section:
    """Figures that belong together."""

    title: str
    text: str
    panels: list[Panel]

    @property
    def is_main(self) -> bool:
        """Whether it says what comes of it all, and so comes before the claims one by one."""
        return self.panels[0].name == "frontier"


def draw_sections(ablation: Ablation) -> list[Section]:
    """Every figure that the runs at hand allow."""
    check_matplotlib()
    with style():
        found = [Section(title, text, list(panels)) for title, text, panels in _sections(ablation)]
    return [section for section in found if section.panels]


def _sections(ablation: Ablation) -> Iterator[tuple[str, str, Iterator[Panel]]]:
    if "ablation" in ablation.experiments:
        rows = summarise(ablation, "ablation")
        names = [row.variant for row in rows]
        routed = [row.variant for row in rows if not row.is_static]
        yield (
            "Cost and quality",
            "Lower is better on both axes. Bars are 95% intervals over seeds.",
            draw_frontiers(rows),
        )
        yield (
            "Over training",
            "Measured on held-out text with routes taken softly; bands are 95% intervals.",
            _curves(ablation, names, routed),
        )
        yield (
            "Where the tokens go",
            "How the weights are shared out among the experts; the passage below shows single "
            "characters.",
            _shares(ablation, routed),
        )
        yield (
            "How sure the controllers are",
            "Uncertainty of every token of the held-out text. A single spike: the controller is as "
            "sure of one token as of any other, and a gate has nothing to go by. One line per "
            "seed, the first drawn bold.",
            _histograms(ablation, routed),
        )
        yield (
            "Calibration",
            "On the diagonal, what is said with 80% confidence holds 8 times in 10.",
            _reliability(ablation, names, routed),
        )
    gated = [name for name in dict.fromkeys((*SHOWN, *ablation.by_variant)) if name in SHOWN]
    yield (
        "Gated routing: the threshold",
        "Tokens less uncertain than a threshold take one expert, the others all. From left to "
        "right fewer tokens are hard.",
        draw_gates(ablation, [name for name in gated if name in ablation.by_variant]),
    )
    for name in ablation.experiments:
        title, question = f"Experiment: {name}", ablation.plan["experiments"][name]["question"]
        if name == "gradient-variance":
            yield title, question, draw_gradients(ablation)
        elif name == "repetition":
            yield title, question, draw_repetition(ablation)
        elif name not in ("ablation", "threshold"):
            yield title, question, draw_sweep(ablation, name)


# --- over training ---


def _curves(ablation: Ablation, names: Sequence[str], routed: Sequence[str]) -> Iterator[Panel]:
    def soft(key: str, scale: float = 1.0) -> Callable[[Row], float | None]:
        return lambda row: None if row["soft"][key] is None else scale * row["soft"][key]

    for name, label, title, caption, read, which in (
        (
            "curve-loss",
            "held-out loss, nats",
            "Loss",
            "How fast each variant learns, without the first tenth of training, where all fall "
            "from the same height.",
            soft("loss"),
            names,
        ),
        (
            "curve-kl",
            "KL to the prior, nats",
            "KL to the prior",
            "Zero means the posterior has become the prior: tokens are no longer told apart. "
            "Prior-free variants have none.",
            soft("kl"),
            routed,
        ),
        (
            "curve-entropy",
            "routing entropy, %",
            "Routing entropy",
            "100% is equal weights for all experts. A sudden fall would be the phase transition "
            "that the paper expects.",
            soft("routing_entropy"),
            routed,
        ),
        (
            "curve-adaptivity",
            "adaptivity, nats",
            "Adaptivity",
            "What a token tells about its route. Zero means every token gets the same weights, "
            "whatever the entropy and the cost say.",
            soft("adaptivity"),
            routed,
        ),
        (
            "curve-cost",
            "projected cost, %",
            "Projected cost",
            "With the paper's costs. The prior's own mean is 22.3%.",
            soft("projected_cost", 100.0),
            routed,
        ),
    ):
        figure, axes = make_axes("step", label)
        drawn = [
            draw_curve(axes, mean_curve(ablation.by_variant[v], read), v, names.index(v))
            for v in which
        ]
        if any(drawn):
            if name == "curve-loss":
                _cut_off_the_start(axes)
            add_legend(axes)
            yield Panel(name, title, caption, figure)


def _cut_off_the_start(axes: "Axes") -> None:
    """Limits without the first tenth of the steps, in which every loss falls the most."""
    data: list[Any] = [line.get_xydata() for line in axes.get_lines()]
    points = [(float(x), float(y)) for pairs in data for x, y in pairs]
    begin = 0.1 * max(x for x, _ in points)
    shown = [y for x, y in points if x >= begin]
    room = 0.05 * (max(shown) - min(shown))
    if room > 0.0:
        axes.set_ylim(min(shown) - room, max(shown) + room)
        axes.set_xlim(left=begin)


# --- routes ---


def _shares(ablation: Ablation, routed: Sequence[str]) -> Iterator[Panel]:
    if not routed:
        return
    figure, axes = make_axes("mean weight, %", "", height=0.6 + 0.42 * 2 * len(routed))
    labels: list[str] = []
    for variant in routed:
        runs = ablation.by_variant[variant]
        for layer in range(len(runs[0].result["soft"]["layers"])):
            _draw_shares(axes, runs, layer, -len(labels))
            labels.append(f"{variant}, layer {layer}")
    axes.set_yticks([-i for i in range(len(labels))], labels, fontsize=8)
    axes.set_xlim(0, 100)
    handles = [patch_of(colour, name) for name, colour in EXPERTS.items()]
    add_legend(axes, handles, columns=3)
    yield Panel(
        "shares",
        "Mean weight of each expert, by layer",
        "Thick bars: how much of each expert an average token takes when experts are mixed. Thin "
        "bars below: the share of tokens that hard routing would send to each.",
        figure,
    )
    for variant in [name for name in SHOWN if name in routed]:
        figure, axes = make_axes("step", "mean weight, %")
        for expert, colour in EXPERTS.items():

            def read(row: Row, expert: str = expert) -> float | None:
                shares = [layer["share"].get(expert) for layer in row["soft"]["layers"]]
                known = [share for share in shares if share is not None]
                return 100.0 * sum(known) / len(known) if known else None

            curve = mean_curve(ablation.by_variant[variant], read)
            steps, means = [s for s, _ in curve], [m.mean for _, m in curve]
            axes.plot(steps, means, color=colour, lw=1.4, label=expert)
        axes.set_ylim(0, 100)
        add_legend(axes, columns=3)
        yield Panel(
            f"shares-{variant}",
            f"{variant}: weights over training",
            "How much of each expert an average token of the held-out text takes, mean over "
            "layers.",
            figure,
        )


def _draw_shares(axes: "Axes", runs: Sequence[Run], layer: int, y: float) -> None:
    for kind, at, height in (("share", y + 0.08, 0.44), ("top_share", y - 0.26, 0.16)):
        left = 0.0
        for expert, colour in EXPERTS.items():
            shares = [run.result["soft"]["layers"][layer][kind].get(expert, 0.0) for run in runs]
            width = 100.0 * sum(shares) / len(shares)
            axes.barh(at, width, height, left=left, color=colour)
            left += width


# --- uncertainty and calibration ---


def _histograms(ablation: Ablation, routed: Sequence[str]) -> Iterator[Panel]:
    for variant in [name for name in SHOWN if name in routed]:
        runs = ablation.by_variant[variant]
        known = runs[0].result.get("histograms", {})
        for signal in (
            ("mutual_information", "entropy") if "entropy" in known else ("mean_entropy",)
        ):
            figure, axes = make_axes(SIGNALS[signal], "share of tokens, %")
            layers = known[signal]["shares"]
            for index, layer in enumerate(layers):
                for number, run in enumerate(runs):
                    found = run.result["histograms"][signal]
                    edges = _edges(found)
                    shares = [100.0 * share for share in found["shares"][layer]]
                    axes.stairs(
                        shares,
                        edges,
                        color=colour_of(index),
                        lw=1.3 if number == 0 else 0.6,
                        label=f"layer {layer}" if number == 0 else None,
                    )
            add_legend(axes)
            yield Panel(
                f"uncertainty-{variant}-{signal}",
                f"{variant}: {SIGNALS[signal].split(',')[0]}",
                "How many tokens of each layer have which value. Further right: "
                f"{MEANINGS[signal]}.",
                figure,
            )


def _edges(histogram: Row) -> list[float]:
    low, high = histogram["low"], histogram["high"]
    count = len(next(iter(histogram["shares"].values())))
    return [low + (high - low) * i / count for i in range(count + 1)]


def _reliability(
    ablation: Ablation, names: Sequence[str], routed: Sequence[str]
) -> Iterator[Panel]:
    for name, which, title, caption, read in (
        (
            "reliability",
            [name for name in names if name in (*SHOWN, "full", "hybrid")],
            "Next character",
            "How often the most probable character is right, against how probable the model says "
            "it is.",
            lambda result: [result["soft"]["calibration"]],
        ),
        (
            "reliability-routing",
            routed,
            "Best expert",
            "How often the expert of largest weight is the one that predicts best when forced on "
            "every token, against its weight. Far below the diagonal: weights are not earned.",
            lambda result: [x["calibration"] for x in result["soft"]["forced"]["layers"]],
        ),
    ):
        figure, axes = make_axes("confidence", "share that holds")
        axes.plot([0, 1], [0, 1], color="#888888", lw=0.8, ls="--")
        for variant in which:
            points = _pooled(read(run.result) for run in ablation.by_variant[variant])
            if points:
                axes.plot(
                    [x for x, _ in points],
                    [y for _, y in points],
                    color=colour_of(names.index(variant)),
                    marker=marker_of(names.index(variant)),
                    ms=3.5,
                    lw=1,
                    label=variant,
                )
        add_legend(axes)
        yield Panel(name, title, caption, figure)


def _pooled(found: Iterator[list[list[Row]]]) -> list[tuple[float, float]]:
    """Confidence and share that held of each bin, over all layers and seeds; rare bins are out."""
    sums: dict[int, list[float]] = {}
    for layers in found:
        for bins in layers:
            for index, one in enumerate(bins):
                total = sums.setdefault(index, [0.0, 0.0, 0.0])
                total[0] += one["count"]
                total[1] += one["count"] * one["confidence"]
                total[2] += one["count"] * one["accuracy"]
    everything = sum(count for count, _, _ in sums.values())
    return [
        (confidence / count, held / count)
        for _, (count, confidence, held) in sorted(sums.items())
        if count > 0.002 * everything
    ]
