"""The benchmark of Attention Residuals runs, and judges itself where it was asked to only."""

import json
import sys

import bench_residuals
import pytest


def test_it_runs_on_a_cpu_and_writes_what_it_measured(tmp_path, monkeypatch, capsys):
    out = tmp_path / "results" / "residuals.json"
    monkeypatch.setattr(sys, "argv", ["bench", "--device", "cpu", "--smoke", "--out", str(out)])
    bench_residuals.main()
    document = json.loads(out.read_text())
    assert document["machine"]["torch"]
    assert document["settings"]["layers"] == 4
    rows = {row["variant"]: row for row in document["rows"]}
    assert list(rows) == ["plain", "full", "block"]
    assert rows["plain"]["overhead"] == 0.0
    # nine queries of 64
    assert rows["full"]["parameters"] - rows["plain"]["parameters"] == 9 * 64
    assert rows["block"]["first_loss"] == pytest.approx(rows["plain"]["first_loss"], rel=0.01)
    # the promise is of 24 layers on a GPU
    assert "of a step" not in capsys.readouterr().out


def test_nothing_is_measured_without_the_plain_model(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", "--variants", "block"])
    with pytest.raises(SystemExit):
        bench_residuals.main()
    assert "must begin with plain" in capsys.readouterr().err
