"""The report as a page: whole, self-contained, escaped, and looked at in a browser."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from PIL import Image

from meta_attention.errors import BackendUnavailableError, DataError
from meta_attention.report.ablation import drawing
from meta_attention.report.ablation.figures import draw_sections
from meta_attention.report.ablation.page import render_page, svg_of, write_report
from meta_attention.report.ablation.read import read_ablation

VOID = {"meta", "link", "br", "hr", "img", "input"}

EXPECTED = {
    *("frontier", "projected", "curve-loss", "curve-kl", "curve-entropy", "curve-adaptivity"),
    *("curve-cost", "shares", "shares-bayesian", "shares-prior-free", "shares-recommended"),
    *("uncertainty-bayesian-entropy", "uncertainty-bayesian-mutual_information"),
    *("uncertainty-prior-free-mean_entropy", "uncertainty-recommended-mutual_information"),
    *("reliability", "reliability-routing"),
    *("threshold-bayesian", "threshold-prior-free", "threshold-recommended"),
    *("prior-floor-perplexity", "kl-schedule-adaptivity", "gradients-recommended-gradients"),
}


class Page(HTMLParser):
    """Elements of a page, and whether each is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found[name] for name in ("src", "href", "xlink:href") if name in found]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def report(ablation_folder, tmp_path_factory):
    pytest.importorskip("matplotlib")
    return write_report(read_ablation([ablation_folder]), tmp_path_factory.mktemp("report") / "r")


@pytest.fixture(scope="module")
def page(report):
    return Page(report.read_text("utf-8"))


def test_every_figure_is_in_the_page_and_beside_it(report, page):
    assert set(page.ids) >= EXPECTED
    for name in EXPECTED:
        assert (report.parent / f"{name}.png").stat().st_size > 2000
        ElementTree.parse(report.parent / f"{name}.svg")


def test_the_page_needs_nothing_else(report, page):
    assert all(link.startswith("#") for link in page.links)
    text = report.read_text("utf-8")
    assert not re.search(r"@import|url\((?!#)|<script|<link", text)
    assert page.open == []


def test_names_within_figures_do_not_clash(page):
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links} <= set(page.ids)


def test_text_is_escaped_and_stays_text(report):
    text = report.read_text("utf-8")
    assert "a &lt;text&gt;" in text
    assert "<b>keeper" not in text
    passage = re.sub(r"<[^>]*>", "", text)
    assert "&lt;b&gt;keeper&lt;/b&gt; &amp; the {{ships}}." in passage


def test_the_page_says_what_it_is_not(report):
    text = report.read_text("utf-8")
    assert "This is the short version" in text
    assert "linear seed 2" in text
    assert "One seed only" not in text


def test_results_come_first_and_all_numbers_last(report, page):
    text = report.read_text("utf-8")
    titles = ("The paper", "Cost and quality", "Claim by", "Over training", "All figures: ablation")
    order = [text.index(f">{title}", text.index("</nav>")) for title in titles]
    assert order == sorted(order)
    assert "Perplexity of the Bayesian variant over prior-free" in text
    for printed in ("25.1%", "59.3%", "-34.2 pp", "43.3%", "+6.3%"):
        assert printed in text


def test_the_contents_name_every_part_in_order(report):
    text = report.read_text("utf-8")
    parts = re.findall(r'<h2 id="([^"]*)">', text)
    assert re.findall(r'<li><a href="#([^"]*)">', text) == parts
    assert len(parts) == text.count("<h2") > 10


def test_rows_without_a_number_are_left_out(report):
    text = report.read_text("utf-8")
    routing = text[text.index("<h3>Routing</h3>") :]
    rows = re.findall(r'<th scope="row">([^<]*)', routing[: routing.index("</table>")])
    assert "bayesian" in rows
    assert "full" not in rows


def test_figures_take_the_ink_of_the_page(report):
    text = report.read_text("utf-8")
    assert drawing.INK not in text
    assert "currentColor" in text
    assert "prefers-color-scheme: dark" in text


def test_the_same_runs_give_the_same_figures(ablation_folder, report):
    first, *_ = draw_sections(read_ablation([ablation_folder]))
    for panel in first.panels:
        assert svg_of(panel.figure) == (report.parent / f"{panel.name}.svg").read_text("utf-8")


def test_a_page_of_one_experiment_has_no_claims(ablation_folder):
    ablation = read_ablation([ablation_folder])
    only = {"prior-floor": ablation.plan["experiments"]["prior-floor"]}
    runs = tuple(r for r in ablation.runs if r.variant in only["prior-floor"]["variants"])
    one = type(ablation)(ablation.plan | {"experiments": only}, runs)
    assert "Claim by claim" not in render_page(one, [], {})
    names = {panel.name for section in draw_sections(one) for panel in section.panels}
    assert {"prior-floor-perplexity", "prior-floor-adaptivity"} <= names
    assert "frontier" not in names


def test_without_matplotlib_the_error_says_where_to_go(ablation_folder, monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(BackendUnavailableError, match="matplotlib, which is not installed"):
        write_report(read_ablation([ablation_folder]), tmp_path)


def test_a_folder_that_cannot_be_written_is_said(ablation_folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="must go to a folder that can be written"):
        write_report(read_ablation([ablation_folder]), tmp_path / "file")


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_a_browser_shows_every_figure_and_nothing_overflows(report, look, width, is_dark):
    shot = report.parent / f"screenshot-{width}-{'dark' if is_dark else 'light'}.png"
    seen = look(report.read_text("utf-8"), width, is_dark, shot)
    assert (seen["width"], seen["isDark"]) == (width, is_dark)
    assert set(seen["figures"]) >= EXPECTED
    for name, (own_width, height) in seen["figures"].items():
        assert own_width > 250, name
        assert height > 150, name
    assert seen["content"] <= width
    for fault in ("outside", "tiny", "faint"):
        assert seen[fault] == [], fault
    with Image.open(shot) as image:
        assert image.height >= seen["height"]
        shown = image.convert("L").crop((0, 0, width, seen["height"])).histogram()
    # mostly the page's ground, and much that is not
    dark = sum(shown[:64]) / sum(shown)
    assert 0.6 < (dark if is_dark else 1.0 - dark) < 0.99
