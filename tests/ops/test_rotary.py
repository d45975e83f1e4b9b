"""Rotary positions are Transformers', in one pass, gradients included."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from meta_attention.errors import ShapeError
from meta_attention.ops.rotary import rotate
from meta_attention.testing import assert_within_error_budget


def make_inputs(B=2, T=5, H=3, P=8, shared=False, dtype=torch.float64):
    x = torch.randn(B, T, H, P, dtype=dtype)
    angle = torch.randn(1 if shared else B, T, P // 2, dtype=dtype).repeat(1, 1, 2)
    return x, angle.cos() * 1.3, angle.sin() * 1.3  # some embeddings scale both


def run(function, x, cos, sin):
    x = x.clone().requires_grad_()
    out = function(x, cos, sin)
    upstream = torch.linspace(-1, 1, out.numel(), device=x.device).view_as(out).to(out.dtype)
    return {"out": out.detach(), "d_x": torch.autograd.grad(out, x, upstream)[0]}


def llama(x, cos, sin):
    return apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)[0]


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_reference_is_that_of_transformers(shared):
    inputs = make_inputs(shared=shared)
    ours, theirs = run(rotate, *inputs), run(llama, *inputs)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name])


@pytest.mark.parametrize(
    "shape",
    [{}, {"T": 1}, {"H": 1, "P": 2}, {"H": 5, "P": 80}, {"H": 40, "P": 256}, {"shared": True}],
    ids=str,
)
def test_kernel_is_the_reference_gradients_included(shape, kernel_device):
    inputs = make_inputs(**shape)
    exact, plain = run(llama, *inputs), run(llama, *(x.float() for x in inputs))
    ours = run(lambda *x: rotate(*x, impl="triton"), *(x.float().to(kernel_device) for x in inputs))
    for name, actual in ours.items():
        assert_within_error_budget(name, actual.cpu(), exact[name], plain[name])


def test_kernel_takes_heads_that_lie_apart(kernel_device):
    x, cos, sin = (y.float().to(kernel_device) for y in make_inputs(P=16))
    apart = torch.cat([x, x], dim=-1).transpose(1, 2).contiguous().transpose(1, 2)[..., :16]
    assert torch.equal(rotate(apart, cos, sin, impl="triton"), rotate(x, cos, sin, impl="triton"))


def test_wrong_tables_are_named():
    x, cos, sin = make_inputs()
    with pytest.raises(ShapeError, match=r"sin must be \[B, T, P\] = \[2, 5, 8\]"):
        rotate(x, cos, sin[:, :4])
    with pytest.raises(ShapeError, match="sin must be"):
        rotate(x, cos, sin[:1])
