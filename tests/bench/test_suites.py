"""Every suite at tiny sizes: what it measures, what it refuses to time, what it survives."""

import json
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from meta_attention.bench import (
    cpu_suite,
    decode_suite,
    layer_suite,
    model_suite,
    op_bench,
    op_peers,
    op_suite,
    run,
)
from meta_attention.bench.data import OpShape
from meta_attention.bench.decode_suite import DecodePlan, DecodeShape, bytes_of_step
from meta_attention.bench.op_suite import FIFTH, QUARTERS, OpPlan
from meta_attention.bench.rows import Row, load_results
from meta_attention.bench.session import Work, describe
from meta_attention.bench.timing import Clock
from meta_attention.errors import BackendUnavailableError, ConfigError
from meta_attention.layers import execution

SHAPE = OpShape(2, 200, H=2, P=16, window=24)
OP = OpPlan(
    shapes=((SHAPE, (op_bench.ALL_FULL, QUARTERS, FIFTH)),),
    flex_mixes=(QUARTERS,),
    flex_lengths=(200,),
    hybrid_window=48,
    linear_lengths=(200,),
)
# without what takes longest
BRIEF = replace(OP, flex_lengths=(), linear_lengths=())
LAYER = layer_suite.LayerPlan(B=2, T=200, H=2, P=16, window=24, small_T=100)
SIZES: dict[str, Any] = {
    "B": 1, "T": 200, "hidden_size": 32, "heads": 2, "head_dim": 16, "intermediate_size": 64,
    "vocab_size": 64, "window": 16, "hybrid_window": 32, "small_T": 100, "small_vocab": 32,
}  # fmt: skip
MODEL = model_suite.ModelPlan(layers=2, **SIZES)
TRAIN = model_suite.ModelPlan(layers=2, mix=FIFTH, **SIZES)
DECODE = DecodePlan((DecodeShape(B=8, S=300, H=4, K=2, P=16, window=24),))


def by_name(rows, name):
    return [row for row in rows if row.name == name]


def test_op_suite_measures_all_of_it(session):
    rows = op_suite.run_op(session, OP)
    assert rows == session.results.rows
    routed = by_name(rows, "routed")
    assert [row.status for row in routed] == ["measured"] * 9
    assert {row.work for row in routed} == {"forward", "backward", "forward + backward"}
    for row in routed:
        assert row.baseline == "SDPA flash"
        assert row.speedup == pytest.approx(row.speedups["SDPA flash"])
        assert row.tflop > 0
        names = {gate.name.partition(",")[0] for gate in row.gates}
        assert {"rows", "sampled full rows"} <= names
        assert ("sum of d_value" in names) == (row.work != "forward")
    for row in by_name(rows, op_peers.HYBRID):
        assert "(1 x SDPA flash + 5 x routed, all local, window 48) / 6" in row.note
    (flex,) = by_name(rows, op_peers.FLEX)
    assert (flex.status, flex.mix) == ("measured", "25/25/50")
    for name in (op_peers.LINEAR_ONLY, op_peers.SSM_ONLY):
        measured = by_name(rows, name)
        assert [row.status for row in measured] == ["measured"] * 3
        assert all(row.speedup > 0 and row.tflop > 0 for row in measured)
    gates = [{gate.name for gate in row.gates} for row in by_name(rows, op_peers.SSM_ONLY)]
    rows_only = {"rows, T=200", "sampled ssm rows"}
    gradients = {f"d_{name}, T=200" for name in ("query", "key", "value")}
    gradients |= {"d_query of sampled ssm rows"}
    assert gates == [rows_only, rows_only | gradients, rows_only | gradients]
    (missing,) = by_name(rows, op_peers.FLA)
    assert (missing.status, missing.timing) == ("missing", None)


def test_a_hybrid_is_priced_from_its_parts(session):
    rows = op_suite.run_op(session, BRIEF)
    (full, local, hybrid) = (
        next(row.ms for row in rows if row.name == name and row.work == "backward")
        for name in ("SDPA flash", op_peers.LOCAL_ONLY, op_peers.HYBRID)
    )
    assert hybrid == pytest.approx((full + 5 * local) / 6)


