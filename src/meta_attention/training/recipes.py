"""Named training runs: a recipe is a function that returns all settings of one.

A recipe gives every setting a value; flags that are given override it (``training/overrides.py``).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from meta_attention.evaluation.tasks.spec import TaskSpec
from meta_attention.training.model_settings import Settings
from meta_attention.training.schedule import Schedule

# Hard routes that adapt. Capability first: a model starts on full attention, and nothing presses it
# until it can do its task. Economy second: then a weight rises, as far as the target asks. Routes
# are drawn, so that no expert is forgotten, and all experts run in training: the gradient of the
# chosen one alone is unbiased, too, but so noisy that 300 steps of the demo end 0.26 nats higher.
#
# On text that weight is the cost's, and the KL has a tenth at most: one that presses also keeps
# routes uncertain, which costs more than it saves (docs/results.md: five seeds, 7.4M parameters).
# Tasks whose need is known are pressed by the KL: that is how they were measured.
ADAPTIVE: dict[str, Any] = {
    "routing": "hard",
    "training_weights": "one_hot",
    "route_gradient": "all",
    "start_expert": "full",
}


def tiny() -> Settings:
    """The paper's Tiny LM: characters, D=128, 2 layers, T=64; its KL weight is 1 throughout."""
    return Settings(
        recipe="tiny",
        tokenizer="characters",
        length=64,
        hidden_size=128,
        layers=2,
        heads=4,
        window_size=8,
        expert_costs="paper",
        shared_projections=False,
        steps=2000,
        batch_size=32,
        lr=1e-3,
        warmup=100,
        kl_weight=Schedule.constant(1.0),
        eval_every=500,
        save_every=500,
    )


def bytes_small() -> Settings:
    """About 5M parameters on bytes, T=1024, one layer in six routed; minutes on a GPU.

    What has beaten a static hybrid on text (docs/results.md): its full layer is routed, head by
    head, among all, a wide window and the window. Routed in all layers, per token, models of this
    kind were worse at the same cost.
    """
    window, wide = ("local",), "local:256"
    return Settings(
        recipe="bytes-small",
        tokenizer="bytes",
        length=1024,
        hidden_size=256,
        layers=6,
        heads=4,
        window_size=32,
        layer_experts=(window, window, window, ("full", wide, "local"), window, window),
        route_granularity="kv_head",
        steps=2400,
        batch_size=32,
        lr=1e-3,
        warmup=100,
        **ADAPTIVE,
        cost_weight=Schedule(0.0, 0.1, 0.5, 0.75),
        # gone before routes are taken: kept to the end it leaves beliefs unsure, at a price
        kl_weight=Schedule(0.0, 0.0, 0.5, 0.8, peak=0.01, turn=0.65),
        target_cost=0.45,
        hold=1.0,
        argmax_from=0.8,
        precision="bf16",
        eval_every=400,
        save_every=400,
    )


def demo() -> Settings:
    """A small model on Python's manual; less than a minute on a CPU."""
    return Settings(
        recipe="demo",
        tokenizer="characters",
        length=128,
        hidden_size=64,
        layers=2,
        heads=4,
        window_size=16,
        steps=300,
        batch_size=16,
        lr=3e-3,
        warmup=30,
        **ADAPTIVE,
        cost_weight=Schedule(0.0, 0.01, 0.5, 0.75),
        # 0.1 pulls so small a model back onto the prior: adaptivity 0.02 nats instead of 0.07
        kl_weight=Schedule(0.0, 0.001, 0.5, 0.75),
        target_cost=0.4,
        # without these two, routes of so short a run leave full attention before anything presses:
        # 0.25 to 0.27 of its cost and 0.006 to 0.016 nats better (three seeds), but hardly routed
        hold=1.0,
        argmax_from=0.8,
        eval_every=100,
        save_every=100,
    )


def recall() -> Settings:
    """Associative recall, where need is known: 128 pairs, T=512; minutes on a GPU."""
    return Settings(
        recipe="recall",
        task="recall",
        tokenizer="task",
        length=512,
        hidden_size=64,
        layers=2,
        heads=2,
        window_size=16,
        # counted at this length, linear attention would be the dearer of the two cheap ones
        expert_costs="paper",
        # with it one layer can store a value under its key; without, two have to find out together
        # that one shall look a token back, and in 1,500 steps with 16 pairs they did not
        short_conv=3,
        # 1 / sqrt(D); at 0.02 it takes longer
        initializer_range=0.125,
        steps=6000,
        batch_size=32,
        lr=3e-3,
        warmup=100,
        weight_decay=0.01,
        **ADAPTIVE,
        # at 0.1 all keys stay on full attention, also those that are stored and ask for nothing;
        # at 0.5 one seed of five lost all recalls again
        kl_weight=Schedule(0.0, 0.3, 0.4, 0.6),
        eval_every=500,
        save_every=500,
    )


def needle() -> Settings:
    """A code hidden in 512 characters of text, T=512; a model as that of recall."""
    return replace(
        recall(),
        recipe="needle",
        task="needle",
        tokenizer="characters",
        steps=4000,
        kl_weight=Schedule(0.0, 0.1, 0.5, 0.75),
    )


RECIPES: dict[str, Callable[[], Settings]] = {
    "demo": demo,
    "tiny": tiny,
    "bytes-small": bytes_small,
    "recall": recall,
    "needle": needle,
}


def default_recipe(task: str | None) -> str:
    """The recipe of a run for which none is named."""
    if task is None:
        return "demo"
    return "needle" if TaskSpec.parse(task).is_text else "recall"
