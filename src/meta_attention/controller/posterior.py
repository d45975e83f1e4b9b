"""The routing posterior: what the controller believes about each token.

For every token the controller returns a Dirichlet over the E experts. Everything later stages
need is a closed form of its concentration: the mean mixes experts, the uncertainty signals say
whether one expert is enough, and the KL to the prior enters the loss.

Values are float32 whatever the model's dtype. The closed forms are evaluated in float64 inside,
because they are differences of large terms: in float32 the entropy at concentration 1e6 is off by
1.7 nats, and 7 in 10,000 samples at [1e-3, 1e-3, 1e6] have a gradient of NaN.

Shapes: B batch, T sequence, E experts (the paper's K; here K always means keys). Where every
key-value head of a token has a route of its own, ``[B, T]`` stands for ``[B, T, G]`` throughout: a
Dirichlet for each of the G heads.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.distributions import Dirichlet

from meta_attention.errors import ShapeError


class Posterior(Protocol):
    """What the later stages ask of a controller's answer."""

    @property
    def mean(self) -> Tensor:
        """Expected routing weights [B, T, E]; each row sums to one."""

    @property
    def mean_entropy(self) -> Tensor:
        """Entropy of the expected weights [B, T] in nats, between 0 and ln E."""

    @property
    def margin(self) -> Tensor:
        """Largest expected weight minus the second largest [B, T]; 1 is certain."""

    learns_by_exploring: ClassVar[bool]
    """Whether only routes that try any expert teach it something."""

    @property
    def lesson(self) -> Tensor:
        """What a hard route's gradient goes to [B, T, E]: the expected weights, or what else."""

    def sample(self) -> Tensor:
        """Routing weights [B, T, E], differentiable in the controller's parameters."""

    def kl_to(self, prior_concentration: Tensor) -> Tensor:
        """KL to a Dirichlet prior per token [B, T] in nats."""


@dataclass(frozen=True, slots=True)
class RoutingPosterior:
    """Dirichlet posterior over experts, one per token or one per key-value head of a token."""

    concentration: Tensor  # [B, T, E] or [B, T, G, E], float32, > 0
    learns_by_exploring: ClassVar[bool] = False

    @property
    def mean(self) -> Tensor:
        """Expected routing weights [B, T, E]; each row sums to one."""
        return self.concentration / self.concentration.sum(dim=-1, keepdim=True)

    @property
    def entropy(self) -> Tensor:
        """The paper's U: differential entropy [B, T] in nats. Unbounded below.

        With a concentration near 0 it is very negative however little the controller knows, so
        low entropy is not low uncertainty; ``mean_entropy``, ``margin`` and
        ``mutual_information`` have no such blind spot.
        """
        a = _wide(self.concentration)
        total = a.sum(dim=-1)
        num_experts = a.shape[-1]
        entropy = (
            _log_beta(a)
            + (total - num_experts) * torch.digamma(total)
            - ((a - 1.0) * torch.digamma(a)).sum(dim=-1)
        )
        return entropy.to(self.concentration.dtype)

    @property
    def mean_entropy(self) -> Tensor:
        """Entropy of the expected weights [B, T] in nats, between 0 and ln E."""
        return _entropy_of_weights(self.mean)

    @property
    def margin(self) -> Tensor:
        """Largest expected weight minus the second largest [B, T]; 1 is certain."""
        return _margin_of_weights(self.mean)

    @property
    def mutual_information(self) -> Tensor:
        """I(expert; weights) [B, T] in nats: the part of ``mean_entropy`` more evidence removes.

        Zero when the weights are known exactly, however evenly they are spread.
        """
        a = _wide(self.concentration)
        total = a.sum(dim=-1, keepdim=True)
        mean = a / total
        # E[H(weights)] under the Dirichlet
        expected = -(mean * (torch.digamma(a + 1.0) - torch.digamma(total + 1.0))).sum(dim=-1)
        information = _entropy_of_weights(mean) - expected
        return information.clamp(min=0.0).to(self.concentration.dtype)

    @property
    def lesson(self) -> Tensor:
        """The expected weights."""
        return self.mean

    @property
    def vacuity(self) -> Tensor:
        """Number of experts over total concentration [B, T]: high where evidence is scarce."""
        return self.concentration.shape[-1] / self.concentration.sum(dim=-1)

    def sample(self) -> Tensor:
        """Reparameterised routing weights [B, T, E], differentiable in the concentration."""
        draws = Dirichlet(_wide(self.concentration), validate_args=False).rsample()
        return draws.to(self.concentration.dtype)

    def kl_to(self, prior_concentration: Tensor) -> Tensor:
        """KL[posterior || prior] per token [B, T] in nats, for a prior of shape [E]."""
        if prior_concentration.shape != self.concentration.shape[-1:]:
            raise ShapeError(
                f"prior_concentration must be [E] = [{self.concentration.shape[-1]}] to match "
                f"concentration {list(self.concentration.shape)}, "
                f"got {list(prior_concentration.shape)}"
            )
        a, b = _wide(self.concentration), _wide(prior_concentration)
        total = a.sum(dim=-1, keepdim=True)
        kl = (
            _log_beta(b)
            - _log_beta(a)
            + ((a - b) * (torch.digamma(a) - torch.digamma(total))).sum(dim=-1)
        )
        return kl.to(self.concentration.dtype)


