"""Tables of what uncertainty knows: means over seeds with 95% intervals, JSON and Markdown."""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import study_uncertainty_plots
from study_variants import place_of

from meta_attention.errors import DataError
from meta_attention.evaluation.beliefs import SIGNALS
from meta_attention.evaluation.statistics import Figure

OUTPUT = "uncertainty.json"  # of a run
REPORT = "uncertainty"  # .json and .md
# what is of one run only
_NOT_OF_A_GROUP = {"seed", "seconds", "device", "torch", "python"}
Row = dict[str, Any]


def report(folders: Sequence[Path], out: Path) -> dict[str, list[Row]]:
    """Write ``uncertainty.json``, ``uncertainty.md`` and the figures of all measured runs."""
    runs = [
        json.loads((folder / OUTPUT).read_text())
        for folder in folders
        if (folder / OUTPUT).is_file()
    ]
    if not runs:
        raise DataError(
            f"a run must have {OUTPUT} to be reported, and none has; measure it first with: python "
            "benchmarks/study_uncertainty.py measure"
        )
    rows = summarise(runs)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{REPORT}.json").write_text(json.dumps(rows, allow_nan=False) + "\n")
    parts = ["# Uncertainty and routes, tested\n"]
    for scale, of_scale in rows.items():
        parts += [f"## {scale}\n", HOW_TO_READ, *tables(of_scale)]
        study_uncertainty_plots.draw(scale, of_scale, repetitions(of_scale), out)
    (out / f"{REPORT}.md").write_text("\n".join(parts))
    print(f"written: {out / REPORT}.json, {out / REPORT}.md")
    return rows


HOW_TO_READ = """Mean over seeds +- half of the 95% interval; of a single seed, over its sequences
where there is one. AUROC: 0.5 knows nothing, below it a signal points the other way. Signals are
the mean over routed layers. The best of all is the farthest from 0.5 of many, picked with the
answer known. Beyond entropy: only tokens of the same tenth of predictive entropy are compared.
"""


