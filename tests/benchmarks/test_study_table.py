"""Every variant in words: what pages say, and that the published ones are what their files say."""

import re
from pathlib import Path

import pytest
import study_frontier
import study_report
import study_table
import study_text
from study_variants import ENDINGS, SCALES, VARIANTS, find_variant

ROOT = Path(__file__).parents[2]
# the rounds of each published figure
PUBLISHED = {
    "small": (
        "small",
        ["second_round", "third_round", "fourth_round", "fifth_round", "sixth_round", "all_layers"],
        "h200",
    ),
    "medium": ("medium", ["eighth_round", "third_round"], "h200"),
    "mini": ("mini", ["mini", "values", "controls"], "cpu"),
    "code": ("small", ["code"], "h200"),
}


def test_a_page_has_every_drawn_variant_with_its_number_and_figures(rounds, tmp_path):
    paths = []
    for name, runs in zip(("first", "second"), rounds, strict=True):
        study_report.report([runs])
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text((runs / "report.json").read_text())
    # in folders that are not there yet
    page, figure = tmp_path / "pages" / "frontier.md", tmp_path / "figures" / "frontier.svg"
    files = ["--rows", *map(str, paths), "--scale", "tiny", "--out", str(figure)]
    assert study_text.main(["frontier", *files, "--table", str(page)]) == 0
    assert figure.exists()
    lines = page.read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "`" in line[:12]]
    assert [row[:2] for row in rows] == [
        ["1", "`hybrid-1-5`"],
        ["2", "`hybrid-1-5-x32-late`"],
        ["3", "`prior-free-wide-kv_head-0.45`"],
    ]
    # two seeds: without an interval
    assert rows[0][2:] == ["full", "1 of 6", "", "2", "0.200", "0", ""]
    assert rows[1][2:] == ["256", "1 of 6", "", "2", "0.100", "+0.1000", ""]
    assert rows[2][2:4] == ["full or 128 or 8", "1 of 6"]
    assert rows[2][4:] == ["token and head, at 0.45 of full", "2", "0.150", "+0.0100", "+0.0000"]
    assert "](frontier.svg)" in page.read_text()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("full", ""),
        ("hybrid-1-5-heads-0.45", "head, fixed, at 0.45 of full"),
        ("rule-wide", "rule: seen before, far back"),
        ("rule-1-5-heads-0.5", "rule: seen before, far back or head, fixed, at 0.5 of full"),
        ("prior-free-all-0.2", "token, at 0.2 of full"),
        ("bayes-all-token-0.2", "token, at 0.2 of full; pressed by the KL"),
        (
            "bayes-wide-kv_head-0.45-fading-sparse",
            "token and head, at 0.45 of full; pressed by its cost, the KL fading; trained with the "
            "chosen experts only",
        ),
        ("value-1-5-0.45-unseen", "token and head, at 0.45 of full; without recurrence"),
    ],
)
def test_a_choice_in_words(name, words):
    assert study_table.choice_of(name) == words


def test_no_two_variants_read_alike():
    small = SCALES["small"]
    read = {
        n: (study_table.attention_of(find_variant(n), small), study_table.choice_of(n))
        for n in VARIANTS
    }
    # where the full layer is, and when it was narrowed, only the name says
    alike = {"hybrid-1-5-last", "hybrid-1-5-x16", "hybrid-1-5-x32"}
    told_apart = [words for name, words in read.items() if name not in alike]
    assert len(set(told_apart)) == len(told_apart)


def test_every_ending_has_words_of_its_own():
    assert set(ENDINGS) == set(study_table.ENDING_WORDS) | {"tilted", "fading", "flat"}
    words = [
        study_table.choice_of(f"bayes-all-token-0.2-{e}") for e in ("tilted", "fading", "flat")
    ]
    assert len(set(words)) == 3


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_pages_are_what_their_files_say(name, tmp_path, capsys):
    scale, files, machine = PUBLISHED[name]
    paths = [ROOT / "benchmarks" / "results" / f"study_{file}_{machine}.json" for file in files]
    figure = ROOT / "docs" / f"frontier_{name}.svg"
    page = tmp_path / "page.md"
    study_table.write_table(study_frontier.published_rows(paths, scale), scale, page, figure=figure)
    assert page.read_text() == figure.with_suffix(".md").read_text()
    # and the figure's key has the same variants under the same numbers
    key = re.findall(r">\s*(\d+)  ([\w.-]+) \(\d+\)<", figure.read_text())
    listed = re.findall(r"^\| (\d+) \| `([\w.-]+)`", page.read_text(), re.MULTILINE)
    assert [number for number, _ in listed] == [number for number, _ in key]
    assert all(full.endswith(short) for (_, full), (_, short) in zip(listed, key, strict=True))
