"""Routing in a terminal: a text with coloured tokens, and a table of its layers."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from meta_attention.errors import ConfigError
from meta_attention.evaluation.forcing import RouteVerdict
from meta_attention.evaluation.inspect import Inspection
from meta_attention.evaluation.routing import RoutingSummary

Shade = tuple[int, int, int]  # red, green, blue

# told apart also by people who see fewer colours; black is readable on each
EXPERT_COLOURS: tuple[Shade, ...] = (
    (86, 180, 233),
    (240, 180, 40),
    (60, 190, 140),
    (220, 150, 190),
    (180, 180, 255),
    (200, 170, 120),
)
HEAT: Shade = (240, 120, 40)


def print_text(console: Console, inspection: Inspection, layer_idx: int, quantity: str) -> None:
    """Print a text with its tokens coloured, and how to read it.

    Args:
        console: Where to; where it has too few colours, experts are named where they change.
        inspection: What to show.
        layer_idx: The layer whose routes are shown.
        quantity: ``"expert"``, ``"loss"``, or one of the layer's signals.
    """
    if not 0 <= layer_idx < len(inspection.layers):
        raise ConfigError(
            f"layer must be between 0 and {len(inspection.layers) - 1}, got {layer_idx}"
        )
    if quantity == "expert":
        _print_experts(console, inspection, layer_idx)
        return
    signals = inspection.layers[layer_idx].signals
    known: dict[str, Sequence[float | None]] = {"loss": inspection.loss, **signals}
    if quantity not in known:
        raise ConfigError(
            f"signal must be one of {', '.join(['expert', *known])} in layer {layer_idx}, "
            f"got {quantity!r}"
        )
    name = quantity if quantity == "loss" else f"{quantity} in layer {layer_idx}"
    groups = inspection.layers[layer_idx].num_groups
    if quantity != "loss" and groups > 1:
        name += f", mean over {groups} key-value heads"
    _print_heat(console, inspection.tokens, known[quantity], name)


def routing_table(routing: RoutingSummary) -> Table:
    """One row per layer: how its tokens are shared out, and whether that depends on the token."""
    names = list(dict.fromkeys(name for layer in routing.layers for name in layer.experts))
    table = _table(
        "Layers: mean weight of each expert; adaptivity and KL in nats",
        ["layer", *names, "adaptivity", "KL", "entropy", "cost"],
    )
    table.add_column("", overflow="fold")
    for index, layer in enumerate(routing.layers):
        entropy = layer.routing_entropy
        notes = {
            "static": layer.is_static,
            f"{layer.entered:.0%} enter": layer.entered < 1.0,
            "[red]expert collapse[/]": layer.has_expert_collapse,
            "[red]prior collapse[/]": layer.has_prior_collapse,
        }
        table.add_row(
            str(index),
            *(_show(layer.share.get(name), ".1%") for name in names),
            _show(layer.adaptivity, ".4f"),
            _show(layer.kl, ".3f"),
            _show(None if entropy is None else entropy / 100.0, ".1%"),
            _show(layer.projected_cost, ".1%"),
            ", ".join(note for note, is_so in notes.items() if is_so),
        )
    return table


def adapter_table(layers: Mapping[str, Mapping[str, Any]]) -> Table:
    """One row per adapted layer, by what ``train_router`` measured of it."""
    names = list(next(iter(layers.values()))["share"])
    table = _table(
        "Adapted layers: share of tokens of each expert; adaptivity in nats",
        ["layer", *names, "adaptivity"],
    )
    for index, layer in layers.items():
        shares = (f"{layer['share'][name]:.1%}" for name in names)
        table.add_row(index, *shares, f"{layer['adaptivity']:.4f}")
    return table


def price_table(offers: Sequence[Mapping[str, float]]) -> Table:
    """One row per cost that a price was found for, by what ``train_router`` measured of it."""
    table = _table(
        "Prices, in nats for full attention, and what routes cost and lose at each",
        ["cost asked for", "price", "attention FLOPs", "loss", "divergence"],
    )
    for offer in offers:
        table.add_row(
            f"{offer['target_cost']:g}",
            f"{offer['price']:.3g}",
            f"{offer['attention_share']:.1%}",
            f"{offer['lm_loss']:.4f}",
            f"{offer['divergence']:.4f}",
        )
    return table


def verdict_table(verdict: RouteVerdict) -> Table:
    """One row per routed layer: how its routes compare with forcing its experts."""
    names = list(dict.fromkeys(name for layer in verdict.layers for name in layer.best_share))
    table = _table(
        "Forced: share of tokens each expert is best for; regrets in nats",
        ["layer", *names, "regret", "static regret", "routing ECE"],
    )
    for layer in verdict.layers:
        table.add_row(
            str(layer.layer),
            *(_show(layer.best_share.get(name), ".1%") for name in names),
            f"{layer.regret:.4f}",
            f"{layer.static_regret:.4f}",
            f"{layer.routing_ece:.4f}",
        )
    return table


def print_task(console: Console, task: str, figures: Mapping[str, Any]) -> None:
    """Print answers and routes on a task with known need, by layer.

    Args:
        console: Where to.
        task: What to call it.
        figures: As :meth:`TaskEvaluation.to_dict` has them.
    """
    parts = {"far": figures["far_accuracy"], "near": figures["near_accuracy"]}
    of_parts = ", ".join(f"{name} {x:.1%}" for name, x in parts.items() if x is not None)
    console.print(
        f"{task}: {figures['accuracy']:.1%} of {figures['num_asked']:,} answers right ({of_parts})",
        soft_wrap=True,
        highlight=False,
    )
    table = _table(
        f"Full attention; {figures['need_share']:.1%} of tokens need it",
        ["layer", "on full", "precision", "recall", "regret, nats"],
    )
    layers = {str(index): layer for index, layer in enumerate(figures["layers"])}
    mean = {"full_share": figures["full_share"], "regret": figures.get("regret")}
    for name, row in {**layers, "any": figures["any_layer"], "mean": mean}.items():
        table.add_row(
            name,
            _show(row["full_share"], ".1%"),
            _show(row.get("precision"), ".1%"),
            _show(row.get("recall"), ".1%"),
            _show(row.get("regret"), ".4f"),
        )
    console.print(table)


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _print_experts(console: Console, inspection: Inspection, layer_idx: int) -> None:
    layer = inspection.layers[layer_idx]
    # an expert has one colour in all layers
    names = list(dict.fromkeys(name for one in inspection.layers for name in one.experts))
    colours = {n: EXPERT_COLOURS[i % len(EXPERT_COLOURS)] for i, n in enumerate(names)}
    # sixteen colours cannot fade
    has_colours = console.color_system in ("256", "truecolor")
    text, last = Text(), ""
    for token, weights, top in zip(inspection.tokens, layer.weights, layer.expert, strict=True):
        expert = layer.experts[top]
        # all weights of a token that passed the block by are zero, and its colour is white
        name = expert if weights[top] > 0.0 else "skipped"
        if not has_colours and name != last:
            text.append(f"[{name}]")
        text.append(_sign(token), _style(colours[expert], weights[top]) if has_colours else "")
        last = name
    legend = Text(f"layer {layer_idx}: ")
    for expert, cost in zip(layer.experts, layer.costs, strict=True):
        legend.append(f" {expert} ", _style(colours[expert], 1.0)).append(f" cost {cost:.3g}  ")
    if layer.num_groups > 1:
        legend.append(f"mean over {layer.num_groups} key-value heads")
    console.print(legend)
    console.print(text)


def _print_heat(
    console: Console, tokens: Sequence[str], values: Sequence[float | None], name: str
) -> None:
    known = [value for value in values if value is not None] or [0.0]
    low, high = min(known), max(known)
    text = Text()
    for token, value in zip(tokens, values, strict=True):
        share = None if value is None else (value - low) / ((high - low) or 1.0)
        text.append(_sign(token), "" if share is None else _style(HEAT, share))
    legend = Text(f"{name}: {low:.3g} ")
    for step in range(9):
        legend.append("  ", _style(HEAT, step / 8))
    console.print(legend.append(f" {high:.3g}"))
    console.print(text)


def _style(colour: Shade, strength: float) -> Style:
    """Black on a colour that fades to white."""
    red, green, blue = (round(255 + (part - 255) * strength) for part in colour)
    return Style(color="#000000", bgcolor=Color.from_rgb(red, green, blue))


def _sign(token: str) -> str:
    return token.replace("\n", "\u21b5\n")


def _show(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
