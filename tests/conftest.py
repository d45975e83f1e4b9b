"""Shared settings. Without a GPU, Triton kernels run in the interpreter on the CPU."""

import os

import pytest
import torch
from hypothesis import settings

# must precede the first import of a kernel
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# xdist runs one worker per core; more threads than that only wait for each other
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# the same examples on every run, and no failure for a slow machine
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("ci")


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
