"""Variants and experiments as data."""

from dataclasses import replace

import pytest

from meta_attention.ablation.variants import (
    EXPERIMENTS,
    VARIANTS,
    find_experiment,
    find_variants,
    paper_base,
    short_base,
    with_steps,
)
from meta_attention.errors import ConfigError

ALL = [variant for experiment in EXPERIMENTS.values() for variant in experiment.variants]


def test_the_ablation_has_the_paper_the_recipe_and_seven_baselines():
    assert list(VARIANTS) == [
        *("bayesian", "bayesian-sampled", "prior-free", "prior-free-cost", "recommended"),
        *("full", "local", "linear", "hybrid"),
    ]
    assert EXPERIMENTS["ablation"].variants == tuple(VARIANTS.values())


def test_the_base_is_the_benchmark_of_the_paper():
    base = paper_base()
    assert (base.hidden_size, base.layers, base.length) == (128, 2, 64)
    assert (base.batch_size, base.steps, base.max_bytes) == (32, 2000, 1_000_000)
    assert (base.tokenizer, base.kl_weight.end, base.shared_projections) == ("characters", 1, False)


@pytest.mark.parametrize("variant", ALL, ids=lambda variant: variant.name)
def test_every_variant_has_a_model(variant):
    settings = variant.settings(short_base(), 3)
    config = settings.model_config(vocab_size=100)
    assert settings.seed == 3
    is_static = all(len(config.experts_of(layer)) == 1 for layer in range(config.num_hidden_layers))
    assert variant.is_static == is_static


def test_variants_of_one_name_are_the_same_run():
    """They share a folder, so they must share all that is in it."""
    by_name = {}
    for variant in ALL:
        key = (variant.settings(paper_base(), 0), variant.probes)
        assert by_name.setdefault(variant.name, key) == key, variant.name


def test_variants_of_an_experiment_differ():
    for experiment in EXPERIMENTS.values():
        settings = [variant.settings(paper_base(), 0).to_dict() for variant in experiment.variants]
        assert all(settings.count(one) == 1 for one in settings), experiment.name


def test_the_matched_baseline_differs_from_the_recipe_in_its_controller_and_what_presses_it():
    own = VARIANTS["recommended"].settings(paper_base(), 0)
    other = VARIANTS["prior-free-cost"].settings(paper_base(), 0)
    differing = {n for n in own.to_dict() if own.to_dict()[n] != other.to_dict()[n]}
    assert differing == {"controller", "kl_weight", "cost_weight"}
    assert own.target_cost == other.target_cost


def test_a_layout_changes_routed_variants_only():
    shared = VARIANTS["bayesian"].in_layout("shared")
    assert shared.name == "bayesian-shared"
    assert shared.settings(paper_base(), 0).shared_projections
    assert VARIANTS["full"].in_layout("shared") is VARIANTS["full"]
    assert VARIANTS["bayesian"].in_layout("own") is VARIANTS["bayesian"]


def test_repeated_text_is_seen_as_often_as_asked_for():
    base = paper_base()
    seen = base.steps * base.batch_size * base.length
    for variant in EXPERIMENTS["repetition"].variants:
        settings = variant.settings(base, 0)
        assert seen / settings.train_bytes == pytest.approx(variant.value, rel=1e-4)
    assert len({v.settings(base, 0).max_bytes for v in EXPERIMENTS["repetition"].variants}) == 1


def test_other_steps_keep_the_evaluation_at_the_end():
    base = with_steps(paper_base(), 30)
    assert (base.steps, base.warmup, base.eval_every, base.save_every) == (30, 3, 30, 8)
    assert with_steps(paper_base(), 1).save_every == 1
    assert replace(with_steps(paper_base(), 2000), save_every=500) == paper_base()


def test_unknown_names_list_the_known():
    with pytest.raises(ConfigError, match=r"one of bayesian, .*hybrid, got 'bayes'"):
        find_variants(["bayesian", "bayes"])
    with pytest.raises(ConfigError, match=r"one of ablation, kl-weight, .*got 'kl'"):
        find_experiment("kl")
    assert [v.name for v in find_variants(["full", "full"])] == ["full"]
