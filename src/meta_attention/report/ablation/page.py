"""The report: one file that needs no network and no other file, and its figures beside it."""

import html
import io
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from meta_attention.errors import DataError
from meta_attention.report.ablation.claims import (
    Answer,
    Claim,
    has_claims,
    own_questions,
    paper_claims,
)
from meta_attention.report.ablation.drawing import EXPERTS, INK, Panel
from meta_attention.report.ablation.figures import SHOWN, draw_sections
from meta_attention.report.ablation.read import Ablation, Row
from meta_attention.report.ablation.results import to_record
from meta_attention.report.ablation.summary import beyond_static, summarise
from meta_attention.report.ablation.table import Cell, cell, collapses

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE, RESULTS = "index.html", "results.json"

# of the paper's table: what it is, its values for Bayesian and prior-free, ours, and how to show it
PAPER_TABLE = (
    ("Normalised perplexity", "1.07", "1.00 (ref)", "+6.3%", 0),
    ("Routing entropy", "43.3%", "55.8%", "-12.5 pp", 1),
    ("Projected FLOP cost", "25.1%", "59.3%", "-34.2 pp", 2),
)

GROUPS: dict[str, dict[str, Cell]] = {
    "Quality": {
        "perplexity, soft": cell("perplexity", ".3f"),
        "vs prior-free, %": cell("relative_perplexity", ".1f", 100.0, "+"),
        "perplexity, hard": cell("hard_perplexity", ".3f"),
        "loss, soft": cell("loss", ".4f"),
        "loss, hard": cell("hard_loss", ".4f"),
        "ECE, soft": cell("ece", ".4f"),
        "ECE, hard": cell("hard_ece", ".4f"),
    },
    "Cost, each in its own unit": {
        "projected cost, %": cell("projected_cost", ".1f"),
        "hard cost, %": cell("hard_cost", ".1f"),
        "attention FLOPs, hard, %": cell("attention_flops", ".1f"),
        "with projections and controller, %": cell("layer_flops", ".1f"),
        "attention FLOPs, soft, %": cell("soft_attention_flops", ".1f"),
    },
    "Routing": {
        "entropy, %": cell("routing_entropy", ".1f"),
        "adaptivity, nats": cell("adaptivity", ".4f"),
        "adaptivity of hard routes": cell("hard_adaptivity", ".4f"),
        "KL, nats": cell("kl", ".4f"),
        "collapsed layers: expert / prior": collapses,
        "U, nats": cell("uncertainty", ".2f"),
        "mutual information, nats": cell("mutual_information", ".3f"),
    },
    "Were the routes right?": {
        "regret, soft, nats": cell("regret", ".4f"),
        "regret, hard": cell("hard_regret", ".4f"),
        "hard, against the best one expert": cell("static_regret", ".4f", 1.0, "+"),
        "routing ECE": cell("routing_ece", ".4f"),
    },
}

GLOSSARY = {
    "soft, hard": "how routes are taken when measured: all experts by weight, or the one of "
    "largest weight. Every variant is measured both ways, whatever it was trained with.",
    "projected cost": "mean of weight times cost, with the paper's costs: full 1, linear 0.15, "
    "local 0.30. Hard cost: the same for hard routes.",
    "attention FLOPs": "counted for what was executed, as a share of full attention in every "
    "layer: scores and values of each token's own route, and the state of linear attention, which "
    "every token updates. At 64 tokens and head width 32 linear attention costs as much as full.",
    "routing entropy": "mean over tokens of the entropy of the weights; 100% is equal weights.",
    "adaptivity": "what a token tells about its route, in nats; 0 means constant routing.",
    "collapsed layers": "expert: more than 95% of tokens to one expert. Prior: mean KL or "
    "adaptivity below 0.01 nats.",
    "regret": "loss with the chosen routes minus loss with each token's best forced expert, one "
    "layer at a time. Below 0, mixing beats any one expert.",
    "ECE": "expected calibration error, 15 bins: of the next character, and of the top expert "
    "being the best one.",
    "interval": "after \u00b1: half of the 95% interval of the mean over seeds (Student's t). "
    "Differences are taken seed by seed. One seed has none.",
    "verdict": "reproduced: the paper's sign, 0 not in our interval, and the paper's number in it "
    "or within a factor of 2 of our mean; a larger gain counts, too. Opposite: clearly the other "
    "sign.",
}


