"""One run of an ablation: trained, measured, stopped and gone on with."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from meta_attention.ablation import run as run_module
from meta_attention.ablation.probes import GRADIENTS_FILE, ROUTING_FILE, GradientProbe, RoutingProbe
from meta_attention.ablation.run import Job, _batches, execute
from meta_attention.ablation.variants import EXPERIMENTS, VARIANTS, paper_base
from meta_attention.errors import ConfigError, DataError
from meta_attention.training.logs import read_metrics, read_rows
from meta_attention.training.run import train_model


@pytest.fixture
def job_of(base, tmp_path):
    def make(variant, folder="run", seed=0):
        variant = VARIANTS[variant] if isinstance(variant, str) else variant
        return Job(variant, seed, variant.settings(base, seed), tmp_path / folder)

    return make


def figures(result):
    """All of a result but what a clock and a machine say."""
    return {name: value for name, value in result.items() if name != "machine"}


def losses(folder):
    return [(row["step"], row.get("task_loss")) for row in read_metrics(folder)]


def test_a_run_leaves_its_settings_its_curves_and_its_figures(job_of):
    job = job_of("recommended")
    result = execute(job)
    assert json.loads((job.folder / "result.json").read_text()) == json.loads(json.dumps(result))
    assert json.loads((job.folder / "run.json").read_text())["settings"]["routing"] == "hard"
    assert [row["step"] for row in read_rows(job.folder / ROUTING_FILE)] == list(range(1, 9))
    assert result["soft"]["routing"] == "soft"
    assert result["hard"]["forced"]["regret"] is not None
    assert set(result["gates"]) == set(result["histograms"])
    # a finished run needs no checkpoints
    assert not list(job.folder.glob("checkpoint-*"))
    # held-out loss of the trained model, measured by Trainer
    trained = json.loads((job.folder / "run.json").read_text())["metrics"]
    assert result["hard"]["loss"] == pytest.approx(trained["task_loss"], rel=1e-5)


def test_a_composition_is_trained_and_measured_like_any_other(job_of):
    variants = {variant.name: variant for variant in EXPERIMENTS["composition"].variants}
    plain, deep = (execute(job_of(variants[name], name)) for name in ("with-ssm", "with-all-three"))
    assert deep["parameters"] > plain["parameters"]
    # half of the tokens pass the second of two blocks by
    entered = [sum(layer["share"].values()) for layer in deep["hard"]["layers"]]
    assert entered[0] == pytest.approx(1.0)
    assert 0.0 <= entered[1] < 0.99
    assert deep["hard"]["forced"]["regret"] is not None
    gates = deep["gates"]["mean_entropy"]
    assert gates[0]["hard_share"] <= gates[-1]["hard_share"] <= 1.0


def test_the_same_seed_gives_the_same_figures_and_another_does_not(job_of):
    one, same = execute(job_of("bayesian-sampled", "a")), execute(job_of("bayesian-sampled", "b"))
    other = execute(job_of("bayesian-sampled", "c", seed=1))
    assert figures(one) == figures(same)
    assert figures(one)["soft"]["loss"] != other["soft"]["loss"]


@pytest.mark.parametrize("step", [3, 6], ids=["before-a-checkpoint", "after-one"])
def test_a_run_that_was_stopped_ends_with_the_same_figures(job_of, monkeypatch, step):
    whole, broken = job_of("recommended", "whole"), job_of("recommended", "broken")
    expected = execute(whole)
    look = RoutingProbe.look

    def stop(self, model, now):
        if now == step:
            raise KeyboardInterrupt
        return look(self, model, now)

    monkeypatch.setattr(RoutingProbe, "look", stop)
    with pytest.raises(KeyboardInterrupt):
        execute(broken)
    assert not broken.is_done
    monkeypatch.setattr(RoutingProbe, "look", look)
    assert figures(execute(broken)) == figures(expected)
    assert losses(broken.folder) == losses(whole.folder)
    assert read_rows(broken.folder / ROUTING_FILE) == read_rows(whole.folder / ROUTING_FILE)


def test_a_run_that_was_trained_is_only_measured(job_of, monkeypatch):
    job = job_of("bayesian")
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "measure_model", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            execute(job)
    before = losses(job.folder)
    result = execute(job)
    assert losses(job.folder) == before
    # and one that is done is only read
    monkeypatch.setattr(run_module, "train_model", lambda *args, **kwargs: 1 / 0)
    assert execute(job) == json.loads(json.dumps(result))


def test_a_folder_with_another_run_is_refused_and_kept(job_of):
    job = job_of("full")
    execute(job)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in job.folder.iterdir())
    other = replace(job, settings=replace(job.settings, lr=0.5))
    with pytest.raises(ConfigError, match=r"a run whose lr is 0.01, not 0.5; choose another"):
        execute(other)
    assert sorted((p.name, p.stat().st_mtime_ns) for p in job.folder.iterdir()) == before


def test_probes_leave_training_as_it_is(job_of, tmp_path):
    """Also where routes are drawn: a probe must not take from the same generator."""
    for name in ("bayesian-sampled", "recommended"):
        probed = next(
            v for v in EXPERIMENTS["gradient-variance"].variants if v.name == f"{name}-gradients"
        )
        job = job_of(probed, f"{name}-probed")
        execute(job)
        train_model(job.settings, tmp_path / f"{name}-plain")
        assert losses(job.folder) == losses(tmp_path / f"{name}-plain")


def test_gradient_noise_is_of_batches_and_of_draws(job_of):
    variant = EXPERIMENTS["gradient-variance"].variants[0]
    job = job_of(variant)
    execute(job)
    rows = read_rows(job.folder / GRADIENTS_FILE)
    assert rows[-1]["step"] == 8
    for layer in rows[-1]["layers"]:
        for kind in ("data", "sample", "one_hot"):
            assert layer[f"{kind}_noise"] > 0.0
        assert layer["norm"] > 0.0


def test_equal_batches_have_no_noise_but_that_of_draws(base, tmp_path):
    import torch

    from meta_attention import MetaAttentionForCausalLM

    settings = VARIANTS["bayesian"].settings(base, 0)
    model = MetaAttentionForCausalLM(settings.model_config(vocab_size=258)).train()
    ids = torch.randint(0, 256, (4, 16))
    found = GradientProbe(tmp_path, [ids] * 4).look(model, 0)
    for layer in found["layers"]:
        assert layer["data_noise"] < 1e-6 * layer["sample_noise"] + 1e-12
    assert model.config.training_weights == "mean"


def test_noise_of_gradients_takes_enough_text():
    blocks = SimpleNamespace(train=[{"input_ids": torch.zeros(64)}] * 5)
    with pytest.raises(DataError, match=r"must have 128 blocks of 64 tokens, .* got 5"):
        _batches(blocks, paper_base())