@dataclass(frozen=True, slots=True)
class PointPosterior:
    """All belief on one set of weights: what a controller without a prior returns.

    It has no evidence to count, so the Dirichlet's own signals (entropy, mutual information,
    vacuity) do not exist here, and the KL term is zero.
    """

    mean: Tensor  # [B, T, E] or [B, T, G, E], float32, rows sum to one
    learns_by_exploring: ClassVar[bool] = False

    @property
    def mean_entropy(self) -> Tensor:
        """Entropy of the weights [B, T] in nats, between 0 and ln E."""
        return _entropy_of_weights(self.mean)

    @property
    def margin(self) -> Tensor:
        """Largest weight minus the second largest [B, T]; 1 is certain."""
        return _margin_of_weights(self.mean)

    @property
    def lesson(self) -> Tensor:
        """The weights."""
        return self.mean

    def sample(self) -> Tensor:
        """The weights themselves: a point has no spread to sample from."""
        return self.mean

    def kl_to(self, prior_concentration: Tensor) -> Tensor:
        """Zero [B, T]: there is no prior to leave."""
        return self.mean.new_zeros(self.mean.shape[:-1])


@dataclass(frozen=True, slots=True)
class ValuePosterior(PointPosterior):
    """Weights that follow from what each expert is worth to a token.

    Of the true worth of each it believes: normally distributed around ``value``, with a variance
    of 1; before a token is seen, around 0. The KL between the two is half the square of ``value``.
    Beside a loss that pays ``-value * gain`` for what an expert would have gained, which is what a
    route's gradient does, minimising it is a regression: ``value`` becomes the expected gain.
    """

    value: Tensor  # [B, T, E] or [B, T, G, E], nats, float32; rows sum to zero
    learns_by_exploring: ClassVar[bool] = True
    num_shares: int = 1
    """The routes that the mean KL of a model is taken over: heads times routed layers."""

    @property
    def lesson(self) -> Tensor:
        """The values, as a share: each of them weighs as much in the loss as its part of the KL."""
        return self.value / self.num_shares

    def kl_to(self, prior_concentration: Tensor) -> Tensor:
        """Of the values to worth nothing [B, T] in nats; the Dirichlet prior has no part in it."""
        return 0.5 * self.value.square().sum(dim=-1)


def _wide(x: Tensor) -> Tensor:
    # Apple GPUs have no float64
    return x if x.device.type == "mps" else x.double()


def _log_beta(concentration: Tensor) -> Tensor:
    total = concentration.sum(dim=-1)
    return torch.lgamma(concentration).sum(dim=-1) - torch.lgamma(total)


def _entropy_of_weights(weights: Tensor) -> Tensor:
    # a softmax weight can underflow to 0, where the entropy is finite but its gradient is not
    tiny = torch.finfo(weights.dtype).tiny
    return torch.special.entr(weights.clamp(min=tiny)).sum(dim=-1)


def _margin_of_weights(weights: Tensor) -> Tensor:
    if weights.shape[-1] == 1:
        return weights.squeeze(-1)
    top = weights.topk(2, dim=-1).values
    return top[..., 0] - top[..., 1]
