"""Rotary positions in one pass; in PyTorch they take seven.

The gradient turns the other way round: the transposed rotation.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from meta_attention.ops.heads import last_contiguous
from meta_attention.ops.launch import apply, ceil_div, launch, next_power_of_2


@triton.jit
def rotate_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    T,
    stride_xb,
    stride_xt,
    stride_xh,
    stride_cb,
    H: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
    BACKWARDS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    b = token // T
    t = token % T
    p = tl.arange(0, BLOCK)
    in_half = p < HALF
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    used = (h < H)[:, None] & in_half[None, :]
    table = b * stride_cb + t * (2 * HALF) + p
    cos1 = tl.load(cos_ptr + table, mask=in_half, other=0.0).to(tl.float32)[None, :]
    cos2 = tl.load(cos_ptr + table + HALF, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin1 = tl.load(sin_ptr + table, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin2 = tl.load(sin_ptr + table + HALF, mask=in_half, other=0.0).to(tl.float32)[None, :]
    row = x_ptr + b * stride_xb + t * stride_xt + h.to(tl.int64)[:, None] * stride_xh + p[None, :]
    x1 = tl.load(row, mask=used, other=0.0).to(tl.float32)
    x2 = tl.load(row + HALF, mask=used, other=0.0).to(tl.float32)
    if BACKWARDS:
        out1 = x1 * cos1 + x2 * sin2
        out2 = x2 * cos2 - x1 * sin1
    else:
        out1 = x1 * cos1 - x2 * sin1
        out2 = x2 * cos2 + x1 * sin2
    out = out_ptr + (token * H + h[:, None]) * (2 * HALF) + p[None, :]
    tl.store(out, out1.to(out_ptr.dtype.element_ty), mask=used)
    tl.store(out + HALF, out2.to(out_ptr.dtype.element_ty), mask=used)


def _launch(x: Tensor, cos: Tensor, sin: Tensor, *, backwards: bool) -> Tensor:
    B, T, H, P = x.shape
    x = last_contiguous(x)
    out = torch.empty(B, T, H, P, dtype=x.dtype, device=x.device)
    block = max(next_power_of_2(P // 2), 1)
    block_h = min(next_power_of_2(H), max(2048 // block, 1))
    launch(
        rotate_kernel,
        (B * T, ceil_div(H, block_h), 1),
        (x, cos, sin, out),
        (T, *x.stride()[:3], 0 if cos.shape[0] == 1 else cos.stride(0)),
        {"H": H, "HALF": P // 2, "BLOCK_H": block_h, "BLOCK": block, "BACKWARDS": backwards},
        num_warps=4,
    )
    return out


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _launch(x, cos, sin, backwards=False)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        return _launch(d_out, *ctx.saved_tensors, backwards=True), None, None


@torch.compiler.disable
def rotate_triton(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return apply(Rotate, x, cos.contiguous(), sin.contiguous())
