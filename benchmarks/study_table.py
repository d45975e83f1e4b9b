"""The figure of the study as a page: every variant in words, with its figures and its seeds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from study_frontier import family_of, numbered
from study_variants import (
    EXPERTS,
    REFERENCE,
    SCALES,
    Scale,
    Variant,
    base_and_endings,
    find_variant,
)

Row = dict[str, Any]
HEADINGS = {
    "static": "Static: nothing is routed",
    "rule": "A rule made by hand",
    "prior-free": "Routed, without a prior",
    "bayes": "Routed, with a prior",
    "value": "Routed by value: what full attention is worth, in nats, against a price",
}
# what an ending changes; those of the prior's pressure are in its own words below
ENDING_WORDS = {
    "depth": "half of the tokens enter every other block",
    "residuals": "residuals by attention over blocks",
    "linear": "linear attention as a third expert",
    "ssm": "a state space as a third expert",
    "sparse": "trained with the chosen experts only",
    "thompson": "routes by Thompson sampling",
    "argmax": "routes are the largest mean",
    "weak": "a prior of a tenth of the strength",
    "recurrence": "controllers see when a token was last seen",
    "brief": "values learnt in a sixth of the steps",
    "wide": "the narrow window is a choice, too",
    "scaled": "values with a scale",
    "on": "the model learns on with its routes",
    "own": "values learnt beside the routes in use",
    "shuffled": "routes shuffled among tokens meanwhile",
    "early": "routed from the first step",
    "blind": "controllers see no token",
}
PRESSURES = {
    "kept": "pressed by its cost, the KL kept small",
    "fading": "pressed by its cost, the KL fading",
    "none": "pressed by its cost, no KL",
}
COLUMNS = (
    "no.",
    "variant",
    "attention",
    "in layers",
    "chosen by",
    "seeds",
    "attention FLOPs",
    "against 1:5",
    "hard - soft",
)


def write_table(rows: Sequence[Row], scale_name: str, path: Path, *, figure: Path) -> None:
    """A page beside a figure; numbers of variants are those of the figure's key."""
    scale, found = SCALES[scale_name], numbered(rows)
    lines = [
        f"# Every variant of {figure.stem}",
        "",
        f"{scale.layers} layers of width {scale.hidden_size}, {scale.kv_heads} key-value heads, "
        f"T={scale.length}. A number under *attention* is a window in tokens; layers that are not "
        f"named have a window of {scale.window_size}. *At 0.45 of full* is the cost of the named "
        "layers that was asked for; attention FLOPs are what was executed, as a share of full "
        "attention in all layers. Losses are held-out nats per token above "
        f"`{REFERENCE}` of the same seed, with 95% intervals from three seeds on; a variant of "
        "several rounds is shown as in the one that has most of its seeds. Written by "
        "`benchmarks/study_text.py frontier --table`.",
        "",
        f"![The same as a figure]({figure.name})",
    ]
    for family, heading in HEADINGS.items():
        named = [(number, row) for number, row in found if family_of(row) == family]
        if named:
            lines += ["", f"## {heading}", "", _line(COLUMNS), "|---" * len(COLUMNS) + "|"]
            lines += [_line(_cells(number, row, scale)) for number, row in named]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    print(f"written: {path}")


def attention_of(variant: Variant, scale: Scale) -> tuple[str, str]:
    """What layers other than those of the window have, and how many they are."""
    window = scale.window_size * variant.widen

    def named(expert: str) -> str:
        base, _, times = expert.partition("*")
        return str(int(times or 1) * window) if base == "local" else base

    others = variant.pattern.replace("L", "") or variant.pattern
    [letter] = set(others)
    where = f"{len(others)} of {len(variant.pattern)}" if len(variant.pattern) > 1 else "all"
    return " or ".join(map(named, EXPERTS[letter])), where


def choice_of(name: str) -> str:
    """How tokens or heads come to their attention."""
    variant = find_variant(name)
    at = "" if variant.target is None else f", at {variant.target:g} of full"
    words = []
    if variant.is_fixed:
        words.append(f"head, fixed{at}")
    elif variant.is_rule:
        by_head = " or head, fixed" if variant.target else ""
        words.append(f"rule: seen before, far back{by_head}{at}")
    elif variant.is_routed:
        each = "token" if variant.granularity == "token" else "token and head"
        words.append(f"{each}{at}")
        if variant.controller == "bayesian":
            words.append(PRESSURES[variant.kl_course] if variant.is_tilted else "pressed by the KL")
    endings = base_and_endings(name)[1]
    words += [word for ending, word in ENDING_WORDS.items() if ending in endings]
    if name.endswith("-unseen"):
        words.append("without recurrence")
    return "; ".join(words)


def _cells(number: int, row: Row, scale: Scale) -> list[str]:
    beyond, name = row["beyond_hybrid"], row["variant"]
    return [
        str(number),
        f"`{name}`",
        *attention_of(find_variant(name), scale),
        choice_of(name),
        str((beyond or row["loss"])["n"]),
        f"{row['attention_flops']['mean']:.3f}",
        _figure(beyond) if beyond else "0",
        _figure(row["soft_gap"]) if row["is_routed"] else "",
    ]


def _figure(figure: Row) -> str:
    # no minus before a zero
    text = f"{round(figure['mean'], 4) + 0.0:+.4f}"
    # of two seeds it would be many times what they differ by
    return f"{text} ±{figure['interval']:.4f}" if figure["n"] > 2 else text


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
