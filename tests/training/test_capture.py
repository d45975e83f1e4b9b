"""Steps replayed from CUDA graphs: the same training, launched as one."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerCallback, TrainingArguments

from meta_attention import MetaAttentionConfig
from meta_attention.errors import ConfigError
from meta_attention.training.capture import check_capture
from meta_attention.training.overrides import build_settings
from meta_attention.training.run import train_model
from meta_attention.training.schedule import Schedule

SMALL = {
    "steps": 40,
    "log_every": 5,
    "eval_every": 20,
    "save_every": 20,
    "hidden_size": 32,
    "layers": 2,
    "length": 32,
    "batch_size": 4,
    "target_cost": None,
    # the recipe has both
    "hold": 0.0,
    "argmax_from": 1.0,
}
# what a schedule, a drawn route, a steered cost and a moving gate need
TRAININGS = {
    "soft": {"routing": "soft", "training_weights": "mean"},
    "sampled": {"routing": "soft", "training_weights": "sample"},
    "drawn and steered": {
        "routing": "hard",
        "training_weights": "one_hot",
        "start_expert": "full",
        "expert_costs": "flops",
        "kl_weight": Schedule.parse("0->0.1@0.2:0.6"),
        "target_cost": 0.6,
    },
    "held, and at the end no longer drawn": {
        "routing": "hard",
        "training_weights": "one_hot",
        # below the target from the start, so that there is something to hold
        "start_expert": None,
        "expert_costs": "flops",
        "cost_weight": Schedule.parse("0->0.5@0.2:0.4"),
        "target_cost": 0.9,
        "hold": 1.0,
        "argmax_from": 0.6,
    },
    "chosen experts only": {
        "routing": "hard",
        "training_weights": "one_hot",
        "route_gradient": "chosen",
        "shared_projections": True,
    },
    "gated": {
        "routing": "gated",
        "uncertainty_threshold": Schedule.parse("0.1->0.5@0.2:0.8"),
    },
}


def rows_of(folder):
    rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
    clocks = ("per_s", "runtime")
    return [{k: v for k, v in row.items() if not any(c in k for c in clocks)} for row in rows]


def assert_agree(ours, expected):
    assert len(ours) == len(expected) > 10
    for row, wanted in zip(ours, expected, strict=True):
        assert row.keys() == wanted.keys()
        for name, value in wanted.items():
            is_figure = isinstance(value, float)
            wanted_value = pytest.approx(value, rel=1e-3, abs=1e-4) if is_figure else value
            assert row[name] == wanted_value, (name, wanted["step"])


class Stopped(Exception):
    pass


class StopAfter(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        if state.global_step == 20:
            raise Stopped


@pytest.mark.gpu
# of operations that have no deterministic form
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("training", TRAININGS)
def test_a_captured_run_has_the_figures_of_one_that_is_not(tmp_path, training):
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        settings = build_settings("demo", SMALL | TRAININGS[training])
        for name, capture in (("plain", False), ("captured", True)):
            train_model(settings, tmp_path / name, capture=capture)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_agree(rows_of(tmp_path / "captured"), rows_of(tmp_path / "plain"))
    held = [row["hold_loss"] for row in rows_of(tmp_path / "plain") if "hold_loss" in row]
    assert bool(held) == ("hold" in TRAININGS[training])
    assert not held or max(held) > 0.01


@pytest.mark.gpu
def test_a_captured_task_goes_on_as_an_unbroken_one(tmp_path):
    task = (
        "recall:pairs=4,fewest_pairs=2,recalls=3,copies=3,copy_distance=3,keys=6,values=6,noise=4"
    )
    given = SMALL | {"task": task, "length": 40, "window_size": 4}
    settings = build_settings("recall", given)
    train_model(settings, tmp_path / "whole", capture=True)
    with pytest.raises(Stopped):
        train_model(settings, tmp_path / "cut", capture=True, callbacks=(StopAfter(),))
    train_model(settings, tmp_path / "cut", capture=True, resume=True)
    whole, cut = (rows_of(tmp_path / name) for name in ("whole", "cut"))
    assert [row["step"] for row in cut] == [row["step"] for row in whole]
    assert cut[-1]["eval_loss"] == pytest.approx(whole[-1]["eval_loss"], rel=1e-3)


# arguments that a graph can hold
USUAL = {
    "device": torch.device("cuda"),
    "world_size": 1,
    "gradient_accumulation_steps": 1,
    "fp16": False,
    "gradient_checkpointing": False,
}


def test_there_is_nothing_to_capture_on_a_cpu(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(ConfigError, match="must have a CUDA device, got cpu"):
        check_capture(args, MetaAttentionConfig())


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("world_size", 2, "one process, got 2"),
        ("gradient_accumulation_steps", 4, "one part, got grad_accum=4"),
        ("fp16", True, "bf16 or fp32, got fp16"),
        ("gradient_checkpointing", True, "no gradient checkpointing"),
    ],
)
def test_what_a_graph_cannot_hold_is_named(attribute, value, message):
    args = SimpleNamespace(**USUAL | {attribute: value})
    with pytest.raises(ConfigError, match=f"{message}; leave --capture out"):
        check_capture(args, MetaAttentionConfig())
    setattr(args, attribute, USUAL[attribute])
    check_capture(args, MetaAttentionConfig())


@pytest.mark.parametrize(
    ("fields", "has_documents", "message"),
    [
        ({"depth_capacity": 0.5, "depth_routing": "threshold"}, False, "depth_routing='top_k'"),
        ({"depth_capacity": 0.5}, True, "depth_capacity without isolate_documents"),
        # also where all of them enter
        ({"depth_capacity": 1.0}, True, "depth_capacity without isolate_documents"),
        ({"depth_capacity": 1.0, "depth_routing": "threshold"}, False, None),
        ({"depth_capacity": 0.5}, False, None),
        ({}, True, None),
    ],
)
def test_a_graph_holds_blocks_that_tokens_pass_by_where_nobody_counts_these(
    fields, has_documents, message
):
    args, config = SimpleNamespace(**USUAL), MetaAttentionConfig(**fields)
    if message is None:
        check_capture(args, config, has_documents)
        return
    with pytest.raises(ConfigError, match=f"{message}.*; leave --capture out"):
        check_capture(args, config, has_documents)
