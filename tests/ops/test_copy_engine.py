"""Descriptors for the copy engine."""

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_descriptor_is_the_one_triton_would_make(dtype):
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from meta_attention.ops.copy_engine import describe, tile_layout

    shape, tile = (64, 128), (1, 64)
    # the second is like one that is known
    for x in (torch.zeros(shape, dtype=dtype), torch.ones(shape, dtype=dtype)):
        ours = describe(x, shape, tile)
        theirs = TensorDescriptor(x, [64, 128], [128, 1], [1, 64], tile_layout(*tile, dtype))
        assert ours.base is x
        assert type(ours) is TensorDescriptor
        assert {**vars(ours), "base": None} == {**vars(theirs), "base": None}
    with pytest.raises(AssertionError):
        describe(x.view(-1)[1:], shape, tile)