def write_report(ablation: Ablation, folder: Path) -> Path:
    """Write ``index.html``, ``results.json`` and every figure as PNG and SVG; the page's path."""
    sections = draw_sections(ablation)
    figures = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for section in sections:
            shown = []
            for panel in section.panels:
                svg = svg_of(panel.figure)
                shown.append(_figure(panel, svg))
                (folder / f"{panel.name}.svg").write_text(svg, "utf-8")
                panel.figure.savefig(folder / f"{panel.name}.png", dpi=150, facecolor="white")
            figures.append(
                f"<h2>{html.escape(_sentence(section.title))}</h2>"
                f"<p>{html.escape(section.text)}</p>"
                f'<div class="figures">{"".join(shown)}</div>'
            )
        record = json.dumps(to_record(ablation), indent=1)
        (folder / RESULTS).write_text(record + "\n", "utf-8")
        (folder / PAGE).write_text(render_page(ablation, figures), "utf-8")
    except OSError as error:
        raise DataError(
            f"the report must go to a folder that can be written, got: {error}"
        ) from error
    return folder / PAGE


def render_page(ablation: Ablation, figures: Sequence[str]) -> str:
    """The page as HTML.

    Args:
        ablation: The runs.
        figures: HTML of the sections with figures.
    """
    parts = {
        "facts": html.escape(_facts(ablation)),
        "banner": _banner(ablation),
        "claims": _claims(ablation),
        "tables": "\n".join(_table(ablation, name) for name in ablation.experiments),
        "figures": "\n".join(figures),
        "passage": _passages(ablation),
        "glossary": "".join(
            f"<p><b>{html.escape(word)}</b>: {html.escape(meaning)}</p>"
            for word, meaning in GLOSSARY.items()
        ),
        "again": _again(ablation),
    }
    template = files("meta_attention.report.ablation").joinpath("page.html").read_text("utf-8")
    # in one pass: a text may contain what looks like a placeholder
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def svg_of(figure: "Figure") -> str:
    """A figure as the text of an SVG file."""
    stream = io.StringIO()
    # without a date, so that the same runs give the same file
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    return stream.getvalue()


# --- head ---


def _facts(ablation: Ablation) -> str:
    settings, first = ablation.plan["settings"], ablation.runs[0].result
    machine = first["machine"]
    return (
        f"{len(ablation.runs)} runs of {len(ablation.by_variant)} variants. Text: "
        f"{first['text']['name']}, {first['text']['bytes']:,} bytes to train on and "
        f"{first['held_out']['bytes']:,} held out. Model: D={settings['hidden_size']}, "
        f"{settings['layers']} layers, T={settings['length']}, window {settings['window_size']}; "
        f"batch {settings['batch_size']}, {settings['steps']:,} steps. Device: "
        f"{machine['device']}, torch {machine['versions']['torch']}."
    )


def _banner(ablation: Ablation) -> str:
    lines = []
    if ablation.plan["is_short"]:
        lines.append(
            "This is the short version: a smaller model, less text and fewer steps than the "
            "paper's. It shows how the report works; its verdicts are no result."
        )
    if ablation.missing:
        lines.append(f"Not done yet, and not in this report: {', '.join(ablation.missing)}.")
    if max(len(runs) for runs in ablation.by_variant.values()) == 1:
        lines.append("One seed only: there are no intervals, and small differences mean nothing.")
    lines += ablation.plan["notes"]
    return "".join(f'<p class="banner">{html.escape(line)}</p>' for line in lines)


# --- claims ---


