"""What a model's routing does, in figures with one meaning each.

Pure functions of routing weights: the training logs and the evaluation say the same thing by the
same name. A :class:`RoutingTally` adds up batches and is reduced to a :class:`RoutingSummary` once.

Where every key-value head of a token has a route of its own, a mean over tokens is one over all
their heads. Adaptivity is the mean of the heads' own: heads that differ, but treat every token
alike, do not add to it.

Shapes: B batch, T sequence, E experts of a layer, G key-value heads that have routes of their own.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from meta_attention.adapt.adaptation import Record
from meta_attention.adapt.router import Router, collect_routing
from meta_attention.config import RoutingName
from meta_attention.controller import RoutingPosterior
from meta_attention.errors import ConfigError, ShapeError
from meta_attention.layers import BayesianMetaAttentionLayer

RoutedLayer = BayesianMetaAttentionLayer | Router
"""Of our own models, or what an adapted model has in its attention modules."""

# an expert collapse: a layer that sends more than this share of its tokens to one expert
EXPERT_COLLAPSE = 0.95
# a prior collapse: a layer whose mean KL or adaptivity is below this, in nats; both of its tokens
# that enter
PRIOR_COLLAPSE = 0.01


@dataclass(frozen=True, slots=True)
class LayerRouting:
    """How one layer routes. A layer of one expert is static: there is nothing to measure."""

    experts: tuple[str, ...]
    share: dict[str, float]
    """Mean weight of each expert over tokens; sums to one, or to the share that enters a block
    which tokens may pass by."""
    top_share: dict[str, float]
    """Share of the tokens whose largest weight each expert has; sums to as much."""
    adaptivity: float | None
    """I(token; route) in nats: H(mean weights) - mean H(weights). None in a static layer.

    Of the tokens that enter, where others pass the block by. Where key-value heads have routes of
    their own, the mean over these."""
    adaptivity_by_expert: dict[str, float] | None
    """Each expert's part of ``adaptivity``, at least 0; they sum to it."""
    routing_entropy: float | None
    """Mean over tokens that enter of H(weights) / ln E, in percent. None in a static layer."""
    projected_cost: float
    """Mean over tokens of the sum over experts of weight * cost."""
    kl: float | None
    """Mean KL to the prior in nats, where there is one.

    Over all tokens, as in the objective: those that pass a block by have a KL of 0."""

    @property
    def is_static(self) -> bool:
        return len(self.experts) == 1

    @property
    def has_expert_collapse(self) -> bool:
        """More than 95% of the tokens that enter go to one expert; False if none enters."""
        return not self.is_static and max(self.top_share.values()) > EXPERT_COLLAPSE * self.entered

    @property
    def entered(self) -> float:
        """Share of the tokens that enter the block; 1 where none may pass it by."""
        return _entered(self.share.values())

    @property
    def has_prior_collapse(self) -> bool:
        """Mean KL or adaptivity below 0.01 nats: tokens that enter are not told apart.

        False if none enters: there is nobody to tell apart.
        """
        if self.adaptivity is None or self.entered == 0.0:
            return False
        # tokens that pass by add nothing to the KL, and must not make it look small
        return self.adaptivity < PRIOR_COLLAPSE or (
            self.kl is not None and self.kl / self.entered < PRIOR_COLLAPSE
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "experts": list(self.experts),
            "is_static": self.is_static,
            "expert_collapse": self.has_expert_collapse,
            "prior_collapse": self.has_prior_collapse,
        }


