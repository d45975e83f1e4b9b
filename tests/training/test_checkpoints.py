"""Killed at any moment, a run goes on as if nothing had happened; what cannot go on says why."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from meta_attention import MetaAttentionConfig
from meta_attention.errors import ConfigError, DataError
from meta_attention.training import trainer as trainer_module
from meta_attention.training.checkpoints import (
    TrainingError,
    check_same_model,
    clear_write_errors,
    find_flaw,
    newest_checkpoint,
    set_aside,
)
from meta_attention.training.logs import read_metrics
from meta_attention.training.run import open_run, train_model
from meta_attention.training.schedule import Schedule

WORKER = Path(__file__).parent / "worker.py"
# 20,000 bytes are 73 batches: the run crosses the end of an epoch, and draws samples besides
OVERRIDES = {"steps": 90, "training_weights": "sample", "eval_every": 40, "save_every": 20}
SMALL = {
    # nothing is drawn: parts of a batch would draw other routes than the whole
    "routing": "soft",
    "tokenizer": "bytes",
    "max_bytes": 20_000,
    "length": 32,
    "hidden_size": 32,
    "heads": 2,
    "window_size": 4,
    "batch_size": 8,
    "steps": 4,
    "eval_every": 2,
    "save_every": 2,
    "log_every": 1,
}
TIMING = ("per_s", "runtime", "_per_second")


def start(out, *flags):
    return subprocess.Popen(
        [sys.executable, str(WORKER), str(out), json.dumps(OVERRIDES), *flags],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, code=0):
    _, errors = process.communicate(timeout=120)
    assert process.returncode == code, errors
    return errors


def without_timing(rows):
    return [{k: v for k, v in row.items() if not k.endswith(TIMING)} for row in rows]


def train_small(out, **overrides):
    return train_model(open_run(out, None, SMALL | overrides, resume=False), out)


def resume_small(out, **overrides):
    return train_model(open_run(out, None, overrides, resume=True), out, resume=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of four steps with two checkpoints; copied, not changed."""
    out = tmp_path_factory.mktemp("finished") / "run"
    train_small(out)
    return out


@pytest.fixture
def stopped(finished, tmp_path):
    """The same, as it was before its end was written."""
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    record = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps(record | {"finished": False}))
    (out / "model.safetensors").unlink()
    return out


def test_a_run_killed_twice_continues_as_the_run_that_was_not(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    unbroken, broken = start(whole), start(killed, "--die-at", "77")
    finish(broken, -signal.SIGKILL)
    assert read_metrics(killed)[-1]["step"] == 77 - 1
    # it goes on from step 60, and dies with half of the next checkpoint written
    finish(start(killed, "--resume", "--die-saving", "80"), -signal.SIGKILL)
    assert (killed / "checkpoint-80" / "model.safetensors").exists()
    errors = finish(start(killed, "--resume"))
    finish(unbroken)
    assert "checkpoint-80 is incomplete" in errors
    assert "from step 60" in errors

    rows = without_timing(read_metrics(whole))
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, 91))
    assert without_timing(read_metrics(killed)) == rows
    for name, tensor in load_file(whole / "model.safetensors").items():
        assert load_file(killed / "model.safetensors")[name].equal(tensor), name


def test_the_same_seed_gives_the_same_curve(finished, tmp_path):
    train_small(tmp_path / "run")
    assert without_timing(read_metrics(tmp_path / "run")) == without_timing(read_metrics(finished))


def test_another_seed_gives_another_curve(finished, tmp_path):
    train_small(tmp_path / "run", seed=1)
    losses = [
        [row["loss"] for row in read_metrics(out) if row["kind"] == "train"]
        for out in (finished, tmp_path / "run")
    ]
    assert losses[0][0] != losses[1][0]


def test_a_complete_checkpoint_has_no_flaw(finished):
    checkpoint, flaws = newest_checkpoint(finished)
    assert checkpoint == finished / "checkpoint-4"
    assert not flaws


FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")


@pytest.mark.parametrize(
    ("name", "damage"),
    # sharded checkpoints have no config.json
    [("config.json", "cut"), *((n, d) for n in FILES for d in ("cut", "missing"))],
)
def test_a_cut_or_missing_file_makes_the_one_before_the_newest(name, damage, stopped):
    path = stopped / "checkpoint-4" / name
    if damage == "cut":
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
    else:
        path.unlink()
    checkpoint, flaws = newest_checkpoint(stopped)
    assert checkpoint == stopped / "checkpoint-2"
    assert list(flaws) == [stopped / "checkpoint-4"]


def test_a_state_of_another_step_is_a_flaw(stopped):
    (stopped / "checkpoint-2").rename(stopped / "checkpoint-9")
    assert find_flaw(stopped / "checkpoint-9") == "trainer_state.json is of step 2"


