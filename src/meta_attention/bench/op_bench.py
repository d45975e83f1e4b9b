"""One shape of the attention op: the data all implementations share, and how they are measured."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from meta_attention.bench.data import (
    EXPERTS,
    FULL,
    LINEAR,
    LOCAL,
    Mix,
    OpShape,
    attention_flops,
    causal_flops,
    make_heads,
)
from meta_attention.bench.gates import (
    ALLOWANCE,
    PEER_ALLOWANCE,
    SMALL_LENGTH,
    Rows,
    sampled_gates,
    small_gates,
    value_gradient_gate,
)
from meta_attention.bench.peers import sdpa
from meta_attention.bench.rows import BACKWARD, BOTH, FORWARD, ROUTED, Gate, Row
from meta_attention.bench.session import Session, Work
from meta_attention.ops.linear_attention import linear_attention
from meta_attention.ops.route_plan import plan_routes
from meta_attention.ops.routed_attention import routed_attention

ALL_FULL, ALL_LOCAL, ALL_LINEAR = Mix(100, 0, 0), Mix(0, 100, 0), Mix(0, 0, 100)

# a backward works out the scores again: five products where the forward has two
BACKWARD_FACTOR = 2.5
FACTORS = {FORWARD: 1.0, BACKWARD: BACKWARD_FACTOR, BOTH: 1.0 + BACKWARD_FACTOR}

KnownGates = dict[tuple[OpShape, Mix, bool], list[Gate]]


def routed_rows(query: Tensor, key: Tensor, value: Tensor, weights: Tensor, window: int) -> Tensor:
    """Everything routing does, from one-hot weights [B, T, E] to rows [B, T, H, P]."""
    plan = plan_routes(weights, is_exclusive=True)
    rows = torch.empty_like(query)
    rows = routed_attention(
        query, key, value, plan, {FULL: None, LOCAL: window}, causal=True, rows=rows
    )
    if weights.shape[-1] > LINEAR:
        rows, _ = linear_attention(
            query, key, value, causal=True, queries=plan.list_of(LINEAR), rows=rows
        )
    return rows


class ShapeBench:
    """Measures implementations of one shape on the same data.

    Args:
        session: The run.
        suite: Name of the suite.
        shape: The shape.
        works: Which of forward, backward and both.
        baselines: PyTorch backends of which the fastest counts.
        known_gates: Verdicts at a small shape, which do not change with the length.
    """

    def __init__(
        self,
        session: Session,
        suite: str,
        shape: OpShape,
        *,
        works: Sequence[str],
        baselines: Sequence[str],
        known_gates: KnownGates,
    ) -> None:
        self.session = session
        self.suite = suite
        self.shape = shape
        self.works = works
        self.baselines = baselines
        self.known_gates = known_gates
        self.data = make_heads(
            shape, dtype=session.dtype, device=session.device, seed=session.seed + shape.T
        )
        self.baseline_rows: dict[str, list[Row]] = {}

    def draw(self, mix: Mix) -> Tensor:
        """Routes [B, T], the same whenever asked for."""
        B, T = self.shape.B, self.shape.T
        return mix.draw(B, T, seed=self.session.seed, device=self.session.device)

    def row(self, name: str, work: str, mix: Mix | None, *, window: int | None = None) -> Row:
        shape = self.shape if window is None else replace(self.shape, window=window)
        return self.session.row(self.suite, name, work, shape.to_dict(), mix)

    def measure(
        self,
        name: str,
        work: str,
        mix: Mix | None,
        prepare: Callable[[], Work],
        *,
        window: int | None = None,
    ) -> Row:
        return self.session.measure(self.row(name, work, mix, window=window), prepare)

    def keep(self, row: Row, *others: Row) -> Row:
        """Store a row, compared with PyTorch's attention and with others."""
        peers = [*self.baseline_rows[row.work], *others]
        return self.session.keep(row, peers, self.baselines)

    def run_baselines(self) -> list[Row]:
        """PyTorch's attention, by every backend that counts."""
        for work in self.works:
            self.baseline_rows[work] = [
                self.measure(name, work, None, partial(self._sdpa_work, name, work))
                for name in self.baselines
            ]
        return [self.keep(row) for rows in self.baseline_rows.values() for row in rows]

    def run_routed(self, mix: Mix) -> list[Row]:
        """Routed attention, from weights to rows."""
        return [
            self.keep(self.measure(ROUTED, work, mix, partial(self._routed_work, mix, work)))
            for work in self.works
        ]

    def work(
        self,
        forward: Callable[[], Tensor],
        work: str,
        gates: Sequence[Gate],
        flops: float,
        *,
        inputs: tuple[Tensor, ...] | None = None,
        upstream: Tensor | None = None,
        in_graph: bool = True,
        note: str | None = None,
    ) -> Work:
        """The part of a forward and its backward that is timed.

        Args:
            forward: Makes rows.
            work: Forward, backward or both.
            gates: What was found of their correctness.
            flops: Of the forward.
            inputs: What gradients are of; default: the heads.
            upstream: Gradient of the rows; default: that of the data.
            in_graph: Time the forward in a CUDA graph, too.
            note: For the row.
        """
        wanted = self.data.heads if inputs is None else inputs
        gradient = self.data.upstream if upstream is None else upstream
        rows = forward() if work == BACKWARD else None

        def call() -> object:
            if work == FORWARD:
                with torch.no_grad():
                    return forward()
            out = forward() if rows is None else rows
            return torch.autograd.grad(out, wanted, gradient, retain_graph=rows is not None)

        return Work(
            call,
            gates,
            flops=flops * FACTORS[work],
            # launches weigh most where there is least to do
            also_in_graph=in_graph and work == FORWARD,
            note=note,
        )

    def timed_gates(
        self,
        forward: Callable[[], Tensor],
        routes: Tensor,
        work: str,
        *,
        window: int | None = None,
        allowance: float = ALLOWANCE,
        linear: tuple[str, Rows] | None = None,
    ) -> list[Gate]:
        """Gates at the shape that is timed, also of the gradients where they are.

        ``linear`` as of :func:`sampled_gates`; its weights need not sum to one.
        """
        check = partial(
            sampled_gates,
            data=self.data,
            routes=routes,
            window=self.shape.window if window is None else window,
            seed=self.session.seed,
            allowance=allowance,
            linear=linear,
        )
        if work == FORWARD:
            with torch.no_grad():
                return check(forward())
        rows = forward()
        d_query, _, d_value = torch.autograd.grad(rows, self.data.heads, self.data.upstream)
        gates = check(rows.detach(), d_query=d_query)
        if linear is not None:
            return gates
        return [*gates, value_gradient_gate(d_value, self.data.upstream)]

    def softmax_flops(self, routes: Tensor, window: int) -> float:
        """Of the forward of full and local rows."""
        return attention_flops(replace(self.shape, window=window), routes, EXPERTS[:LINEAR])

    def _sdpa_work(self, name: str, work: str) -> Work:
        forward = partial(sdpa, name, *self.data.heads)
        routes = self.draw(ALL_FULL)
        gates = self.timed_gates(forward, routes, work, allowance=PEER_ALLOWANCE)
        return self.work(forward, work, gates, causal_flops(self.shape))

    def _routed_work(self, mix: Mix, work: str) -> Work:
        routes = self.draw(mix)
        weights = mix.weights(routes)
        forward = partial(routed_rows, *self.data.heads, weights, self.shape.window)
        small = self._small_gates(mix, gradients=work != FORWARD)
        gates = [*small, *self.timed_gates(forward, routes, work)]
        return self.work(forward, work, gates, attention_flops(self.shape, routes, mix.experts))

    def _small_gates(self, mix: Mix, *, gradients: bool) -> list[Gate]:
        shape = replace(self.shape, B=1, T=min(self.shape.T, SMALL_LENGTH))
        known = (shape, mix, gradients)
        if known not in self.known_gates:
            self.known_gates[known] = small_gates(
                lambda q, k, v, r: routed_rows(q, k, v, mix.weights(r), shape.window),
                shape,
                mix,
                dtype=self.session.dtype,
                device=self.session.device,
                seed=self.session.seed,
                gradients=gradients,
            )
        return self.known_gates[known]