@dataclass(frozen=True, slots=True)
class RoutingSummary:
    """How a model routes: its layers, and their means."""

    layers: list[LayerRouting]
    kl: float | None
    """Mean KL over routed layers and tokens, nats."""
    num_tokens: int

    @property
    def projected_cost(self) -> float:
        """Mean over all layers, static ones included."""
        return sum(layer.projected_cost for layer in self.layers) / len(self.layers)

    @property
    def routed_cost(self) -> float | None:
        """Mean over routed layers; None if all are static.

        With hard routes, the share of full attention's cost that is executed in these layers.
        """
        return mean_of_known([layer.projected_cost for layer in self.layers if not layer.is_static])

    @property
    def adaptivity(self) -> float | None:
        """Mean over routed layers, nats; None if all are static."""
        return mean_of_known([layer.adaptivity for layer in self.layers])

    @property
    def routing_entropy(self) -> float | None:
        """Mean over routed layers, percent; None if all are static."""
        return mean_of_known([layer.routing_entropy for layer in self.layers])

    @property
    def collapsed_layers(self) -> dict[str, list[int]]:
        """Indices of the layers with an expert collapse and with a prior collapse."""
        return {
            "expert": [i for i, layer in enumerate(self.layers) if layer.has_expert_collapse],
            "prior": [i for i, layer in enumerate(self.layers) if layer.has_prior_collapse],
        }

    def to_dict(self) -> dict[str, Any]:
        return {
            "num_tokens": self.num_tokens,
            "kl": self.kl,
            "projected_cost": self.projected_cost,
            "routed_cost": self.routed_cost,
            "adaptivity": self.adaptivity,
            "routing_entropy": self.routing_entropy,
            "collapsed_layers": self.collapsed_layers,
            "layers": [layer.to_dict() for layer in self.layers],
        }


def summarise_routing(
    weights: Sequence[Tensor],
    kl: float | Sequence[float | None] | None,
    expert_names: Sequence[Sequence[str]],
    costs: Sequence[Tensor],
    mask: Tensor | None = None,
) -> RoutingSummary:
    """Reduce the routing weights of one batch.

    Args:
        weights: ``[B, T, E]`` or ``[B, T, G, E]`` per layer, rows summing to one.
        kl: Mean KL to the prior in nats: of each layer (None where there is no prior), or one
            number for the whole model, which then stands for every routed layer. Over all tokens,
            those that pass a block by with a KL of 0.
        expert_names: Names of the experts of each layer.
        costs: Cost of each expert ``[E]`` per layer.
        mask: ``[B, T]``, 0 for padding.
    """
    groups = [weight.shape[2] if weight.dim() == 4 else 1 for weight in weights]
    tally = RoutingTally(expert_names, costs, groups=groups)
    tally.add(weights, mask)
    return tally.summary(kl)


