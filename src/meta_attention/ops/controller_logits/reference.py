"""The network in PyTorch, and what it sees of a token."""

import torch
import torch.nn.functional as F
from torch import Tensor

# norm and position, beside the hidden state itself
NUM_EXTRA_FEATURES = 2


def token_features(x: Tensor, position_ids: Tensor, *, max_positions: int) -> Tensor:
    """Hidden state, its norm / sqrt(D), and its absolute position: ``[B, T, D + 2]``.

    The position is divided by the longest length the model is made for, never by the length at
    hand: a token has the same features in training, prefill and decode.

    Args:
        x: Normalised hidden states ``[B, T, D]``.
        position_ids: Absolute positions ``[B, T]``.
        max_positions: ``max_position_embeddings`` of the model.
    """
    # at least float32; stays float64 when the tests use it as an oracle
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    salience = torch.linalg.vector_norm(x, dim=-1, keepdim=True) / x.shape[-1] ** 0.5
    position = (position_ids.to(x.dtype) / max_positions).unsqueeze(-1)
    return torch.cat([x, salience, position], dim=-1)


def controller_logits_reference(
    x: Tensor,
    position_ids: Tensor,
    weight1: Tensor,
    bias1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    *,
    max_positions: int,
) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        features = token_features(x, position_ids, max_positions=max_positions)
        return F.linear(F.gelu(F.linear(features, weight1, bias1)), weight2, bias2)
