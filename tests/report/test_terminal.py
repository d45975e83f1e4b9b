"""Routing in a terminal."""

import io

import pytest
from rich.console import Console

from meta_attention.errors import ConfigError
from meta_attention.evaluation.forcing import LayerVerdict, RouteVerdict
from meta_attention.report.terminal import print_text, routing_table, verdict_table


def console(colours="truecolor"):
    return Console(
        file=io.StringIO(),
        width=80,
        color_system=colours,
        force_terminal=colours is not None,
        legacy_windows=False,
    )


def text_of(console):
    return console.file.getvalue()


def test_each_expert_has_a_colour_and_the_legend_names_it(inspection):
    shown = console()
    print_text(shown, inspection, 0, "expert")
    for name in inspection.layers[0].experts:
        assert f" {name} " in text_of(shown)
    assert text_of(shown).count("\x1b[38;2;0;0;0;48;2;") >= len(inspection.tokens)


def test_without_colours_experts_are_named_where_they_change(inspection):
    shown = console(None)
    print_text(shown, inspection, 2, "expert")
    layer = inspection.layers[2]
    assert f"[{layer.experts[layer.expert[0]]}]The" in text_of(shown)
    assert "\x1b" not in text_of(shown)


def test_without_colours_tokens_that_passed_by_are_named_too(inspection):
    inspection.layers[0].weights[1] = [0.0] * len(inspection.layers[0].experts)
    shown = console(None)
    print_text(shown, inspection, 0, "expert")
    assert "[skipped] <b>[" in text_of(shown)


@pytest.mark.parametrize("quantity", ["loss", "margin"])
def test_a_signal_is_shown_from_its_least_to_its_greatest(quantity, inspection):
    shown = console()
    print_text(shown, inspection, 0, quantity)
    values = inspection.layers[0].signals["margin"]
    name = "margin in layer 0"
    if quantity == "loss":
        values, name = inspection.loss[1:], "loss"
    assert f"{name}: {min(values):.3g} " in text_of(shown)
    assert f" {max(values):.3g}\n" in text_of(shown)


@pytest.mark.parametrize(("layer", "quantity"), [(3, "expert"), (-1, "expert"), (1, "margin")])
def test_what_is_not_there_is_refused(layer, quantity, inspection):
    with pytest.raises(ConfigError, match="must be"):
        print_text(console(), inspection, layer, quantity)


def test_the_table_fits_a_terminal_and_names_what_is_static(inspection):
    shown = console(None)
    shown.print(routing_table(inspection.routing))
    lines = text_of(shown).splitlines()
    assert max(map(len, lines)) <= 80
    assert "\u2026" not in text_of(shown)
    for name in ("adaptivity", "linear", "static"):
        assert name in text_of(shown)


def test_a_verdict_is_shown_per_layer():
    layer = LayerVerdict(2, 0.25, -0.125, 0.5, {"full": 1.0}, {"full": 0.75})
    shown = console(None)
    shown.print(verdict_table(RouteVerdict([layer])))
    for number in ("0.2500", "-0.1250", "0.5000", "75.0%"):
        assert number in text_of(shown)
