"""An inspection made by hand: three layers, one of them static, and text that must be escaped.

And a browser, where there is one, to look at pages as a reader would.
"""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meta_attention.evaluation.inspect import InspectedLayer, Inspection
from meta_attention.evaluation.routing import summarise_routing

TOKENS = ["The", " <b>", "&amp;", "</script>", "<script>alert(1)", '"\n', "{{title}}", "\u20ac'"]

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--disable-dev-shm-usage"),
)
# the page itself says what a reader would see; text is judged against what it stands on
PROBE = """<script>addEventListener("load", () => {
  const rgba = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].reduce((sum, x, i) => sum + [.2126, .7152, .0722][i] *
    (x <= 10 ? x / 3294 : ((x / 255 + .055) / 1.055) ** 2.4), 0);
  const ground = node => {
    for (; node; node = node.parentElement) {
      const found = rgba(getComputedStyle(node).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  const contrast = node => {
    const style = getComputedStyle(node), isSvg = node.namespaceURI.endsWith("svg");
    const [a, b] = [light(rgba(isSvg ? style.fill : style.color)), light(ground(node))];
    return (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
  };
  const box = node => node.getBoundingClientRect();
  const all = selector => [...document.querySelectorAll(selector)].filter(node => box(node).width);
  const name = node => node.tagName + " " + node.textContent.trim().slice(0, 40);
  const root = document.documentElement;
  parent.postMessage({
    width: innerWidth, content: root.scrollWidth, height: root.scrollHeight,
    isDark: matchMedia("(prefers-color-scheme: dark)").matches,
    figures: Object.fromEntries(all("figure[id]").map(node => [node.id,
      [box(node.querySelector("svg")).width, box(node.querySelector("svg")).height]])),
    outside: all("body *").filter(node => !node.closest(".scroll > *, svg > *") &&
      (box(node).right > innerWidth + 1 || box(node).left < -1)).map(name),
    tiny: all("figure svg text").filter(node => parseFloat(getComputedStyle(node).fontSize) *
      box(node.ownerSVGElement).width / node.ownerSVGElement.viewBox.baseVal.width < 9).map(name),
    faint: all("h1, h2, h3, p, a, th, td, dt, dd, figcaption, summary, .verdict, figure svg text")
      .filter(node => contrast(node) < 4.5).map(name),
  }, "*");
});</script></body>"""

Look = Callable[[str, int, bool, Path], dict[str, Any]]


@pytest.fixture(scope="session")
def look(tmp_path_factory: pytest.TempPathFactory) -> Look:
    """Show a page to a browser; what it saw, and all of the page in a PNG file.

    The page stands in a frame of the given width: a window of a browser has a least width, which is
    more than a phone's.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"needs one of {', '.join(BROWSERS)}")
    profile = tmp_path_factory.mktemp("profile")
    blank = [browser, *FLAGS, f"--user-data-dir={profile}", "--dump-dom", "about:blank"]
    if subprocess.run(blank, capture_output=True, timeout=120).returncode:
        pytest.skip(f"{browser} is here, but does not start")

    def show(source: str, width: int, is_dark: bool, shot: Path) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("browser")
        host = folder / "host.html"
        scheme = f"--blink-settings=preferredColorScheme={0 if is_dark else 1}"

        def run(height: int, *flags: str) -> str:
            probed = html.escape(source.replace("</body>", PROBE))
            host.write_text(
                '<!doctype html><meta charset="utf-8"><body style="margin:0">'
                f'<iframe style="border:0;display:block;width:{width}px;height:{height}px" '
                f'srcdoc="{probed}"></iframe><pre></pre><script>addEventListener("message", '
                "e => document.querySelector('pre').textContent = JSON.stringify(e.data))</script>",
                "utf-8",
            )
            own = (scheme, f"--user-data-dir={profile}", *flags)
            return subprocess.run(
                [browser, *FLAGS, *own, host.as_uri()],
                check=True,
                timeout=120,
                capture_output=True,
                text=True,
            ).stdout

        # time goes on only while nothing loads, so that the page has answered
        dump = run(800, "--virtual-time-budget=5000", "--dump-dom")
        found = re.search(r"<pre>(\{.*\})</pre>", dump)
        assert found is not None
        seen: dict[str, Any] = json.loads(html.unescape(found[1]))
        height = seen["height"]
        # the window's own bars are part of its size
        run(height, f"--window-size={max(width, 500)},{height + 200}", f"--screenshot={shot}")
        return seen

    return show


@pytest.fixture
def inspection() -> Inspection:
    names = [("full", "linear", "local"), ("local",), ("full", "local")]
    costs = [[1.0, 0.15, 0.3], [0.3], [1.0, 0.3]]
    weights = [torch.randn(len(TOKENS), len(n)).mul(2.0).softmax(-1) for n in names]
    layers = []
    for name, cost, weight in zip(names, costs, weights, strict=True):
        signals = {"margin": torch.rand(len(TOKENS)).tolist()} if len(name) > 1 else {}
        layers.append(
            InspectedLayer(name, cost, weight.tolist(), weight.argmax(-1).tolist(), signals)
        )
    return Inspection(
        tokens=TOKENS,
        ids=list(range(len(TOKENS))),
        loss=[None, *torch.rand(len(TOKENS) - 1).tolist()],
        layers=layers,
        routing=summarise_routing(
            [w[None] for w in weights], [0.5, None, 0.2], names, [torch.tensor(c) for c in costs]
        ),
    )
