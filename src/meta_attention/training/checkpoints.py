"""Which checkpoint a run can go on from, and what happens when one cannot be written.

A checkpoint is Trainer's own folder. Trainer writes ``trainer_state.json`` last and removes older
checkpoints only after it, so a run that is killed at any moment leaves a complete one behind.
"""

import errno
import json
import re
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open

from meta_attention.config import MetaAttentionConfig
from meta_attention.errors import ConfigError, MetaAttentionError

# less than this left: what torch reports as a failed write is a full disk
_FULL_DISK = 1 << 20  # bytes


class TrainingError(MetaAttentionError, RuntimeError):
    """Something that stopped a training run; what it had saved is untouched."""


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of a run, complete or not, the newest first."""
    found = [path for path in folder.glob("checkpoint-*") if re.fullmatch(r"\d+", step_of(path))]
    return sorted(found, key=lambda path: -int(step_of(path)))


def step_of(checkpoint: Path) -> str:
    return checkpoint.name.removeprefix("checkpoint-")


def find_flaw(checkpoint: Path) -> str | None:
    """Why a checkpoint is unusable; None if it is complete.

    A write that was cut off leaves a file missing or short. Both formats show that without being
    read whole: safetensors by its header, PyTorch's by the directory at the end of a zip file.
    """
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text("utf-8"))
        for config in checkpoint.glob("config.json"):
            json.loads(config.read_text("utf-8"))
    except (OSError, ValueError) as error:
        return _first_line(error)
    if str(state.get("global_step")) != step_of(checkpoint):
        return f"trainer_state.json is of step {state.get('global_step')}"
    weights = sorted(checkpoint.glob("model*.safetensors"))
    # FSDP's own formats are one file each, or a folder with an index that is written last
    parts = ["optimizer", "scheduler", "rng_state"] + ([] if weights else ["pytorch_model"])
    for part in parts:
        files = [p for p in checkpoint.glob(f"{part}*") if not p.name.endswith(".json")]
        if not files:
            return f"it has no {part}"
        for path in files:
            is_whole = (path / ".metadata").is_file() if path.is_dir() else zipfile.is_zipfile(path)
            if not is_whole:
                return f"{path.name} is incomplete"
    for path in weights:
        try:
            with safe_open(path, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            return f"{path.name}: {_first_line(error)}"
    return None


def newest_checkpoint(folder: Path) -> tuple[Path | None, dict[Path, str]]:
    """The newest complete checkpoint of a run, and why each newer one is not."""
    flaws: dict[Path, str] = {}
    for checkpoint in list_checkpoints(folder):
        flaw = find_flaw(checkpoint)
        if flaw is None:
            return checkpoint, flaws
        flaws[checkpoint] = flaw
    return None, flaws


def set_aside(checkpoint: Path) -> Path:
    """Rename an incomplete checkpoint, so that nothing takes it for one."""
    target = checkpoint.with_name(f"incomplete-{checkpoint.name}")
    shutil.rmtree(target, ignore_errors=True)
    return checkpoint.rename(target)


def check_same_model(checkpoint: Path, config: MetaAttentionConfig) -> None:
    """Raise unless a checkpoint holds a model of this config, naming the field that differs.

    FSDP's sharded checkpoints have no config; they load into the same model or not at all.
    """
    if not (checkpoint / "config.json").is_file():
        return
    saved = MetaAttentionConfig.from_pretrained(checkpoint)
    for name in MetaAttentionConfig.__annotations__:
        ours, theirs = getattr(config, name), getattr(saved, name)
        # a schedule moves the threshold, and an estimate the prior; the settings of the run say how
        if ours != theirs and name not in ("uncertainty_threshold", "prior_strength"):
            raise ConfigError(
                f"{checkpoint} must hold the model of this run, but its {name} is {theirs!r} and "
                f"this run's is {ours!r}; start a new run in another folder"
            )


@contextmanager
def clear_write_errors(what: str, folder: Path, partial: Path | None = None) -> Iterator[None]:
    """Turn a failed write into one sentence that says what is left to go on from.

    Args:
        what: What is written, as the subject of the sentence.
        folder: Folder of the run.
        partial: Removed when it fails: half of a checkpoint helps nobody, least of all on a full
            disk.
    """
    try:
        yield
    # a full disk is an OSError to Python, and an error of their own to the two tensor formats
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, MetaAttentionError):
            raise
        reason = _first_line(error)
        is_full = getattr(error, "errno", None) == errno.ENOSPC
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if is_full or shutil.disk_usage(there).free < _FULL_DISK:
            reason = f"no space left on the disk of {folder}"
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
        kept, _ = newest_checkpoint(folder)
        rest = "no checkpoint had been saved before; make room or choose another folder"
        if kept is not None:
            rest = f"the last good checkpoint is {kept}; make room and go on with --resume"
        raise TrainingError(f"{what} could not be written: {reason}; {rest}") from error


def _first_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
