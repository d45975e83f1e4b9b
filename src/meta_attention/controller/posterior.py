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

    def lesson_of(self, taken: Tensor) -> Tensor:
        """What a hard route's gradient goes to [B, T, E]: the expected weights, or what else.

        ``taken`` [B, T] is the expert of the route.
        """

    def sample(self) -> Tensor:
        """Routing weights [B, T, E], differentiable in the controller's parameters."""

    def kl_to(self, prior_concentration: Tensor, taken: Tensor | None = None) -> Tensor:
        """KL to a Dirichlet prior per token [B, T] in nats.

        With the expert ``taken`` [B, T], of what a route on it can teach, where that is less.
        """


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

    def lesson_of(self, taken: Tensor) -> Tensor:
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

    def kl_to(self, prior_concentration: Tensor, taken: Tensor | None = None) -> Tensor:
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

    def lesson_of(self, taken: Tensor) -> Tensor:
        """The weights."""
        return self.mean

    def sample(self) -> Tensor:
        """The weights themselves: a point has no spread to sample from."""
        return self.mean

    def kl_to(self, prior_concentration: Tensor, taken: Tensor | None = None) -> Tensor:
        """Zero [B, T]: there is no prior to leave."""
        return self.mean.new_zeros(self.mean.shape[:-1])


@dataclass(frozen=True, slots=True)
class ValuePosterior(PointPosterior):
    """Weights that follow from what each expert is worth to a token, next to the dearest.

    What an expert gains on the dearest is believed to be distributed around ``value``, by an
    exponential family whose natural parameter is ``score``, 0 where nothing is known::

        scale None    normal            value = score                 variance 1
        scale s       Skellam           value = s * sinh(score)       variance sqrt(s^2 + value^2)

    Minus the log-likelihood of a gain is ``normaliser(score) - score * gain``. A route's gradient
    is ``-gain``, so beside the ``normaliser`` it makes a regression: ``value`` becomes the expected
    gain. What is normal has the same error everywhere; with a scale, values that are small are told
    apart more finely, and a price is decided on by small ones.

    A gain is read from the gradient at the expert that a route has taken, and is one of first
    order. Between that one and the dearest it errs to one side or to the other, and routes that
    try both have the mean; of a third it would err to one side alone, and teaches nothing.
    """

    score: Tensor  # [B, T, E] or [B, T, G, E], float32; 0 for the dearest
    learns_by_exploring: ClassVar[bool] = True
    dearest: int = 0
    scale: float | None = None  # nats
    num_shares: int = 1
    """The routes that the mean KL of a model is taken over: heads times routed layers."""

    @property
    def value(self) -> Tensor:
        """What experts are worth [B, T, E] in nats, next to the dearest."""
        return value_of(self.score, self.scale)

    def lesson_of(self, taken: Tensor) -> Tensor:
        """The scores, as a share: each of them weighs as much in the loss as its part of the KL."""
        score = self.score * self._is_taught(taken)
        # what an expert gains, the dearest loses
        is_dearest = torch.arange(score.shape[-1], device=score.device) == self.dearest
        return (score - score.sum(dim=-1, keepdim=True) * is_dearest) / self.num_shares

    def kl_to(self, prior_concentration: Tensor, taken: Tensor | None = None) -> Tensor:
        """The normalisers [B, T] in nats: of normal gains, the KL of these to worth nothing.

        The Dirichlet prior has no part in it.
        """
        if self.scale is None:
            normaliser = 0.5 * self.score.square()
        else:
            # cosh(score) - 1, also where that is small
            normaliser = 2.0 * self.scale * (0.5 * self.score).sinh().square()
        if taken is not None:
            normaliser = normaliser * self._is_taught(taken)
        return normaliser.sum(dim=-1)

    def _is_taught(self, taken: Tensor) -> Tensor:
        """Of which experts a route teaches [B, T, E]: of its own, or of all if on the dearest."""
        taken = taken.unsqueeze(-1)
        experts = torch.arange(self.score.shape[-1], device=taken.device)
        return (taken == experts) | (taken == self.dearest)


def value_of(score: Tensor, scale: float | None) -> Tensor:
    """Nats, from scores of the same shape; see :class:`ValuePosterior`."""
    return score if scale is None else scale * score.sinh()


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
