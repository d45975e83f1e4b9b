"""Mixture of Depths: blocks that some tokens enter and the others pass by (Raposo et al., 2024).

    enters[t]                               from the token's score, or a prediction of it
    out[t] = x[t] + gate[t] * update[t]     where it enters; update is what the block would add
    out[t] = x[t]                           where it passes by

The block runs on the tokens that enter, packed row by row, and on nothing else: no projections, no
experts, no controller, no feed-forward. To the others it is not there, nor they to it: they leave
no key, no value and no trace in a state. Positions stay those of the text; a window is one of
tokens that entered.

Shapes: B batch, T sequence, N tokens of a row that enter, at most, D width, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist
from types import SimpleNamespace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from meta_attention.config import MetaAttentionConfig
from meta_attention.controller import PointPosterior, Posterior, RoutingPosterior, ValuePosterior
from meta_attention.depth.packing import Entered, Entry, Packing
from meta_attention.errors import ConfigError
from meta_attention.layers import LayerOutput, MetaAttentionCache, MetaTransformerBlock
from meta_attention.layers.attention import Rotation
from meta_attention.layers.decode_step import DecodeStep
from meta_attention.layers.entered import EnteredMemory, EnteredRows
from meta_attention.layers.projections import number_documents, positions_of
from meta_attention.objective import mean_over_tokens
from meta_attention.precision import KeepFloat32
from meta_attention.routing import Routes


@dataclass(frozen=True, slots=True)
class DepthOutput(LayerOutput):
    """Output of a block that tokens may pass by. Of those that do, all weights are zero."""

    entered: Entered
    depth_loss: Tensor | None  # [], what teaches the router; None in evaluation


class TokenScore(nn.Linear):
    """One number for each token.

    Args:
        config: Model configuration.
        start: Share of tokens that a new one is to have above 0.
    """

    def __init__(self, config: MetaAttentionConfig, start: float) -> None:
        super().__init__(config.hidden_size, 1)
        # of normalised tokens and new weights, numbers are spread like this
        spread = config.initializer_range * config.hidden_size**0.5
        self.start_bias = spread * NormalDist().inv_cdf(start)
        self.reset_start()

    def reset_start(self) -> None:
        """Begin with that share, after the weights were drawn anew."""
        with torch.no_grad():
            # of Transformers: leaves alone what was loaded
            init.constant_(self.bias, self.start_bias)


class DepthRouter(KeepFloat32):
    """One score for each token, in float32: who enters a block, and how much it then counts.

    Args:
        config: Model configuration, with a ``depth_capacity``.
    """

    def __init__(self, config: MetaAttentionConfig) -> None:
        super().__init__()
        assert config.depth_capacity is not None
        self.capacity = config.depth_capacity
        self.routing = config.depth_routing
        self.eps = config.rms_norm_eps
        # whichever decides lets about as many in as have room
        is_predicted = self.routing == "top_k" and self.capacity < 1.0
        is_decided = self.routing == "threshold" and self.capacity < 1.0
        self.score = TokenScore(config, self.capacity if is_decided else 0.5)
        self.predictor = TokenScore(config, self.capacity) if is_predicted else None

    def forward(self, x: Tensor, is_token: Tensor | None) -> Entry:
        """Choose.

        Args:
            x: Hidden states ``[B, T, D]`` before the block.
            is_token: ``[B, T]`` boolean, False for padding; None: there is none.
        """
        with torch.autocast(x.device.type, enabled=False):
            # at least float32, float64 in tests; padding may hold anything
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            if is_token is not None:
                x = x.masked_fill(~is_token.unsqueeze(-1), 0.0)
            x = F.rms_norm(x, x.shape[-1:], eps=self.eps)
            score = self.score(x).squeeze(-1)  # [B, T]
            predicted = None if self.predictor is None else self.predictor(x.detach()).squeeze(-1)
        gate = torch.sigmoid(score)
        T = x.shape[1]
        loss, num_entered = None, None
        if self.capacity == 1.0:
            enters = torch.ones_like(score, dtype=torch.bool)
            num_entered = T if is_token is None else None
            loss = score.new_zeros(()) if self.training else None
        elif predicted is None:
            enters = score > 0.0
            if self.training:
                loss = self._share_loss(enters, gate, is_token)
        elif self.training:
            enters = self._highest(score.detach(), is_token)
            num_entered = self._room(T) if is_token is None else None
            losses = F.binary_cross_entropy_with_logits(
                predicted, enters.to(predicted.dtype), reduction="none"
            )
            loss = mean_over_tokens(losses, is_token)
        else:
            enters = predicted > 0.0
        if is_token is not None:
            enters = enters & is_token
        return Entry(enters, gate, loss, num_entered)

    def _room(self, num_tokens: int) -> int:
        return max(1, round(self.capacity * num_tokens))

    def _highest(self, score: Tensor, is_token: Tensor | None) -> Tensor:
        """Which tokens [B, T] have the highest scores of their row, as many as have room."""
        T = score.shape[1]
        room = self._room(T)
        if is_token is None:
            is_chosen = torch.ones(1, 1, dtype=torch.bool, device=score.device)
        else:
            score = score.masked_fill(~is_token, float("-inf"))
            rooms = (self.capacity * is_token.sum(dim=1, keepdim=True)).round().clamp(min=1)
            is_chosen = torch.arange(room, device=score.device) < rooms  # [B, room]
        best = score.topk(room, dim=1).indices
        nobody = torch.zeros_like(score, dtype=torch.bool)
        return nobody.scatter(1, best, is_chosen.expand_as(best))

    def _share_loss(self, enters: Tensor, gate: Tensor, is_token: Tensor | None) -> Tensor:
        """Squared distance of the share that enters from the capacity.

        Its gradient is that of the share of gates (straight-through).
        """
        share = mean_over_tokens(enters + (gate - gate.detach()), is_token)
        return (share - self.capacity).square()

    def extra_repr(self) -> str:
        return f"capacity={self.capacity}, routing={self.routing}"


class MixtureOfDepthsBlock(MetaTransformerBlock):
    """A block that tokens may pass by, with the router that says which.

    Args:
        config: Model configuration, with a ``depth_capacity``.
        layer_idx: Index of the block in its model.
    """

    def __init__(self, config: MetaAttentionConfig, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx)
        self.depth_router = DepthRouter(config)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        past_key_values: MetaAttentionCache | None = None,
        rotation: Rotation | None = None,
        step: DecodeStep | None = None,
        recurrence: Tensor | None = None,
    ) -> DepthOutput:
        """As a block; of tokens that pass by, routing weights, KL and costs are zero."""
        entered = self.choose(x, attention_mask, document_ids, past_key_values, step)
        arguments = (attention_mask, position_ids, document_ids, past_key_values, rotation, step)
        rows, output = entered.take(x), x
        attended = self.attend_entered(rows, entered, *arguments, recurrence)
        if rows is not None and attended is not None:
            update = attended.output + self.feed_forward(rows + attended.output)
            output = entered.put(rows + entered.gated(update).to(rows.dtype), x)
        return self.describe(output, attended, entered)

    def choose(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        document_ids: Tensor | None,
        past_key_values: MetaAttentionCache | None,
        step: DecodeStep | None,
    ) -> Entered:
        """Who of the tokens ``x`` [B, T, D] enters; the others are those of :meth:`forward`."""
        memory = self._memory_of(past_key_values)
        is_token = _find_tokens(attention_mask, document_ids, step, x.shape[1])
        entry = self.depth_router(x, is_token)
        if step is None:
            # in training a place at least, so that all parameters have a gradient: processes that
            # train together wait for each other's
            return Entered(entry, Packing.of(entry, least_places=1 if self.training else 0))
        if memory is not None and memory.waits_for_host and not entry.enters.any():
            return Entered(entry, None)
        return Entered(entry, Packing(None, entry.enters))

    def attend_entered(
        self,
        rows: Tensor | None,
        entered: Entered,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        document_ids: Tensor | None,
        past_key_values: MetaAttentionCache | None,
        rotation: Rotation | None,
        step: DecodeStep | None,
        recurrence: Tensor | None,
    ) -> LayerOutput | None:
        """The attention half of ``rows`` [B, N, D] that entered, without its residual.

        Counts all tokens in the cache, those included that passed by. None: nobody entered.
        """
        enters, packing = entered.entry.enters, entered.packing
        B, T = enters.shape
        memory = self._memory_of(past_key_values)
        if rows is None or packing is None:
            if memory is not None:
                memory.count(None, T)
            return None
        if document_ids is not None:
            # as long as all are there: two of one number may have stood on both sides of another
            document_ids = number_documents(document_ids, attention_mask)
        if position_ids is None:
            position_ids = self._positions(
                attention_mask, document_ids, past_key_values, step, enters
            )
        mask, cache = packing.is_entered, None
        if step is not None:
            step = DecodeStep(step.position, step.length, step.start, enters.squeeze(1))
        if memory is not None:
            everyone = torch.ones(B, rows.shape[1], dtype=torch.bool, device=rows.device)
            view = EnteredMemory(memory, everyone if mask is None else mask)
            mask = view.mask if step is None and view.past > 0 else mask
            # all that attention asks of a cache is the memory of its own layer
            layers = {self.attention.layer_idx: view}
            cache = cast(MetaAttentionCache, SimpleNamespace(layers=layers))
        attended = self.attend(
            rows,
            mask if step is None else None,
            packing.take(position_ids),
            None if document_ids is None else packing.blank(packing.take(document_ids), 0),
            cache,
            None if rotation is None else (packing.take(rotation[0]), packing.take(rotation[1])),
            step,
            None if recurrence is None else packing.take(recurrence),
        )
        if memory is not None:
            memory.count(enters.sum(dim=1), T)
        return attended

    def describe(
        self, output: Tensor, attended: LayerOutput | None, entered: Entered
    ) -> DepthOutput:
        """With the routes of all tokens: of those that pass by, no expert and no evidence."""
        controller = self.attention.controller
        prior, costs = controller.prior_concentration, controller.costs
        enters, packing = entered.entry.enters, entered.packing
        shape = (*enters.shape, *controller.groups)

        def spread(of: Callable[[LayerOutput], Tensor], rest: Tensor) -> Tensor:
            everywhere = rest.expand(*shape, *rest.shape)
            if attended is None or packing is None:
                return everywhere
            rows = of(attended)
            return packing.put(rows, everywhere.to(rows.dtype))

        posterior: Posterior
        given = None if attended is None else attended.posterior
        is_point = self.attention.config.controller != "bayesian" and len(costs) > 1
        if isinstance(given, PointPosterior) or (given is None and is_point):
            mean = spread(lambda out: out.posterior.mean, torch.full_like(prior, 1 / len(costs)))
            if isinstance(given, ValuePosterior):
                score = spread(
                    lambda out: cast(ValuePosterior, out.posterior).score, torch.zeros_like(prior)
                )
                posterior = replace(given, mean=mean, score=score)
            else:
                posterior = (PointPosterior if given is None else type(given))(mean)
        else:
            posterior = RoutingPosterior(
                spread(lambda out: cast(RoutingPosterior, out.posterior).concentration, prior)
            )
        nobody = torch.zeros((), dtype=torch.bool, device=output.device)
        explored = None
        if attended is not None and attended.routes.explored is not None:
            explored = spread(lambda out: cast(Tensor, out.routes.explored), nobody)
        routes = Routes(
            spread(lambda out: out.routes.weights, torch.zeros_like(costs)),
            spread(lambda out: out.routes.hard, nobody),
            explored,
        )
        return DepthOutput(
            output,
            posterior,
            routes,
            prior,
            costs,
            is_padding=~enters,
            teaches_belief=self.attention.config.route_gradient == "chosen",
            entered=entered,
            depth_loss=entered.entry.loss,
        )

    def _memory_of(self, cache: MetaAttentionCache | None) -> EnteredRows | None:
        if cache is None:
            return None
        memory = cache.layers[self.attention.layer_idx]
        if not isinstance(memory, EnteredRows):
            raise ConfigError(
                f"past_key_values must keep the tokens that enter layer {self.attention.layer_idx}"
                f", got a {type(memory).__name__}: it is of another model"
            )
        return memory

    def _positions(
        self,
        attention_mask: Tensor | None,
        document_ids: Tensor | None,
        cache: MetaAttentionCache | None,
        step: DecodeStep | None,
        enters: Tensor,
    ) -> Tensor:
        """Absolute positions, as the attention layer would count them were no token missing."""
        if step is not None:
            return step.position_ids
        past = 0 if cache is None else cache.layers[self.attention.layer_idx].get_seq_length()
        marks = attention_mask if document_ids is None else document_ids
        if marks is not None and document_ids is None:
            marks = marks.bool()
        B, T = enters.shape
        return positions_of(marks, B, T, past, enters.device)


def _find_tokens(
    attention_mask: Tensor | None, document_ids: Tensor | None, step: DecodeStep | None, T: int
) -> Tensor | None:
    """Which of the new tokens [B, T] are no padding; None: all."""
    if step is not None:
        return None if step.is_token is None else step.is_token.unsqueeze(1)
    marks = [m[:, -T:] != 0 for m in (attention_mask, document_ids) if m is not None]
    return torch.stack(marks).all(dim=0) if marks else None
