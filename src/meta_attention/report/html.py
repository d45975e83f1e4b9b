"""One file that shows where the tokens of a text go; needs no network and no other file."""

import html
import json
import math
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from meta_attention.errors import DataError
from meta_attention.evaluation.inspect import Inspection
from meta_attention.evaluation.routing import LayerRouting

# what can be shown of a token: its name on the page, and how to read it
QUANTITIES = {
    "expert": ("expert", "the stronger the colour, the larger the weight of the top expert"),
    "loss": ("loss", "nats the model pays for this token, given those before it"),
    "mean_entropy": ("entropy of the weights", "nats; high: the weights are spread evenly"),
    "margin": ("margin", "largest weight minus the second; low: two experts are close"),
    "mutual_information": (
        "mutual information",
        "nats; high: the controller would change its mind with more evidence",
    ),
    "vacuity": ("vacuity", "experts / total concentration; high: little evidence"),
    "entropy": (
        "entropy of the posterior",
        "the paper's U, nats; very low also where the controller knows nothing",
    ),
    "kl": ("KL to the prior", "nats; high: far from what the costs alone would say"),
}


def render_inspection(inspection: Inspection, title: str) -> str:
    """The page as HTML.

    Args:
        inspection: What to show.
        title: Heading of the page, such as the name of the checkpoint.
    """
    shown = ["expert", "loss", *inspection.signals]
    # an expert has one colour in all layers
    experts = list(dict.fromkeys(name for layer in inspection.layers for name in layer.experts))
    parts = {
        "title": html.escape(title),
        "summary": html.escape(_summary(inspection)),
        "layers": _options(
            [(str(i), f"layer {i}") for i in range(len(inspection.layers))],
            inspection.first_routed_layer,
        ),
        "quantities": _options([(name, QUANTITIES[name][0]) for name in shown], 0),
        "tokens": "".join(_token(i, token) for i, token in enumerate(inspection.tokens)),
        "shares": "\n".join(
            _share_row(i, layer, experts) for i, layer in enumerate(inspection.routing.layers)
        ),
        "data": _data(inspection, experts),
    }
    template = files("meta_attention.report").joinpath("inspect.html").read_text("utf-8")
    # in one pass: a text may contain what looks like a placeholder
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def write_inspection(inspection: Inspection, path: Path, title: str) -> None:
    """Write the page to ``path``."""
    page = render_inspection(inspection, title)
    try:
        path.write_text(page, "utf-8")
    except OSError as error:
        raise DataError(f"the page must go to a file that can be written, got: {error}") from error


def _summary(inspection: Inspection) -> str:
    routing, losses = inspection.routing, [x for x in inspection.loss if x is not None]
    facts = [f"{len(inspection.tokens):,} tokens", f"{len(inspection.layers)} layers"]
    if losses:
        facts.append(f"loss {sum(losses) / len(losses):.3f} nats per token")
    facts.append(f"projected cost {routing.projected_cost:.1%} of full attention")
    if inspection.num_groups > 1:
        facts.append(f"routes are means over {inspection.num_groups} key-value heads")
    return ", ".join(facts)


def _options(options: list[tuple[str, str]], chosen: int) -> str:
    return "".join(
        f'<option value="{value}"{" selected" if index == chosen else ""}>{html.escape(name)}'
        "</option>"
        for index, (value, name) in enumerate(options)
    )


def _token(index: int, token: str) -> str:
    kind = "t n" if "\n" in token else "t"
    return f'<span class="{kind}" id="t{index}" tabindex="-1">{html.escape(token)}</span>'


def _share_row(index: int, layer: LayerRouting, experts: list[str]) -> str:
    """One layer of the table: how its tokens are shared out, as a bar and in words."""
    bar = "".join(
        f'<i class="e{experts.index(name) % 6}" style="width:{share:.2%}"></i>'
        for name, share in layer.share.items()
    )
    words = ", ".join(f"{name} {share:.1%}" for name, share in layer.share.items())
    notes = [
        name
        for name, is_so in (
            ("static", layer.is_static),
            (f"{layer.entered:.0%} enter", layer.entered < 1.0),
            ("expert collapse", layer.has_expert_collapse),
            ("prior collapse", layer.has_prior_collapse),
        )
        if is_so
    ]
    figures = [
        "" if layer.adaptivity is None else f"{layer.adaptivity:.4f}",
        "" if layer.routing_entropy is None else f"{layer.routing_entropy:.1f}%",
        "" if layer.kl is None else f"{layer.kl:.3f}",
        f"{layer.projected_cost:.1%}",
        ", ".join(notes),
    ]
    cells = "".join(f"<td>{figure}</td>" for figure in figures)
    return (
        f'<tr data-layer="{index}"><th scope="row"><button type="button">{index}</button></th>'
        f'<td class="share"><span class="bar" aria-hidden="true">{bar}</span>'
        f"{html.escape(words)}</td>{cells}</tr>"
    )


def _data(inspection: Inspection, experts: list[str]) -> str:
    data = {
        "experts": experts,
        "quantities": QUANTITIES,
        "loss": inspection.loss,
        "layers": [
            {
                "experts": layer.experts,
                "costs": layer.costs,
                "weights": layer.weights,
                "top": layer.expert,
                "signals": layer.signals,
            }
            for layer in inspection.layers
        ],
    }
    # no "<" in it, so that no text can end the element it stands in
    return json.dumps(_rounded(data), separators=(",", ":")).replace("<", "\\u003c")


def _rounded(value: Any) -> Any:
    """Numbers to four digits, and null for what JSON has no number for."""
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
