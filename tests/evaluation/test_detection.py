"""AUROC and its intervals."""

import pytest
import torch

from meta_attention.errors import DataError, ShapeError
from meta_attention.evaluation import detection
from meta_attention.evaluation.detection import (
    auroc,
    draw_sequences,
    mean_interval,
    measure_auroc,
    quantile_classes,
)


def naive(scores, is_positive):
    """The definition, pair by pair."""
    positive, negative = scores[is_positive], scores[~is_positive]
    above = (positive[:, None] > negative).double() + 0.5 * (positive[:, None] == negative)
    return above.mean().item()


def test_it_is_the_definition_with_equals_counting_half():
    scores, is_positive = torch.randint(6, (400,)).float(), torch.rand(400) < 0.3
    assert scores.unique().numel() == 6
    assert auroc(scores, is_positive) == pytest.approx(naive(scores, is_positive), abs=1e-12)


def test_extremes_are_known():
    is_positive = torch.tensor([False, False, True, True])
    assert auroc(torch.tensor([1.0, 2.0, 3.0, 4.0]), is_positive) == 1.0
    assert auroc(torch.tensor([4.0, 3.0, 2.0, 1.0]), is_positive) == 0.0
    assert auroc(torch.ones(4), is_positive) == 0.5
    assert auroc(torch.tensor([float("-inf"), 0.0, 1.0, float("inf")]), is_positive) == 1.0
    assert auroc(torch.ones(4), torch.ones(4).bool()) is None


def test_counting_in_parts_changes_nothing(monkeypatch):
    scores, is_positive = torch.randn(9, 20), torch.rand(9, 20) < 0.5
    whole = measure_auroc(scores, is_positive)
    # seven ranks at a time
    monkeypatch.setattr(detection, "_MAX_COUNTS", 9 * 7)
    assert measure_auroc(scores, is_positive) == whole


def test_a_resample_is_the_auroc_of_the_sequences_drawn():
    scores, is_positive = torch.randn(7, 11), torch.rand(7, 11) < 0.4
    weights = draw_sequences(7, 50, seed=3)
    assert torch.equal(weights.sum(dim=1), torch.full((50,), 7.0))
    values = []
    for counts in weights.long():
        drawn = torch.arange(7).repeat_interleave(counts)
        values.append(naive(scores[drawn].flatten(), is_positive[drawn].flatten()))
    low, high = torch.tensor(values).double().quantile(torch.tensor([0.025, 0.975]).double())
    measured = measure_auroc(scores, is_positive, num_resamples=50, seed=3)
    assert (measured.low, measured.high) == pytest.approx((low.item(), high.item()), abs=1e-6)


def test_an_interval_knows_that_tokens_of_a_sequence_are_not_independent():
    # a sequence is of one kind and has one score: 40 facts, however long it is
    kind = torch.arange(40) % 2 == 0
    score = torch.randn(40) + 0.5 * kind
    long = measure_auroc(score[:, None].expand(-1, 64), kind[:, None].expand(-1, 64))
    short = measure_auroc(score[:, None], kind[:, None])
    assert (long.low, long.high) == pytest.approx((short.low, short.high))
    assert long.high - long.low > 0.1


def test_a_single_sequence_has_no_interval():
    found = measure_auroc(torch.rand(1, 50), torch.rand(1, 50) > 0.5)
    assert found.value is not None
    assert (found.low, found.high) == (None, None)


def test_strata_leave_what_another_score_does_not_know():
    known = torch.randint(2, (30, 50))
    is_positive = torch.rand(30, 50) < 0.2 + 0.6 * known
    echo = known + 0.1 * torch.randn(30, 50)
    assert measure_auroc(echo, is_positive).value > 0.75
    within = measure_auroc(echo, is_positive, strata=known)
    assert within.low < 0.5 < within.high
    parts = [measure_auroc(echo, is_positive, strata=known + k).value for k in (0, 5)]
    assert parts[0] == parts[1] == within.value


def test_a_mean_has_its_interval_over_sequences():
    mean, low, high = mean_interval(torch.arange(10.0)[:, None].expand(-1, 5))
    assert mean == 4.5
    assert low < 4.5 < high
    assert 3.0 < high - low < 4.5  # 2 * 1.96 * 2.87 / sqrt(10) = 3.56
    assert mean_interval(torch.ones(4, 3)) == (1.0, 1.0, 1.0)


def test_classes_are_equally_large_and_keep_equals_together():
    classes = quantile_classes(torch.randperm(100).view(4, 25), 5)
    assert torch.bincount(classes.flatten()).tolist() == [20] * 5
    assert quantile_classes(torch.tensor([0.0, 1.0, 1.0, 1.0]), 2).tolist() == [0, 1, 1, 1]


def test_what_has_no_rank_or_no_place_is_refused():
    is_positive = torch.tensor([[True, False]])
    with pytest.raises(DataError, match="NaN"):
        measure_auroc(torch.tensor([[float("nan"), 1.0]]), is_positive)
    with pytest.raises(ShapeError, match=r"\[S, T\]"):
        measure_auroc(torch.ones(2), is_positive)
    with pytest.raises(ShapeError, match="strata"):
        measure_auroc(torch.ones(1, 2), is_positive, strata=torch.zeros(2))
