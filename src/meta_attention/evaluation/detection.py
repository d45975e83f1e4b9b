"""Does a score tell two kinds of tokens apart? AUROC, with intervals over whole sequences.

AUROC is the chance that a positive scores higher than a negative, equals counting half: 1/2 for a
score that knows nothing, below it for one that points the other way. Tokens of a sequence are not
independent, so intervals come from drawing whole sequences anew (bootstrap), all scores of a
sequence together.

Every figure follows from two tables: for each pair of sequences, the pairs of a positive of the
first and a negative of the second, and how many of them the positive wins. To draw sequences anew
is to weigh rows and columns, so that a thousand draws cost two products of matrices.

Shapes: S sequences, T scores of each.
"""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from meta_attention.errors import ConfigError, DataError, ShapeError

NUM_RESAMPLES = 500
# of all sequences at as many ranks as are counted at a time
_MAX_COUNTS = 1 << 25


@dataclass(frozen=True, slots=True)
class Auroc:
    """A figure with the bounds of its 95% interval; None where a kind has no example."""

    value: float | None
    low: float | None
    high: float | None

    def to_dict(self) -> dict[str, float | None]:
        return asdict(self)


def auroc(scores: Tensor, is_positive: Tensor) -> float | None:
    """Chance that a positive scores higher than a negative; None if there are none of a kind.

    Args:
        scores: Any shape.
        is_positive: Boolean, of the same shape.
    """
    return measure_auroc(scores.reshape(1, -1), is_positive.reshape(1, -1), num_resamples=0).value


def measure_auroc(
    scores: Tensor,
    is_positive: Tensor,
    *,
    strata: Tensor | None = None,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Auroc:
    """AUROC over all scores, with an interval over sequences.

    Args:
        scores: ``[S, T]``.
        is_positive: Boolean ``[S, T]``.
        strata: Whole numbers ``[S, T]``: only scores of one stratum are compared. With deciles of
            another score as strata, what this one knows that the other does not.
        num_resamples: How many times sequences are drawn anew; 0 for no interval, and of a single
            sequence there is none.
        seed: Of these draws; equal seeds draw the same sequences for every score.
    """
    _check(scores, is_positive, strata)
    wins, pairs = _count_pairs(scores, is_positive, strata)
    total = pairs.sum().item()
    if total == 0:
        return Auroc(None, None, None)
    value = wins.sum().item() / total
    if not num_resamples or len(scores) < 2:
        return Auroc(value, None, None)
    weights = draw_sequences(len(scores), num_resamples, seed).to(wins)
    won, compared = ((weights @ table * weights).sum(dim=1) for table in (wins, pairs))
    # a draw may have none of a kind
    known = (won / compared)[compared > 0]
    if not len(known):
        return Auroc(value, None, None)
    low, high = known.quantile(known.new_tensor([0.025, 0.975])).tolist()
    return Auroc(value, low, high)


def draw_sequences(num_sequences: int, num_resamples: int, seed: int = 0) -> Tensor:
    """How often each sequence comes up when as many are drawn with replacement, float32 [R, S]."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(num_sequences, (num_resamples, num_sequences), generator=generator)
    counts = torch.zeros(num_resamples, num_sequences)
    return counts.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float32))


def mean_interval(
    values: Tensor, *, num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> tuple[float, float, float]:
    """Mean of ``[S, T]`` and the bounds of its 95% interval over sequences."""
    by_sequence = values.double().mean(dim=1)
    weights = draw_sequences(len(values), num_resamples, seed).to(by_sequence)
    means = weights @ by_sequence / len(values)
    low, high = means.quantile(means.new_tensor([0.025, 0.975])).tolist()
    return by_sequence.mean().item(), low, high


def quantile_classes(values: Tensor, num_classes: int) -> Tensor:
    """Class of each value, 0 for the lowest, int64; classes are equally large but for equals."""
    if num_classes < 1:
        raise ConfigError(f"num_classes must be >= 1, got {num_classes}")
    flat = values.flatten().float()
    ordered = flat.sort().values
    cuts = [len(flat) * k // num_classes for k in range(1, num_classes)]
    # values equal to a cut are above it
    return torch.bucketize(values.float(), ordered[cuts], right=True)


def _check(scores: Tensor, is_positive: Tensor, strata: Tensor | None) -> None:
    if scores.dim() != 2 or is_positive.shape != scores.shape:
        raise ShapeError(
            f"scores and is_positive must both be [S, T], got {list(scores.shape)} and "
            f"{list(is_positive.shape)}"
        )
    if strata is not None and strata.shape != scores.shape:
        raise ShapeError(
            f"strata must have the shape of scores, {list(scores.shape)}, got {list(strata.shape)}"
        )
    if scores.isnan().any():
        raise DataError("scores must be numbers, got NaN: it has no rank")


def _count_pairs(
    scores: Tensor, is_positive: Tensor, strata: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Pairs won by the positive, and all pairs, by sequence of either: float64 [S, S] each."""
    S = len(scores)
    row = torch.arange(S, device=scores.device).unsqueeze(1).expand_as(scores)
    # Apple GPUs have no float64
    wide = torch.float32 if scores.device.type == "mps" else torch.float64
    wins = torch.zeros(S, S, dtype=wide, device=scores.device)
    pairs = torch.zeros_like(wins)
    strata = torch.zeros_like(row) if strata is None else strata
    for stratum in strata.unique().tolist():
        inside = strata == stratum
        is_won, rows = is_positive[inside].bool(), row[inside]
        values, rank = scores[inside].unique(return_inverse=True)
        # sequences may have examples of one kind only
        of_positive, row_of_positive = rows[is_won].unique(return_inverse=True)
        of_negative, row_of_negative = rows[~is_won].unique(return_inverse=True)
        if not len(of_positive) or not len(of_negative):
            continue
        positives, negatives = rank[is_won], rank[~is_won]
        won = wins.new_zeros(len(of_positive), len(of_negative))
        below = wins.new_zeros(len(of_negative), 1)
        width = max(1, _MAX_COUNTS // S)
        for first in range(0, len(values), width):
            last = min(first + width, len(values))
            wanted = _count_ranks(positives, row_of_positive, first, last, len(of_positive))
            counts = _count_ranks(negatives, row_of_negative, first, last, len(of_negative))
            wanted, counts = wanted.to(wide), counts.to(wide)
            # negatives below each rank, and half of those at it
            won += wanted @ (below + counts.cumsum(dim=1) - counts / 2).T
            below += counts.sum(dim=1, keepdim=True)
        wins[of_positive.unsqueeze(1), of_negative] += won
        num_positive = torch.bincount(rows[is_won], minlength=S).to(wide)
        num_negative = torch.bincount(rows[~is_won], minlength=S).to(wide)
        pairs += num_positive.unsqueeze(1) * num_negative
    return wins, pairs


def _count_ranks(rank: Tensor, row: Tensor, first: int, last: int, num_rows: int) -> Tensor:
    """How many scores of each row have each rank from ``first`` to ``last - 1``."""
    is_inside = (rank >= first) & (rank < last)
    at = row[is_inside] * (last - first) + rank[is_inside] - first
    return torch.bincount(at, minlength=num_rows * (last - first)).view(num_rows, -1)
