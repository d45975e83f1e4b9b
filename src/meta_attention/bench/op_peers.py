"""Peers of the attention op beside PyTorch's own: FlexAttention, a static hybrid, fla.

And the experts that all tokens may go to alone: linear attention, a state-space model.
"""

from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from meta_attention.bench.data import EXPERTS, FULL, LOCAL, Mix, attention_flops
from meta_attention.bench.gates import (
    ALLOWANCE,
    PEER_ALLOWANCE,
    sampled_gates,
    small_gates,
    state_space_rows,
)
from meta_attention.bench.op_bench import ALL_LINEAR, ALL_LOCAL, ShapeBench
from meta_attention.bench.peers import (
    FlexCall,
    FlexRows,
    build_flex,
    fla_linear_attention,
    has_fla,
    plan_flex,
)
from meta_attention.bench.rows import FORWARD, Row, Timing, fastest
from meta_attention.bench.session import Work
from meta_attention.experts.ssm import StateSpaceRates
from meta_attention.ops.linear_attention import linear_attention
from meta_attention.ops.route_plan import plan_routes
from meta_attention.ops.routed_attention import routed_attention

FLEX = "FlexAttention"
LOCAL_ONLY = "routed, all local"
FLEX_LOCAL = "FlexAttention, all local"
HYBRID = "static hybrid"
LINEAR_ONLY = "linear, all tokens"
FLA = "fla linear attention"
SSM_ONLY = "ssm, all tokens"

# the static hybrid: one full layer in this many, the others with this window
HYBRID_PERIOD, HYBRID_WINDOW = 6, 1024


class FlexPeer:
    """FlexAttention over the softmax rows of given routes, planned and compiled once.

    It is given its queries gathered and its mask built: neither is timed with it.
    """

    def __init__(self, bench: ShapeBench, routes: Tensor, window: int) -> None:
        self.bench = bench
        self.routes = routes
        self.window = window

    @cached_property
    def rows(self) -> FlexRows:
        return plan_flex(self.routes, self.window)

    @cached_property
    def attend(self) -> FlexCall:
        return build_flex(self.bench.session.device)

    def work(self, work: str) -> Work:
        bench, data = self.bench, self.bench.data
        needs_gradient = work != FORWARD
        q = self.rows.gather(data.query.detach()).requires_grad_(needs_gradient)
        k, v = (
            x.detach().transpose(1, 2).contiguous().requires_grad_(needs_gradient)
            for x in (data.key, data.value)
        )
        forward = partial(self.attend, q, k, v, self.rows.mask)
        # as it will be called: a change of mode would compile it again
        with torch.set_grad_enabled(needs_gradient):
            rows = forward().detach()
        gates = sampled_gates(
            self.rows.scatter(rows, data.query.detach()),
            data,
            self.routes,
            self.window,
            seed=bench.session.seed,
            experts=(FULL, LOCAL),
            allowance=PEER_ALLOWANCE,
        )
        note = "softmax rows only; neither gathering queries nor building the mask is counted"
        if work == FORWARD and bench.session.clock.is_cuda:
            mask_ms = bench.session.clock.time(
                lambda: plan_flex(self.routes, self.window)
            ).median_ms
            note += f": the mask alone takes {mask_ms:.2f} ms"
        return bench.work(
            forward,
            work,
            gates,
            bench.softmax_flops(self.routes, self.window),
            inputs=(q, k, v),
            upstream=self.rows.gather(data.upstream) * self.rows.is_row[:, None, :, None],
            in_graph=False,
            note=note,
        )


def run_flex(bench: ShapeBench, mix: Mix, works: tuple[str, ...]) -> list[Row]:
    """FlexAttention over the routes of a mix."""
    flex = FlexPeer(bench, bench.draw(mix), bench.shape.window)
    return [bench.keep(bench.measure(FLEX, work, mix, partial(flex.work, work))) for work in works]


def run_hybrid(bench: ShapeBench, window: int, flex_works: tuple[str, ...]) -> list[Row]:
    """A static hybrid, priced from its parts: one layer full, the others local."""
    routes = bench.draw(ALL_LOCAL)
    flex = FlexPeer(bench, routes, window)
    rows: list[Row] = []
    for work in bench.works:
        own = partial(_local_work, bench, routes, work, window)
        parts = [bench.measure(LOCAL_ONLY, work, ALL_LOCAL, own, window=window)]
        if work in flex_works:
            prepare = partial(flex.work, work)
            parts.append(bench.measure(FLEX_LOCAL, work, ALL_LOCAL, prepare, window=window))
        rows += [bench.keep(part) for part in parts]
        rows.append(bench.keep(_price_hybrid(bench, work, parts, window)))
    return rows


def run_linear(bench: ShapeBench) -> list[Row]:
    """Linear attention of all tokens, next to that of flash-linear-attention."""
    measured = [
        bench.measure(LINEAR_ONLY, work, ALL_LINEAR, partial(_linear_work, bench, work, False))
        for work in bench.works
    ]
    rows = [bench.keep(row) for row in measured]
    if not has_fla():
        row = bench.row(FLA, FORWARD, ALL_LINEAR)
        row.status = "missing"
        row.reason = "the package fla (flash-linear-attention) is not installed"
        return [*rows, bench.keep(row)]
    for own in measured:
        prepare = partial(_linear_work, bench, own.work, True)
        rows.append(bench.keep(bench.measure(FLA, own.work, ALL_LINEAR, prepare), own))
    return rows


