"""Targets are data, and rows are held against those that are for them."""

import pytest

from meta_attention.bench.rows import Row
from meta_attention.bench.targets import TARGETS, judge


def make_row(suite, work, mix, name="routed", **fields):
    shape = fields.pop("shape", {"T": 16384, "P": 128})
    return Row(suite=suite, name=name, work=work, shape=shape, dtype="bfloat16", mix=mix, **fields)


@pytest.mark.parametrize(
    ("work", "mix", "T", "bound"),
    [
        ("forward", "25/25/50", 4096, 1.5),
        ("forward", "25/25/50", 16384, 3.0),
        ("forward", "25/25/50", 65536, 3.5),
        ("forward", "10/30/60", 16384, 4.5),
        ("forward", "10/30/60", 65536, 7.0),
        ("forward", "20/80/0", 32768, 3.5),
        ("forward + backward", "20/80/0", 32768, 2.5),
        ("forward + backward", "25/25/50", 16384, 2.5),
        ("forward + backward", "25/25/50", 65536, 3.2),
    ],
)
def test_speedups_of_the_op(work, mix, T, bound):
    row = make_row("op", work, mix, shape={"T": T, "P": 128}, speedup=bound, memory_ratio=1.1)
    judge(row)
    assert [(v.quantity, v.is_met) for v in row.verdicts] == [
        ("speedup", True),
        ("memory_ratio", True),
    ]
    row.speedup, row.memory_ratio = bound - 0.01, 1.11
    assert [v.is_met for v in judge(row).verdicts] == [False, False]


def test_all_full_is_held_against_cudnn():
    row = make_row("op", "forward", "100/0/0", speedups={"SDPA cuDNN": 0.93, "SDPA flash": 1.2})
    verdict = judge(row).verdicts[0]
    assert (verdict.quantity, verdict.target) == ("speedup vs SDPA cuDNN", ">= 0.92x")
    assert (verdict.value, verdict.is_met) == (0.93, True)


def test_what_was_not_measured_is_neither_met_nor_missed():
    verdict = judge(make_row("op", "backward", "100/0/0")).verdicts[0]
    assert (verdict.value, verdict.is_met) == (None, None)


def test_shares_are_percent():
    row = make_row("layer", "forward", "25/25/50", routing_share=0.04)
    (verdict,) = judge(row).verdicts
    assert (verdict.target, verdict.is_met) == ("<= 3%", False)


def test_peers_have_no_targets():
    assert judge(make_row("op", "forward", "25/25/50", name="FlexAttention")).verdicts == []
    # nor have other head widths, but for memory
    other = make_row("op", "forward", "25/25/50", shape={"T": 16384, "P": 64})
    assert [v.quantity for v in judge(other).verdicts] == ["memory_ratio"]


def test_every_target_has_one_bound():
    assert all((target.at_least is None) != (target.at_most is None) for target in TARGETS)
    suites = {"op", "layer", "model", "decode", "cpu"}
    assert {target.suite for target in TARGETS} == suites
