"""Controllers: tokens in, a posterior over experts out.

All have the interface ``controller(x, position_ids) -> posterior`` and the buffers ``costs``,
``prior_concentration`` and ``uncertainty_threshold``, so that exchanging one for another is one
word of configuration.

Shapes: B batch, T sequence, E experts, G key-value heads where each has a route of its own.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from meta_attention.config import MetaAttentionConfig
from meta_attention.controller.features import NUM_EXTRA_FEATURES
from meta_attention.controller.posterior import (
    PointPosterior,
    Posterior,
    RoutingPosterior,
    ValuePosterior,
    value_of,
)
from meta_attention.controller.prior import compute_aware_prior
from meta_attention.ops.controller_logits import Network, controller_logits
from meta_attention.precision import KeepFloat32

# evidence of a controller that starts on one expert: for it, and for the others
START_EVIDENCE, REST_EVIDENCE = 6.0, 0.02
# what such an expert is worth at first, in nats
START_VALUE = 0.1
# and its score, where values have a scale: it is worth ten of these more than another
START_SCORE = 3.0
# nats by which one expert must be better for weights to prefer it by a factor of e, where values
# have no scale, which else it is: of hard routes it changes nothing
TEMPERATURE = 0.02


class Controller(KeepFloat32):
    """Costs and prior: all that the later stages read of a controller beside its answer.

    Args:
        config: Model configuration.
        costs: Cost of each expert relative to full attention, in (0, 1].
        layer_idx: Index of its layer, where layers differ in their prior.
    """

    costs: Tensor  # [E]
    prior_concentration: Tensor  # [E]
    uncertainty_threshold: Tensor  # []
    price: Tensor  # [], nats for the cost of full attention; 0 but for controllers of values
    groups: tuple[int, ...] = ()  # axes of a token's routes: none, or (G,)

    def __init__(
        self, config: MetaAttentionConfig, costs: Sequence[float], *, layer_idx: int = 0
    ) -> None:
        super().__init__()
        self.config = config
        self.max_positions = config.max_position_embeddings
        self._costs = [float(cost) for cost in costs]
        strength = config.prior_strength_of(layer_idx)
        self._prior = {"strength": strength, "floor": config.prior_floor}
        # not saved: both follow from the config
        prior = compute_aware_prior(self._costs, **self._prior)
        self.register_buffer(
            "costs", torch.tensor(self._costs, dtype=torch.float32), persistent=False
        )
        self.register_buffer("prior_concentration", prior, persistent=False)
        # a tensor, so that a schedule can move it without compiling anew
        threshold = torch.tensor(config.uncertainty_threshold or 0.0, dtype=torch.float32)
        self.register_buffer("uncertainty_threshold", threshold, persistent=False)
        price = torch.tensor(config.price, dtype=torch.float32)
        self.register_buffer("price", price, persistent=False)

    def reset_buffers(self) -> None:
        """Fill the buffers anew, after the module was built without memory of its own."""
        self.costs.copy_(torch.tensor(self._costs))
        self.prior_concentration.copy_(compute_aware_prior(self._costs, **self._prior))
        self.uncertainty_threshold.fill_(self.config.uncertainty_threshold or 0.0)
        self.price.fill_(self.config.price)

    @property
    def prior_strength(self) -> float:
        """Scale of the prior; the paper's beta_0."""
        return self._prior["strength"]

    def set_prior_strength(self, strength: float) -> None:
        """Another scale of the prior from now on; the config is left to whoever owns it."""
        self._prior["strength"] = strength
        prior = compute_aware_prior(self._costs, **self._prior)
        self.prior_concentration.copy_(prior)

    def reset_start(self) -> None:
        """Believe in the expert to start on, after the weights were drawn anew."""

    def view_of(self, x: Tensor) -> Tensor:
        """What it sees of hidden states ``x`` [B, T, D]: they, too, learn from its lessons."""
        return x

    def forward(self, x: Tensor, position_ids: Tensor) -> Posterior:
        raise NotImplementedError


class MLPController(Controller):
    """Features and a 2-layer MLP with GELU; subclasses read its logits as a posterior.

    Args:
        config: Model configuration.
        costs: Cost of each expert relative to full attention, in (0, 1].
        start: Index of the expert that is believed in at first; None: as the weights have it.
        layer_idx: Index of its layer, where layers differ in their prior.
    """

    def __init__(
        self,
        config: MetaAttentionConfig,
        costs: Sequence[float],
        start: int | None = None,
        *,
        layer_idx: int = 0,
    ) -> None:
        super().__init__(config, costs, layer_idx=layer_idx)
        self.start = start
        if config.route_granularity == "kv_head":
            self.groups = (config.num_key_value_heads,)
        width = config.controller_hidden_size
        self.mlp = nn.Sequential(
            nn.Linear(config.hidden_size + NUM_EXTRA_FEATURES, width),
            nn.GELU(),
            nn.Linear(width, math.prod(self.groups) * len(costs)),
        )
        self.reset_start()

    def reset_start(self) -> None:
        if self.start is None:
            return
        evidence = torch.full_like(self.prior_concentration, REST_EVIDENCE)
        # a stronger prior takes more to overcome
        evidence[self.start] = START_EVIDENCE * max(1.0, self.prior_strength)
        last: nn.Linear = self.mlp[-1]  # type: ignore[assignment]
        with torch.no_grad():
            # of Transformers: leaves alone what was loaded
            init.copy_(last.bias, self.logits_of(evidence).repeat(math.prod(self.groups)))

    def logits_of(self, evidence: Tensor) -> Tensor:
        """Logits [E] from which ``forward`` makes the posterior of ``evidence``, or its mean."""
        raise NotImplementedError

    @property
    def network(self) -> Network:
        """The parameters, as tensor functions take them."""
        # read for every token of a decoded text, so where they lie: modules search for theirs
        layers: Any = self._modules["mlp"]
        first, _, second = layers._modules.values()
        a, b = first._parameters, second._parameters
        return Network(a["weight"], a["bias"], b["weight"], b["bias"])

    def logits(self, x: Tensor, position_ids: Tensor) -> Tensor:
        """Unbounded scores [B, T, E] or [B, T, G, E], in float32 also under autocast."""
        logits = controller_logits(
            x, position_ids, self.network, max_positions=self.max_positions, impl=self.config.impl
        )
        return logits.unflatten(-1, (*self.groups, -1)) if self.groups else logits


