"""Tables and plots of results."""

import io

import pytest
from rich.console import Console

from meta_attention.bench.plot import plot_results
from meta_attention.bench.rows import Gate, Results, Row, Timing, compare
from meta_attention.bench.table import print_results
from meta_attention.bench.targets import judge
from meta_attention.errors import ConfigError, DataError


def make_row(name, ms, T=16384, work="forward", mix=None, **fields):
    fields = {"suite": "op", "shape": {"B": 2, "T": T, "H": 8, "P": 128}} | fields
    timing = None if ms is None else Timing(ms, 0.9 * ms, 1.1 * ms, ms, 20)
    return Row(name=name, work=work, dtype="bfloat16", mix=mix, timing=timing, **fields)


@pytest.fixture
def results():
    machine = {"device": "NVIDIA H200", "torch": "2.11", "commit": "abc", "date": "2026-01-01"}
    results = Results(machine, {}, {"matmul_tflops_per_s": 700.0, "copy_gbytes_per_s": 4100.0})
    for T in (4096, 16384):
        for work in ("forward", "forward + backward"):
            flash = make_row("SDPA flash", T / 4096, T, work, peak_mib=100.0)
            routed = make_row(
                "routed", T / 16384, T, work, "25/25/50", peak_mib=120.0, graph_ms=0.2,
                tflops_per_s=321.0, ceiling_share=0.46, gates=[Gate("rows", 0.003, 0.01)],
            )  # fmt: skip
            for row in (flash, routed):
                results.add(judge(compare(row, [flash], baselines=["SDPA flash"])))
    results.add(
        make_row("SDPA cuDNN", None, status="failed", reason="RuntimeError: no kernel [bf16]")
    )
    results.add(make_row("static hybrid", 0.8, note="priced from its parts"))
    return results


def render(results, width=170):
    console = Console(file=io.StringIO(), width=width)
    print_results(console, results)
    return console.file.getvalue()


def test_table_shows_times_rates_memory_and_targets(results):
    text = render(results)
    for part in (
        "NVIDIA H200", "matmul 700 TFLOP/s", "op: bfloat16 B=2 T=16384", "1.000", "0.200",
        "0.900-1.100", "321 (46%)", "120 (1.20x)", "3.0e-03", "4.00x", "Targets", "memory ratio",
        "<= 1.1x", "missed", "met", "priced from its parts",
    ):  # fmt: skip
        assert part in text, part


def test_a_row_without_a_time_stays_with_its_reason(results):
    text = render(results)
    assert "failed" in text
    assert "SDPA cuDNN (forward): failed, RuntimeError: no kernel [bf16]" in text


def test_a_narrow_terminal_loses_no_row(results):
    narrow = render(results, width=80)
    assert narrow.count("routed") == render(results).count("routed")
    assert "4.00x" in narrow
    assert "graph ms" not in narrow


def test_no_times_of_a_cpu(results):
    for row in results.rows:
        row.suite, row.is_comparable = "cpu", False
    text = render(results)
    assert "ratios only" in text
    assert "4.00x" in text
    for part in ("median ms", "0.900-1.100", "321"):
        assert part not in text


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_plot_is_drawn(results, ending, tmp_path):
    path = tmp_path / f"plot.{ending}"
    plot_results(results, path)
    start = path.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if ending == "png" else b"<?xml" in start


def test_a_plot_has_a_line_for_every_mix_and_peer(results, tmp_path):
    path = tmp_path / "plot.svg"
    plot_results(results, path)
    text = path.read_text()
    for name in ("routed 25/25/50", "SDPA flash", "forward + backward", "microseconds per token"):
        assert f"<!-- {name} -->" in text, name


def test_what_cannot_be_drawn_is_one_sentence(results, tmp_path):
    with pytest.raises(ConfigError, match=r"must end in \.png or \.svg, got .*plot.jpeg"):
        plot_results(results, tmp_path / "plot.jpeg")
    for row in results.rows:
        row.is_comparable = False
    with pytest.raises(DataError, match="measured on a GPU; there are none"):
        plot_results(results, tmp_path / "plot.png")
