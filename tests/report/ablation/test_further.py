"""Numbers of the further experiments, by hand."""

from types import SimpleNamespace

import pytest

from meta_attention.report.ablation.further import (
    entropy_drops,
    further_record,
    gate_points,
    gradient_noise,
)
from meta_attention.report.ablation.read import read_ablation


def run_of(**parts):
    return SimpleNamespace(**{"result": {}, "gradients": [], "curve": []} | parts)


def ablation_of(runs, experiment):
    return SimpleNamespace(
        by_variant=runs,
        experiments=[experiment],
        variants_of=lambda name: list(runs),
        plan={
            "experiments": {experiment: {"variants": {n: float(n[-1]) for n in runs}}},
        },
    )


def gate(loss, flops):
    return {"hard_share": 0.5, "attention_flops": flops, "loss": loss, "threshold": 0.1}


def test_gates_are_means_over_the_runs_that_have_them():
    gates = [{"margin": [gate(1.0, 2.0), gate(3.0, 1.0)]}, {"margin": [gate(2.0, 1.0)] * 2}]
    runs = [run_of(result={"gates": g}) for g in gates] + [run_of()]
    found = gate_points(ablation_of({"a1": runs}, "threshold"), "a1")
    assert found == {
        "margin": [
            {"hard_share": 0.5, "attention_flops": 1.5, "loss": 1.5},
            {"hard_share": 0.5, "attention_flops": 1.0, "loss": 2.5},
        ]
    }


def test_noise_is_relative_to_the_gradient_it_is_in():
    def row(step, norm):
        noise = {"data_noise": 1.0, "sample_noise": 2.0, "one_hot_noise": 4.0}
        return {"step": step, "layers": [noise | {"norm": norm}]}

    runs = [run_of(gradients=[row(1, 2.0), row(9, 4.0)]), run_of(gradients=[row(1, 1.0)])]
    found = gradient_noise(ablation_of({"a1": runs}, "gradient-variance"), "a1")
    assert found["data"] == [{1: pytest.approx(0.75), 9: pytest.approx(0.25)}]
    assert found["one_hot"][0][1] == pytest.approx(4 * 0.75)


def test_drops_are_by_how_often_the_text_is_seen():
    def curve(*entropies):
        return [
            {"step": 10 * i, "soft": {"routing_entropy": entropy}}
            for i, entropy in enumerate(entropies)
        ]

    runs = {
        "repetition-bayesian-1": [run_of(curve=curve(90, 30, 30)), run_of(curve=curve(90, 90, 30))],
        "repetition-bayesian-2": [run_of(curve=curve(90, 60, 30))],
        "repetition-prior-free-4": [run_of(curve=curve(90, 30, 30))],
    }
    found = entropy_drops(ablation_of(runs, "repetition"), "bayesian")
    assert list(found) == [1.0, 2.0]
    step, share = found[1.0]
    assert (step.mean, share.mean) == (15.0, pytest.approx(100.0))
    assert found[2.0][1].mean == pytest.approx(50.0)


def test_the_record_has_what_was_run(ablation_folder):
    record = further_record(read_ablation([ablation_folder]))
    assert set(record) == {"gradient_noise"}
    noise = record["gradient_noise"]["recommended-gradients"]
    assert noise["sample"] == [{1: 1.0}, {1: 1.0}]
