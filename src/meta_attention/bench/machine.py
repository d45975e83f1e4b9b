"""Where and with what a result was measured."""

import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers

import meta_attention


def describe_machine(device: torch.device, *, commit: str | None = None) -> dict[str, Any]:
    """Hardware, versions, commit and date.

    Args:
        device: What is measured; a CPU is described by its kind and number of cores.
        commit: Of the source; default: as git has it, if the source is a checkout.
    """
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else platform.machine(),
        "cores": os.cpu_count(),
        "driver": _driver() if is_cuda else None,
        "cuda": torch.version.cuda if is_cuda else None,
        "cudnn": torch.backends.cudnn.version() if is_cuda else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": transformers.__version__,
        "meta_attention": meta_attention.__version__,
        "commit": _commit() if commit is None else commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _driver() -> str | None:
    lines = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return lines.splitlines()[0].strip() if lines else None


def _commit() -> str | None:
    root = Path(meta_attention.__file__).parents[2]
    # an installed package may lie in a checkout of something else
    if not (root / ".git").exists():
        return None
    return _output(["git", "-C", str(root), "describe", "--always", "--dirty"])


def _output(command: list[str]) -> str | None:
    """What a command prints; None if there is no such command, or it fails."""
    if shutil.which(command[0]) is None:
        return None
    result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return result.stdout.strip() or None if result.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
