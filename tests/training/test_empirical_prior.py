"""The strength of a prior, estimated from posteriors."""

from dataclasses import replace

import pytest
import torch
from torch.utils.data import default_collate

from meta_attention import MetaAttentionForCausalLM, RoutingPosterior, compute_aware_prior
from meta_attention.errors import ConfigError
from meta_attention.training.corpus import Corpus
from meta_attention.training.empirical_prior import (
    EVERY,
    PRIOR_FILE,
    STRONGEST,
    WEAKEST,
    EmpiricalPrior,
    estimate_strength,
    text_to_look_at,
)
from meta_attention.training.logs import read_metrics, read_rows
from meta_attention.training.packing import pack
from meta_attention.training.recipes import tiny
from meta_attention.training.run import train_model
from meta_attention.training.tokenizer import build_tokenizer
from meta_attention.training.trainer import MetaAttentionTrainer

COSTS = torch.tensor([1.0, 0.15, 0.30])


@pytest.mark.parametrize("strength", [0.05, 1.0, 20.0])
def test_posteriors_on_a_prior_give_its_strength(strength):
    prior = compute_aware_prior(COSTS, strength=strength, floor=0.01)
    found = estimate_strength(prior.expand(4, 7, 3), COSTS, 0.01)
    assert found == pytest.approx(strength, rel=1e-4)


def test_no_other_strength_is_nearer_to_the_posteriors():
    posterior = RoutingPosterior(torch.rand(5, 20, 3) * 4.0 + 0.1)

    def kl(strength):
        prior = compute_aware_prior(COSTS, strength=strength, floor=0.01)
        return posterior.kl_to(prior).double().mean().item()

    best = estimate_strength(posterior.concentration, COSTS, 0.01)
    assert WEAKEST < best < STRONGEST
    assert all(kl(best) < kl(best * factor) for factor in (0.5, 0.9, 1.1, 2.0))


def test_an_estimate_has_bounds():
    sure = compute_aware_prior(COSTS, strength=1e5, floor=0.01)
    assert estimate_strength(sure.expand(2, 2, 3), COSTS, 0.01) == STRONGEST


@pytest.fixture
def settings():
    small = replace(tiny(), max_bytes=20_000, length=16, hidden_size=16, heads=2, window_size=4)
    steps = 2 * EVERY + 1
    small = replace(small, batch_size=4, steps=steps, warmup=0, eval_every=steps, save_every=EVERY)
    return replace(small, empirical_prior=True, kl_weight=type(small.kl_weight).constant(0.01))


def test_a_run_estimates_and_its_saved_model_has_the_estimate(settings, tmp_path):
    train_model(settings, tmp_path)
    rows = read_rows(tmp_path / PRIOR_FILE)
    assert [row["step"] for row in rows] == [EVERY, 2 * EVERY]
    model = MetaAttentionForCausalLM.from_pretrained(tmp_path)
    assert list(model.config.prior_strength) == rows[-1]["prior_strength"]
    for layer, strength in zip(model.model.layers, rows[-1]["prior_strength"], strict=True):
        prior = compute_aware_prior(COSTS, strength=strength, floor=0.01)
        torch.testing.assert_close(layer.attention.controller.prior_concentration, prior)
    assert rows[-1]["prior_strength"][0] != rows[-1]["prior_strength"][1]


def test_a_run_that_was_stopped_goes_on_with_its_estimate(settings, tmp_path, monkeypatch):
    train_model(settings, tmp_path / "whole")
    estimate = EmpiricalPrior.estimate
    calls = []

    def stop(self, model):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return estimate(self, model)

    monkeypatch.setattr(EmpiricalPrior, "estimate", stop)
    with pytest.raises(KeyboardInterrupt):
        train_model(settings, tmp_path / "broken")
    monkeypatch.setattr(EmpiricalPrior, "estimate", estimate)
    train_model(settings, tmp_path / "broken", resume=True, say=lambda line: None)
    losses = [
        [(row["step"], row.get("task_loss"), row.get("kl")) for row in read_metrics(folder)]
        for folder in (tmp_path / "whole", tmp_path / "broken")
    ]
    assert losses[0] == losses[1]


