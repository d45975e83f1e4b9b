"""Tiles of matrices for the copy engine of Hopper GPUs, as kernels in Gluon take them."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# renamed between the versions of Triton we run on
copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


def tile_layout(rows: int, width: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How the copy engine leaves a tile in shared memory."""
    if dtype == torch.float32:
        # numbers of rows, in a line
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    kind = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([rows, width], kind)


@lru_cache(maxsize=1024)
def _fields(shape: tuple[int, int], tile: tuple[int, int], dtype: torch.dtype) -> dict[str, Any]:
    """What descriptors have in common that differ in their memory only, checked by Triton."""
    layout = tile_layout(*tile, dtype)
    nothing = torch.empty(0, dtype=dtype)
    return vars(TensorDescriptor(nothing, list(shape), [shape[1], 1], list(tile), layout))


def describe(x: Tensor, shape: tuple[int, int], tile: tuple[int, int]) -> TensorDescriptor:
    """The memory of ``x`` as a matrix, of which the copy engine takes a tile at a time."""
    assert x.data_ptr() % 16 == 0
    # past the other checks, which take as long as a launch
    described = object.__new__(TensorDescriptor)
    vars(described).update(_fields(shape, tile, x.dtype), base=x)
    return described