def test_a_peer_that_cannot_run_is_a_row_with_its_reason(session):
    rows = op_suite.run_op(session, BRIEF)
    failed = by_name(rows, "SDPA cuDNN")
    assert len(failed) == 3
    for row in failed:
        assert (row.status, row.timing) == ("failed", None)
        assert "\n" not in row.reason
        assert "RuntimeError" in row.reason


def test_a_wrong_implementation_has_no_time(session, monkeypatch):
    attend = op_bench.routed_attention

    def wrong(query, key, value, plan, windows, **options):
        windows = {index: w and w + 1 for index, w in windows.items()}
        return attend(query, key, value, plan, windows, **options)

    monkeypatch.setattr(op_bench, "routed_attention", wrong)
    rows = op_suite.run_op(session, BRIEF)
    for row in by_name(rows, "routed"):
        is_local = row.mix != "100/0/0"
        assert row.status == ("failed" if is_local else "measured")
        assert (row.timing is None) == is_local
        if is_local:
            assert "sampled local rows: error" in row.reason
            assert row.speedup is None
    # the others are timed all the same
    assert all(row.timing for row in by_name(rows, "SDPA flash"))


def test_a_wrong_linear_expert_has_no_time(session, monkeypatch):
    attend = op_bench.linear_attention

    def wrong(query, key, value, **options):
        return attend(query * 1.1, key, value, **options)

    monkeypatch.setattr(op_bench, "linear_attention", wrong)
    rows = by_name(op_suite.run_op(session, BRIEF), "routed")
    assert {row.mix for row in rows if row.status == "failed"} == {"25/25/50"}


@pytest.mark.parametrize("wrong", [{"decay": 0.98}, {"skip": 1.1}])
def test_a_wrong_state_space_has_no_time(wrong, session, monkeypatch):
    attend = op_peers.linear_attention

    def change(query, key, value, **options):
        options |= {name: options[name] * factor for name, factor in wrong.items()}
        return attend(query, key, value, **options)

    bench = op_bench.ShapeBench(
        session, "op", SHAPE, works=("forward", "backward"), baselines=(), known_gates={}
    )
    bench.run_baselines()
    assert {row.status for row in op_peers.run_state_space(bench)} == {"measured"}
    monkeypatch.setattr(op_peers, "linear_attention", change)
    assert {row.status for row in op_peers.run_state_space(bench)} == {"failed"}


def test_on_a_gpu_there_are_graphs_memory_and_ceilings(gpu_session):
    rows = op_suite.run_op(gpu_session, OP)
    for row in by_name(rows, "routed"):
        assert (row.graph_ms is not None) == (row.work == "forward")
        assert (row.peak_mib, row.memory_ratio) == (64.0, 1.0)
        assert row.ceiling_share == pytest.approx(row.tflops_per_s / 700.0)
        assert any(v.quantity == "memory_ratio" and v.is_met for v in row.verdicts) == (
            row.work != "backward"
        )


def test_a_call_that_cannot_be_captured_keeps_its_time(gpu_session, monkeypatch):
    def refuse(call):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(gpu_session.clock, "time_graph", refuse)
    row = gpu_session.row("op", "routed", "forward", {}, None)
    gpu_session.measure(row, lambda: Work(lambda: None, also_in_graph=True, note="first"))
    assert row.timing is not None
    assert row.note.startswith("first; no CUDA graph: RuntimeError: operation not permitted")
    (_, routed) = layer_suite.run_layer(gpu_session, LAYER)
    assert "launched one by one" in routed.note


def test_layer_suite_says_what_routing_costs(session):
    full, routed = layer_suite.run_layer(session, LAYER)
    assert (full.status, routed.status) == ("measured", "measured")
    assert routed.routing_share > 0
    for part in ("controller", "policy", "plan", "merge"):
        assert part in routed.note
    assert [v.quantity for v in routed.verdicts] == ["routing_share"]
    assert routed.baseline == "full only"


def test_layer_parts_come_from_graphs_where_there_are_any(gpu_session):
    _, routed = layer_suite.run_layer(gpu_session, LAYER)
    assert "in CUDA graphs" in routed.note


