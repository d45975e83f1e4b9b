"""Results of the study of adapted models: what attention is worth, and who spends it best."""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from study_adapt_measure import PASSAGE, RESULT, TIMES, VARIANTS

from meta_attention.errors import DataError

Row = dict[str, Any]

# what the flagship is held to
MOST_ATTENTION, MOST_LOSS, LEAST_RETRIEVAL = 0.30, 0.02, 0.95

# the order of tables, and what each family is
FAMILIES = {
    "base": "full attention everywhere",
    **{
        f"ours, {kind}{suffix}": f"a route for every {every} by a trained router{what}"
        for suffix, what in (
            ("", ""),
            (" + LoRA", ", its base with LoRA"),
            (", moved", ", its threshold moved to another cost"),
        )
        for kind, every in (
            ("token", "token"),
            ("key-value head", "key-value head"),
            ("wide key-value head", "key-value head among three experts"),
            (
                "wide key-value head, by its KL",
                "key-value head among three experts, pressed by the KL",
            ),
            (
                "wide key-value head, weak prior",
                "key-value head among three experts, a prior of a tenth of the strength",
            ),
            (
                "wide key-value head, fading KL",
                "key-value head among three experts, the KL gone before routes are taken",
            ),
        )
    },
    "prior-free": "a route for every key-value head among three experts, without a prior",
    "blind": "one expert for every key-value head among three, learnt, whatever the token",
    "random": "random routes with the shares of a trained router, by layer and head",
    "soft cut": "a router trained soft, its weights cut at a threshold",
    "static": "the most sensitive layers full, nothing trained",
    "static heads": "the most sensitive key-value heads full, nothing trained",
    "static + LoRA": "the most sensitive layers full, or a wide window everywhere, with our LoRA",
    "every": "every third or sixth layer full, nothing trained",
    "window": "a window everywhere, nothing trained",
}
# families that begin at a window everywhere; all of them end at full attention everywhere
FROM_WINDOW = ("random", "soft cut", "static", "static heads", "every")
OURS = tuple(name for name in FAMILIES if name.startswith("ours"))
# points of these do not lie on one line
SCATTERED = ("random", "window")


def report(runs: Path, *, earlier: Path | None = None, is_quiet: bool = False) -> dict[str, Any]:
    """Print a table; write ``adapt.json``, ``adapt.md`` and the figures.

    Args:
        runs: Folder of results.
        earlier: An ``adapt.json`` of the same text whose rows are taken along, but for those that
            the folder has anew.
        is_quiet: Print nothing.
    """
    rows = read_rows(runs, earlier)
    summary: dict[str, Any] = {
        "targets": {
            "attention_share": MOST_ATTENTION,
            "loss_increase": MOST_LOSS,
            "retrieval_of_base": LEAST_RETRIEVAL,
        },
        "rows": rows,
        "at_equal_cost": [compare_at_cost(row, rows) for row in rows if row["family"] in OURS],
    }
    (runs / "adapt.json").write_text(json.dumps(summary, indent=1) + "\n")
    text = to_markdown(summary)
    (runs / "adapt.md").write_text(text)
    drawn = draw_figures(rows, runs)
    if not is_quiet:
        Console(width=180).print(Markdown(text))
        written = [runs / "adapt.json", runs / "adapt.md", *drawn]
        print(f"written: {', '.join(map(str, written))}")
    return summary


def read_rows(runs: Path, earlier: Path | None = None) -> list[Row]:
    """One level of figures of every result, in the order of families and costs."""
    paths = sorted((runs / VARIANTS).glob(f"*/{RESULT}"))
    results = [json.loads(path.read_text()) for path in paths]
    base = next((r for r in results if r["variant"]["family"] == "base"), None)
    if base is None:
        raise DataError(
            f"a folder of runs must have the variant full, but {runs} does not; run the command "
            "baselines first"
        )
    times = {
        path.parent.name: json.loads(path.read_text())["rows"]
        for path in (runs / VARIANTS).glob(f"*/{TIMES}")
    }
    rows = [
        figures_of(result, base["facts"], times.get(result["variant"]["name"]))
        for result in results
    ]
    if earlier is not None:
        rows += _rows_of_earlier(earlier, rows, times)
    order = list(FAMILIES)
    return sorted(rows, key=lambda row: (order.index(row["family"]), row["attention_share"]))