class BayesianMetaController(MLPController):
    """Dirichlet posterior under a compute-aware prior: concentration = prior + evidence.

    Args:
        config: Model configuration.
        costs: Cost of each expert relative to full attention, in (0, 1].
    """

    def forward(self, x: Tensor, position_ids: Tensor) -> RoutingPosterior:
        evidence = F.softplus(self.logits(x, position_ids))  # [B, T, (G,) E]
        return RoutingPosterior(self.prior_concentration + evidence)

    def logits_of(self, evidence: Tensor) -> Tensor:
        return evidence.expm1().log()


class PriorFreeController(MLPController):
    """The ablation: the same features and MLP, softmax weights, no prior.

    What makes it economical, if anything, is ``cost_weight`` in the objective.

    Args:
        config: Model configuration.
        costs: Cost of each expert relative to full attention, in (0, 1].
    """

    def forward(self, x: Tensor, position_ids: Tensor) -> PointPosterior:
        return PointPosterior(self.logits(x, position_ids).softmax(dim=-1))

    def logits_of(self, evidence: Tensor) -> Tensor:
        return (self.prior_concentration + evidence).log()


class ValueController(MLPController):
    """What each expert is worth to a token, in nats, and what it costs at the going price.

    The same features and MLP say by how much the loss would be lower with one expert than with
    another. A token takes the one that is worth most after ``price * cost`` is paid. The price is
    no parameter but set, and may be another in use: a lower one buys more attention.

    Args:
        config: Model configuration.
        costs: Cost of each expert relative to full attention, in (0, 1].
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dearest = self._costs.index(max(self._costs))
        layers = range(self.config.num_hidden_layers)
        self.set_routed_layers(sum(len(self.config.experts_of(index)) > 1 for index in layers))

    def reset_start(self) -> None:
        super().reset_start()
        if self.start is not None:
            # worth something to every token, and no more to one than to another
            with torch.no_grad():
                init.zeros_(self.mlp[-1].weight)  # type: ignore[arg-type]

    @property
    def knows(self) -> bool:
        """Whether it tells tokens apart: one that starts on an expert does not yet."""
        return bool(self.mlp[-1].weight.any())  # type: ignore[operator]

    def view_of(self, x: Tensor) -> Tensor:
        # else what later layers have yet to learn would count as a gain or a loss of earlier ones
        return x.detach()

    def set_routed_layers(self, number: int) -> None:
        """In how many layers of the model, this one included, tokens have a choice."""
        self.num_shares = number * math.prod(self.groups)
        scale = self.config.value_scale
        self.scale = None if scale is None else scale / self.num_shares

    def forward(self, x: Tensor, position_ids: Tensor) -> ValuePosterior:
        logits = self.logits(x, position_ids)  # [B, T, (G,) E]
        score = logits - logits[..., self.dearest, None]
        surplus = value_of(score.detach(), self.scale) - self.price * self.costs
        weights = (surplus / (self.scale or TEMPERATURE)).softmax(dim=-1)
        return ValuePosterior(weights, score, self.dearest, self.scale, self.num_shares)

    def logits_of(self, evidence: Tensor) -> Tensor:
        start = START_VALUE if self.config.value_scale is None else START_SCORE
        return start * (evidence == evidence.max())


class StaticController(Controller):
    """A layer of one expert has nothing to choose: every token gets it, and nothing is learnt."""

    def forward(self, x: Tensor, position_ids: Tensor) -> RoutingPosterior:
        return RoutingPosterior(self.prior_concentration.expand(*x.shape[:2], -1))


def build_controller(
    config: MetaAttentionConfig,
    costs: Sequence[float],
    start: int | None = None,
    *,
    layer_idx: int = 0,
) -> Controller:
    """The controller the config names, or a static one where there is nothing to choose.

    Args:
        config: Model configuration.
        costs: Cost of each expert relative to full attention, in (0, 1].
        start: Index of the expert to start on, where the layer has it.
        layer_idx: Index of its layer, where layers differ in their prior.
    """
    if len(costs) == 1:
        return StaticController(config, costs, layer_idx=layer_idx)
    kinds = {
        "bayesian": BayesianMetaController,
        "prior_free": PriorFreeController,
        "value": ValueController,
    }
    return kinds[config.controller](config, costs, start, layer_idx=layer_idx)
