"""Verdicts on what the paper says."""

import pytest

from meta_attention.evaluation.statistics import Figure
from meta_attention.report.ablation.claims import judge, own_questions, paper_claims
from meta_attention.report.ablation.read import read_ablation
from meta_attention.report.ablation.summary import Drop, largest_drop


@pytest.mark.parametrize(
    ("mean", "interval", "verdict"),
    [
        (-30.0, 5.0, "reproduced"),
        (-20.0, 5.0, "reproduced"),
        (-10.0, 5.0, "not reproduced"),  # less than half of it
        (-80.0, 5.0, "not reproduced"),  # more than twice as much
        (-30.0, 40.0, "not reproduced"),  # may be nothing
        (-10.0, 9.0, "not reproduced"),
        (10.0, 5.0, "opposite"),
        (10.0, 12.0, "not reproduced"),
        (0.0, None, "not reproduced"),
        (-30.0, None, "reproduced"),  # one seed
        (3.0, None, "opposite"),
    ],
)
def test_a_verdict_needs_the_sign_the_size_and_the_interval(mean, interval, verdict):
    figure = Figure(mean, interval, 1 if interval is None else 5)
    assert judge(figure, paper=-34.2) == verdict


def test_more_of_a_gain_reproduces_it():
    assert judge(Figure(-80.0, 5.0, 5), -34.2, is_gain=True) == "reproduced"
    assert judge(Figure(-10.0, 5.0, 5), -34.2, is_gain=True) == "not reproduced"


def test_nothing_measured_is_no_verdict():
    assert judge(None, 1.0) == "not measured"


def test_every_claim_has_a_figure_and_a_verdict(ablation_folder):
    ablation = read_ablation([ablation_folder])
    claims = paper_claims(ablation)
    assert len(claims) == 10
    assert all(claim.ours is not None and claim.ours.n == 3 for claim in claims)
    assert all(claim.verdict != "not measured" for claim in claims)
    # nothing was trained, so there is nothing that commits in training
    assert claims[-1].ours.mean == 0.0
    assert len(own_questions(ablation)) == 5


def test_a_bar_of_ours_is_not_given_as_a_number_of_the_paper(ablation_folder):
    for claim in paper_claims(read_ablation([ablation_folder])):
        has_number = any(letter.isdigit() for letter in claim.printed)
        assert has_number != ("The paper gives no number" in claim.comment), claim.text


def test_a_cut_in_cost_alone_does_not_meet_the_criterion(ablation_folder):
    """Cheaper by half, and as good as full attention or a nat worse."""
    ablation = read_ablation([ablation_folder])
    for nats, verdict in ((0.1, "reproduced"), (1.0, "not reproduced")):
        for run, full in zip(
            ablation.by_variant["bayesian"], ablation.by_variant["full"], strict=True
        ):
            run.result["hard"]["flops"]["attention"] = 0.5
            run.result["hard"]["loss"] = full.result["hard"]["loss"] + nats
        claim = next(c for c in paper_claims(ablation) if c.printed == "30% or more")
        assert claim.ours.mean == pytest.approx(50.0)
        assert claim.verdict == verdict


def test_a_fall_onto_the_prior_is_no_commitment(ablation_folder):
    ablation = read_ablation([ablation_folder])
    for adaptivity, verdict in ((0.2, "reproduced"), (0.001, "not reproduced")):
        for run in ablation.by_variant["bayesian"]:
            for row, entropy in zip(run.curve, (90.0, 40.0, 40.0), strict=True):
                row["soft"] |= {"routing_entropy": entropy, "adaptivity": adaptivity}
        assert paper_claims(ablation)[-1].verdict == verdict


def test_a_claim_is_the_difference_seed_by_seed(ablation_folder):
    ablation = read_ablation([ablation_folder])
    costs = [
        100.0 * (a.result["soft"]["projected_cost"] - b.result["soft"]["projected_cost"])
        for a, b in zip(
            ablation.by_variant["bayesian"], ablation.by_variant["prior-free"], strict=True
        )
    ]
    claim = next(c for c in paper_claims(ablation) if c.printed == "-34.2 pp")
    assert claim.ours.mean == pytest.approx(sum(costs) / 3)
    # an untrained posterior leans to cheap experts, an untrained softmax does not
    assert claim.ours.high < 0.0


def test_a_sharp_fall_is_told_from_a_gradual_one():
    def drop(*values):
        rows = [{"step": 10 * i, "soft": {"routing_entropy": v}} for i, v in enumerate(values)]
        return largest_drop(rows)

    assert drop(90, 90, 30, 30) == Drop(20, pytest.approx(100.0))
    assert drop(90, 80, 70, 60, 50).share == pytest.approx(25.0)
    assert drop(50, 90, 80, 60) == Drop(30, pytest.approx(100.0 * 2 / 3))
    assert drop(90, 90.5, 90.2).share == 0.0
    assert drop(None, None) is None
