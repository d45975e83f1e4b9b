"""Which implementation runs: the one asked for, or none."""

import pytest
import torch

from meta_attention.errors import BackendUnavailableError, ConfigError
from meta_attention.ops.backend import choose_impl
from meta_attention.ops.rotary import rotate


def test_auto_is_the_reference_on_a_cpu():
    assert choose_impl("op", "auto", torch.zeros(1)) == "reference"


def test_a_kernel_asked_for_runs_or_raises(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_impl("op", "triton", torch.zeros(1)) == "triton"
    with pytest.raises(BackendUnavailableError, match=r"got torch\.float64"):
        choose_impl("op", "triton", torch.zeros(1, dtype=torch.float64))
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(BackendUnavailableError, match="needs CUDA tensors, got cpu"):
        choose_impl("op", "triton", torch.zeros(1))
    monkeypatch.setattr("meta_attention.ops.backend.has_triton", lambda: False)
    with pytest.raises(BackendUnavailableError, match="needs the package triton"):
        choose_impl("op", "triton", torch.zeros(1))


def test_an_unknown_name_lists_the_known():
    with pytest.raises(ConfigError, match="auto, reference, triton, got 'cuda'"):
        choose_impl("op", "cuda", torch.zeros(1))


@pytest.mark.gpu
def test_auto_is_the_kernel_on_a_gpu_and_the_reference_for_the_compiler():
    x = torch.zeros(1, device="cuda")
    assert choose_impl("op", "auto", x) == "triton"
    assert choose_impl("op", "auto", x.double()) == "reference"
    seen = []

    def compiled(y):
        seen.append(choose_impl("op", "auto", y, compiles=True))
        return y + 1

    torch.compile(compiled, backend="eager")(x)
    assert seen == ["reference"]


@pytest.mark.gpu
def test_kernels_asked_for_by_name_run_outside_of_graphs():
    x = torch.randn(1, 4, 2, 8, device="cuda")
    table = torch.randn(1, 4, 8, device="cuda")

    def turn(y):
        return rotate(y * 2, table, table, impl="triton") + 1

    torch.testing.assert_close(torch.compile(turn, backend="eager")(x), turn(x))