@dataclass(frozen=True, slots=True)
class StateSpace:
    """A new state-space expert, but for its projection of step sizes: these are drawn."""

    step: Tensor  # [T, K], the same in all sequences
    rate: Tensor  # [K]
    skip: Tensor  # [H]

    @classmethod
    def of(cls, bench: ShapeBench) -> "StateSpace":
        T, H = bench.shape.T, bench.shape.H
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(bench.session.seed)
            rates, noise = StateSpaceRates(H, H), torch.randn(T, H)
        step = F.softplus(rates.step_bias + noise)
        parts = (step, rates.log_rate.exp(), rates.skip)
        return cls(*(x.detach().to(bench.session.device) for x in parts))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Rows [B, T, H, P], as the expert works them out."""
        B, T = query.shape[:2]
        step = self.step[:T].expand(B, -1, -1)
        key = (key * step.unsqueeze(-1)).to(key.dtype)
        decay = -step * self.rate
        rows, _ = linear_attention(
            query, key, value, causal=True, decay=decay, normalise=False, skip=self.skip
        )
        return rows

    def define(self, query: Tensor, key: Tensor, value: Tensor, routes: Tensor) -> Tensor:
        """The same by definition; routes are those of all tokens."""
        last = torch.arange(query.shape[1], device=query.device)
        reach = {"first": torch.zeros_like(last), "last": last}
        return torch.stack(
            [self.rows(*heads, **reach) for heads in zip(query, key, value, strict=True)]
        )

    def rows(self, query: Tensor, key: Tensor, value: Tensor, **reach: Tensor) -> Tensor:
        """Single rows of one sequence."""
        parts = {"step": self.step, "rate": self.rate, "skip": self.skip}
        return state_space_rows(query, key, value, **reach, **parts)


def run_state_space(bench: ShapeBench) -> list[Row]:
    """A state-space model of all tokens."""
    model = StateSpace.of(bench)
    rows = [
        bench.measure(SSM_ONLY, work, None, partial(_state_space_work, bench, model, work))
        for work in bench.works
    ]
    return [bench.keep(row) for row in rows]


def local_rows(query: Tensor, key: Tensor, value: Tensor, weights: Tensor, window: int) -> Tensor:
    """Routed attention where every token is local."""
    plan = plan_routes(weights, is_exclusive=True)
    rows = torch.empty_like(query)
    return routed_attention(query, key, value, plan, {LOCAL: window}, causal=True, rows=rows)


def _local_work(bench: ShapeBench, routes: Tensor, work: str, window: int) -> Work:
    forward = partial(local_rows, *bench.data.heads, ALL_LOCAL.weights(routes), window)
    gates = bench.timed_gates(forward, routes, work, window=window)
    return bench.work(forward, work, gates, bench.softmax_flops(routes, window))


def _price_hybrid(bench: ShapeBench, work: str, parts: list[Row], window: int) -> Row:
    row = bench.row(HYBRID, work, None, window=window)
    full, local = fastest(bench.baseline_rows[work]), fastest(parts)
    if full is None or local is None or full.timing is None or local.timing is None:
        row.status, row.reason = "failed", "its parts could not be measured"
        return row
    row.timing = _blend(full.timing, local.timing, 1.0 / HYBRID_PERIOD)
    row.note = (
        f"priced: (1 x {full.name} + {HYBRID_PERIOD - 1} x {local.name}, window {window}) "
        f"/ {HYBRID_PERIOD}"
    )
    return row


def _blend(one: Timing, other: Timing, share: float) -> Timing:
    """Times of what is ``share`` of one and otherwise the other."""

    def blend(name: str) -> float:
        return share * getattr(one, name) + (1.0 - share) * getattr(other, name)

    return Timing(
        blend("median_ms"),
        blend("low_ms"),
        blend("high_ms"),
        blend("repeat_ms"),
        min(one.runs, other.runs),
    )


def _linear_work(bench: ShapeBench, work: str, by_fla: bool) -> Work:
    forward = partial(fla_linear_attention if by_fla else _own_linear, *bench.data.heads)
    routes = bench.draw(ALL_LINEAR)
    allowance = PEER_ALLOWANCE if by_fla else ALLOWANCE
    gates = bench.timed_gates(forward, routes, work, allowance=allowance)
    return bench.work(forward, work, gates, attention_flops(bench.shape, routes, EXPERTS))


def _state_space_work(bench: ShapeBench, model: StateSpace, work: str) -> Work:
    shape, session = bench.shape, bench.session
    forward = partial(model.attend, *bench.data.heads)
    gates = small_gates(
        lambda q, k, v, routes: model.attend(q, k, v),
        shape,
        ALL_LINEAR,
        dtype=session.dtype,
        device=session.device,
        seed=session.seed,
        gradients=work != FORWARD,
        definition=model.define,
    )
    routes = bench.draw(ALL_LINEAR)
    gates += bench.timed_gates(forward, routes, work, linear=("ssm", model.rows))
    # a state of P x P numbers for each head is added to and read
    flops = 4.0 * shape.B * shape.T * shape.H * shape.P * shape.P
    return bench.work(forward, work, gates, flops)


def _own_linear(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    rows, _ = linear_attention(query, key, value, causal=True)
    return rows