def test_model_suite_compares_four_models(session):
    rows = model_suite.run_model(session, MODEL)
    assert [row.name for row in rows] == ["full only", "static hybrid", "routed soft", "routed"]
    assert {row.status for row in rows} == {"measured"}, [row.reason for row in rows]
    routed = rows[-1]
    assert set(routed.speedups) >= {"full only", "static hybrid", "routed soft"}
    assert [gate.name for gate in routed.gates] == ["hidden states, T=100", "hidden states, T=200"]
    assert routed.tflop < rows[2].tflop
    assert "M parameters" in routed.note


def test_a_model_that_takes_other_routes_has_no_time(session, monkeypatch):
    plan = execution.plan_routes

    def wrong(weights, **options):
        return plan(weights.roll(1, dims=1), **options)

    monkeypatch.setattr(execution, "plan_routes", wrong)
    routed = model_suite.run_model(session, MODEL)[-1]
    assert (routed.status, routed.timing) == ("failed", None)
    assert "hidden states" in routed.reason


def test_train_suite_measures_a_step(session):
    full, routed = model_suite.run_train(session, TRAIN)
    assert {full.status, routed.status} == {"measured"}, routed.reason
    names = [gate.name for gate in routed.gates]
    assert "gradient of k_proj, T=100" in names
    assert "hidden states, T=200" in names
    assert routed.work == "training step"


def test_decode_suite_counts_the_bytes(session):
    rows = decode_suite.run_decode(session, DECODE)
    routed = by_name(rows, "routed")
    assert [row.status for row in routed] == ["measured"] * 3, [row.reason for row in routed]
    assert {row.work for row in rows} == {"step"}
    quarters, fifth, full = routed
    cache = 8 * 2 * 2 * 300 * 16 * 4  # B, key and value, K, S, P, float32
    assert full.gbytes * 1e9 == pytest.approx(cache)
    assert by_name(rows, "SDPA default")[0].gbytes == full.gbytes
    # 2 rows of 300, 2 of 25 and the states of all 8
    states = 2 * 8 * 2 * 16 * 17 * 4
    assert quarters.gbytes * 1e9 == pytest.approx(cache * (2 * 300 + 2 * 25) / (8 * 300) + states)
    assert fifth.gbytes * 1e9 == pytest.approx(cache * (2 * 300 + 6 * 25) / (8 * 300))


def test_decode_is_timed_launched_and_from_a_graph(gpu_session):
    rows = by_name(decode_suite.run_decode(gpu_session, DECODE), "routed")
    assert [row.work for row in rows] == ["step"] * 3 + ["step, graph"] * 3
    assert all(row.bandwidth_share > 0 for row in rows)


def test_a_wrong_decode_has_no_time(session, monkeypatch):
    step = decode_suite.routed_decode

    def wrong(query, key, value, weights, windows, **options):
        options["length"] = options["length"] - 1
        return step(query, key, value, weights, windows, **options)

    monkeypatch.setattr(decode_suite, "routed_decode", wrong)
    rows = by_name(decode_suite.run_decode(session, DECODE), "routed")
    assert {row.status for row in rows} == {"failed"}
    assert all(row.timing is None for row in rows)


def test_a_wrong_state_has_no_time(session, monkeypatch):
    step = decode_suite.routed_decode

    def wrong(*args, **options):
        rows = step(*args, **options)
        if options["linear"] is not None:
            options["linear"].state.mul_(1.01)
        return rows

    monkeypatch.setattr(decode_suite, "routed_decode", wrong)
    rows = by_name(decode_suite.run_decode(session, DECODE), "routed")
    assert [row.status for row in rows] == ["failed", "measured", "measured"]
    assert rows[0].reason.startswith("states, S=300: error")


def test_windows_wider_than_the_cache_read_the_cache():
    shape = DecodeShape(B=1, S=10, H=1, K=1, P=2, window=256)
    assert bytes_of_step(shape, torch.tensor([1]), 2, has_state=False) == 2 * 10 * 2 * 2


def test_nothing_is_started_after_the_time_limit(session):
    session.time_limit = 0.0
    time.sleep(0.001)
    rows = op_suite.run_op(session, OP)
    measurable = [row for row in rows if row.name not in (op_peers.HYBRID, op_peers.FLA)]
    assert {row.status for row in measurable} == {"skipped"}
    assert "time limit" in measurable[0].reason