def summarise(runs: Sequence[Row]) -> dict[str, list[Row]]:
    """By scale, a row for each variant and number of repetitions."""
    groups: dict[str, dict[tuple[str, int], list[Row]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        groups[run["scale"]][run["variant"], run["repeat"]].append(run)

    def place(key: tuple[str, int]) -> tuple[int, list[str], int]:
        name, repeat = key
        return *place_of(name), repeat

    return {
        scale: [_summary(of_scale[key]) for key in sorted(of_scale, key=place)]
        for scale, of_scale in groups.items()
    }


def _summary(runs: Sequence[Row]) -> Row:
    first = runs[0]
    name, repeat = first["variant"], first["repeat"]
    kept = [{key: run[key] for key in run if key not in _NOT_OF_A_GROUP} for run in runs]
    return merge(kept) | {
        "variant": name,
        "repeat": repeat,
        "label": name if repeat == 1 else f"{name}, text x{repeat}",
        "seeds": sorted(run["seed"] for run in runs),
    }


def merge(nodes: Sequence[Any]) -> Any:
    """Trees of figures of several seeds as one: every number a mean with its interval."""
    known = [node for node in nodes if node is not None]
    if not known:
        return None
    first = known[0]
    if isinstance(first, dict) and set(first) == {"value", "low", "high"}:
        figure = merge([node["value"] for node in known])
        if figure and figure["n"] == 1:
            [node] = [node for node in known if node["value"] is not None]
            if node["low"] is not None:
                figure["interval"] = _short((node["high"] - node["low"]) / 2)
        return figure
    if isinstance(first, dict):
        names = dict.fromkeys(name for node in known for name in node)
        return {name: merge([node.get(name) for node in known]) for name in names}
    if isinstance(first, list):
        # curves and layers of unequal number have no mean
        is_one = len({len(node) for node in known}) == 1
        return [merge(values) for values in zip(*known, strict=True)] if is_one else None
    if isinstance(first, int | float) and not isinstance(first, bool):
        found = Figure.of(known)
        assert found is not None
        half = None if found.interval is None else _short(found.interval)
        return {"mean": _short(found.mean), "interval": half, "n": found.n}
    return first


def _short(value: float) -> float:
    """Six digits: there are thousands of figures, and none is known better."""
    return float(f"{value:.6g}")


# --- Markdown ---


def tables(rows: Sequence[Row]) -> list[str]:
    routed = [row for row in rows if row.get("hurts")]
    # the others have tokens that pass blocks by
    complete = [row for row in routed if row["adaptive"]]
    parts = []
    if routed:
        for against, what in (("soft", "soft routes"), ("full", "full attention everywhere")):
            parts += ["### Does a signal know where hard routing hurts? Against " + what + "\n"]
            parts += [_hurts(routed, against)]
        notes = {row["label"]: row["note"] for row in routed if row.get("note")}
        parts += [f"{label}: {note}.\n" for label, note in notes.items()]
    parts += ["### Calibration error of predictions and of routes\n", _calibration(rows)]
    for name in dict.fromkeys(name for row in rows for name in row["shift"]):
        for level in ("sequence", "token"):
            parts += [f"### Is a text foreign? {name}, by {level}: AUROC\n"]
            parts += [_shift([row for row in rows if name in row["shift"]], name, level)]
    if complete:
        parts += ["### Which tokens go to full attention? Share of full over its mean\n"]
        parts += [_classes(complete)]
        parts += ["### I(class; route), nats, mean over routed layers\n", _information(complete)]
        parts += ["### How much of a route is the token alone?\n", _explained(complete)]
        parts += ["### Does it matter which token takes which route? Nats above its own routes\n"]
        parts += [_adaptive(complete)]
    if routed:
        parts += ["### How suddenly: largest share of the fall within 5% of the steps\n"]
        parts += [_emergence(routed)]
    repeated = repetitions(rows)
    if repeated:
        parts += ["### The same text again and again, in equal steps\n", _repeated(repeated)]
    return parts


def repetitions(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of variants that were trained with several numbers of repetitions."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["variant"]].append(row)
    return {name: group for name, group in groups.items() if len(group) > 1}


def cell(figure: Row | None, digits: int = 3, *, sign: bool = False) -> str:
    if figure is None:
        return "-"
    half = figure["interval"]
    value = f"{figure['mean']:{'+' if sign else ''}.{digits}f}"
    return value if half is None else f"{value} +-{half:.{digits}f}"


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    marks = ["---"] + ["---:"] * (len(columns) - 1)
    return "".join(f"| {' | '.join(line)} |\n" for line in (columns, marks, *lines))


def _hurts(rows: Sequence[Row], against: str) -> str:
    columns = ["variant", "hurts", "of tokens", "mean nats", *SIGNALS, "predictive entropy"]
    columns += ["best of all, seen afterwards", "best beyond entropy"]
    lines = []
    for row in rows:
        hurts = row["hurts"][against]
        for name, found in hurts["definitions"].items() if hurts else ():
            signals = found["signals"]
            everything = {
                f"{signal}, {layer}": figure
                for signal, layers in signals.items()
                for layer, figure in layers.items()
            }
            beyond = {
                f"{signal}, {layer}": figure
                for signal, layers in found["beyond_entropy"].items()
                for layer, figure in layers.items()
            }
            lines.append(
                [
                    row["label"],
                    name,
                    cell(found["share"]),
                    cell(hurts["mean"], 4, sign=True),
                    *(cell(signals.get(signal, {}).get("mean")) for signal in SIGNALS),
                    cell(found["baselines"]["predictive entropy"]),
                    _best(everything),
                    _best(beyond),
                ]
            )
    return _table(columns, lines)


def _best(figures: dict[str, Row | None]) -> str:
    known = {name: figure for name, figure in figures.items() if figure}
    if not known:
        return "-"
    name = max(known, key=lambda name: abs(known[name]["mean"] - 0.5))
    return f"{cell(known[name])} ({name})"


def _calibration(rows: Sequence[Row]) -> str:
    columns = ["variant", "controller", "ECE hard", "ECE soft", "routing ECE"]
    columns += ["regret, nats", "static regret, nats"]
    lines = []
    for row in rows:
        routing = row["calibration"]["routing"] or {}
        ece = row["calibration"]["ece"]
        lines.append(
            [
                row["label"],
                row["controller"],
                cell(ece["hard"], 4),
                # a static model has no other way
                cell(ece["soft"], 4) if routing else "-",
                cell(routing.get("routing_ece"), 4),
                cell(routing.get("regret"), 4),
                cell(routing.get("static_regret"), 4, sign=True),
            ]
        )
    return _table(columns, lines)


def _shift(rows: Sequence[Row], name: str, level: str) -> str:
    plain = list(rows[0]["shift"][name][level]["baselines"])
    columns = ["variant", *SIGNALS, *plain]
    columns += ["best beyond entropy"] if level == "token" else []
    lines = []
    for row in rows:
        found = row["shift"][name][level]
        line = [row["label"]]
        line += [cell(found["signals"].get(signal, {}).get("mean")) for signal in SIGNALS]
        line += [cell(found["baselines"][baseline]) for baseline in plain]
        if level == "token":
            beyond = found["beyond_entropy"]
            line.append(_best({f"{s}, {at}": beyond[s][at] for s in beyond for at in beyond[s]}))
        lines.append(line)
    return _table(columns, lines)


def _classes(rows: Sequence[Row]) -> str:
    lines = [["share of full", *(cell(row["classes"]["full"]) for row in rows)]]
    families = [row["classes"]["families"] for row in rows]
    for family in families[0]:
        for label in dict.fromkeys(k for of_row in families for k in of_row[family]["classes"]):
            found = [of_row[family]["classes"].get(label) or {} for of_row in families]
            lines.append(
                [f"{family}: {label}", *(cell(one.get("lift"), 2) for one in found)],
            )
    return _table(["class", *(row["label"] for row in rows)], lines)


def _information(rows: Sequence[Row]) -> str:
    families = list(rows[0]["classes"]["families"])
    lines = [
        [family, *(cell(row["classes"]["families"][family]["information"], 4) for row in rows)]
        for family in families
    ]
    return _table(["family", *(row["label"] for row in rows)], lines)


def _explained(rows: Sequence[Row]) -> str:
    lines = [
        [row["label"], *(cell(row["explained"][k]) for k in ("entropy", "information", "share"))]
        for row in rows
    ]
    return _table(["variant", "H(route), nats", "I(route; token), held out", "share"], lines)


def _adaptive(rows: Sequence[Row]) -> str:
    swaps = list(rows[0]["adaptive"])
    lines = [
        [row["label"], *(cell(row["adaptive"][swap]["cost"], 4, sign=True) for swap in swaps)]
        for row in rows
    ]
    return _table(["variant", *swaps], lines)


def _emergence(rows: Sequence[Row]) -> str:
    kinds = ("routing_entropy", "believed_cost", "routed_cost")
    columns = ["variant"] + [f"{k}: {w}" for k in kinds for w in ("fall", "share", "at step")]
    lines = []
    for row in rows:
        line = [row["label"]]
        for kind in kinds:
            found = row["emergence"]["sharpest"].get(kind) or {}
            line += [cell(found.get("fall")), cell(found.get("share"), 2), cell(found.get("to"), 0)]
        lines.append(line)
    return _table(columns, lines)


def _repeated(groups: dict[str, list[Row]]) -> str:
    columns = ["variant", "repeat", "validation loss", "training loss", "adaptivity, nats"]
    columns += ["shuffled routes, nats"]
    read: list[Callable[[Row], Row | None]] = [
        lambda row: row["validation_loss"],
        lambda row: row["train_loss"],
        lambda row: row["adaptivity"],
        lambda row: row["adaptive"]["shuffled"]["cost"] if row.get("adaptive") else None,
    ]
    lines = [
        [name, str(row["repeat"]), *(cell(look(row), 4) for look in read)]
        for name, group in groups.items()
        for row in group
    ]
    return _table(columns, lines)
