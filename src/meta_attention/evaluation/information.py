"""How much one thing says of another, in nats, from counts of both.

Of two things with few values and many examples, :func:`mutual_information` is what it says. Where
one has thousands of values, such as the identity of a token, many are seen once or twice, and
counts seem to explain what they only remember: :func:`heldout_information` counts on one half of
the examples and is judged on the other.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from meta_attention.errors import ShapeError


@dataclass(frozen=True, slots=True)
class HeldoutInformation:
    """What a cause says of an effect on examples that were not counted."""

    information: float
    """Nats by which knowing the cause predicts the effect better; below 0 if it misleads."""
    entropy: float
    """Nats it takes to predict the effect by its shares alone."""

    @property
    def share(self) -> float:
        """Part of the effect that is explained, at most 1; 0 where there is nothing to explain."""
        return self.information / self.entropy if self.entropy > 0.0 else 0.0


def entropy(counts: Tensor) -> Tensor:
    """Entropy in nats of the distribution that counts ``[..., K]`` have, ``[...]``."""
    shares = counts / counts.sum(dim=-1, keepdim=True).clamp(min=1.0)
    return torch.special.entr(shares).sum(dim=-1)


def count_both(cause: Tensor, effect: Tensor) -> Tensor:
    """How often each pair of values occurs: float64 ``[causes, effects]``.

    Args:
        cause: Whole numbers from 0, any shape.
        effect: The same.
    """
    if cause.shape != effect.shape:
        raise ShapeError(
            f"cause and effect must have one shape, got {list(cause.shape)} and "
            f"{list(effect.shape)}"
        )
    if not cause.numel():
        raise ShapeError("cause and effect must have an example, got none")
    cause, effect = cause.flatten().long(), effect.flatten().long()
    num_causes, num_effects = int(cause.max()) + 1, int(effect.max()) + 1
    pairs = torch.bincount(cause * num_effects + effect, minlength=num_causes * num_effects)
    # on the CPU: some devices have no float64, and tables are small
    return pairs.view(num_causes, num_effects).cpu().double()


def mutual_information(cause: Tensor, effect: Tensor) -> float:
    """I(cause; effect) in nats; arguments as :func:`count_both`."""
    counts = count_both(cause, effect)
    apart = entropy(counts.sum(dim=0)) + entropy(counts.sum(dim=1))
    return max(0.0, (apart - entropy(counts.flatten())).item())


def heldout_information(
    cause: Tensor, effect: Tensor, is_first: Tensor, *, smoothing: float = 1.0
) -> HeldoutInformation:
    """I(cause; effect) judged on the half that was not counted; each half has its turn.

    Args:
        cause: Whole numbers from 0, any shape.
        effect: The same.
        is_first: Boolean, of the same shape: the half. Tokens of a sequence belong together.
        smoothing: Examples of the overall shares that are added to those of every cause.
    """
    if is_first.shape != cause.shape:
        raise ShapeError(
            f"is_first must have the shape of cause, {list(cause.shape)}, got "
            f"{list(is_first.shape)}"
        )
    num_causes, num_effects = int(cause.max()) + 1, int(effect.max()) + 1
    by_half = count_both(is_first.long() * num_causes + cause, effect)
    table = by_half.new_zeros(2 * num_causes, num_effects)
    table[: len(by_half)] = by_half
    gained = needed = 0.0
    for seen, judged in ((0, 1), (1, 0)):
        counts, others = table.view(2, num_causes, num_effects)[[seen, judged]]
        overall = counts.sum(dim=0) + 0.5
        overall = overall / overall.sum()
        smoothed = counts + smoothing * overall
        by_cause = smoothed / smoothed.sum(dim=1, keepdim=True)
        plain = -(others.sum(dim=0) * overall.log()).sum().item()
        needed += plain
        gained += plain + (others * by_cause.log()).sum().item()
    total = cause.numel()
    return HeldoutInformation(gained / total, needed / total)
