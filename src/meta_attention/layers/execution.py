"""The running of a layer's experts: on all tokens, on listed ones, or on the newest of each row.

The first is for soft routes, which take every expert; the second for hard and gated ones. The third
is a decoding step, and does what either would: it adds up the experts of a row in one launch.

Shapes: B batch, T sequence, D width, H heads, P head width, E experts, G key-value heads where each
has a route of its own, otherwise 1.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meta_attention.config import MetaAttentionConfig, RoutingName
from meta_attention.experts import (
    LINEAR_STATES,
    Expert,
    Heads,
    LinearStateExpert,
    RecurrentExpert,
    SoftmaxExpert,
    keep_listed,
)
from meta_attention.layers.cache import LayerMemory
from meta_attention.layers.decode_step import DecodeStep
from meta_attention.ops.route_merge import route_merge, take_chosen
from meta_attention.ops.route_plan import RoutePlan, plan_routes
from meta_attention.ops.routed_attention import routed_attention
from meta_attention.ops.routed_decode import LinearStep, routed_decode


class HeadsKind(NamedTuple):
    """Which of a layer's queries, keys and values an expert sees."""

    projections: int
    rotated: bool


HeadsByKind = dict[HeadsKind, Heads]


class SoftmaxCall(NamedTuple):
    """What softmax experts that run in one kernel have in common."""

    kind: HeadsKind
    num_sinks: int
    scale: float | None
    softcap: float | None

    @property
    def scores(self) -> dict[str, Any]:
        """Arguments of the attention functions."""
        return {"num_sinks": self.num_sinks, "scale": self.scale, "softcap": self.softcap}