def _rows_of_earlier(path: Path, rows: Sequence[Row], times: Mapping[str, Any]) -> list[Row]:
    """Rows that are not among those of now, with times of now where there are some."""
    if not path.is_file():
        raise DataError(f"an earlier report must be a file adapt.json, and there is no {path}")
    before = json.loads(path.read_text())["rows"]
    base_now, base_before = (
        next(row for row in both if row["family"] == "base") for both in (rows, before)
    )
    for name in ("length", "num_sequences", "loss", "accuracy"):
        if base_now[name] != base_before[name]:
            raise DataError(
                f"rows of {path} must be of the same base and text, but its base has {name} "
                f"{base_before[name]} and that of the runs {base_now[name]}"
            )
    names = {row["name"] for row in rows}
    kept = [row for row in before if row["name"] not in names]
    return [row | {"times": times.get(row["name"], row["times"])} for row in kept]


def figures_of(
    result: Row, base_facts: Mapping[str, Sequence[Row]], times: Sequence[Row] | None
) -> Row:
    """What tables and figures show of a variant, at the longest length."""
    variant, last = result["variant"], result["text"]["lengths"][-1]
    facts = {name: rows[-1] for name, rows in result["facts"].items()}
    base = {name: rows[-1] for name, rows in base_facts.items()}
    accuracy = _mean([row["accuracy"] for row in facts.values()])
    base_accuracy = _mean([row["accuracy"] for row in base.values()])
    retrieval = accuracy / base_accuracy if base_accuracy > 0 else None
    meets = (
        last["attention_share"] <= MOST_ATTENTION
        and last["loss_increase"] <= MOST_LOSS
        and retrieval is not None
        and retrieval >= LEAST_RETRIEVAL
    )
    return {
        "name": variant["name"],
        "family": variant["family"],
        "length": last["length"],
        "attention_share": last["attention_share"],
        "loss": last["adapted_loss"],
        "loss_increase": last["loss_increase"],
        "accuracy": {name: row["accuracy"] for name, row in facts.items()},
        "log_probability": {name: row["log_probability"] for name, row in facts.items()},
        "retrieval_of_base": retrieval,
        "by_length": {
            str(row["length"]): {
                "attention_share": row["attention_share"],
                "loss_increase": row["loss_increase"],
                "accuracy": {n: r[i]["accuracy"] for n, r in result["facts"].items()},
            }
            for i, row in enumerate(result["text"]["lengths"])
        },
        "positions": result["text"]["positions"],
        "num_sequences": result["text"]["num_sequences"],
        "meets_targets": meets,
        "times": times,
        "device": result["device"],
        "dtype": result["dtype"],
        "versions": result["versions"],
    }


def compare_at_cost(row: Row, rows: Sequence[Row]) -> Row:
    """A routed variant against every other family at its cost.

    A family is read between its two points next to the cost, on a straight line. The base is a
    point of every family, as each can spend all there is: all layers or tokens full, or a window as
    long as the text. Where it can have no token on full attention, the window is one, too. A
    variant with random routes of its own is compared with these.
    """
    base = [point_of(r) for r in rows if r["family"] == "base"]
    window = [point_of(r) for r in rows if r["name"] == "window"]
    found: dict[str, Any] = {}
    for family in FAMILIES:
        own = [r for r in rows if r["family"] == family and r["name"] != "window-no-sinks"]
        if family in OURS or family == "base" or not own:
            continue
        like = [r for r in own if r["name"] == f"{row['name']}-random"]
        if like:
            other: float | None = like[0]["loss_increase"]
        else:
            points = [point_of(r) for r in own] + base + (window if family in FROM_WINDOW else [])
            other = loss_at(sorted(points), row["attention_share"])
        found[family] = None if other is None else other - row["loss_increase"]
    return {
        "name": row["name"],
        "attention_share": row["attention_share"],
        "loss_increase": row["loss_increase"],
        "better_by": found,
    }


