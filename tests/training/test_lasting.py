"""Which model a run leaves. That runs go on and say what they could not write: test_checkpoints."""

import shutil

import pytest
import torch
from torch import nn
from transformers import TrainingArguments

from meta_attention.training.lasting import LastingTrainer

# what four steps towards 4 pass, the second of which evaluation likes best
WEIGHTS = [1.0, 1.75, 2.3125, 2.734375]
BEST, LAST = 2, 4


class Follower(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, target):
        return {"loss": (self.weight - target).square().mean()}


def build_trainer(folder, metric="eval_loss"):
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=LAST,
        learning_rate=0.125,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        metric_for_best_model=metric,
        greater_is_better=False,
        label_names=["target"],
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to="none",
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    data = [[{"target": torch.tensor(target)}] * 8 for target in (4.0, WEIGHTS[BEST - 1])]
    return LastingTrainer(Follower(), args, train_dataset=data[0], eval_dataset=data[1])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    trainer = build_trainer(folder)
    trainer.train_from(None)
    assert left_by(trainer) == (WEIGHTS[BEST - 1], BEST)
    return folder


@pytest.fixture
def moved(finished, tmp_path):
    """A copy; where the run was first, there is nothing of it any more."""
    shutil.copytree(finished, tmp_path / "run")
    hidden = finished.rename(finished.with_name("hidden"))
    yield tmp_path / "run"
    hidden.rename(finished)


def left_by(trainer):
    return trainer.model.weight.item(), trainer.model_step


@pytest.mark.parametrize("step", [1, 3, LAST])
def test_the_best_model_is_left_wherever_a_run_was_stopped_and_moved_to(step, moved):
    trainer = build_trainer(moved)
    trainer.train_from(moved / f"checkpoint-{step}")
    assert left_by(trainer) == (WEIGHTS[BEST - 1], BEST)


@pytest.mark.parametrize("step", [3, LAST])
def test_a_best_model_that_is_gone_leaves_the_last(step, moved):
    shutil.rmtree(moved / f"checkpoint-{BEST}")
    trainer = build_trainer(moved)
    trainer.train_from(moved / f"checkpoint-{step}")
    assert left_by(trainer) == (WEIGHTS[LAST - 1], LAST)


def test_where_no_model_is_the_best_the_last_is_left(tmp_path):
    trainer = build_trainer(tmp_path, metric=None)
    trainer.train_from(None)
    assert left_by(trainer) == (WEIGHTS[LAST - 1], LAST)
    again = build_trainer(tmp_path, metric=None)
    again.train_from(tmp_path / f"checkpoint-{LAST}")
    assert left_by(again) == (WEIGHTS[LAST - 1], LAST)