def test_an_incomplete_checkpoint_is_kept_under_another_name(stopped, finished, capsys):
    (stopped / "checkpoint-4" / "trainer_state.json").unlink()
    resume_small(stopped)
    assert "warning: checkpoint-4 is incomplete" in capsys.readouterr().err
    assert (stopped / "incomplete-checkpoint-4" / "model.safetensors").exists()
    assert without_timing(read_metrics(stopped)) == without_timing(read_metrics(finished))
    # a second one of that name replaces the first
    assert set_aside(stopped / "checkpoint-4").name == "incomplete-checkpoint-4"


def test_a_gated_run_resumes_where_its_threshold_was(tmp_path):
    gated = {"routing": "gated", "uncertainty_threshold": Schedule(0.0, 1.0)}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    record = train_small(whole, **gated)
    shutil.copytree(whole, stopped)
    shutil.rmtree(stopped / "checkpoint-4")
    (stopped / "run.json").write_text(json.dumps(record | {"finished": False}))
    resume_small(stopped)
    assert without_timing(read_metrics(stopped)) == without_timing(read_metrics(whole))
    assert MetaAttentionConfig.from_pretrained(stopped).uncertainty_threshold == 1.0


def test_a_steered_run_resumes_where_its_economy_was(tmp_path):
    """The checkpoint lies between two windows of the economy, after the loss has settled."""
    steered = {
        "routing": "hard",
        "training_weights": "one_hot",
        "start_expert": "full",
        "target_cost": 0.5,
        "kl_weight": Schedule.parse("0->0.1@settled+10s"),
        "settle_steps": 10,
        "settle_drop": 0.5,
        "steps": 50,
        "eval_every": 18,
        "save_every": 36,
    }
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    record = train_small(whole, **steered)
    shutil.copytree(whole, stopped)
    (stopped / "run.json").write_text(json.dumps(record | {"finished": False}))
    for checkpoint in stopped.glob("checkpoint-*"):
        if checkpoint.name != "checkpoint-36":
            shutil.rmtree(checkpoint)
    state = json.loads((stopped / "checkpoint-36" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["economy"]["settled"] == 20
    assert state["stateful_callbacks"]["economy"]["log_multiplier"] > 0.0
    assert state["stateful_callbacks"]["economy"]["watched"][0] > 0.0
    resume_small(stopped)
    rows = without_timing(read_metrics(whole))
    assert without_timing(read_metrics(stopped)) == rows
    trained = [row for row in rows if row["kind"] == "train"]
    assert trained[-1]["settled_step"] == 20
    assert trained[-1]["multiplier"] != trained[35]["multiplier"]


@pytest.mark.parametrize("step", [6, 12])
def test_a_held_run_resumes_before_and_after_its_routes_are_no_longer_drawn(step, tmp_path):
    held = {
        "routing": "hard",
        "training_weights": "one_hot",
        "start_expert": None,
        "cost_weight": Schedule.parse("0->0.1@0:0.2"),
        "target_cost": 0.9,
        "hold": 1.0,
        "argmax_from": 0.6,
        "steps": 15,
        "save_every": step,
    }
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    record = train_small(whole, **held)
    shutil.copytree(whole, stopped)
    (stopped / "run.json").write_text(json.dumps(record | {"finished": False}))
    for checkpoint in stopped.glob("checkpoint-*"):
        if checkpoint.name != f"checkpoint-{step}":
            shutil.rmtree(checkpoint)
    resume_small(stopped)
    rows = without_timing(read_metrics(whole))
    assert without_timing(read_metrics(stopped)) == rows
    assert any(row["hold_loss"] > 0.0 for row in rows if row["kind"] == "train")
    assert MetaAttentionConfig.from_pretrained(stopped).training_weights == "one_hot"


def test_a_run_stopped_at_its_end_is_ended(stopped, finished):
    record = resume_small(stopped)
    assert record["finished"]
    assert record["steps"] == 4
    saved = json.loads((finished / "run.json").read_text())["metrics"]
    assert record["metrics"]["task_loss"] == pytest.approx(saved["task_loss"], rel=1e-9)
    for name, tensor in load_file(finished / "model.safetensors").items():
        assert load_file(stopped / "model.safetensors")[name].equal(tensor)


def test_a_run_stopped_before_its_first_checkpoint_starts_over(stopped, finished, capsys):
    for step in (2, 4):
        shutil.rmtree(stopped / f"checkpoint-{step}")
    resume_small(stopped)
    assert "from the beginning" in capsys.readouterr().err
    assert without_timing(read_metrics(stopped)) == without_timing(read_metrics(finished))


def test_a_finished_run_is_left_alone(finished, capsys):
    before = (finished / "run.json").stat().st_mtime_ns
    assert resume_small(finished)["finished"]
    assert "nothing to do" in capsys.readouterr().err
    assert (finished / "run.json").stat().st_mtime_ns == before


def test_a_moved_run_keeps_its_best_checkpoint(stopped):
    state = json.loads((stopped / "checkpoint-4" / "trainer_state.json").read_text())
    assert not state["best_model_checkpoint"].startswith(str(stopped))
    shutil.rmtree(stopped / "checkpoint-4")
    resume_small(stopped)
    state = json.loads((stopped / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"].startswith(str(stopped))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"lr": 0.5}, "whose lr is 0.003, got 0.5"),
        ({"hidden_size": 64}, "whose hidden_size is 32, got 64"),
        ({"experts": ("full",)}, "whose experts is"),
        ({"steps": 8}, "whose steps is 4, got 8"),
        ({"eval_every": 0}, "whose eval_every is 2, got 0"),
    ],
)
def test_resume_refuses_other_settings_by_name(overrides, message, stopped):
    with pytest.raises(ConfigError, match=message):
        resume_small(stopped, **overrides)


def test_resume_may_change_how_a_step_is_computed_and_reported(stopped, finished):
    shutil.rmtree(stopped / "checkpoint-4")
    resume_small(stopped, grad_accum=2, save_every=3)
    rows = zip(read_metrics(stopped), read_metrics(finished), strict=False)
    for ours, theirs in rows:
        if ours["kind"] == "train":
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)


def test_resume_refuses_another_recipe(stopped):
    with pytest.raises(ConfigError, match="whose recipe is 'demo', got 'tiny'"):
        open_run(stopped, "tiny", {}, resume=True)


def test_resume_refuses_other_text(stopped):
    with pytest.raises(DataError, match="must be the text it began with"):
        resume_small(stopped, max_bytes=10_000)


def test_a_checkpoint_of_another_config_is_refused_by_field(stopped):
    config = MetaAttentionConfig.from_pretrained(stopped / "checkpoint-4")
    config.window_size = 99
    config.save_pretrained(stopped / "checkpoint-4")
    with pytest.raises(ConfigError, match="its window_size is 99 and this run's is 4"):
        resume_small(stopped)


def test_a_checkpoint_of_the_same_config_is_accepted(finished):
    checkpoint = finished / "checkpoint-4"
    check_same_model(checkpoint, MetaAttentionConfig.from_pretrained(checkpoint))


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"must be one that can be made, got .*Not a directory"):
        train_small(tmp_path / "file" / "run")


