"""The routed attention layer. ``forward`` is the pipeline.

Shapes: B batch, T sequence, D width, H heads, P head width, E experts.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meta_attention.config import MetaAttentionConfig
from meta_attention.controller import Posterior, build_controller
from meta_attention.errors import ConfigError, ShapeError
from meta_attention.experts import (
    Expert,
    Heads,
    RecurrentExpert,
    SoftmaxExpert,
    build_experts,
    expert_costs,
    keep_listed,
)
from meta_attention.layers.cache import MetaAttentionCache, RoutedCacheLayer
from meta_attention.layers.projections import (
    MetaAttentionRotaryEmbedding,
    Projections,
    number_documents,
    positions_of,
)
from meta_attention.ops.heads import check_mask
from meta_attention.ops.route_merge import route_merge, take_chosen
from meta_attention.ops.route_plan import RoutePlan, plan_routes
from meta_attention.ops.routed_attention import routed_attention
from meta_attention.routing import Routes, choose_routes

Rotation = tuple[Tensor, Tensor]  # cosines and sines, [B, T, P] each


class HeadsKind(NamedTuple):
    """Which of a layer's queries, keys and values an expert sees."""

    projections: int
    rotated: bool


@dataclass(frozen=True, slots=True)
class LayerOutput:
    """Attention output with the routing it was produced by."""

    output: Tensor  # [B, T, D], zero for padding
    kl: Tensor  # [B, T] nats, zero for padding
    projected_cost: Tensor  # [B, T], sum over experts of weight * cost, zero for padding
    posterior: Posterior
    routes: Routes


