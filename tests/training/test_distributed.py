"""Several processes take the steps of one."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from meta_attention.errors import ConfigError
from meta_attention.training.logs import read_metrics
from meta_attention.training.recipes import demo
from meta_attention.training.run import training_arguments

WORKER = Path(__file__).parent / "worker.py"
# isolated documents give the processes different numbers of predicted tokens; the KL is as large
# as the task loss, so that counting it twice would show
OVERRIDES = {
    "steps": 6,
    "isolate_documents": True,
    "kl_weight": "1",
    "eval_every": 3,
    "save_every": 3,
}
# blocks that are called twice, the second time with what the first call chose
ALL_THREE = OVERRIDES | {
    "layers": 3,
    "experts": ("full", "ssm", "local"),
    "expert_costs": "flops",
    "depth_capacity": 0.5,
    "residual": "attention",
}
TIMING = ("per_s", "runtime", "_per_second")


def load_worker():
    spec = importlib.util.spec_from_file_location("worker", WORKER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def launch(out, *flags, overrides=OVERRIDES):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run(
        [sys.executable, *launcher, str(WORKER), str(out), json.dumps(overrides), *flags],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run on one process."""
    out = tmp_path_factory.mktemp("alone") / "run"
    load_worker().run(out, OVERRIDES)
    return out


def assert_same_run(one, other):
    rows, other_rows = read_metrics(one), read_metrics(other)
    assert len(rows) == len(other_rows) == 6 + 2
    for row, other_row in zip(rows, other_rows, strict=True):
        for name, value in row.items():
            if isinstance(value, float) and not name.endswith(TIMING):
                assert other_row[name] == pytest.approx(value, abs=1e-5, rel=1e-5), name
    gradients = torch.load(one / "gradients.pt")["gradients"]
    others = torch.load(other / "gradients.pt")["gradients"]
    torch.testing.assert_close(others, gradients, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(
        load_file(other / "model.safetensors"),
        load_file(one / "model.safetensors"),
        atol=1e-5,
        rtol=0,
    )


def test_two_processes_reach_the_losses_and_gradients_of_one(alone, tmp_path):
    out = tmp_path / "run"
    result = launch(out)
    assert result.returncode == 0, result.stderr
    assert_same_run(alone, out)
    record = json.loads((out / "run.json").read_text())
    assert record["processes"] == 2
    # the KL is a mean over all tokens, not a sum over processes
    kl = read_metrics(alone)[0]["kl_loss"]
    assert read_metrics(out)[0]["kl_loss"] == pytest.approx(kl, abs=1e-5)
    assert kl > 1.0


def test_fsdp2_shards_the_model_and_takes_the_same_steps(alone, tmp_path):
    out = tmp_path / "run"
    result = launch(out, "--fsdp")
    assert result.returncode == 0, result.stderr
    assert torch.load(out / "gradients.pt")["placements"] == ["(Shard(dim=0),)"]
    assert_same_run(alone, out)
    # checkpoints are shards, the result is a model as any other
    assert (out / "checkpoint-6" / "pytorch_model_fsdp_0" / ".metadata").is_file()


def test_fsdp2_takes_the_same_steps_with_depth_and_residuals(tmp_path):
    load_worker().run(tmp_path / "alone", ALL_THREE)
    result = launch(tmp_path / "run", "--fsdp", overrides=ALL_THREE)
    assert result.returncode == 0, result.stderr
    assert_same_run(tmp_path / "alone", tmp_path / "run")


def test_a_batch_must_divide_among_the_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="got 16 and 3 x 1"):
        training_arguments(demo(), tmp_path)
