"""The routed attention layer. ``forward`` is the pipeline.

Shapes: B batch, T sequence, D width, H heads, P head width, E experts, G key-value heads where each
has a route of its own.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meta_attention.config import MetaAttentionConfig
from meta_attention.controller import Posterior, RecurrenceEmbedding, build_controller
from meta_attention.errors import ConfigError, ShapeError
from meta_attention.experts import build_experts, expert_costs
from meta_attention.layers.cache import MetaAttentionCache, RoutedCacheLayer, conv_state_name
from meta_attention.layers.decode_step import DecodeStep
from meta_attention.layers.execution import ExpertExecution, HeadsByKind, HeadsKind
from meta_attention.layers.projections import (
    MetaAttentionRotaryEmbedding,
    Projections,
    number_documents,
    positions_of,
)
from meta_attention.ops.heads import check_mask
from meta_attention.ops.route_merge import route_merge
from meta_attention.ops.route_plan import RoutePlan
from meta_attention.routing import Routes, choose_routes

Rotation = tuple[Tensor, Tensor]  # cosines and sines, [B, T, P] each


@dataclass(frozen=True, slots=True)
class LayerOutput:
    """Attention output with the routing it was produced by.

    What only the objective needs is worked out when asked for: inference never asks. It is of
    tokens, also where their key-value heads have routes of their own: the mean over these, so that
    ``kl_weight`` and ``cost_weight`` mean the same as with one route for all.
    """

    output: Tensor  # [B, T, D], zero for padding
    posterior: Posterior
    routes: Routes
    prior_concentration: Tensor  # [E]
    costs: Tensor  # [E]
    is_padding: Tensor | None  # [B, T]
    teaches_belief: bool  # whether the cost's gradient goes to the whole belief

    @property
    def kl(self) -> Tensor:
        """Of the posterior to the prior [B, T] in nats, zero for padding.

        And zero where nothing is learnt: values learn from routes that explore.
        """
        if not self.posterior.learns_by_exploring:
            return self._of_tokens(self.posterior.kl_to(self.prior_concentration))
        kl = self.posterior.kl_to(self.prior_concentration, self.routes.expert)
        explored = self.routes.explored
        return self._of_tokens(torch.zeros_like(kl) if explored is None else kl * explored)

    @property
    def projected_cost(self) -> Tensor:
        """Sum over experts of weight * cost [B, T], zero for padding."""
        weights = self.routes.weights
        if self.teaches_belief and weights.requires_grad:
            # the chosen weight's own gradient could only lower the belief in what was chosen,
            # however cheap; a cost is known of all experts, so the whole belief learns of it
            mean = self.posterior.mean
            weights = weights.detach() + (mean - mean.detach())
        return self._of_tokens((weights * self.costs).sum(dim=-1))

    @property
    def evaluated_cost(self) -> Tensor:
        """Cost of the expert that is most believed in [B, T], zero for padding; no gradient.

        It is what a hard route executes in evaluation; in training another may have been drawn.
        """
        return self._of_tokens(self.costs[self.posterior.mean.detach().argmax(dim=-1)])

    @property
    def routing_entropy(self) -> Tensor:
        """H(expected weights) / ln E [B, T], zero for padding; no gradient. Of a layer of choices.

        Of drawn routes, too, it is how undecided the controller was.
        """
        mean_entropy = self.posterior.mean_entropy.detach()
        return self._of_tokens(mean_entropy / math.log(len(self.costs)))

    def _of_tokens(self, x: Tensor) -> Tensor:
        """[B, T] from [B, T] or [B, T, G], zero for padding."""
        x = x.mean(dim=2) if x.dim() == 3 else x
        return x if self.is_padding is None else x.masked_fill(self.is_padding, 0.0)


class BayesianMetaAttentionLayer(nn.Module):
    """Attention whose algorithm is chosen per token; stands where self-attention stands.

    With ``route_granularity="kv_head"`` it is chosen per key-value head of a token.

    Args:
        config: Model configuration.
        layer_idx: Index of the layer in its model; picks its experts where layers differ.
    """

    def __init__(self, config: MetaAttentionConfig, layer_idx: int = 0) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        experts = build_experts(config, layer_idx)
        self.expert_names = tuple(experts)
        start = config.start_expert
        self.controller = build_controller(
            config,
            expert_costs(config, experts),
            None if start not in experts else self.expert_names.index(start),
            layer_idx=layer_idx,
        )
        has_choice = len(experts) > 1 and config.recurrence is not None
        self.recurrence = RecurrenceEmbedding(config) if has_choice else None
        self.experts = nn.ModuleList(experts.values())
        self.execution = ExpertExecution(config, self.expert_names, self.experts)
        # one set for all experts, or one each
        num_projections = 1 if config.shared_projections else len(experts)
        self.projections = nn.ModuleList(Projections(config) for _ in range(num_projections))
        self.rotary = MetaAttentionRotaryEmbedding(config) if config.use_rope else None

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
    ) -> LayerOutput:
        """Route and attend.

        Args:
            x: Hidden states ``[B, T, D]``, already normalised by the block.
            attention_mask: 1 for tokens and 0 for padding on either side, ``[B, T]``; with a
                cache ``[B, S]``, the S - T tokens before these included.
            position_ids: Absolute positions ``[B, T]``; default: counted from each row's first
                token, and from the first of each document.
            document_ids: ``[B, T]``: tokens of different documents packed into one row do not see
                each other. Neighbours of one number are one document; 0 is padding. Default: one
                document.
            past_key_values: What earlier calls left; these tokens are added to it.
            rotation: Rotary cosines and sines of ``position_ids``, where a model shares them
                among its layers.
            step: Where the one new token of each row stands, in place of a mask, where a model
                knows; see :meth:`MetaAttentionCache.prepare`.
            recurrence: When each token was last seen ``[B, T, N]``, where the controller asks for
                it (``config.recurrence``); see :func:`last_seen`.
        """
        memory = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        if step is not None and position_ids is None:
            position_ids = step.position_ids
        mask, position_ids = self._check_inputs(
            x, attention_mask, position_ids, document_ids, memory
        )
        if step is not None:
            is_padding = step.is_padding
        else:
            is_padding = None if mask is None else mask[:, -x.shape[1] :] == 0  # [B, T]
        if is_padding is not None:
            # padding may hold anything, also what 0 * x would not remove
            x = x.masked_fill(is_padding.unsqueeze(-1), 0.0)

        # tokens -> posterior -> routes
        seen = self._seen(self.controller.view_of(x), recurrence)
        posterior = self.controller(seen, position_ids)
        gradient = self.config.route_gradient
        routes = choose_routes(
            posterior,
            routing=self.config.routing,
            draw=self.config.training_weights if self.training else "mean",
            gradient=gradient,
            signal=self.config.uncertainty_signal,
            threshold=self.controller.uncertainty_threshold,
            explored_share=self.config.explored_share,
        )

        # routes -> plan -> experts -> merge; for the newest tokens alone, all in one
        documents = None if document_ids is None else mask
        heads = self._project(x, position_ids, rotation, is_padding, documents, memory)
        run = self.execution
        if (
            step is not None
            and memory is not None
            and run.can_run_newest(*run.newest_tensors(heads, memory))
        ):
            merged = run.on_newest(heads, x, routes.weights, step, memory)
            output = self._output(0, merged)
        else:
            if step is not None and memory is not None:
                mask = memory.mask_of(step)
            plan = run.plan(routes.weights, is_padding, self.config.routing)
            if plan is None:
                rows = run.on_all(heads, x, mask, memory)
            else:
                rows = run.on_listed(heads, x, mask, memory, plan)
            output = self._merge(rows, routes, plan)

        if is_padding is not None:
            output = output.masked_fill(is_padding.unsqueeze(-1), 0.0)
        return LayerOutput(
            output,
            posterior,
            routes,
            self.controller.prior_concentration,
            self.controller.costs,
            is_padding,
            teaches_belief=gradient == "chosen",
        )

    def _seen(self, x: Tensor, recurrence: Tensor | None) -> Tensor:
        """What the controller sees of tokens [B, T, D]."""
        if self.recurrence is None:
            return x
        if recurrence is None or recurrence.shape != (*x.shape[:2], self.config.recurrence):
            raise ShapeError(
                f"recurrence must be [B, T, N] = {[*x.shape[:2], self.config.recurrence]}, when "
                "each token was last seen, as config.recurrence asks for; got "
                f"{None if recurrence is None else list(recurrence.shape)}"
            )
        hint = self.recurrence(recurrence)
        return x.to(torch.promote_types(x.dtype, hint.dtype)) + hint

    def _project(
        self,
        x: Tensor,
        position_ids: Tensor,
        rotation: Rotation | None,
        is_padding: Tensor | None = None,
        documents: Tensor | None = None,
        memory: RoutedCacheLayer | None = None,
    ) -> HeadsByKind:
        """Queries, keys and values by projection set, plain and rotated."""
        heads: HeadsByKind = {}
        projections: list[Projections] = list(self.projections)  # type: ignore[arg-type]
        for index, projection in enumerate(projections):
            name = conv_state_name(index)
            past = None if memory is None else memory.states.get(name)
            own, inputs = projection.heads(x, is_padding, documents, past)
            heads[HeadsKind(index, False)] = own
            if memory is not None and inputs is not None:
                # a view would hold all of a long prompt in memory
                memory.keep_state(name, inputs.clone())
        if self.rotary is not None:
            cos, sin = rotation if rotation is not None else self.rotary(x, position_ids)
            for kind, plain in list(heads.items()):
                heads[kind._replace(rotated=True)] = self.rotary.rotate(plain, cos, sin)
        return heads

    def _merge(self, rows: list[Tensor], routes: Routes, plan: RoutePlan | None) -> Tensor:
        """Weighted sum [B, T, D]: before the output projection if it is shared, after otherwise."""
        if self.config.shared_projections or (len(rows) == 1 and plan is None):
            return self._output(0, self.execution.merge(rows, routes.weights, plan))
        outputs = [self._output(index, row) for index, row in enumerate(rows)]
        return route_merge(
            routes.weights, outputs, only_listed=plan is not None, impl=self.config.impl
        )

    def _output(self, index: int, rows: Tensor) -> Tensor:
        """Rows [B, T, H * P] through an output projection: [B, T, D]."""
        projections: Projections = self.projections[index]  # type: ignore[assignment]
        return projections.output(rows)

    def _check_inputs(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        document_ids: Tensor | None,
        memory: RoutedCacheLayer | None,
    ) -> tuple[Tensor | None, Tensor]:
        """Mask [B, S], boolean or of document numbers, and positions [B, T]."""
        width, longest = self.config.hidden_size, self.config.max_position_embeddings
        if x.dim() != 3 or x.shape[-1] != width or 0 in x.shape:
            raise ShapeError(
                f"x must be [B, T, D] with B and T above 0 and D = {width}, got {list(x.shape)}"
            )
        B, T, _ = x.shape
        past = 0 if memory is None else memory.get_seq_length()
        if past + T > longest:
            raise ShapeError(
                f"the sequence must fit max_position_embeddings = {longest}, got {past + T} "
                "tokens; shorten it or build the model with a larger value"
            )
        if memory is not None and not self.config.causal:
            raise ConfigError("a cache needs causal=True: earlier tokens would see later ones")
        check_mask(attention_mask, B, past + T)
        mask = None if attention_mask is None else attention_mask.bool()
        if document_ids is not None:
            check_mask(document_ids, B, T)
            self._check_documents(memory)
            mask = number_documents(document_ids, mask)
        if position_ids is None:
            return mask, positions_of(mask, B, T, past, x.device)
        if position_ids.shape not in ((B, T), (1, T)):
            raise ShapeError(
                f"position_ids must be [B, T] = [{B}, {T}] to match x {list(x.shape)}, "
                f"got {list(position_ids.shape)}"
            )
        return mask, position_ids.expand(B, T)

    def _check_documents(self, memory: RoutedCacheLayer | None) -> None:
        if memory is not None:
            raise ConfigError("a cache holds one document per row; leave document_ids out")
        for name, expert in zip(self.expert_names, self.experts, strict=True):
            if not expert.keeps_documents_apart:
                raise ConfigError(
                    f"expert {name!r} does not keep documents apart; leave document_ids out"
                )

    def extra_repr(self) -> str:
        return f"experts={', '.join(self.expert_names)}"
