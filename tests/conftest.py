"""Shared settings. Without a GPU, Triton kernels run in the interpreter on the CPU."""

import os

import pytest
import torch
from hypothesis import settings

# must precede the first import of a kernel
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# the same examples on every run, and no failure for a slow machine
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    # xdist runs one worker per core; more threads than that, of torch, of the interpreter's arrays
    # or of commands that tests start, wait for each other in loops
    if config.getoption("numprocesses", None):
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ.setdefault(name, "1")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def kernel_device() -> str:
    """Where kernels run: on the GPU, or in Triton's interpreter."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
