"""The paper's initialisation table."""

from dataclasses import replace

import pytest
import torch

from meta_attention.evaluation import check
from meta_attention.evaluation.check import ValueRow, run_check


def test_structure_holds_and_values_are_near_the_papers():
    report = run_check(seeds=20)
    assert report.passed
    assert [row.name for row in report.structure] == [
        "output shape",
        "NaN / Inf",
        "log B(prior) finite",
        "weights sum to one",
    ]
    ours = {row.name: row for row in report.values}
    for name in ("mean weight: full", "mean weight: linear", "mean weight: local"):
        assert ours[name].agrees
    assert ours["entropy of the mean (nats)"].agrees
    assert ours["KL to the prior (nats)"].mean == pytest.approx(3.42, abs=0.3)


def test_a_value_outside_our_range_is_explained():
    report = run_check(seeds=20)
    for row in report.values:
        assert bool(row.note) != row.agrees
    (kl,) = (row for row in report.values if row.name.startswith("KL"))
    # the evidence at which the closed form gives the paper's 3.42
    assert "evidence 0.88 would give" in kl.note


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_bad_number_fails_the_structure(value, monkeypatch):
    forward = check._forward

    def poisoned(config, seed):
        out = forward(config, seed)
        output = out.output.clone()
        if seed == 1:
            output[0, 3, 5] = value
        return replace(out, output=output)

    monkeypatch.setattr(check, "_forward", poisoned)
    report = run_check(seeds=2)
    assert not report.passed
    assert [row.name for row in report.structure if not row.holds] == ["NaN / Inf"]


def test_a_wrong_shape_fails_the_structure(monkeypatch):
    forward = check._forward
    monkeypatch.setattr(
        check, "_forward", lambda c, s: replace(forward(c, s), output=torch.zeros(2, 64, 64))
    )
    assert not run_check(seeds=1).passed


def test_running_the_check_leaves_the_callers_random_state_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    check._forward(check.paper_config(), seed=0)
    assert torch.equal(torch.rand(1), expected)


def test_agreement_is_judged_at_the_papers_digits():
    row = ValueRow("x", 1.06, mean=1.0, std=0.1, low=0.9, high=1.0551, note="")
    assert row.agrees
    assert not replace(row, high=1.0549).agrees
