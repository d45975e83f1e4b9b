"""A recipe with some of its settings replaced, and what has to change with them.

Settings of a recipe were chosen together. One that is replaced alone would leave others without a
meaning: these are fitted to it, unless they were given too, and what would do nothing is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from meta_attention.errors import ConfigError
from meta_attention.evaluation.tasks.spec import TaskSpec
from meta_attention.training.model_settings import Settings
from meta_attention.training.recipes import RECIPES
from meta_attention.training.schedule import Schedule
from meta_attention.training.settings import NO_WEIGHT


def build_settings(recipe: str, overrides: Mapping[str, Any]) -> Settings:
    """A recipe with some of its settings replaced.

    What a setting that was given leaves without a meaning goes with it, unless it was given too: a
    shorter run than the recipe's has a warm-up of at most a tenth of it; experts for all layers
    replace those per layer; without full attention nothing starts on it; where nothing is routed,
    or softly, there is no target and nothing is held up to it; routes that learn from the chosen
    expert alone are drawn to the end; experts with projections of their own are chosen per token;
    what presses a prior-free controller is its cost, when the KL would have; and a KL weight that
    is given alone presses in place of the recipe's cost, as the KL does where routes are not hard;
    a KL that goes again before routes are taken goes with that moment, and stays where no cost
    presses beside it.
    A task of text takes the place of one with a vocabulary of its own, or the other way round,
    together with a tokenizer. In shorter blocks, the windows of a recipe that has
    several are narrower.
    """
    if recipe not in RECIPES:
        raise ConfigError(f"recipe must be one of {', '.join(RECIPES)}, got {recipe!r}")
    settings, changed = RECIPES[recipe](), dict(overrides)
    if "steps" in changed and changed["steps"] > 0:
        changed.setdefault("warmup", min(settings.warmup, changed["steps"] // 10))
    if "layer_experts" not in changed:
        if "experts" in changed:
            changed["layer_experts"] = None
        else:
            changed |= _fit_windows(settings, changed)
    if changed.get("controller") == "prior_free" and settings.cost_weight.end == 0.0:
        changed.setdefault("cost_weight", settings.kl_weight)
    is_hard = changed.get("routing", settings.routing) == "hard"
    has_prior = changed.get("controller", settings.controller) == "bayesian"
    is_swapped = has_prior and ("kl_weight" in changed or not is_hard)
    if is_swapped and settings.cost_weight.end > 0.0 and "cost_weight" not in changed:
        changed.setdefault("kl_weight", settings.cost_weight)
        changed["cost_weight"] = NO_WEIGHT
    if changed.get("routing") == "soft" and settings.training_weights == "one_hot":
        changed.setdefault("training_weights", "mean")
    by_layer = changed.get("layer_experts", settings.layer_experts)
    layers = by_layer or [changed.get("experts", settings.experts)]
    if "start_expert" not in changed and settings.start_expert not in chain(*layers):
        changed["start_expert"] = None
    is_static = all(len(layer) == 1 for layer in layers)
    if is_static or not is_hard:
        changed.setdefault("target_cost", None)
    if changed.get("target_cost", settings.target_cost) is None:
        changed.setdefault("hold", 0.0)
    if changed.get("route_gradient") == "chosen":
        changed.setdefault("argmax_from", 1.0)
    if settings.kl_weight.peak is not None and "kl_weight" not in changed:
        changed["kl_weight"] = _fit_peak(settings, changed)
    if changed.get("shared_projections") is False:
        changed.setdefault("route_granularity", "token")
    if changed.get("task") is not None:
        own = "task" if not TaskSpec.parse(changed["task"]).is_text else "characters"
        if "task" in (own, settings.tokenizer):
            changed.setdefault("tokenizer", own)
    built = replace(settings, **changed)
    _check_effect(built, overrides)
    _check_windows(layers, built)
    return built


def _fit_peak(settings: Settings, changed: Mapping[str, Any]) -> Schedule:
    """The KL of a recipe that lets it go again, where what it goes with was changed."""
    kl, taken = settings.kl_weight, changed.get("argmax_from", settings.argmax_from)
    assert kl.peak is not None
    if not any(changed.get("cost_weight", settings.cost_weight).values):
        return Schedule(kl.start, kl.peak, kl.begin, kl.turn or kl.finish)
    if taken <= kl.begin:
        return NO_WEIGHT
    return replace(kl, finish=taken, turn=(kl.begin + taken) / 2)


def _check_effect(settings: Settings, given: Mapping[str, Any]) -> None:
    """Refuse what was given and would do nothing: who gave it wants what it is a part of."""
    for name in ("depth_routing", "depth_weight"):
        if name in given and settings.depth_capacity is None:
            raise ConfigError(
                f"{name} is of Mixture of Depths and needs a depth_capacity, the share of tokens "
                "that enter; set it or leave it out"
            )
    if "residual_blocks" in given and settings.residual != "block_attention":
        raise ConfigError(
            "residual_blocks are those of residual='block_attention', got "
            f"residual={settings.residual!r}; set that or leave them out"
        )


def _fit_windows(settings: Settings, changed: Mapping[str, Any]) -> dict[str, Any]:
    """Windows of a recipe that has several, in shorter blocks than its own.

    They keep their share of a block, and so does what they cost of full attention. Where the
    window was given, those that would be no wider are left out.
    """
    length, layers = changed.get("length", settings.length), settings.layer_experts or ()
    has_several = any(":" in name for name in chain(*layers))
    if not has_several or length >= settings.length:
        return {}

    def fit(window: int) -> int:
        return max(1, window * length // settings.length)

    window = changed.get("window_size", fit(settings.window_size))

    def fit_expert(name: str) -> tuple[str, ...]:
        base, is_wide, wide = name.partition(":")
        if not is_wide:
            return (name,)
        return (f"{base}:{fit(int(wide))}",) if fit(int(wide)) > window else ()

    fitted = tuple(tuple(chain(*map(fit_expert, layer))) for layer in layers)
    return {"window_size": window, "layer_experts": fitted}


def _check_windows(layers: Sequence[Sequence[str]], settings: Settings) -> None:
    """Raise where a layer has a choice, and in it a window that every token of a block is in."""
    for name in chain(*(layer for layer in layers if len(layer) > 1)):
        base, _, wide = name.partition(":")
        window = int(wide) if wide.isdecimal() else settings.window_size
        if base == "local" and window >= settings.length - 1:
            raise ConfigError(
                f"the windows of routed layers must be shorter than a block, got {name} of "
                f"{window} tokens in blocks of {settings.length}: that is full attention by "
                "another name; make it narrower, or length larger"
            )