def test_cpu_suite_end_to_end(tmp_path, monkeypatch):
    plan = OpPlan(
        suite="cpu", shapes=((OpShape(1, 256, H=2, P=16, window=32), (QUARTERS,)),),
        works=("forward",), baselines=("SDPA default",), hybrid_window=None,
    )  # fmt: skip
    suite = run.Suite(cpu_suite.run_cpu, lambda session: cpu_suite.run_cpu(session, plan))
    monkeypatch.setitem(run.SUITE_RUNS, "cpu", suite)
    monkeypatch.setattr(run, "Clock", lambda device, **options: fast_clock(device))
    path, lines = tmp_path / "cpu.json", []
    threads = torch.get_num_threads()
    results = run.run_suites(
        ["cpu"], quick=True, seed=3, commit="abc", path=path, say=lines.append, time_limit=60.0
    )
    assert torch.get_num_threads() == threads
    assert results.is_complete
    assert load_results(path).rows == results.rows
    baseline, routed = results.rows
    assert (baseline.status, routed.status) == ("measured", "measured")
    assert routed.is_comparable is False
    assert "ms" not in lines[-1]
    assert "x SDPA default" in lines[-1]
    document = json.loads(path.read_text())
    assert document["machine"]["commit"] == "abc"
    assert document["arguments"] == {
        "suites": ["cpu"], "quick": True, "seed": 3, "time_limit_s": 60.0,
    }  # fmt: skip
    for key in ("device", "python", "torch", "triton", "cuda", "cudnn", "driver", "date"):
        assert key in document["machine"]


def fast_clock(device):
    return Clock(device, budget_ms=0.0, min_runs=2, max_runs=2)


def test_one_broken_suite_does_not_cost_the_others(monkeypatch):
    def broken(session):
        raise RuntimeError("CUDA error:\nan illegal memory access")

    monkeypatch.setattr(run, "check_suites", lambda names: None)
    monkeypatch.setattr(run, "GPU_SUITES", ())
    monkeypatch.setitem(run.SUITE_RUNS, "op", run.Suite(broken, broken))
    monkeypatch.setitem(run.SUITE_RUNS, "cpu", run.Suite(keep_one, keep_one))
    results = run.run_suites(["op", "cpu"])
    assert [row.status for row in results.rows] == ["failed", "measured"]
    assert results.rows[0].reason == "RuntimeError: CUDA error: an illegal memory access"
    assert results.is_complete


def keep_one(session):
    row = session.row("cpu", "routed", "forward", {}, None)
    return [session.keep(session.measure(row, lambda: Work(lambda: None)))]


def test_an_interrupted_run_keeps_its_rows(monkeypatch, tmp_path):
    def interrupted(session):
        keep_one(session)
        raise KeyboardInterrupt

    monkeypatch.setitem(run.SUITE_RUNS, "cpu", run.Suite(interrupted, interrupted))
    path = tmp_path / "results.json"
    results = run.run_suites(["cpu"], path=path)
    assert results.is_complete is False
    assert len(load_results(path).rows) == 1


def test_default_sizes_are_those_that_have_targets():
    shapes = {(shape.B, shape.T, shape.P) for shape, _ in op_suite.DEFAULT.shapes}
    assert shapes == {
        (8, 4096, 128), (2, 16384, 128), (1, 32768, 128), (1, 65536, 128), (2, 16384, 64),
    }  # fmt: skip
    assert op_suite.DEFAULT.flex_works(OpShape(2, 16384)) == ("forward",)
    assert op_suite.DEFAULT.flex_works(OpShape(1, 65536)) == ()
    assert op_suite.DEFAULT.flex_works(OpShape(2, 16384, H=16, P=64)) == ()
    assert set(run.SUITE_RUNS) == set(run.SUITES)


def test_gpu_suites_need_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailableError, match="'--suite cpu' runs without one"):
        run.check_suites(["op", "cpu"])
    with pytest.raises(ConfigError, match="got 'ops'"):
        run.check_suites(["ops"])
    run.check_suites(["cpu"])


def test_a_line_of_progress_says_why():
    row = Row(
        suite="op", name="fla", work="forward", shape={"T": 8}, dtype="bfloat16",
        status="missing", reason="not installed",
    )  # fmt: skip
    assert describe(row) == "op T=8 forward fla: missing, not installed"