def point_of(row: Row) -> tuple[float, float]:
    return row["attention_share"], row["loss_increase"]


def loss_at(points: Sequence[tuple[float, float]], cost: float) -> float | None:
    """Loss increase at a cost, from points (cost, loss increase) in rising order of cost."""
    below = [point for point in points if point[0] <= cost]
    above = [point for point in points if point[0] >= cost]
    if not below:
        return None
    # cheaper ones could be had for this cost, too
    least = min(loss for _, loss in below)
    if not above:
        return least
    (a, x), (b, y) = below[-1], above[0]
    return min(least, x if a == b else x + (y - x) * (cost - a) / (b - a))


def to_markdown(summary: Mapping[str, Any]) -> str:
    rows: Sequence[Row] = summary["rows"]
    length = rows[0]["length"]
    columns = [
        "variant",
        "family",
        "attention FLOPs",
        "loss increase",
        "one fact",
        "one of several",
    ]
    columns += ["log-probability", "of base", "prefill", "decode", "targets"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        cells = [
            row["name"],
            row["family"],
            f"{row['attention_share']:.3f}",
            f"{row['loss_increase']:+.4f}",
            f"{row['accuracy']['one']:.2f}",
            f"{row['accuracy']['several']:.2f}",
            " / ".join(f"{value:.2f}" for value in row["log_probability"].values()),
            _cell(row["retrieval_of_base"], ".0%"),
            _times(speedups_of(row, "prefill")),
            _times(speedups_of(row, "decode")),
            "met" if row["meets_targets"] else "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    compared = [name for name in FAMILIES if any(r["family"] == name for r in rows)]
    compared = [name for name in compared if name not in (*OURS, "base")]
    lines += ["", f"| better by, nats at equal cost | {' | '.join(compared)} |"]
    lines += ["|---" * (len(compared) + 1) + "|"]
    for row in summary["at_equal_cost"]:
        cells = [_cell(row["better_by"].get(name), "+.4f") for name in compared]
        lines.append(f"| {row['name']} at {row['attention_share']:.3f} | {' | '.join(cells)} |")
    shown = "; ".join(f"{name}: {FAMILIES[name]}" for name in FAMILIES if name in compared)
    lines += [
        "",
        f"{rows[0]['num_sequences']} held-out sequences of {length} tokens, {rows[0]['device']}. "
        "Attention FLOPs: scores and values of the executed routes, as a share of the base's. Loss "
        "increase: nats per token over the base. One fact, one of several: share of the codes "
        "hidden in the text that are told right, and the log-probability of both. Of base: mean of "
        "both as a share of the base's. Prefill, decode: times as fast as the base, measured, "
        "by rows of the batch; both with the kind of cache that suits them best. Targets: at most "
        f"{MOST_ATTENTION:.0%} of the attention, at most {MOST_LOSS} nats, at least "
        f"{LEAST_RETRIEVAL:.0%} of the base's answers. Better by: loss of the family at the same "
        "cost, between its points on a straight line, minus ours. The base is the last point of "
        "every family, also of those measured at lower costs only (all layers or tokens full, a "
        "window as long as the text), and the window the first of "
        f"{', '.join(FROM_WINDOW)}; a cheaper point that is better stands in; - where there is no "
        "point at this cost or below. "
        f"{shown}.",
        "",
    ]
    return "\n".join(lines)


def speedups_of(row: Row, phase: str) -> dict[int, float]:
    """Times as fast as the base at the longest length, by rows of the batch.

    Each has the cache that suits it best.
    """
    timed: dict[int, list[Row]] = {}
    for times in row["times"] or ():
        if (times["phase"], times["length"]) == (phase, row["length"]):
            timed.setdefault(times["batch"], []).append(times)
    return {
        batch: min(t["base_ms"] for t in rows) / min(t["adapted_ms"] for t in rows)
        for batch, rows in sorted(timed.items())
    }


def _times(speedups: Mapping[int, float]) -> str:
    return ", ".join(f"{batch}: {value:.2f}" for batch, value in speedups.items()) or "-"


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def draw_figures(rows: Sequence[Row], runs: Path) -> list[Path]:
    """The frontier, and a passage for every trained router."""
    try:
        import matplotlib
    except ImportError:
        print("no figures: matplotlib is not installed; run report where it is")
        return []
    matplotlib.use("Agg")
    drawn = [draw_frontier(rows, runs / "adapt_frontier.svg")]
    for row in rows:
        passage = runs / VARIANTS / row["name"] / PASSAGE
        is_own = row["family"] in OURS and not row["family"].endswith("moved")
        if is_own and passage.is_file():
            path = runs / f"adapt_passage_{row['name']}.svg"
            drawn.append(draw_passage(json.loads(passage.read_text()), row["name"], path))
    return drawn


def draw_frontier(rows: Sequence[Row], path: Path) -> Path:
    """Loss increase and answers against attention FLOPs, a line per family."""
    import matplotlib.pyplot as plt

    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["family"]].append(row)
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    for index, (family, own) in enumerate(groups.items()):
        is_ours = family in OURS
        style = {"color": f"C{index % 10}", "alpha": 0.9, "label": family}
        style |= {"marker": "o" if is_ours else "s", "lw": 1.6 if is_ours else 0.8}
        style["ls"] = "-" if index < 10 else "--"
        if family in SCATTERED:
            style["lw"] = 0.0
        costs = [row["attention_share"] for row in own]
        left.plot(costs, [row["loss_increase"] for row in own], **style)
        known = [row for row in own if row["retrieval_of_base"] is not None]
        right.plot(
            [row["attention_share"] for row in known],
            [row["retrieval_of_base"] for row in known],
            **style,
        )
    left.axhline(MOST_LOSS, color="grey", lw=0.8, ls=":")
    right.axhline(LEAST_RETRIEVAL, color="grey", lw=0.8, ls=":")
    for axis in (left, right):
        axis.axvline(MOST_ATTENTION, color="grey", lw=0.8, ls=":")
        axis.set_xlabel("attention FLOPs, share of the base's (dotted: targets)")
        axis.set_xscale("log")
        axis.grid(alpha=0.3)
    left.set_ylabel("loss increase, nats per token")
    # a window without sinks would hide all else
    left.set_yscale("symlog", linthresh=0.02)
    right.set_ylabel("answers, share of the base's")
    left.legend(fontsize=8)
    save_figure(figure, path)
    return path


def draw_passage(passage: Mapping[str, Any], name: str, path: Path) -> Path:
    """Tokens along, layers up: dark where a token takes full attention."""
    import matplotlib.pyplot as plt

    tokens = [token.replace("\n", "\u23ce") for token in passage["tokens"]]
    layers = sorted(passage["on_full"], key=int)
    grid = [passage["on_full"][layer] for layer in layers]
    figure, axis = plt.subplots(
        figsize=(0.17 * len(tokens) + 1.5, 0.16 * len(layers) + 1.8), layout="constrained"
    )
    axis.imshow(grid, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto", origin="lower")
    # dollar signs would begin a formula
    shown = [token.replace("$", r"\$") for token in tokens]
    axis.set_xticks(range(len(tokens)), shown, rotation=90, fontsize=6)
    axis.set_yticks(range(len(layers)), layers, fontsize=6)
    axis.set_ylabel("layer")
    axis.set_title(f"{name}: share of a layer's heads on full attention", size=9)
    save_figure(figure, path)
    return path


def save_figure(figure: Any, path: Path) -> None:
    """Drawn again, the same figure is the same file."""
    import matplotlib.pyplot as plt

    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name}):
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