class ExpertExecution:
    """Runs the experts of one layer, and writes what they leave in its cache.

    Args:
        config: Model configuration.
        names: Names of the experts.
        experts: The experts, in the same order.
    """

    def __init__(
        self, config: MetaAttentionConfig, names: tuple[str, ...], experts: nn.ModuleList
    ) -> None:
        self.config = config
        self.names = names
        self.experts = experts
        # a config takes its time to be read
        self.causal = config.causal
        self.shared_projections = config.shared_projections
        # which heads each expert sees
        self.kinds = [
            HeadsKind(
                0 if config.shared_projections else index,
                config.use_rope and bool(expert.uses_rope),
            )
            for index, expert in enumerate(experts)
        ]
        # plain lists of what does not change: a step of decoding waits for all that is looked up
        self._softmax = [(i, e) for i, e in enumerate(experts) if isinstance(e, SoftmaxExpert)]
        self._finished = [i for i, e in self._softmax if e.has_finish]
        self.has_finish = bool(self._finished)
        self._linear = [(i, e) for i, e in enumerate(experts) if isinstance(e, LinearStateExpert)]
        # the heads whose keys and values some expert reads from the cache
        with_kinds = zip(self.kinds, experts, strict=True)
        kept = [kind for kind, e in with_kinds if not isinstance(e, RecurrentExpert)]
        self._kinds_kept = list(dict.fromkeys(kept))
        self._others = [(i, e) for i, e in enumerate(experts) if not isinstance(e, SoftmaxExpert)]
        self._steps_are_known = (
            all(type(e) in LINEAR_STATES for _, e in self._others)
            and len(self._kinds_kept) <= 1
            and len({kind.projections for kind in self.kinds}) == 1
        )
        self._calls: tuple[object, dict[SoftmaxCall, dict[int, int | None]]] = ((), {})

    def plan(
        self, weights: Tensor, is_padding: Tensor | None, routing: RoutingName
    ) -> RoutePlan | None:
        """Which tokens each expert works on; None where all experts work on all tokens."""
        if routing == "soft" or len(self.experts) == 1:
            return None
        if weights.requires_grad and self.config.route_gradient == "all":
            # a straight-through gradient reads the rows that were not chosen, too
            return None
        return plan_routes(
            weights,
            mask=None if is_padding is None else ~is_padding,
            is_exclusive=routing == "hard",
            impl=self.config.impl,
        )

    def merge(self, rows: list[Tensor], weights: Tensor, plan: RoutePlan | None) -> Tensor:
        """Weighted sum [B, T, H * P] of rows before a shared output projection."""
        if len(rows) == 1 and plan is None:
            return rows[0]  # of one expert, which has all the weight
        shape = rows[0].shape
        if weights.dim() == 4:
            # the heads of a group have weights of their own, as if they were a token
            weights = weights.flatten(1, 2)  # [B, T * G, E]
            rows = [row.reshape(*weights.shape[:2], -1) for row in rows]
        if plan is not None and plan.is_exclusive:
            merged = take_chosen(weights, rows[0])
        else:
            merged = route_merge(weights, rows, only_listed=plan is not None, impl=self.config.impl)
        return merged.reshape(shape)

    def on_all(
        self, heads: HeadsByKind, x: Tensor, mask: Tensor | None, memory: LayerMemory | None
    ) -> list[Tensor]:
        """Rows [B, T, H * P] of every expert."""
        with_past, new_mask, past_mask = self._with_past(heads, mask, memory, x.shape[1])
        rows = []
        for index, (name, expert) in enumerate(zip(self.names, self.experts, strict=True)):
            kind = self.kinds[index]
            if isinstance(expert, RecurrentExpert):
                state = None if memory is None else memory.states.get(name)
                row, state = expert(heads[kind], x, new_mask, state)
                if memory is not None:
                    memory.keep_state(name, state)
            else:
                row = expert(with_past[kind], x, past_mask)
            rows.append(row.flatten(2))
        if memory is not None:
            memory.advance(x.shape[1])
        return rows

    def on_listed(
        self,
        heads: HeadsByKind,
        x: Tensor,
        mask: Tensor | None,
        memory: LayerMemory | None,
        plan: RoutePlan,
    ) -> list[Tensor]:
        """Rows [B, T, H * P] of every expert for its own tokens; one for all under hard routing."""
        with_past, new_mask, past_mask = self._with_past(heads, mask, memory, x.shape[1])
        query = next(iter(heads.values())).query
        # where each token takes one expert and all share what follows, they share a buffer
        shares = plan.is_exclusive and self.shared_projections
        if not shares:
            buffers = [torch.zeros_like(query) for _ in self.experts]
        elif mask is not None or self.has_finish:
            # rows may be read that nobody has written: those of padding, say
            buffers = [torch.zeros_like(query)]
        elif torch.is_grad_enabled():
            # a training gone wrong may route a token nowhere; its row must not look like one
            buffers = [torch.full_like(query, float("nan"))]
        else:
            buffers = [torch.empty_like(query)]

        for call, windows in self._softmax_calls().items():
            seen = with_past[call.kind]
            rows = routed_attention(
                seen.query,
                seen.key,
                seen.value,
                plan,
                windows,
                causal=self.causal,
                mask=past_mask,
                rows=buffers[0] if shares else None,
                **call.scores,
                impl=self.config.impl,
            )
            if shares and not self.has_finish:
                buffers[0] = rows
                continue
            for slot, index in enumerate(windows):
                own = rows if plan.is_exclusive else rows[slot]
                if index in self._finished:
                    expert: SoftmaxExpert = self.experts[index]  # type: ignore[assignment]
                    own = keep_listed(plan.list_of(index), expert.finish(own, x), own)
                    rows = own if shares else rows
                buffers[0 if shares else index] = own

        for index, other in self._others:
            name, buffer = self.names[index], 0 if shares else index
            if isinstance(other, RecurrentExpert):
                state = None if memory is None else memory.states.get(name)
                buffers[buffer], state = other.attend(
                    heads[self.kinds[index]],
                    x,
                    new_mask,
                    state,
                    plan.list_of(index),
                    buffers[buffer],
                )
                if memory is not None:
                    memory.keep_state(name, state)
            elif isinstance(other, Expert):
                buffers[buffer] = other.attend(
                    with_past[self.kinds[index]],
                    x,
                    past_mask,
                    plan.list_of(index),
                    buffers[buffer],
                )
        if memory is not None:
            memory.advance(x.shape[1])
        return [buffer.flatten(2) for buffer in buffers]

    def can_run_newest(self, *tensors: Tensor) -> bool:
        """Whether :meth:`on_newest` knows the experts, and these queries, keys and values.

        It does not know experts with projections or algorithms of their own, nor softmax experts
        that differ in more than their window, and has no gradient.
        """
        if not self.knows_newest:
            return False
        first = tensors[0]
        # under autocast they may differ
        return not first.requires_grad and all(x.dtype == first.dtype for x in tensors)

    @property
    def knows_newest(self) -> bool:
        """Whether :meth:`on_newest` knows the experts."""
        return self._steps_are_known and len(self._softmax_calls()) <= 1

    def newest_tensors(self, heads: HeadsByKind, memory: LayerMemory) -> list[Tensor]:
        """What :meth:`can_run_newest` asks for, of a layer that writes to its cache itself."""
        seen = [heads[kind] for kind in self._kinds_kept] or list(heads.values())[:1]
        tensors = [x for h in seen for x in (h.query, h.key, h.value)]
        return tensors + [x for x in (memory.keys, memory.values) if x is not None]

    def on_newest(
        self,
        heads: HeadsByKind,
        x: Tensor,
        weights: Tensor,
        step: DecodeStep,
        memory: LayerMemory,
    ) -> Tensor:
        """Rows [B, 1, H * P] of the newest tokens, their experts summed by weight.

        The weights are [B, 1, E] or [B, 1, G, E].
        """
        kinds = self._kinds_kept
        newest = heads[kinds[0] if kinds else self.kinds[0]]
        steps = [self._linear_step(i, expert, heads, x, memory) for i, expert in self._linear]
        key, value = newest.key.transpose(1, 2), newest.value.transpose(1, 2)  # [B, K, 1, P]
        if kinds:
            key, value, length, start = memory.update_newest(key, value, step)
        else:
            # nobody reads keys: the newest stand for all
            length, start = torch.ones_like(step.length), None
        at = DecodeStep(step.position, length, start, step.is_token)
        rows = self.attend_newest(newest.query.squeeze(1), key, value, x, weights, at, steps)
        memory.advance(1)
        return rows.flatten(1).unsqueeze(1)

    def attend_newest(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        x: Tensor,
        weights: Tensor,
        step: DecodeStep,
        steps: Sequence[LinearStep] = (),
    ) -> Tensor:
        """Rows [B, H, P] of the newest tokens, their experts summed by weight.

        One launch, and another for each expert that has a say in what becomes of its rows, and for
        each state beyond the first.

        Args:
            query: ``[B, H, P]``.
            key: The cache ``[B, K, S, P]``, the newest tokens' keys in it.
            value: Likewise.
            x: Layer input ``[B, 1, D]``.
            weights: ``[B, 1, E]`` or ``[B, 1, G, E]``.
            step: Which part of the cache is filled.
            steps: Of the linear experts.
        """
        weights = weights.squeeze(1) if weights.dim() == 4 else weights  # [B, G, E]
        calls = self._softmax_calls()  # one, if any
        windows: dict[int, int | None] = {}
        scores: dict[str, Any] = {}
        if calls:
            (call, windows), *_ = calls.items()
            scores = call.scores

        def attend(
            weights: Tensor, windows: dict[int, int | None], linear: LinearStep | None
        ) -> Tensor:
            return routed_decode(
                query,
                key,
                value,
                weights,
                windows,
                length=step.length,
                start=step.start,
                is_token=step.is_token,
                linear=linear,
                **scores,
                impl=self.config.impl,
            )

        if not self._finished and len(steps) <= 1:
            return attend(weights, windows, steps[0] if steps else None)
        plain = {index: window for index, window in windows.items() if index not in self._finished}
        dtype = torch.promote_types(query.dtype, torch.float32)
        rows = []
        if plain or steps:
            rows.append(attend(weights, plain, steps[0] if steps else None).to(dtype))
        rows += [attend(weights, {}, state).to(dtype) for state in steps[1:]]
        for index in self._finished:
            # weighted after it is finished
            own = attend((weights > 0).to(weights.dtype), {index: windows[index]}, None)
            expert: SoftmaxExpert = self.experts[index]  # type: ignore[assignment]
            own = expert.finish(own.unsqueeze(1), x).squeeze(1)
            own = own.unflatten(1, (weights.shape[1], -1))  # [B, G, heads of a group, P]
            weight = weights[..., index, None, None]
            rows.append(torch.where(weight > 0, weight * own, 0.0).to(dtype).flatten(1, 2))
        merged = rows[0] if len(rows) == 1 else torch.stack(rows).sum(dim=0)
        return merged.to(query.dtype)

    def _linear_step(
        self,
        index: int,
        expert: LinearStateExpert,
        heads: HeadsByKind,
        x: Tensor,
        memory: LayerMemory,
    ) -> LinearStep:
        """The newest tokens as a linear expert sees them, and its state."""
        own = expert.inputs(heads[self.kinds[index]], x)
        B, _, K, P = own.key.shape

        def zeros() -> Tensor:
            dtype = torch.promote_types(own.query.dtype, torch.float32)
            return own.key.new_zeros(B, K, P, P + 1, dtype=dtype)

        query, key, value = (x.squeeze(1) for x in (own.query, own.key, own.value))
        return LinearStep(
            index,
            query,
            key,
            value,
            memory.open_state(self.names[index], zeros),
            decay=None if own.decay is None else own.decay.squeeze(1),
            skip=own.skip,
            normalise=own.normalise,
        )

    def _softmax_calls(self) -> dict[SoftmaxCall, dict[int, int | None]]:
        """Windows of the softmax experts, by what they have in common: these run in one kernel."""
        # what may be set on an expert, at any time
        found = [(e.window, e.num_sinks, e.scale, e.softcap) for _, e in self._softmax]
        if self._calls[0] == found:
            return self._calls[1]
        # an expert without a window sees all sinks, and runs along with those that have one
        most = max((sinks for window, sinks, _, _ in found if window is not None), default=0)
        calls: dict[SoftmaxCall, dict[int, int | None]] = {}
        for (index, _), (window, sinks, scale, softcap) in zip(self._softmax, found, strict=True):
            num_sinks = most if window is None else sinks
            call = SoftmaxCall(self.kinds[index], num_sinks, scale, softcap)
            calls.setdefault(call, {})[index] = window
        self._calls = (found, calls)
        return calls

    def _with_past(
        self,
        heads: HeadsByKind,
        mask: Tensor | None,
        memory: LayerMemory | None,
        T: int,
    ) -> tuple[HeadsByKind, Tensor | None, Tensor | None]:
        """Heads that see the cache, and the masks of the new tokens and of all they see."""
        new_mask = None if mask is None else mask[:, -T:]
        if memory is None:
            return heads, new_mask, mask
        with_past = self._remember(heads, memory)
        kept = next(iter(with_past.values())).key.shape[1] if with_past else 0
        # a window may have dropped the oldest keys
        return with_past, new_mask, None if mask is None else mask[:, mask.shape[1] - kept :]

    def _remember(self, heads: HeadsByKind, memory: LayerMemory) -> HeadsByKind:
        """Add keys and values to the cache; heads that see all of it, for experts that look."""
        kinds = self._kinds_kept
        if not kinds:
            return {}
        # the cache keeps [B, heads, S, P]: the heads of all kinds side by side
        new = [(heads[kind].key, heads[kind].value) for kind in kinds]
        keys, values = (
            new[0] if len(new) == 1 else (torch.cat(x, dim=2) for x in zip(*new, strict=True))
        )
        keys, values = memory.update(keys.transpose(1, 2), values.transpose(1, 2))
        parts = (x.transpose(1, 2).chunk(len(kinds), dim=2) for x in (keys, values))
        return {
            kind: Heads(heads[kind].query, key, value)
            for kind, key, value in zip(kinds, *parts, strict=True)
        }
