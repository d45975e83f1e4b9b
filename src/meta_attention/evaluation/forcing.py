"""Were the routes right? Judged by forcing each expert in turn.

One routed layer at a time sends every token to one expert while the other layers route as they
do; each expert of the layer has its turn. The best expert of a token in that layer is the one
under which the model predicts the next token with the smallest loss.

One layer at a time, because E experts in L layers have E ** L combinations, and because a layer's
route can only be compared with another of the same layer when nothing else moves. All tokens at
once, because one token at a time would take a pass each: what the expert does to earlier tokens
is therefore part of its loss. Likewise all key-value heads of a token at once, also where these
have routes of their own; each of them then says for itself which expert is best.

Experts of equal loss are all best: a token that sees no further than the window has no reason to
prefer full attention to local, and no route of it is wrong.

:func:`force_routes` forces any routes, a token each: those of other tokens, say, to see whether it
matters which token takes which.

Shapes: B batch, T sequence, E experts of a layer, G key-value heads that have routes of their own,
M tokens judged.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meta_attention.controller import PointPosterior
from meta_attention.errors import ConfigError, ShapeError
from meta_attention.evaluation.calibration import CalibrationTally
from meta_attention.evaluation.routing import RoutedLayer, mean_of_known
from meta_attention.layers import BayesianMetaAttentionLayer


class ForcedPosterior(PointPosterior):
    """A point that no gate doubts: what the signals of a Dirichlet tend to as evidence grows."""

    @property
    def mutual_information(self) -> Tensor:
        return self.mean.new_zeros(self.mean.shape[:-1])

    @property
    def vacuity(self) -> Tensor:
        return self.mean.new_zeros(self.mean.shape[:-1])

    @property
    def entropy(self) -> Tensor:
        return self.mean.new_full(self.mean.shape[:-1], float("-inf"))


class ForcedController(nn.Module):
    """Stands in for a controller and sends tokens to given experts.

    Args:
        controller: The one it stands in for; costs and prior stay its own.
        expert_index: The expert every token takes, or that of each, ``[B, T]`` or ``[B, T, G]``;
            or that of each head ``[G]``, whatever the token.
    """

    def __init__(self, controller: nn.Module, expert_index: int | Tensor) -> None:
        super().__init__()
        self.controller = controller
        self.expert_index = expert_index

    @property
    def costs(self) -> Tensor:
        return self.controller.costs  # type: ignore[return-value]

    @property
    def prior_concentration(self) -> Tensor:
        return self.controller.prior_concentration  # type: ignore[return-value]

    @property
    def uncertainty_threshold(self) -> Tensor:
        return self.controller.uncertainty_threshold  # type: ignore[return-value]

    @property
    def groups(self) -> tuple[int, ...]:
        return self.controller.groups  # type: ignore[return-value]

    def view_of(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor, position_ids: Tensor) -> ForcedPosterior:
        shape = (*x.shape[:2], *self.groups)
        if isinstance(self.expert_index, int):
            expert = torch.full(shape, self.expert_index, device=x.device)
        else:
            expert = self.expert_index.to(x.device).long()
        if expert.shape == self.groups:
            expert = expert.expand(shape)
        if expert.shape != shape:
            raise ShapeError(
                f"forced routes must be {list(shape)}, one for each route there is, got "
                f"{list(expert.shape)}"
            )
        return ForcedPosterior(F.one_hot(expert, len(self.costs)).float())


def attention_layers(model: nn.Module) -> list[RoutedLayer]:
    """The routed attention layers of a model, static ones included, in order.

    Of an adapted model its routers: layers that were not adapted are left out.
    """
    return [module for module in model.modules() if isinstance(module, RoutedLayer)]


@contextmanager
def force_expert(
    model: nn.Module, layer_indices: Sequence[int], expert_index: int
) -> Iterator[None]:
    """Send every token of the layers to one expert; afterwards the model is as before.

    Args:
        model: A routed model.
        layer_indices: Which of its layers.
        expert_index: Index of the expert among those of the layer.
    """
    with _standing_in(model, dict.fromkeys(layer_indices, expert_index)):
        yield


@contextmanager
def force_routes(model: nn.Module, routes: Mapping[int, Tensor]) -> Iterator[None]:
    """Send tokens to given experts; afterwards the model is as before.

    Args:
        model: A routed model, called with one batch of the shape of the routes.
        routes: By index of the layer, the index of the expert of every token ``[B, T]``, or of
            every key-value head ``[B, T, G]`` where these have routes of their own; or without B
            and T, if it is the same for all tokens. Not of blocks that tokens may pass by.
    """
    with _standing_in(model, routes):
        yield


@contextmanager
def _standing_in(model: nn.Module, experts: Mapping[int, int | Tensor]) -> Iterator[None]:
    """Forced controllers in place of the layers' own."""
    layers = attention_layers(model)
    for index, expert in experts.items():
        if not 0 <= index < len(layers):
            raise ConfigError(f"layer must be below the model's {len(layers)}, got {index}")
        layer, names = layers[index], layers[index].expert_names
        is_packed = isinstance(layer, BayesianMetaAttentionLayer) and layer.config.may_skip(
            layer.layer_idx
        )
        if is_packed and isinstance(expert, Tensor):
            raise ConfigError(
                f"routes by token must be of layers that every token enters, got {index}: others "
                "see their tokens packed; force one expert on all, or leave the layer out"
            )
        low, high = (expert, expert) if isinstance(expert, int) else _extremes(expert)
        if not 0 <= low <= high < len(names):
            raise ConfigError(
                f"expert must be below the {len(names)} of layer {index}, {', '.join(names)}; "
                f"got {low if low < 0 else high}"
            )
    controllers = {index: layers[index].controller for index in experts}
    try:
        for index, controller in controllers.items():
            layers[index].controller = ForcedController(controller, experts[index])  # type: ignore[assignment]
        yield
    finally:
        for index, controller in controllers.items():
            layers[index].controller = controller


