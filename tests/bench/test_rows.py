"""Rows and results: plain data that survives a file, and comparisons within a run."""

import json
import math

import pytest

from meta_attention.bench.rows import (
    Gate,
    Results,
    Row,
    Timing,
    Verdict,
    compare,
    fastest,
    load_results,
)
from meta_attention.errors import DataError


def make_row(name, ms=None, **fields):
    timing = None if ms is None else Timing(ms, ms, ms, ms, 10)
    return Row(
        suite="op", name=name, work="forward", shape={"T": 8}, dtype="float32", timing=timing,
        **fields,
    )  # fmt: skip


def test_results_survive_a_file(tmp_path):
    path = tmp_path / "results.json"
    results = Results({"device": "x"}, {"seed": 0}, {"copy_gbytes_per_s": 1.0}, path=path)
    row = make_row("routed", 2.0, mix="25/25/50", gates=[Gate("rows", 0.1, 0.2)])
    row.verdicts = [Verdict("speedup", ">= 2x", None, None)]
    results.add(row)
    results.add(make_row("peer", status="failed", reason="no such kernel"))
    loaded = load_results(path)
    assert loaded.rows == results.rows
    assert (loaded.machine, loaded.ceilings) == (results.machine, results.ceilings)
    assert loaded.is_complete is False


def test_a_file_is_written_with_every_row_and_never_half(tmp_path):
    path = tmp_path / "results.json"
    results = Results({}, {}, path=path)
    for count in range(1, 4):
        results.add(make_row("routed", 1.0))
        assert len(json.loads(path.read_text())["rows"]) == count
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


def test_json_has_no_nan():
    results = Results({}, {})
    results.add(make_row("routed", gates=[Gate("rows", math.nan, math.inf)]))
    gate = json.loads(results.to_json())["rows"][0]["gates"][0]
    assert gate == {"name": "rows", "error": None, "budget": None}
    assert not Gate("rows", math.nan, 1.0).is_passed


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 99, "rows": []}'])
def test_what_is_no_result_is_one_sentence(text, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(
        DataError, match="must be results written by 'meta-attention bench"
    ) as caught:
        load_results(path)
    assert "\n" not in str(caught.value)


def test_the_fastest_baseline_counts():
    flash, cudnn, other = make_row("flash", 4.0), make_row("cudnn", 3.0), make_row("flex", 1.0)
    cudnn.peak_mib = 100.0
    row = make_row("routed", 1.5, peak_mib=110.0)
    compare(row, [flash, cudnn, other], baselines=["flash", "cudnn"])
    assert (row.baseline, row.speedup) == ("cudnn", 2.0)
    assert row.speedups["flex"] == pytest.approx(2 / 3)
    assert row.memory_ratio == pytest.approx(1.1)


def test_peers_without_a_time_are_no_baseline():
    row = make_row("routed", 1.0)
    compare(row, [make_row("flash", status="failed")], baselines=["flash"])
    assert (row.baseline, row.speedup, row.speedups) == (None, None, {})
    assert fastest([]) is None