class BayesianMetaAttentionLayer(nn.Module):
    """Attention whose algorithm is chosen per token; stands where self-attention stands.

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
        self.controller = build_controller(config, expert_costs(config, experts))
        self.experts = nn.ModuleList(experts.values())
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
        """
        memory = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        mask, position_ids = self._check_inputs(
            x, attention_mask, position_ids, document_ids, memory
        )
        is_padding = None if mask is None else mask[:, -x.shape[1] :] == 0  # [B, T]
        if is_padding is not None:
            # padding may hold anything, also what 0 * x would not remove
            x = x.masked_fill(is_padding.unsqueeze(-1), 0.0)

        # tokens -> posterior -> routes
        posterior = self.controller(x, position_ids)
        routes = choose_routes(
            posterior,
            routing=self.config.routing,
            draw=self.config.training_weights if self.training else "mean",
            gradient=self.config.route_gradient,
            signal=self.config.uncertainty_signal,
            threshold=self.controller.uncertainty_threshold,
        )

        # routes -> plan -> experts -> merge
        heads = self._project(x, position_ids, rotation)
        plan = self._plan(routes, is_padding)
        if plan is None:
            rows = self._attend(heads, x, mask, memory)
        else:
            rows = self._attend_listed(heads, x, mask, memory, plan)
        output = self._merge(rows, routes, plan)

        # what the objective needs
        kl = posterior.kl_to(self.controller.prior_concentration)
        cost = (routes.weights * self.controller.costs).sum(dim=-1)
        if is_padding is not None:
            output = output.masked_fill(is_padding.unsqueeze(-1), 0.0)
            kl, cost = kl.masked_fill(is_padding, 0.0), cost.masked_fill(is_padding, 0.0)
        return LayerOutput(output, kl, cost, posterior, routes)

    def _project(
        self, x: Tensor, position_ids: Tensor, rotation: Rotation | None
    ) -> dict[HeadsKind, Heads]:
        """Queries, keys and values by projection set, plain and rotated."""
        projections: list[Projections] = list(self.projections)  # type: ignore[arg-type]
        heads = {HeadsKind(index, False): p.heads(x) for index, p in enumerate(projections)}
        if self.rotary is not None:
            cos, sin = rotation if rotation is not None else self.rotary(x, position_ids)
            for kind, plain in list(heads.items()):
                heads[kind._replace(rotated=True)] = self.rotary.rotate(plain, cos, sin)
        return heads

    def _plan(self, routes: Routes, is_padding: Tensor | None) -> RoutePlan | None:
        """Which tokens each expert works on; None where all experts work on all tokens."""
        if self.config.routing == "soft" or len(self.experts) == 1:
            return None
        if routes.weights.requires_grad and self.config.route_gradient == "all":
            # a straight-through gradient reads the rows that were not chosen, too
            return None
        return plan_routes(
            routes.weights,
            mask=None if is_padding is None else ~is_padding,
            is_exclusive=self.config.routing == "hard",
            impl=self.config.impl,
        )

    def _attend(
        self,
        heads: dict[HeadsKind, Heads],
        x: Tensor,
        mask: Tensor | None,
        memory: RoutedCacheLayer | None,
    ) -> list[Tensor]:
        """Rows [B, T, H * P] of every expert."""
        with_past, new_mask, past_mask = self._with_past(heads, mask, memory, x.shape[1])
        rows = []
        for index, (name, expert) in enumerate(zip(self.expert_names, self.experts, strict=True)):
            kind = self._kind_of(index)
            if isinstance(expert, RecurrentExpert):
                state = None if memory is None else memory.states.get(name)
                row, state = expert(heads[kind], x, new_mask, state)
                if memory is not None:
                    memory.states[name] = state
            else:
                row = expert(with_past[kind], x, past_mask)
            rows.append(row.flatten(2))
        if memory is not None:
            memory.advance(x.shape[1])
        return rows

    def _attend_listed(
        self,
        heads: dict[HeadsKind, Heads],
        x: Tensor,
        mask: Tensor | None,
        memory: RoutedCacheLayer | None,
        plan: RoutePlan,
    ) -> list[Tensor]:
        """Rows [B, T, H * P] of every expert for its own tokens; one for all under hard routing."""
        with_past, new_mask, past_mask = self._with_past(heads, mask, memory, x.shape[1])
        query = next(iter(heads.values())).query
        # where each token takes one expert and all share what follows, they share a buffer
        shares = plan.is_exclusive and self.config.shared_projections
        buffers = [torch.zeros_like(query) if self._leaves_gaps(mask) else torch.empty_like(query)]
        if not shares:
            buffers = [torch.zeros_like(query) for _ in self.experts]

        for kind, windows in self._windows_by_kind().items():
            rows = routed_attention(
                with_past[kind].query,
                with_past[kind].key,
                with_past[kind].value,
                plan,
                windows,
                causal=self.config.causal,
                mask=past_mask,
                rows=buffers[0] if shares else None,
                impl=self.config.impl,
            )
            for slot, index in enumerate(windows):
                own = rows if plan.is_exclusive else rows[slot]
                expert: SoftmaxExpert = self.experts[index]  # type: ignore[assignment]
                if expert.has_finish:
                    own = keep_listed(plan.list_of(index), expert.finish(own, x), own)
                    rows = own if shares else rows
                buffers[0 if shares else index] = own

        for index, (name, other) in enumerate(zip(self.expert_names, self.experts, strict=True)):
            expert_heads, buffer = self._kind_of(index), 0 if shares else index
            queries = plan.list_of(index)
            if isinstance(other, RecurrentExpert):
                state = None if memory is None else memory.states.get(name)
                buffers[buffer], state = other.attend(
                    heads[expert_heads], x, new_mask, state, queries, buffers[buffer]
                )
                if memory is not None:
                    memory.states[name] = state
            elif isinstance(other, Expert) and not isinstance(other, SoftmaxExpert):
                buffers[buffer] = other.attend(
                    with_past[expert_heads], x, past_mask, queries, buffers[buffer]
                )
        if memory is not None:
            memory.advance(x.shape[1])
        return [buffer.flatten(2) for buffer in buffers]

    def _windows_by_kind(self) -> dict[HeadsKind, dict[int, int | None]]:
        """Softmax experts, by the heads they see: those of one kind run in one kernel."""
        windows: dict[HeadsKind, dict[int, int | None]] = {}
        for index, expert in enumerate(self.experts):
            if isinstance(expert, SoftmaxExpert):
                windows.setdefault(self._kind_of(index), {})[index] = expert.window
        return windows

    def _leaves_gaps(self, mask: Tensor | None) -> bool:
        """Whether rows may be read that nobody has written: those of padding, say."""
        return mask is not None or any(
            isinstance(e, SoftmaxExpert) and e.has_finish for e in self.experts
        )

    def _with_past(
        self,
        heads: dict[HeadsKind, Heads],
        mask: Tensor | None,
        memory: RoutedCacheLayer | None,
        T: int,
    ) -> tuple[dict[HeadsKind, Heads], Tensor | None, Tensor | None]:
        """Heads that see the cache, and the masks of the new tokens and of all they see."""
        new_mask = None if mask is None else mask[:, -T:]
        if memory is None:
            return heads, new_mask, mask
        with_past = self._remember(heads, memory)
        kept = next(iter(with_past.values())).key.shape[1] if with_past else 0
        # a window may have dropped the oldest keys
        return with_past, new_mask, None if mask is None else mask[:, mask.shape[1] - kept :]

    def _remember(
        self, heads: dict[HeadsKind, Heads], memory: RoutedCacheLayer
    ) -> dict[HeadsKind, Heads]:
        """Add keys and values to the cache; heads that see all of it, for experts that look."""
        kinds = list(
            dict.fromkeys(
                self._kind_of(index)
                for index, expert in enumerate(self.experts)
                if not isinstance(expert, RecurrentExpert)
            )
        )
        if not kinds:
            return {}
        # the cache keeps [B, heads, S, P]: the heads of all kinds side by side
        keys, values = memory.update(
            torch.cat([heads[kind].key for kind in kinds], dim=2).transpose(1, 2),
            torch.cat([heads[kind].value for kind in kinds], dim=2).transpose(1, 2),
        )
        per_kind = zip(
            kinds,
            keys.transpose(1, 2).chunk(len(kinds), dim=2),
            values.transpose(1, 2).chunk(len(kinds), dim=2),
            strict=True,
        )
        return {kind: Heads(heads[kind].query, key, value) for kind, key, value in per_kind}

    def _kind_of(self, index: int) -> HeadsKind:
        """Which heads an expert sees."""
        own = 0 if self.config.shared_projections else index
        return HeadsKind(own, self.rotary is not None and bool(self.experts[index].uses_rope))

    def _merge(self, rows: list[Tensor], routes: Routes, plan: RoutePlan | None) -> Tensor:
        """Weighted sum [B, T, D]: before the output projection if it is shared, after otherwise."""
        impl, only_listed = self.config.impl, plan is not None
        projections: list[Projections] = list(self.projections)  # type: ignore[arg-type]
        if not self.config.shared_projections:
            outputs = [p.output(row) for p, row in zip(projections, rows, strict=True)]
            return route_merge(routes.weights, outputs, only_listed=only_listed, impl=impl)
        if plan is not None and plan.is_exclusive:
            return projections[0].output(take_chosen(routes.weights, rows[0]))
        merged = route_merge(routes.weights, rows, only_listed=only_listed, impl=impl)
        return projections[0].output(merged)

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
