"""The page that shows where tokens go."""

import json
from html.parser import HTMLParser

import pytest

from meta_attention.errors import DataError
from meta_attention.report.html import QUANTITIES, render_inspection, write_inspection

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Elements, attributes and texts of a page; fails where tags do not match."""

    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes = [], [], []
        self.texts, self.tokens, self.options = {}, [], []
        self.in_token = False
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)
        if dict(attrs).get("class", "").split(" ")[0] == "t":
            self.tokens.append("")
            self.in_token = True
        if tag == "option":
            self.options.append(dict(attrs))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self.in_token = False

    def handle_data(self, data):
        where = self.open[-1] if self.open else ""
        self.texts.setdefault(where, []).append(data)
        if self.in_token:
            self.tokens[-1] += data


def data_of(source):
    begin = source.index('id="data">') + len('id="data">')
    return json.loads(source[begin : source.index("</script>", begin)])


def test_it_needs_nothing_from_elsewhere(inspection):
    source = render_inspection(inspection, "tiny")
    page = Page(source)
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    assert not {"src", "href", "srcset", "action"} & {name for name, _ in page.attributes}
    for text in ("http:", "https:", "//", "@import", "url(", "fetch(", "XMLHttpRequest"):
        assert text not in source


def test_all_text_is_there_and_escaped(inspection):
    source = render_inspection(inspection, "tiny")
    page = Page(source)
    # the parser has turned references back; the markup of the text never became markup
    assert page.tokens == inspection.tokens
    assert page.tags.count("script") == 2
    assert "b" not in page.tags
    assert "<script>alert" not in source


def test_a_title_is_text_and_a_placeholder_in_the_text_stays(inspection):
    source = render_inspection(inspection, "<i>{{data}}</i>")
    assert "<h1>Where the tokens go: &lt;i&gt;{{data}}&lt;/i&gt;</h1>" in source
    assert ">{{title}}</span>" in source


def test_the_numbers_are_those_of_the_inspection(inspection):
    data = data_of(render_inspection(inspection, "tiny"))
    assert data["experts"] == ["full", "linear", "local"]
    assert data["loss"][0] is None
    for shown, layer in zip(data["layers"], inspection.layers, strict=True):
        assert shown["experts"] == list(layer.experts)
        assert shown["top"] == layer.expert
        assert shown["weights"][2] == pytest.approx(layer.weights[2], rel=1e-3)
        assert shown["signals"].keys() == layer.signals.keys()


def test_numbers_json_cannot_hold_are_left_out(inspection):
    inspection.loss[1] = float("nan")
    inspection.loss[2] = float("inf")
    assert data_of(render_inspection(inspection, "tiny"))["loss"][:3] == [None] * 3


def test_every_layer_and_quantity_can_be_chosen_and_is_named(inspection):
    source = render_inspection(inspection, "tiny")
    page = Page(source)
    assert [o["value"] for o in page.options] == ["0", "1", "2", "expert", "loss", "margin"]
    assert [o["value"] for o in page.options if "selected" in o] == ["0", "expert"]
    assert source.count('<tr data-layer="') == 3
    for name, share in inspection.routing.layers[0].share.items():
        assert f"{name} {share:.1%}" in source
    assert "static" in "".join(page.texts["td"])
    assert set(data_of(source)["quantities"]) == set(QUANTITIES)


def test_it_follows_the_readers_light_and_width(inspection):
    source = render_inspection(inspection, "tiny")
    assert "prefers-color-scheme: dark" in source
    assert 'name="viewport" content="width=device-width' in source


def test_a_place_that_cannot_be_written_is_one_sentence(inspection, tmp_path):
    write_inspection(inspection, tmp_path / "page.html", "tiny")
    assert (tmp_path / "page.html").read_text("utf-8").startswith("<!doctype html>")
    with pytest.raises(DataError, match="can be written"):
        write_inspection(inspection, tmp_path / "no" / "page.html", "tiny")


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_a_browser_shows_it_and_nothing_overflows(inspection, look, width, is_dark, tmp_path):
    shot = tmp_path / "screenshot.png"
    seen = look(render_inspection(inspection, "tiny"), width, is_dark, shot)
    assert (seen["width"], seen["isDark"]) == (width, is_dark)
    assert seen["content"] <= width
    assert (seen["outside"], seen["faint"]) == ([], [])
    assert shot.stat().st_size > 5000
