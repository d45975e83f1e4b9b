"""How every figure of a report is drawn: small, in one ink, in colours that can be told apart."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meta_attention.errors import BackendUnavailableError
from meta_attention.evaluation.statistics import Figure as Mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# text and axes; a page replaces it by its own ink, light or dark
INK = "#25303b"
# inches; small, so that text can be read on a phone, where a figure is as wide as the page
SIZE = (3.6, 2.7)
ROW = 0.17  # of a legend
# told apart also by people who see fewer colours, on light and on dark
COLOURS = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#d55e00",
    "#56b4e9",
    "#8a6d3b",
    "#7f7fbf",
    "#999999",
)
MARKERS = "oDs^vPX<>"
EXPERTS = {"full": "#0072b2", "linear": "#e69f00", "local": "#009e73"}
LINES = ("-", "--", "-.", ":")
SIGNALS = {
    "mutual_information": "mutual information, nats",
    "mean_entropy": "entropy of the weights, nats",
    "margin": "1 - margin",
    "vacuity": "vacuity",
    "entropy": "the paper's U, nats",
}
# what it means for a token to be far to the right
MEANINGS = {
    "mutual_information": "more evidence could still change the controller's mind",
    "mean_entropy": "the weights are spread evenly over the experts",
    "entropy": "the posterior is spread out; very low also where the controller knows nothing",
}


@dataclass(frozen=True)
class Panel:
    """A figure, and what it shows in plain words."""

    name: str
    title: str
    caption: str
    figure: "Figure"


LEGEND: dict[str, Any] = {
    "fontsize": 8,
    "frameon": False,
    "labelcolor": INK,
    "handlelength": 1.8,
    "columnspacing": 1.2,
    "borderpad": 0.1,
    "labelspacing": 0.3,
}


def check_matplotlib() -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise BackendUnavailableError(
            "figures need matplotlib, which is not installed here; run 'meta-attention report' "
            "where it is"
        ) from error
    matplotlib.use("Agg")


def style() -> AbstractContextManager[None]:
    """How figures look, while they are drawn and saved; what others draw is left alone."""
    import matplotlib

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "ablation",
        "font.size": 8.5,
        **{f"{name}.color": INK for name in ("text", "xtick", "ytick")},
        **{f"axes.{name}": INK for name in ("edgecolor", "labelcolor")},
    }
    return matplotlib.rc_context(settings)


def make_axes(x_label: str, y_label: str, height: float | None = None) -> "tuple[Figure, Axes]":
    # no pyplot: it would keep every figure
    from matplotlib.figure import Figure

    figure = Figure(figsize=(SIZE[0], height or SIZE[1]), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(color="#888888", alpha=0.25, lw=0.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def add_legend(axes: "Axes", handles: Sequence[Any] | None = None, columns: int = 2) -> None:
    """Above the axes, where it covers nothing; the figure grows by as much.

    Args:
        axes: Of the only plot of its figure.
        handles: What to show; by default everything that was drawn with a label.
        columns: How many entries side by side.
    """
    shown = axes.get_legend_handles_labels()[0] if handles is None else list(handles)
    if not shown:
        return
    figure = axes.get_figure(root=True)
    assert figure is not None
    rows = -(-len(shown) // columns)
    figure.set_figheight(figure.get_figheight() + ROW * rows)
    figure.legend(handles=shown, loc="outside upper left", ncol=columns, **LEGEND)


def patch_of(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)


def sample_of(label: str, marker: str = "", line: str = "") -> Any:
    """An entry of a legend for what has no colour of its own."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color="#888888", marker=marker, ls=line, lw=1, ms=6, label=label)


def line_of(index: int) -> str:
    """Lines that lie on one another are both seen."""
    return LINES[index % len(LINES)]


def colour_of(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def marker_of(index: int) -> str:
    return MARKERS[index % len(MARKERS)]


def draw_curve(axes: "Axes", curve: Sequence[tuple[int, Mean]], label: str, index: int) -> bool:
    if not curve:
        return False
    steps = [step for step, _ in curve]
    colour = colour_of(index)
    means = [mean.mean for _, mean in curve]
    axes.plot(steps, means, color=colour, ls=line_of(index), lw=1.4, label=label)
    if any(mean.interval for _, mean in curve):
        low, high = [m.low for _, m in curve], [m.high for _, m in curve]
        # of two or three seeds a band would hide everything
        if all(mean.n >= 4 for _, mean in curve):
            axes.fill_between(steps, low, high, color=colour, alpha=0.18, lw=0)
    return True
