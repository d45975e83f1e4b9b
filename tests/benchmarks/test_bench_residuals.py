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
    assert "kernels" not in rows["plain"]
    # the promise is of 24 layers on a GPU
    assert "% of a step" not in capsys.readouterr().out


def test_a_profile_says_what_a_step_runs_at_each_width(tmp_path, monkeypatch, capsys):
    out = tmp_path / "residuals.json"
    monkeypatch.setitem(bench_residuals.SMOKE, "hidden_sizes", [64, 128])
    options = ["--device", "cpu", "--smoke", "--profile", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench", *options, "--variants", "plain", "block"])
    bench_residuals.main()
    rows = json.loads(out.read_text())["rows"]
    assert [(row["hidden_size"], row["variant"]) for row in rows] == [
        *((64, "plain"), (64, "block"), (128, "plain"), (128, "block"))
    ]
    shown = capsys.readouterr().out
    for row in rows:
        kernels = row["kernels"]
        assert len(kernels) == bench_residuals.MAX_KERNELS
        assert [k["ms"] for k in kernels] == sorted((k["ms"] for k in kernels), reverse=True)
        assert row["kernels_ms"] > sum(k["ms"] for k in kernels)
        assert f"{row['variant']}, D={row['hidden_size']}" in shown
    # of one step: seven matrices in each of four blocks and one more, with two gradients each
    assert {k["name"]: k["calls"] for k in rows[0]["kernels"]}["aten::mm"] == 3 * (4 * 7 + 1)


def test_nothing_is_measured_without_the_plain_model(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", "--variants", "block"])
    with pytest.raises(SystemExit):
        bench_residuals.main()
    assert "must begin with plain" in capsys.readouterr().err


def test_a_step_is_captured_on_a_gpu_only(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", "--device", "cpu", "--smoke", "--capture"])
    with pytest.raises(SystemExit):
        bench_residuals.main()
    assert "--capture must have a CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
def test_captured_steps_are_timed(monkeypatch, tmp_path):
    out = tmp_path / "rows.json"
    options = ["--device", "cuda", "--smoke", "--capture", "--profile", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench", *options, "--variants", "plain", "block"])
    bench_residuals.main()
    document = json.loads(out.read_text())
    assert document["settings"]["capture"]
    assert [row["variant"] for row in document["rows"]] == ["plain", "block"]
    for row in document["rows"]:
        assert row["step_ms"] > 0
        assert row["kernels_ms"] > 0
