"""Rotary positions as Transformers' Llama applies them."""

import torch
from torch import Tensor


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)  # [B, T, 1, P]
    first, second = x.chunk(2, dim=-1)
    rotated = (x * cos) + (torch.cat((-second, first), dim=-1) * sin)
    return rotated.to(x.dtype)