class RoutingTally:
    """Sums over tokens from which every figure follows, so that batches and processes add up.

    Args:
        expert_names: Names of the experts of each layer.
        costs: Cost of each expert ``[E]`` per layer.
        priors: Prior concentration ``[E]`` per layer, for the KL of each.
        groups: How many key-value heads of each layer have routes of their own; default: 1, one
            route for all of them.
    """

    def __init__(
        self,
        expert_names: Sequence[Sequence[str]],
        costs: Sequence[Tensor],
        priors: Sequence[Tensor] | None = None,
        *,
        groups: Sequence[int] | None = None,
    ) -> None:
        if len(expert_names) != len(costs):
            raise ShapeError(
                f"expert_names and costs must have one entry per layer, got {len(expert_names)} "
                f"and {len(costs)}"
            )
        self.expert_names = [tuple(names) for names in expert_names]
        self.costs = [cost.double().tolist() for cost in costs]
        self.priors = priors
        self.groups = [1] * len(expert_names) if groups is None else list(groups)
        if len(self.groups) != len(expert_names):
            raise ShapeError(
                f"routes must be given for each of {len(expert_names)} layers, got "
                f"{len(self.groups)}"
            )
        sizes = [(g + 2) * len(n) + 2 for g, n in zip(self.groups, expert_names, strict=True)]
        self.sums = torch.zeros(1 + sum(sizes), dtype=torch.float64)
        """Tokens; then per layer, the weights of each head and expert, for each expert entropy
        terms and tokens whose top it is, and the KL with the number of tokens that have one."""

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """A tally for every routed attention layer of a model, static ones included, in order."""
        layers = [m for m in model.modules() if isinstance(m, RoutedLayer)]
        return cls(
            [layer.expert_names for layer in layers],
            [layer.controller.costs for layer in layers],
            [layer.controller.prior_concentration for layer in layers],
            groups=[math.prod(layer.controller.groups) for layer in layers],
        )

    def count(
        self,
        weights: Sequence[Tensor],
        mask: Tensor | None = None,
        concentrations: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """What each row of a batch adds to ``sums``, ``[B, len(sums)]``; arguments as ``add``."""
        if len(weights) != len(self.expert_names):
            raise ShapeError(
                f"weights must have one tensor for each of {len(self.expert_names)} layers, got "
                f"{len(weights)}"
            )
        first = weights[0]
        # Apple GPUs have no float64
        wide = torch.float32 if first.device.type == "mps" else torch.float64
        is_token = torch.ones(first.shape[:2], device=first.device)
        if mask is not None:
            is_token = (mask != 0).float()  # [B, T]
        columns = [is_token.sum(dim=1, dtype=wide).unsqueeze(1)]  # [B, 1]
        for index, (weight, names) in enumerate(zip(weights, self.expert_names, strict=True)):
            if weight.shape[-1] != len(names):
                raise ShapeError(
                    f"weights must end in one number for each of {list(names)}, got shape "
                    f"{list(weight.shape)}"
                )
            weight = weight.detach().float()
            weight = weight if weight.dim() == 4 else weight.unsqueeze(2)  # [B, T, G, E]
            if weight.shape[2] != self.groups[index]:
                raise ShapeError(
                    f"weights of layer {index} must have routes for {self.groups[index]} key-value "
                    f"heads of a token, got {weight.shape[2]}"
                )
            top = torch.zeros_like(weight).scatter_(-1, weight.argmax(dim=-1, keepdim=True), 1.0)
            # a token that passed the block by has no expert at all
            top = top.masked_fill(weight.sum(dim=-1, keepdim=True) == 0.0, 0.0)
            entropy = torch.special.entr(weight)
            parts = [weight.flatten(2), entropy.mean(dim=2), top.mean(dim=2)]  # [B, T, columns]
            parts += self._kl(index, concentrations)
            for part in parts:
                kept = part.masked_fill(is_token.unsqueeze(-1) == 0, 0.0)
                columns.append(kept.sum(dim=1, dtype=wide))
            if len(parts) == 3:
                columns.append(columns[0].new_zeros(len(weight), 2))
        return torch.cat(columns, dim=1)

    def add(
        self,
        weights: Sequence[Tensor],
        mask: Tensor | None = None,
        concentrations: Sequence[Tensor | None] | None = None,
    ) -> None:
        """Count the tokens of one batch.

        Args:
            weights: ``[B, T, E]`` or ``[B, T, G, E]`` per layer.
            mask: ``[B, T]``, 0 for padding.
            concentrations: Of the same shapes per layer, None without a prior. For the KL, which
                needs the priors.
        """
        counted = self.count(weights, mask, concentrations).sum(dim=0)
        self.sums = self.sums.to(counted) + counted

    def summary(self, kl: float | Sequence[float | None] | None = None) -> RoutingSummary:
        """Figures over every token counted so far.

        ``kl`` as in :func:`summarise_routing`; default: what was counted.
        """
        return self.summary_of(self.sums, kl)

    def summary_of(
        self, sums_of_tokens: Tensor, kl: float | Sequence[float | None] | None = None
    ) -> RoutingSummary:
        """Figures from sums as :meth:`count` gives them, added up elsewhere."""
        num_tokens, *sums = sums_of_tokens.tolist()
        given = kl if isinstance(kl, Sequence) else [kl] * len(self.expert_names)
        layers, begin = [], 0
        per_layer = zip(self.expert_names, self.costs, self.groups, given, strict=True)
        for names, costs, groups, layer_kl in per_layer:
            size = len(names)
            *shares, entropy, top = (
                [value / max(num_tokens, 1.0) for value in sums[i : i + size]]
                for i in range(begin, begin + (groups + 2) * size, size)
            )
            begin += (groups + 2) * size + 2
            kl_sum, kl_tokens = sums[begin - 2 : begin]
            if layer_kl is None and kl_tokens:
                layer_kl = kl_sum / kl_tokens
            layers.append(_layer(names, costs, shares, entropy, top, layer_kl))
        return RoutingSummary(
            layers, mean_of_known([layer.kl for layer in layers]), int(num_tokens)
        )

    def _kl(self, index: int, concentrations: Sequence[Tensor | None] | None) -> list[Tensor]:
        """KL of a layer and a one for each token that has it, ``[B, T, 2]``, where known."""
        concentration = None if concentrations is None else concentrations[index]
        if concentration is None or self.priors is None or len(self.expert_names[index]) == 1:
            return []
        kl = RoutingPosterior(concentration.detach()).kl_to(
            self.priors[index].to(concentration.device)
        )
        kl = kl.mean(dim=2) if kl.dim() == 3 else kl
        return [torch.stack([kl, torch.ones_like(kl)], dim=-1)]


def _layer(
    names: tuple[str, ...],
    costs: list[float],
    shares: list[list[float]],
    entropy: list[float],
    top: list[float],
    kl: float | None,
) -> LayerRouting:
    """One layer from its means over tokens, each a list of E numbers, the shares one per head."""
    is_static = len(names) == 1
    by_expert = list(zip(*shares, strict=True))  # [E][G]
    share = [sum(heads) / len(heads) for heads in by_expert]
    # what passes the block by says nothing of how the rest are told apart
    entered = _entered(share) or 1.0
    spread = [sum(_entropy_term(x / entered) for x in heads) / len(heads) for heads in by_expert]
    entropy = [x / entered for x in entropy]
    # entropy is concave, so each term is at least 0 but for rounding
    parts = [max(0.0, s - e) for s, e in zip(spread, entropy, strict=True)]
    return LayerRouting(
        experts=names,
        share=dict(zip(names, share, strict=True)),
        top_share=dict(zip(names, top, strict=True)),
        adaptivity=None if is_static else sum(parts),
        adaptivity_by_expert=None if is_static else dict(zip(names, parts, strict=True)),
        routing_entropy=None if is_static else 100.0 * sum(entropy) / math.log(len(names)),
        projected_cost=sum(s * c for s, c in zip(share, costs, strict=True)),
        kl=None if is_static else kl,
    )


def _entered(share: Iterable[float]) -> float:
    """Share of tokens that have an expert; weights sum to one but for rounding."""
    total = sum(share)
    return total if total < 1.0 - 1e-6 else 1.0


def _entropy_term(share: float) -> float:
    return -share * math.log(share) if share > 0.0 else 0.0


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """None if nothing is known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


@dataclass(frozen=True, slots=True)
class RoutingReader:
    """Where a call of a model leaves its routing: in the output of ours, beside it if adapted."""

    model: nn.Module
    record: Record | None

    @property
    def options(self) -> dict[str, Any]:
        """What the model has to be called with."""
        return {"output_routing": True} if self.record is None else {}

    def read(self, output: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        """Weights and concentrations (None without a prior) of every routed layer, in order."""
        if self.record is None:
            return output.routing_weights, output.concentrations
        routers = [module for module in self.model.modules() if isinstance(module, Router)]
        missing = [r.layer_idx for r in routers if r.layer_idx not in self.record.layers]
        if missing:
            raise ConfigError(
                f"layer {missing[0]} ran as the base model has it, so it has no routes to read; "
                "route every layer, or name one of its experts"
            )
        outputs = [self.record.layers[router.layer_idx] for router in routers]
        return (
            tuple(out.routes.weights for out in outputs),
            tuple(
                out.posterior.concentration if isinstance(out.posterior, RoutingPosterior) else None
                for out in outputs
            ),
        )


@contextmanager
def reading_routing(model: nn.Module) -> Iterator[RoutingReader]:
    """Call a model, ours or adapted, with the reader's options; then read what it routed."""
    if not any(isinstance(module, Router) for module in model.modules()):
        yield RoutingReader(model, None)
        return
    with collect_routing(model) as record:
        yield RoutingReader(model, record)


@contextmanager
def routed_as(model: Any, routing: RoutingName) -> Iterator[None]:
    """Take a model's routes in another way; afterwards it is as before."""
    before = model.config.routing
    model.config.routing = routing
    try:
        yield
    finally:
        model.config.routing = before