def test_an_existing_run_is_not_overwritten(finished, tmp_path):
    with pytest.raises(ConfigError, match="already holds a run or a model; go on with it by --res"):
        open_run(finished, None, SMALL, resume=False)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="must be a folder"):
        open_run(tmp_path / "file", None, SMALL, resume=False)
    with pytest.raises(ConfigError, match="must be a run to resume"):
        open_run(tmp_path, None, {}, resume=True)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ConfigError, match="must be readable"):
        open_run(tmp_path, None, {}, resume=True)
    (tmp_path / "run.json").write_text('{"settings": {"recipe": "demo"}}')
    with pytest.raises(ConfigError, match="must hold the settings of a run of this version"):
        open_run(tmp_path, None, {}, resume=True)


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"),
    ],
    ids=["python", "torch"],
)
def test_a_full_disk_is_one_sentence_and_costs_one_checkpoint(error, tmp_path, monkeypatch):
    out = tmp_path / "run"
    save = trainer_module.MetaAttentionTrainer._save_optimizer_and_scheduler

    def fill_disk(self, folder):
        if self.state.global_step == 4:
            monkeypatch.setattr(
                shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0)
            )
            raise error
        save(self, folder)

    monkeypatch.setattr(
        trainer_module.MetaAttentionTrainer, "_save_optimizer_and_scheduler", fill_disk
    )
    with pytest.raises(TrainingError) as caught:
        train_small(out)
    message = str(caught.value)
    assert message.startswith("the checkpoint of step 4 could not be written: no space left")
    assert f"the last good checkpoint is {out / 'checkpoint-2'}" in message
    assert "\n" not in message
    assert not (out / "checkpoint-4").exists()
    # with room again, the run goes on from there
    monkeypatch.undo()
    assert resume_small(out)["steps"] == 4


def test_a_failed_write_without_any_checkpoint_says_so(tmp_path):
    with (
        pytest.raises(
            TrainingError, match="the log could not be written: denied: x; no checkpoint"
        ),
        clear_write_errors("the log", tmp_path),
    ):
        raise OSError(13, "denied", "x")


def test_rows_after_the_checkpoint_and_a_cut_line_are_dropped(stopped, finished):
    shutil.rmtree(stopped / "checkpoint-4")
    path = stopped / "metrics.jsonl"
    path.write_text(path.read_text()[:-40])
    resume_small(stopped)
    assert without_timing(read_metrics(stopped)) == without_timing(read_metrics(finished))
