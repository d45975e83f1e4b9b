"""Readable PyTorch definition of the merge."""

from collections.abc import Sequence

import torch
from torch import Tensor


def route_merge_reference(weights: Tensor, rows: Sequence[Tensor], reads_all: bool) -> Tensor:
    # at least float32; stays float64 when the tests use it as an oracle
    compute = torch.promote_types(rows[0].dtype, torch.float32)
    merged = torch.zeros_like(rows[0], dtype=compute)
    for w, row in zip(weights.to(compute).unbind(dim=-1), rows, strict=True):
        w = w.unsqueeze(-1)  # [B, T, 1]
        row = row.to(compute)
        merged = merged + w * (row if reads_all else torch.where(w > 0, row, 0.0))
    return merged.to(rows[0].dtype)