def _claims(ablation: Ablation) -> str:
    parts = []
    if has_claims(ablation):
        claims = paper_claims(ablation)
        parts += [
            "<h2>The paper's table beside ours</h2>",
            _paper_table(ablation, claims),
            "<h2>Claim by claim</h2>",
            f'<div class="cards">{"".join(map(_card, claims))}</div>',
        ]
    if questions := own_questions(ablation):
        parts += [
            "<h2>What the paper did not ask</h2>",
            "<p>Losses under hard routes, as they would run cheaply; below 0 the first is "
            "better.</p>",
            f'<div class="cards">{"".join(map(_answer, questions))}</div>',
        ]
    return "\n".join(parts)


def _paper_table(ablation: Ablation, claims: Sequence[Claim]) -> str:
    rows = {row.variant: row for row in summarise(ablation, "ablation")}
    head = ["", "paper: Bayesian", "paper: prior-free", "paper: difference", "ours: Bayesian"]
    head += ["ours: prior-free", "ours: difference", "verdict"]
    shown = ("relative_perplexity", "routing_entropy", "projected_cost")
    body = []
    for key, (name, bayesian, prior_free, difference, index) in zip(
        shown, PAPER_TABLE, strict=True
    ):
        cells = [bayesian, prior_free, difference]
        for variant in ("bayesian", "prior-free"):
            figure = rows[variant][key] if variant in rows else None
            if figure is None:
                cells.append("not run")
            elif key == "relative_perplexity":
                cells.append(f"{1.0 + figure.mean:.3f}")
            else:
                cells.append(f"{figure.show('.1f')}%")
        claim = claims[index]
        cells.append("" if claim.ours is None else _quantity(claim))
        body.append((name, [*map(html.escape, cells), _verdict(claim)]))
    return _html_table(head, body)


def _card(claim: Claim) -> str:
    ours = "not measured" if claim.ours is None else _quantity(claim)
    comment = f"<p>{html.escape(claim.comment)}</p>" if claim.comment else ""
    return (
        f'<div class="card"><h3>{html.escape(claim.text)}</h3><dl>'
        f"<dt>paper</dt><dd>{html.escape(claim.printed)}</dd><dt>ours</dt><dd>{html.escape(ours)}</dd>"
        f"<dt>verdict</dt><dd>{_verdict(claim)}</dd></dl>"
        f"<p>{html.escape(_sentence(claim.measure))}.</p>{comment}</div>"
    )


def _answer(answer: Answer) -> str:
    difference = answer.difference.show(".4f", sign="+")
    return (
        f'<div class="card"><h3>{html.escape(answer.question)}</h3><dl>'
        f"<dt>difference</dt><dd>{html.escape(difference)} nats</dd></dl>"
        f"<p>{html.escape(_sentence(answer.answer))}.</p></div>"
    )


def _quantity(claim: Claim) -> str:
    assert claim.ours is not None
    digits = ".3f" if claim.unit == "nats" else ".1f"
    return f"{claim.ours.show(digits, sign='+')} {claim.unit}"


def _verdict(claim: Claim) -> str:
    note = " (one seed)" if claim.ours is not None and claim.ours.n == 1 else ""
    kind = claim.verdict.replace(" ", "-")
    return f'<span class="verdict {kind}">{claim.verdict}{note}</span>'


def _sentence(text: str) -> str:
    """With a capital at the beginning; names within keep theirs."""
    return text[:1].upper() + text[1:]


# --- tables ---


def _table(ablation: Ablation, experiment: str) -> str:
    rows = summarise(ablation, experiment)
    plan = ablation.plan["experiments"][experiment]
    parts = [
        f"<h2>All figures: {html.escape(experiment)}</h2><p>{html.escape(plan['question'])}</p>"
    ]
    for name, columns in GROUPS.items():
        head = ["variant", "seeds", *columns]
        extra = beyond_static(rows) if name.startswith("Cost") and experiment == "ablation" else {}
        if extra:
            head.append("hard loss beyond static, nats")
        body = []
        for row in rows:
            cells = [str(len(row.seeds)), *(html.escape(show(row)) for show in columns.values())]
            if extra:
                cells.append(f"{extra[row.variant]:+.4f}" if row.variant in extra else "")
            body.append((row.variant, cells))
        parts.append(f"<h3>{name}</h3>{_html_table(head, body)}")
    return "\n".join(parts)


