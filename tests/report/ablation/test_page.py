"""The report as a page: whole, self-contained, escaped, and looked at in a browser."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from meta_attention.errors import BackendUnavailableError, DataError
from meta_attention.report.ablation import drawing
from meta_attention.report.ablation.figures import draw_sections
from meta_attention.report.ablation.page import render_page, svg_of, write_report
from meta_attention.report.ablation.read import read_ablation

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
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


def test_the_paper_s_table_comes_first(report):
    text = report.read_text("utf-8")
    order = [text.index(f"<h2>{title}") for title in ("The paper", "Claim by", "All figures")]
    assert order == sorted(order)
    assert text.index("<h2>Cost and quality") > order[-1]
    assert "Perplexity of the Bayesian variant over prior-free" in text
    for printed in ("25.1%", "59.3%", "-34.2 pp", "43.3%", "+6.3%"):
        assert printed in text


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
    assert "Claim by claim" not in render_page(one, [])
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


@pytest.mark.parametrize("width", [360, 1280])
def test_a_browser_shows_every_figure_and_nothing_overflows(report, width, tmp_path):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"needs one of {', '.join(BROWSERS)}")
    # the page itself reports what a person would see
    probe = """<script>addEventListener("load", () => {
      const figures = [...document.querySelectorAll("figure svg")];
      const flat = figures.filter(figure => figure.getBoundingClientRect().height < 100);
      const found = [document.documentElement.scrollWidth, innerWidth, figures.length, flat.length];
      document.title = found.join(" ");
    });</script></body>"""
    probed = tmp_path / "probed.html"
    probed.write_text(report.read_text("utf-8").replace("</body>", probe), "utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},4000"]
    shot = report.parent / f"screenshot-{width}.png"
    subprocess.run(
        [browser, *flags, f"--screenshot={shot}", probed.as_uri()], check=True, timeout=120
    )
    dump = subprocess.run(
        [browser, *flags, "--dump-dom", probed.as_uri()],
        check=True,
        timeout=120,
        capture_output=True,
        text=True,
    ).stdout
    title = re.search(r"<title>(\d+) (\d+) (\d+) (\d+)</title>", dump)
    assert title is not None
    content, window, figures, flat = map(int, title.groups())
    assert content <= window
    assert figures >= len(EXPECTED)
    assert flat == 0
    assert shot.stat().st_size > 20_000
