"""Runs on tasks with known need."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from meta_attention.errors import ConfigError, DataError
from meta_attention.evaluation.tasks import RecallTask, TaskDataset, evaluate_task
from meta_attention.training.logs import describe, read_metrics
from meta_attention.training.model_settings import Settings
from meta_attention.training.overrides import build_settings
from meta_attention.training.recipes import RECIPES, default_recipe
from meta_attention.training.run import train_model
from meta_attention.training.tasks import held_out_task, read_task_blocks

RECALL = "recall:pairs=6,fewest_pairs=2,recalls=4,copies=4,copy_distance=3,keys=8,values=8,noise=4"
SMALL = {
    "window_size": 4,
    "hidden_size": 32,
    "steps": 4,
    "batch_size": 4,
    "eval_every": 2,
    "save_every": 2,
    "log_every": 2,
}
TASKS = {
    "recall": {"task": RECALL, "length": 40},
    "needle": {"task": "needle:digits=3", "length": 100, "max_bytes": 20000},
    "multi_key": {"task": "multi_key:facts=3,questions=2", "length": 200, "max_bytes": 20000},
}


def settings_of(name, **changes):
    given = SMALL | TASKS[name] | changes
    return build_settings(default_recipe(given["task"]), given)


@pytest.fixture(autouse=True)
def few_sequences(monkeypatch):
    monkeypatch.setattr("meta_attention.training.tasks.NUM_HELD_OUT", 6)


@pytest.mark.parametrize("name", TASKS)
def test_a_run_logs_answers_and_routes_and_judges_them_at_the_end(name, tmp_path):
    settings, out = settings_of(name), tmp_path / "run"
    record = train_model(settings, out)
    rows = [row for row in read_metrics(out) if row["kind"] == "eval"]
    assert [row["step"] for row in rows] == [2, 4]
    for key in ("accuracy", "far_accuracy", "need_share", "full_share", "full_recall"):
        assert 0.0 <= rows[-1][f"eval_{key}"] <= 1.0
    assert "eval_layer_1/full_recall" in rows[-1]
    assert "eval_bits_per_byte" not in rows[-1]
    assert "accuracy" in describe(rows[-1])

    # the last model counts: an earlier one may answer better, and at any cost
    assert record["metrics"]["accuracy"] == pytest.approx(rows[-1]["eval_accuracy"])
    assert record["metrics"]["task_loss"] == pytest.approx(rows[-1]["eval_task_loss"])
    assert record["task"]["loss"] == pytest.approx(record["metrics"]["task_loss"], rel=1e-4)
    assert record["task"]["accuracy"] == pytest.approx(record["metrics"]["accuracy"])
    assert record["task"]["full_share"] == pytest.approx(record["metrics"]["full_share"])
    assert record["task"]["regret"] is not None
    assert json.loads((out / "run.json").read_text())["task"] == record["task"]

    # what was saved is what was judged
    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert model.config.vocab_size == len(tokenizer)
    spec, dataset = held_out_task(model, tokenizer, out, name, size=6)
    assert str(spec) == settings.task
    if name == "recall":
        again = evaluate_task(model, dataset)
        assert again.to_dict()["accuracy"] == pytest.approx(record["task"]["accuracy"])


def test_a_resumed_run_gives_the_losses_of_an_unbroken_one(tmp_path):
    whole = train_model(settings_of("recall"), tmp_path / "whole")
    short = settings_of("recall")
    record = train_model(short, tmp_path / "broken")
    assert record["data"] == whole["data"]
    # as if it had been killed after the second step
    run = tmp_path / "broken"
    for path in (run / "checkpoint-4").iterdir():
        path.unlink()
    (run / "checkpoint-4").rmdir()
    (run / "run.json").write_text(json.dumps(record | {"finished": False}))
    again = train_model(short, run, resume=True, say=lambda line: None)
    assert again["metrics"]["task_loss"] == whole["metrics"]["task_loss"]
    assert again["task"] == whole["task"]
    # another task is another run
    other = replace(short, task=RECALL.replace("noise=4", "noise=5"))
    (run / "run.json").write_text(json.dumps(record | {"finished": False}))
    with pytest.raises((ConfigError, DataError)):
        train_model(other, run, resume=True, say=lambda line: None)


def test_every_sequence_of_a_run_is_new():
    blocks = read_task_blocks(settings_of("recall"), None)
    assert len(blocks.train) == 4 * 4
    rows = {tuple(row["input_ids"].tolist()) for row in (blocks.train[i] for i in range(16))}
    assert len(rows) == 16
    assert isinstance(blocks.valid, TaskDataset)
    assert not any(tuple(blocks.valid[i]["input_ids"].tolist()) in rows for i in range(6))
    assert read_task_blocks(settings_of("recall", eval_every=0), None).valid is None


def test_the_words_of_recall_can_be_written_and_read():
    blocks = read_task_blocks(settings_of("recall"), None)
    row = blocks.train[0]["input_ids"]
    text = blocks.tokenizer.decode(row)
    assert set(text.split()) <= set(blocks.train.task.words)
    assert blocks.tokenizer(text)["input_ids"] == row.tolist()


def test_text_to_hide_facts_in_can_be_given(tmp_path):
    (tmp_path / "text.txt").write_text("nothing but lower case letters here, over and over. " * 200)
    settings = settings_of("needle", data=(str(tmp_path / "text.txt"),))
    blocks = read_task_blocks(settings, None)
    row = blocks.valid[0]["input_ids"]
    text = blocks.tokenizer.decode(row)
    assert "lower case" in text
    # also the characters that only the facts have are in the vocabulary
    assert "The code of" in text
    assert blocks.tokenizer.unk_token_id not in row


def test_the_recipe_has_the_sizes_of_the_notes():
    settings = build_settings("recall", {})
    assert (settings.layers, settings.hidden_size, settings.window_size) == (2, 64, 16)
    assert (settings.routing, settings.training_weights) == ("hard", "one_hot")
    assert str(settings.kl_weight) == "0->0.3@0.4:0.6"
    assert settings.model_config(vocab_size=500).short_conv == 3
    task = read_task_blocks(settings, None).train.task
    assert task == RecallTask(window=16, reach=32)


@pytest.mark.parametrize("task", ["recall", "needle", "multi_key"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_task_goes_with_any_recipe(recipe, task):
    settings = build_settings(recipe, {"task": task})
    assert (settings.tokenizer == "task") == (task == "recall")
    assert Settings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "recall", "data": ("x.txt",)}, "data must not be given with task recall"),
        ({"task": "recall", "max_bytes": 10}, "max_bytes must not be given with task recall"),
        ({"task": "recall", "tokenizer": "bytes"}, "tokenizer must not be given with task recall"),
        ({"task": "needle", "tokenizer": "task"}, "'task' is the vocabulary of task recall"),
        ({"tokenizer": "task"}, "'task' is the vocabulary of task recall"),
        ({"task": "needle", "isolate_documents": True}, "isolate_documents must not be given"),
        ({"task": "nothing"}, "task must be one of"),
    ],
)
def test_settings_that_do_not_go_together_are_one_sentence(changes, message):
    with pytest.raises(ConfigError, match=message):
        build_settings("demo", changes)


def test_a_model_is_asked_in_its_own_words_and_length(tmp_path):
    out = tmp_path / "run"
    train_model(settings_of("recall", steps=1, warmup=0), out)
    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    spec, dataset = held_out_task(model, tokenizer, out, "recall:pairs=4", length=32, size=3)
    assert spec.sizes["pairs"] == 4
    assert dataset.batch(0, 8)["input_ids"].shape == (3, 32)
    with torch.no_grad():
        assert model(**{"input_ids": dataset.batch(0, 8)["input_ids"]}).logits.isfinite().all()
    for task, options, message in (
        ("recall:keys=9", {}, "trained on the words of its vocabulary"),
        ("recall", {"length": 41}, "max_position_embeddings = 40"),
        ("recall", {"data": ["x.txt"]}, "data must not be given with task recall"),
    ):
        with pytest.raises(ConfigError, match=message):
            held_out_task(model, tokenizer, out, task, **options)
