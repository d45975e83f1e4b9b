"""Runs reduced over seeds."""

import json

import pytest

from meta_attention.errors import DataError
from meta_attention.report.ablation.read import read_ablation
from meta_attention.report.ablation.results import to_record
from meta_attention.report.ablation.summary import (
    beyond_static,
    frontier,
    interpolate,
    mean_curve,
    paired,
    summarise,
)


@pytest.fixture(scope="module")
def ablation(ablation_folder):
    return read_ablation([ablation_folder])


def test_every_variant_is_a_row_with_its_seeds(ablation):
    rows = {row.variant: row for row in summarise(ablation, "ablation")}
    assert len(rows) == 9
    assert rows["full"].seeds == (0, 1, 2)
    assert rows["linear"].seeds == (0, 1)
    assert ablation.missing == ["linear seed 2"]


def test_perplexities_are_relative_to_the_same_seed(ablation):
    rows = {row.variant: row for row in summarise(ablation, "ablation")}
    ratios = [
        a["soft"]["perplexity"] / b["soft"]["perplexity"] - 1.0
        for a, b in paired(ablation, "bayesian", "prior-free")
    ]
    assert len(ratios) == 3
    assert rows["bayesian"]["relative_perplexity"].mean == pytest.approx(sum(ratios) / 3)
    assert rows["prior-free"]["relative_perplexity"].mean == 0.0


def test_hard_losses_are_compared_with_the_recipe_of_the_same_seed(ablation):
    rows = {row.variant: row for row in summarise(ablation, "ablation")}
    losses = [
        a["hard"]["loss"] - b["hard"]["loss"] for a, b in paired(ablation, "full", "recommended")
    ]
    assert len(losses) == 3
    assert rows["full"]["beyond_recommended"].mean == pytest.approx(sum(losses) / 3)
    assert rows["recommended"]["beyond_recommended"].mean == 0.0
    # linear lacks a seed
    assert rows["linear"]["beyond_recommended"].n == 2


def test_what_a_variant_does_not_have_is_left_out(ablation):
    rows = {row.variant: row for row in summarise(ablation, "ablation")}
    for name in ("routing_entropy", "adaptivity", "kl", "regret", "expert_collapses"):
        assert rows["full"][name] is None
    assert rows["prior-free"]["kl"] is None
    assert rows["prior-free"]["uncertainty"] is None
    assert rows["prior-free"]["mean_entropy"].n == 3
    assert rows["full"]["attention_flops"].mean == pytest.approx(100.0)
    assert rows["full"]["model_flops"].mean == pytest.approx(100.0)


def test_an_experiment_with_an_axis_has_its_values(ablation):
    assert [row.value for row in summarise(ablation, "prior-floor")] == [0.001, 0.01, 0.1, 0.5]


def test_the_frontier_leaves_out_what_another_beats():
    points = [(1.0, 3.0), (2.0, 3.5), (3.0, 2.0), (0.5, 4.0)]
    assert frontier(points) == [(0.5, 4.0), (1.0, 3.0), (3.0, 2.0)]
    assert interpolate(frontier(points), 2.0) == pytest.approx(2.5)
    assert interpolate(frontier(points), 4.0) is None


def test_only_routed_variants_are_compared_with_static_ones(ablation):
    rows = summarise(ablation, "ablation")
    found = beyond_static(rows)
    assert not {"full", "local", "linear", "hybrid"} & set(found)


def test_a_curve_is_a_mean_over_seeds(ablation):
    runs = ablation.by_variant["full"]
    curve = mean_curve(runs, lambda row: row["soft"]["loss"])
    assert [step for step, _ in curve] == [1, 2, 4]
    losses = [run.result["soft"]["loss"] for run in runs]
    assert curve[0][1].mean == pytest.approx(sum(losses) / 3)
    assert mean_curve(runs, lambda row: row["soft"]["kl"]) == []


def test_all_of_it_is_json(ablation):
    record = json.loads(json.dumps(to_record(ablation), allow_nan=False))
    assert {row["variant"] for row in record["experiments"]["ablation"]} >= {"hybrid"}
    assert "seconds" not in record["machine"]
    assert record["missing"] == ["linear seed 2"]


def test_folders_of_other_settings_do_not_mix(ablation_folder, tmp_path):
    plan = json.loads((ablation_folder / "ablation.json").read_text())
    plan["settings"]["lr"] = 7.0
    (tmp_path / "ablation.json").write_text(json.dumps(plan))
    with pytest.raises(DataError, match="same settings"):
        read_ablation([ablation_folder, tmp_path])
    with pytest.raises(DataError, match=r"has no ablation\.json"):
        read_ablation([tmp_path / "nothing"])
    with pytest.raises(DataError, match="must have a finished run"):
        read_ablation([tmp_path])
    same = read_ablation([ablation_folder, ablation_folder])
    assert len(same.runs) == len(read_ablation([ablation_folder]).runs)
