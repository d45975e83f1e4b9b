"""Every Python block of the README and the docs runs, and examples stay short."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": page.stem}
    for number, block in enumerate(python_blocks(page)):
        exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)


def test_the_readme_has_code():
    assert python_blocks(ROOT / "README.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    """What headings of a page can be linked by, as GitHub makes it of them."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_headings_lead_to_one(page):
    for file, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text("utf-8")):
        target = page.parent / file if file else page
        assert anchor in anchors(target), f"{page.name} links to {file}#{anchor}"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_example_is_short_and_runs(example, tmp_path):
    assert len(example.read_text("utf-8").splitlines()) < 80
    result = subprocess.run(
        [sys.executable, "-W", "error", example],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout
