"""Rotary positions: the two halves of a head turned against each other.

out[:, :P/2] = x1 cos1 - x2 sin1
out[:, P/2:] = x2 cos2 + x1 sin2
"""

from torch import Tensor

from meta_attention.config import Impl
from meta_attention.errors import ShapeError
from meta_attention.ops.backend import choose_impl
from meta_attention.ops.rotary.reference import rotate_reference

__all__ = ["rotate"]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, impl: Impl = "auto") -> Tensor:
    """Rotate heads by their positions.

    Args:
        x: ``[B, T, H, P]``.
        cos: ``[B, T, P]`` or ``[1, T, P]``, as Transformers' rotary embeddings give it.
        sin: Likewise. Neither has a gradient.
        impl: ``"auto"``, ``"reference"`` or ``"triton"``.
    """
    B, T, _, P = x.shape
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape not in ((B, T, P), (1, T, P)) or table.shape != cos.shape:
            raise ShapeError(
                f"{name} must be [B, T, P] = [{B}, {T}, {P}] to match x {list(x.shape)}, "
                f"got {list(table.shape)}"
            )
    if choose_impl("rotate", impl, x, compiles=True) == "triton":
        from meta_attention.ops.rotary.kernel import rotate_triton

        return rotate_triton(x, cos, sin)
    return rotate_reference(x, cos, sin)
