"""A training run of its own process, which can be told to die: run by the tests, not a test.

python worker.py OUT '{"steps": 6}' [--resume] [--die-at STEP] [--die-saving STEP] [--fsdp]
"""

import argparse
import json
import os
import signal
import warnings
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from meta_attention.training.run import open_run, train_model
from meta_attention.training.schedule import Schedule
from meta_attention.training.trainer import MetaAttentionTrainer

# small enough for a second of training, and several epochs of it
SETTINGS = {
    # nothing is drawn: processes would draw other routes than one alone
    "routing": "soft",
    "tokenizer": "bytes",
    "max_bytes": 20_000,
    "length": 32,
    "hidden_size": 32,
    "heads": 2,
    "window_size": 4,
    "batch_size": 8,
    "log_every": 1,
}


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class DieAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            die()


class KeepGradients(TrainerCallback):
    """Gradients of the first step, whole also where they are sharded."""

    def __init__(self, path):
        self.path = path

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0:
            gradients, placements = {}, set()
            for name, parameter in model.named_parameters():
                grad = parameter.grad
                if isinstance(grad, DTensor):
                    placements.add(str(parameter.placements))
                    grad = grad.full_tensor()
                gradients[name] = grad.clone()
            if state.is_world_process_zero:
                kept = {"gradients": gradients, "placements": sorted(placements)}
                torch.save(kept, self.path)


def die_saving(step):
    """Die with the model of a checkpoint written and its optimizer half written."""
    save = MetaAttentionTrainer._save_optimizer_and_scheduler

    def save_or_die(self, folder):
        save(self, folder)
        if self.state.global_step == step:
            path = Path(folder) / "optimizer.pt"
            path.write_bytes(path.read_bytes()[:1000])
            die()

    MetaAttentionTrainer._save_optimizer_and_scheduler = save_or_die


def shard_on_cpus():
    """Accelerate shards on GPUs only; tell it that these processes have some.

    What follows is FSDP2 itself: PyTorch shards, gathers and reduces through gloo.
    """
    from accelerate import DistributedType, PartialState  # type: ignore[import-untyped]

    os.environ |= {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    }
    create = MetaAttentionTrainer.create_accelerator_and_postprocess

    def create_sharding(self):
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        create(self)

    MetaAttentionTrainer.create_accelerator_and_postprocess = create_sharding


def run(out, overrides, resume=False, callbacks=()):
    given = SETTINGS | overrides
    if "kl_weight" in given:
        given["kl_weight"] = Schedule.parse(given["kl_weight"])
    settings = open_run(out, None, {} if resume else given, resume=resume)
    out.mkdir(exist_ok=True)
    keep = KeepGradients(out / "gradients.pt")
    return train_model(settings, out, resume=resume, callbacks=(keep, *callbacks))


if __name__ == "__main__":
    warnings.simplefilter("error")
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("overrides", type=json.loads)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--die-at", type=int)
    parser.add_argument("--die-saving", type=int)
    parser.add_argument("--fsdp", action="store_true")
    arguments = parser.parse_args()
    if arguments.die_saving is not None:
        die_saving(arguments.die_saving)
    if arguments.fsdp:
        shard_on_cpus()
    run(arguments.out, arguments.overrides, arguments.resume, (DieAt(arguments.die_at),))