def _extremes(expert: Tensor) -> tuple[int, int]:
    low, high = torch.stack(expert.aminmax()).tolist()
    return low, high


@dataclass(frozen=True, slots=True)
class LayerVerdict:
    """How the routes of one layer compare with forcing its experts, mean over tokens.

    Over those that enter the layer's block, where others pass it by: these have no route there.
    """

    layer: int
    regret: float
    """Loss with the chosen routes minus loss with each token's best expert, nats.

    The best is picked with the answer known, so 0 is out of reach for a router; below 0, mixing
    experts is better than any one of them."""
    static_regret: float
    """Loss with the chosen routes minus loss with the one expert best for all tokens, nats.

    Below 0, routing per token is worth having in this layer."""
    routing_ece: float
    """Calibration error of "the top expert is the best expert", said with the top weight.

    Said by every key-value head where each has a route of its own."""
    forced_loss: dict[str, float]
    """Loss with each expert forced on all tokens, nats."""
    best_share: dict[str, float]
    """Share of the tokens for which each expert is best; equals share a token."""


@dataclass(frozen=True, slots=True)
class RouteVerdict:
    """All routed layers that a token entered, and their means; None if there are none."""

    layers: list[LayerVerdict]

    @property
    def regret(self) -> float | None:
        return mean_of_known(layer.regret for layer in self.layers)

    @property
    def static_regret(self) -> float | None:
        return mean_of_known(layer.static_regret for layer in self.layers)

    @property
    def routing_ece(self) -> float | None:
        return mean_of_known(layer.routing_ece for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        return {
            "regret": self.regret,
            "static_regret": self.static_regret,
            "routing_ece": self.routing_ece,
            "layers": [asdict(layer) for layer in self.layers],
        }


class RouteJudge:
    """Forces every expert of every routed layer on each batch, and adds up what comes out.

    Args:
        model: A routed model with a layer of more than one expert.
        tie: Losses no further than this from the lowest are equal to it, in nats. In reduced
            precision rounding would else say which of two equal experts is the best.
    """

    def __init__(self, model: nn.Module, *, tie: float = 0.0) -> None:
        self.model, self.tie = model, tie
        self.experts = {
            index: layer.expert_names
            for index, layer in enumerate(attention_layers(model))
            if len(layer.expert_names) > 1
        }
        if not self.experts:
            raise ConfigError("forcing experts needs a layer of more than one, got none")
        self.num_tokens = dict.fromkeys(self.experts, 0)
        self.chosen = dict.fromkeys(self.experts, 0.0)
        # per layer [2, E]: loss with each expert forced, tokens for which it is best
        self.sums = {
            index: torch.zeros(2, len(names), dtype=torch.float64)
            for index, names in self.experts.items()
        }
        self.best = dict.fromkeys(self.experts, 0.0)
        self.calibration = {index: CalibrationTally() for index in self.experts}

    @property
    def num_passes(self) -> int:
        """Calls of ``rescore`` in one :meth:`add`."""
        return sum(map(len, self.experts.values()))

    def add(self, loss: Tensor, weights: Sequence[Tensor], rescore: Callable[[], Tensor]) -> None:
        """Judge one batch.

        Args:
            loss: Loss of the next token ``[M]`` with the chosen routes, nats.
            weights: Routing weights of these tokens ``[M, E]`` or ``[M, G, E]`` per layer, zero of
                those that passed its block by: they are not judged there.
            rescore: Returns the loss anew ``[M]``; called with each expert forced.
        """
        chosen = loss.double().cpu()
        for layer, names in self.experts.items():
            weight = weights[layer].cpu()
            has_entered = weight.flatten(1).sum(dim=-1) > 0.0  # [M]
            losses = []
            for expert in range(len(names)):
                with force_expert(self.model, [layer], expert):
                    losses.append(rescore().double().cpu())
            forced = torch.stack(losses, dim=-1)[has_entered]  # [those, E]
            lowest = forced.amin(dim=-1, keepdim=True)
            is_best = forced <= lowest + self.tie
            self.num_tokens[layer] += len(forced)
            self.chosen[layer] += chosen[has_entered].sum().item()
            self.best[layer] += lowest.sum().item()
            self.sums[layer][0] += forced.sum(dim=0)
            self.sums[layer][1] += (is_best / is_best.sum(dim=-1, keepdim=True)).sum(dim=0)
            confidence, top = weight[has_entered].max(dim=-1)  # [those] or [those, G]
            is_right = is_best.gather(-1, top.flatten(1) if top.dim() > 1 else top.unsqueeze(-1))
            self.calibration[layer].add(confidence, is_right.view_as(top))

    def verdict(self) -> RouteVerdict:
        """Figures over every token judged so far."""
        judged = [layer for layer in self.experts if self.num_tokens[layer]]
        return RouteVerdict([self._verdict_on(layer) for layer in judged])

    def _verdict_on(self, layer: int) -> LayerVerdict:
        n, chosen = self.num_tokens[layer], self.chosen[layer]
        losses, best = (self.sums[layer] / n).tolist()
        names = self.experts[layer]
        return LayerVerdict(
            layer,
            regret=(chosen - self.best[layer]) / n,
            static_regret=chosen / n - min(losses),
            routing_ece=self.calibration[layer].error,
            forced_loss=dict(zip(names, losses, strict=True)),
            best_share=dict(zip(names, best, strict=True)),
        )