def test_an_estimate_looks_at_isolated_documents_as_training_does(settings, tmp_path):
    corpus = Corpus("short", ["abcde", "fgh", "ijklmno"] * 20)
    tokenizer = build_tokenizer("bytes", corpus)
    apart, together = (pack(corpus, tokenizer, 16, isolate_documents=i) for i in (True, False))
    torch.manual_seed(0)
    config = settings.model_config(vocab_size=len(tokenizer))
    config.initializer_range = 0.5
    model = MetaAttentionForCausalLM(config).eval()
    found, other = (
        EmpiricalPrior(tmp_path, text_to_look_at(blocks), 1.0).estimate(model)
        for blocks in (apart, together)
    )
    batch = default_collate([apart[index] for index in range(len(apart))])
    with torch.no_grad():
        out = model(batch["input_ids"], document_ids=batch["document_ids"], output_routing=True)
    assert found == pytest.approx(
        [estimate_strength(concentration, COSTS, 0.01) for concentration in out.concentrations]
    )
    assert found[1] != pytest.approx(other[1], rel=1e-4)


def priors_of(model):
    return [layer.attention.controller.prior_concentration for layer in model.model.layers]


def test_the_best_model_has_the_prior_it_was_trained_with(settings, tmp_path, monkeypatch):
    """Not that of the last step, whose weights are others."""

    def find_best(trainer):
        trainer.state.best_model_checkpoint = str(tmp_path / f"checkpoint-{EVERY}")

    monkeypatch.setattr(MetaAttentionTrainer, "find_best", find_best)
    train_model(replace(settings, steps=2 * EVERY), tmp_path)
    first, last = (row["prior_strength"] for row in read_rows(tmp_path / PRIOR_FILE))
    assert first != last
    saved = MetaAttentionForCausalLM.from_pretrained(tmp_path)
    best = MetaAttentionForCausalLM.from_pretrained(tmp_path / f"checkpoint-{EVERY}")
    assert list(saved.config.prior_strength) == first
    torch.testing.assert_close(saved.state_dict(), best.state_dict(), rtol=0.0, atol=0.0)
    torch.testing.assert_close(priors_of(saved), priors_of(best), rtol=0.0, atol=0.0)


def test_a_run_that_was_stopped_after_its_last_step_keeps_its_prior(
    settings, tmp_path, monkeypatch
):
    train_from = MetaAttentionTrainer.train_from

    def stop(trainer, checkpoint):
        train_from(trainer, checkpoint)
        raise KeyboardInterrupt

    settings = replace(settings, steps=2 * EVERY)
    with monkeypatch.context() as patched:
        patched.setattr(MetaAttentionTrainer, "train_from", stop)
        with pytest.raises(KeyboardInterrupt):
            train_model(settings, tmp_path)
    train_model(settings, tmp_path, resume=True, say=lambda line: None)
    model = MetaAttentionForCausalLM.from_pretrained(tmp_path)
    rows = read_rows(tmp_path / PRIOR_FILE)
    assert list(model.config.prior_strength) == rows[-1]["prior_strength"]


def test_before_the_first_estimate_a_prior_is_as_set(settings, tmp_path):
    settings = replace(settings, steps=EVERY // 2, prior_strength=0.7)
    train_model(settings, tmp_path)
    model = MetaAttentionForCausalLM.from_pretrained(tmp_path)
    assert set(model.config.prior_strength) == {0.7}


def test_without_a_prior_there_is_nothing_to_estimate():
    with pytest.raises(ConfigError, match="must have a prior to estimate"):
        replace(tiny(), empirical_prior=True, controller="prior_free")
