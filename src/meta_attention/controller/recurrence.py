"""How long ago a token stood in the text before: what a hidden state cannot tell a controller.

A controller chooses before attention runs. From the token alone it may know that names are looked
up, but not whether there is anything to find: that a name stands far back, and not within a window.
When it was last seen, alone and together with the tokens before it, can be told from the ids, for
the price of a sort; see ``docs/results/text.md`` for what that is worth.

A distance counts tokens of the row, or of the document packed into it, padding left out; 0 means
never before. It depends on nothing that follows, so decoding can go on counting.

Shapes: B batch, T sequence, N lengths of runs: of the token alone, of two tokens, and so on.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from transformers import initialization as init

from meta_attention.config import MetaAttentionConfig
from meta_attention.precision import KeepFloat32

# distances from the last of these on are one to a controller
NUM_POWERS = 31


def last_seen(
    ids: Tensor,
    num_lengths: int,
    is_token: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> Tensor:
    """Distances ``[B, T, N]`` to where the 1, 2, ... N tokens that end here last ended before.

    Args:
        ids: Tokens ``[B, T]``.
        num_lengths: N.
        is_token: ``[B, T]``, False for padding, which has and is no distance. None: there is none.
        document_ids: Numbers ``[B, T]``, every document of a row one of its own: nothing is found
            in another. None: a row is one.
    """
    if is_token is None:
        return _last_seen(ids, num_lengths, document_ids)
    # tokens to the front of their rows, so that padding lies between none of them
    order = (~is_token).to(torch.uint8).argsort(dim=1, stable=True)
    packed_documents = None if document_ids is None else document_ids.gather(1, order)
    packed = _last_seen(ids.gather(1, order), num_lengths, packed_documents)
    index = order.unsqueeze(-1).expand_as(packed)
    distances = torch.empty_like(packed).scatter_(1, index, packed)
    return distances.masked_fill(~is_token.unsqueeze(-1), 0)


def _last_seen(ids: Tensor, num_lengths: int, document_ids: Tensor | None) -> Tensor:
    T = ids.shape[1]
    alone = ids.long()
    if document_ids is not None:
        # ranks of ids, which are fewer than the row has tokens, and above them the document
        alone = document_ids.long() * T + _rank(alone)[0]
    alone, distance = _rank(alone)
    runs, distances = alone, [distance]
    for _ in range(num_lengths - 1):
        # what ends one token earlier, and this token; no run of the row's first is like another
        before = F.pad(runs[:, :-1], (1, 0), value=T)
        runs, distance = _rank(before * (T + 1) + alone)
        distances.append(distance)
    return torch.stack(distances, dim=-1)


def _rank(keys: Tensor) -> tuple[Tensor, Tensor]:
    """A number below T for every different key of a row, and how far back the same one last was."""
    ordered, index = keys.sort(dim=1, stable=True)
    is_again = F.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
    ranks = torch.cumsum(~is_again, dim=1) - 1
    apart = F.pad(index[:, 1:] - index[:, :-1], (1, 0)) * is_again
    rank, distance = (torch.empty_like(x).scatter_(1, index, x) for x in (ranks, apart))
    return rank, distance


def newest_last_seen(tokens: Tensor, position: Tensor, num_lengths: int) -> Tensor:
    """As :func:`last_seen` of the newest token alone: ``[B, 1, N]``.

    Nothing of it is read by the host, and its shapes are those of ``tokens``: a step that asks for
    it can be captured.

    Args:
        tokens: All tokens ``[B, S]``, the newest included, -1 for padding before them; what lies
            after the newest is not looked at.
        position: Where the newest stands ``[1]``.
        num_lengths: N.
    """
    S = tokens.shape[1]
    at = torch.arange(S, device=tokens.device)
    is_same = (at < position).expand_as(tokens)
    distances = []
    for back in range(num_lengths):
        # of the run that ends at each place, the token so far back; none is before the first
        newest = tokens.index_select(1, (position - back).clamp(min=0))  # [B, 1]
        there = F.pad(tokens, (back, 0), value=-1)[:, :S]
        is_same = is_same & (there == newest) & (newest >= 0)
        last = torch.where(is_same, at, -1).amax(dim=1, keepdim=True)
        distances.append(torch.where(last >= 0, position - last, 0))
    return torch.stack(distances, dim=-1)


class RecurrenceEmbedding(KeepFloat32):
    """What distances add to a hidden state, for a controller to see: learnt, nothing at first.

    Distances between powers of two are the same to it. How many there are does not depend on how
    long texts may be: a model that was trained on short ones can be loaded for longer ones.

    Args:
        config: Model configuration, with a ``recurrence``.
    """

    bounds: Tensor  # [K - 1]

    def __init__(self, config: MetaAttentionConfig) -> None:
        super().__init__()
        assert config.recurrence is not None
        self.register_buffer("bounds", _powers_of_two(), persistent=False)
        shape = (config.recurrence, len(self.bounds) + 1, config.hidden_size)
        self.weight = Parameter(torch.empty(shape))  # [N, K, D]
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        # the buffer is not saved; weights that were loaded are left alone
        self.bounds.copy_(_powers_of_two())
        init.zeros_(self.weight)

    def forward(self, distances: Tensor) -> Tensor:
        """``[B, T, D]`` of distances ``[B, T, N]``."""
        bucket = torch.bucketize(distances.contiguous(), self.bounds, right=True)  # 0: never
        # one length at a time: all together are N times as large as the tokens
        hint = F.embedding(bucket[..., 0], self.weight[0])
        for index, weight in zip(bucket.unbind(dim=-1)[1:], self.weight[1:], strict=True):
            hint = hint + F.embedding(index, weight)
        return hint


def _powers_of_two() -> Tensor:
    return 2 ** torch.arange(NUM_POWERS)