def _html_table(head: Sequence[str], body: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Cells of the body are HTML, everything else is text."""
    columns = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in head)
    rows = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th>'
        f"{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        for name, cells in body
    )
    return (
        f'<div class="scroll"><table><thead><tr>{columns}</tr></thead><tbody>{rows}</tbody>'
        "</table></div>"
    )


# --- figures and the passage ---


def _figure(panel: Panel, svg: str) -> str:
    is_wide = panel.name == "shares"
    return (
        f'<figure id="{panel.name}"{" class=wide" if is_wide else ""}>'
        f"<h3>{html.escape(panel.title)}</h3>{_inline(panel, svg)}"
        f"<figcaption>{html.escape(panel.caption)}</figcaption></figure>"
    )


def _inline(panel: Panel, svg: str) -> str:
    """The figure as an element of the page, in its ink and with names of its own."""
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg [^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg [^>]*?) height="[^"]*"', r"\1", svg, count=1)
    for pattern in (r'( id=")', r'(href="#)', r"(url\(#)"):
        svg = re.sub(pattern, rf"\g<1>{panel.name}-", svg)
    label = html.escape(f"{panel.title}. {panel.caption}", quote=True)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def _passages(ablation: Ablation) -> str:
    names = [name for name in SHOWN if name in ablation.by_variant]
    names += [
        name
        for name in ablation.by_variant
        if name not in SHOWN and not ablation.by_variant[name][0].result["is_static"]
    ]
    if not names:
        return ""
    legend = "".join(
        f'<b class="e{index}">{html.escape(name)}</b>' for index, name in enumerate(EXPERTS)
    )
    parts = [
        "<h2>A passage, coloured by route</h2><p>Held-out text, in pieces of one window each; the "
        "colour of a character is the expert of its largest weight, the stronger the larger.</p>"
        f'<p class="legend">{legend}</p>'
    ]
    for index, name in enumerate(names):
        run = ablation.by_variant[name][0]
        layers = "".join(
            f"<h3>layer {number}</h3>{_passage(run.result['passage'], number)}"
            for number in range(len(run.result["passage"]["layers"]))
        )
        is_open = " open" if index < 3 else ""
        title = html.escape(f"{name}, seed {run.seed}")
        parts.append(f"<details{is_open}><summary>{title}</summary>{layers}</details>")
    return "\n".join(parts)


def _passage(passage: Row, number: int) -> str:
    layer = passage["layers"][number]
    order = list(EXPERTS)
    spans: list[list[str]] = []
    last: tuple[int, float] | None = None
    for token, expert, weight in zip(
        passage["tokens"], layer["expert"], layer["weight"], strict=True
    ):
        name = layer["experts"][expert]
        look = (order.index(name) if name in order else 3, round(weight, 1))
        if look != last:
            spans.append([f'<span class="e{look[0]}" style="--w:{look[1]:g}">'])
            last = look
        spans[-1].append(html.escape(token))
    return f'<div class="text">{"".join("".join(span) + "</span>" for span in spans)}</div>'


def _again(ablation: Ablation) -> str:
    settings = ablation.plan["settings"]
    data = "".join(f" --data {path}" for path in settings["data"])
    short = " --short" if ablation.plan["is_short"] else ""
    sweeps = "".join(f" --sweep {name}" for name in ablation.experiments if name != "ablation")
    command = f"meta-attention ablate{short}{data} --seeds {ablation.plan['seeds']}{sweeps}"
    return (
        f"<p><code>{html.escape(command)}</code></p>"
        "<p>Same seed, same machine: the same figures. <code>meta-attention report RUNS</code> "
        "makes this page again from the runs' figures alone.</p>"
    )
