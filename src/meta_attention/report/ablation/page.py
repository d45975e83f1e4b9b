"""The report: one file that needs no network and no other file, and its figures beside it."""

import html
import io
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
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
from meta_attention.report.ablation.drawing import EXPERTS, INK, Panel, style
from meta_attention.report.ablation.figures import SHOWN, Section, draw_sections
from meta_attention.report.ablation.glossary import GLOSSARY
from meta_attention.report.ablation.read import Ablation, Row
from meta_attention.report.ablation.results import to_record
from meta_attention.report.ablation.summary import beyond_static, summarise
from meta_attention.report.ablation.table import Cell, cell, collapses

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE, RESULTS = "index.html", "results.json"

BESIDE = "The paper's table beside ours"
# the rows of the paper's table, as the first of its claims have them: our figure, its name, the
# paper's Bayesian and prior-free values, and their difference
PAPER_TABLE = {
    "relative_perplexity": ("Normalised perplexity", "1.07", "1.00 (ref)", "+6.3%"),
    "routing_entropy": ("Routing entropy", "43.3%", "55.8%", "-12.5 pp"),
    "projected_cost": ("Projected FLOP cost", "25.1%", "59.3%", "-34.2 pp"),
}

GROUPS: dict[str, dict[str, Cell]] = {
    "Quality": {
        "seeds": lambda row: str(len(row.seeds)),
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


def write_report(ablation: Ablation, folder: Path) -> Path:
    """Write ``index.html``, ``results.json`` and every figure as PNG and SVG; the page's path."""
    sections = draw_sections(ablation)
    drawn = {panel.name: svg_of(panel.figure) for s in sections for panel in s.panels}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for section in sections:
            for panel in section.panels:
                (folder / f"{panel.name}.svg").write_text(drawn[panel.name], "utf-8")
                with style():
                    panel.figure.savefig(folder / f"{panel.name}.png", dpi=200, facecolor="white")
        record = json.dumps(to_record(ablation), indent=1)
        (folder / RESULTS).write_text(record + "\n", "utf-8")
        (folder / PAGE).write_text(render_page(ablation, sections, drawn), "utf-8")
    except OSError as error:
        raise DataError(
            f"the report must go to a folder that can be written, got: {error}"
        ) from error
    return folder / PAGE


def render_page(ablation: Ablation, sections: Sequence[Section], drawn: Mapping[str, str]) -> str:
    """The page as HTML: what came of it first, then why, then every number.

    Args:
        ablation: The runs.
        sections: Figures, in order.
        drawn: The SVG text of each by its name.
    """
    shown = [(section.is_main, _section(section, drawn)) for section in sections]
    parts = {
        "facts": html.escape(_facts(ablation)),
        "banner": _banner(ablation),
        "table": _paper_table(ablation),
        "frontier": "\n".join(text for is_main, text in shown if is_main),
        "claims": _claims(ablation),
        "figures": "\n".join(text for is_main, text in shown if not is_main),
        "passage": _passages(ablation),
        "tables": "\n".join(_table(ablation, name) for name in ablation.experiments),
        "glossary": _glossary(),
        "again": _again(ablation),
    }
    parts["contents"] = "".join(
        f'<li><a href="#{name}">{title}</a></li>'
        for name, title in re.findall(r'<h2 id="([^"]*)">(.*?)</h2>', "".join(parts.values()))
    )
    template = files("meta_attention.report.ablation").joinpath("page.html").read_text("utf-8")
    # in one pass: a text may contain what looks like a placeholder
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def svg_of(figure: "Figure") -> str:
    """A figure as the text of an SVG file."""
    stream = io.StringIO()
    # without a date, so that the same runs give the same file
    with style():
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    return stream.getvalue()


# --- head ---


def _heading(title: str) -> str:
    """Of a part of the page that the contents name."""
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    return f'<h2 id="part-{name}">{html.escape(_sentence(title))}</h2>'


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
        verdicts = Counter(claim.verdict for claim in claims)
        tally = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
        parts += [
            _heading("Claim by claim"),
            f"<p>Everything the paper says of its table, and what our runs say. {len(claims)} "
            f"claims: {tally}.</p>",
            f'<div class="cards">{"".join(map(_card, claims))}</div>',
        ]
    if questions := own_questions(ablation):
        parts += [
            _heading("What the paper did not ask"),
            "<p>Losses under hard routes, as they would run cheaply; below 0 the first is "
            "better.</p>",
            f'<div class="cards">{"".join(map(_answer, questions))}</div>',
        ]
    return "\n".join(parts)


def _paper_table(ablation: Ablation) -> str:
    """A part per figure, in which the paper's row is above ours; narrow enough for a phone."""
    if not has_claims(ablation):
        return ""
    rows = {row.variant: row for row in summarise(ablation, "ablation")}
    head = "".join(
        f'<th scope="col">{name}</th>' for name in ("", "Bayesian", "prior-free", "difference")
    )
    parts = []
    for key, claim in zip(PAPER_TABLE, paper_claims(ablation), strict=False):
        name, *printed = PAPER_TABLE[key]
        ours = []
        for variant in ("bayesian", "prior-free"):
            figure = rows[variant][key]
            if figure is None:
                ours.append("not known")
            elif key == "relative_perplexity":
                ours.append(f"{1.0 + figure.mean:.3f}")
            else:
                ours.append(f"{figure.show('.1f')}%")
        ours.append("not measured" if claim.ours is None else _quantity(claim))
        parts.append(
            f'<tbody><tr><th scope="rowgroup" colspan="4"><span>{html.escape(name)}</span> '
            f"{_verdict(claim)}</th></tr>{_row('paper', printed)}{_row('ours', ours)}</tbody>"
        )
    return (
        f"{_heading(BESIDE)}<p>The paper compares attention that is routed under its Bayesian "
        "prior with the same routing without a prior. Below each row of its table is what our runs "
        "measured, and beside the name whether that reproduces the difference.</p>"
        f'<table class="paper"><thead><tr>{head}</tr></thead>{"".join(parts)}</table>'
    )


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
    space = "" if claim.unit == "%" else " "
    return f"{claim.ours.show(digits, sign='+')}{space}{claim.unit}"


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
    parts = [f"{_heading(f'All figures: {experiment}')}<p>{html.escape(plan['question'])}</p>"]
    for name, columns in GROUPS.items():
        head = ["variant", *columns]
        extra = beyond_static(rows) if name.startswith("Cost") and experiment == "ablation" else {}
        if extra:
            head.append("hard loss beyond static, nats")
        body = []
        for row in rows:
            cells = [show(row) for show in columns.values()]
            if extra:
                cells.append(f"{extra[row.variant]:+.4f}" if row.variant in extra else "")
            # a static variant has nothing to say of routes
            if any(cells):
                body.append((row.variant, cells))
        if body:
            parts.append(f"<h3>{name}</h3>{_html_table(name, head, body)}")
    return "\n".join(parts)


def _html_table(name: str, head: Sequence[str], body: Sequence[tuple[str, Sequence[str]]]) -> str:
    """A table that scrolls by itself where it is wider than the page, also by keys."""
    columns = "".join(f'<th scope="col">{html.escape(title)}</th>' for title in head)
    rows = "".join(_row(title, cells) for title, cells in body)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(name)}"><table>'
        f"<thead><tr>{columns}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _row(title: str, cells: Sequence[str]) -> str:
    shown = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
    return f'<tr><th scope="row">{html.escape(title)}</th>{shown}</tr>'


# --- figures and the passage ---


def _section(section: Section, drawn: Mapping[str, str]) -> str:
    shown = "".join(_figure(panel, drawn[panel.name]) for panel in section.panels)
    kind = "figures main" if section.is_main else "figures"
    return (
        f"{_heading(section.title)}<p>{html.escape(section.text)}</p>"
        f'<div class="{kind}">{shown}</div>'
    )


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
        f"{_heading('A passage, coloured by route')}<p>Held-out text, in pieces of one window "
        "each; the colour of a character is the expert of its largest weight, the stronger the "
        "larger.</p>"
        f'<p class="legend">{legend}</p>'
    ]
    # one is open, so that a phone has not to scroll through all of them
    first = "recommended" if "recommended" in names else names[0]
    for name in names:
        run = ablation.by_variant[name][0]
        layers = "".join(
            f"<div><h3>layer {number}</h3>{_passage(run.result['passage'], number)}</div>"
            for number in range(len(run.result["passage"]["layers"]))
        )
        title = html.escape(f"{name}, seed {run.seed}")
        parts.append(
            f"<details{' open' if name == first else ''}><summary>{title}</summary>"
            f'<div class="layers">{layers}</div></details>'
        )
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


def _glossary() -> str:
    words = "".join(
        f"<dt>{html.escape(word)}</dt><dd>{html.escape(_sentence(meaning))}</dd>"
        for word, meaning in GLOSSARY.items()
    )
    return f'{_heading("What the words mean")}<dl class="words">{words}</dl>'


def _again(ablation: Ablation) -> str:
    settings = ablation.plan["settings"]
    data = "".join(f" --data {path}" for path in settings["data"])
    short = " --short" if ablation.plan["is_short"] else ""
    sweeps = "".join(f" --sweep {name}" for name in ablation.experiments if name != "ablation")
    command = f"meta-attention ablate{short}{data} --seeds {ablation.plan['seeds']}{sweeps}"
    return (
        f"{_heading('Run it again')}<p><code>{html.escape(command)}</code></p>"
        "<p>Same seed, same machine: the same figures. <code>meta-attention report RUNS</code> "
        "makes this page again from the runs' figures alone.</p>"
    )
