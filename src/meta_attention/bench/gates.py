"""Is it right? Asked before anything is timed.

At a small shape an output is held against attention as it is written on paper, in float64; at the
shape that is timed, rows drawn at random are worked out again one by one. As in the tests, the
error may be twice that of plain PyTorch in the same precision.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from meta_attention.bench.data import FULL, LINEAR, LOCAL, Mix, OpData, OpShape, make_heads
from meta_attention.bench.rows import Gate
from meta_attention.testing import (
    naive_full_attention,
    naive_linear_attention,
    naive_local_attention,
)

Forward = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # heads and routes -> rows
Rows = Callable[..., Tensor]  # as attend_rows

ALLOWANCE = 2.0  # times the error of plain PyTorch
PEER_ALLOWANCE = 4.0  # peers are not on trial, but must not be timed on nonsense

SMALL_BATCH, SMALL_LENGTH = 2, 600
SAMPLED_ROWS = 16  # of each expert, in the first and in the last sequence


def gate(name: str, actual: Tensor, oracle: Tensor, plain: Tensor) -> Gate:
    """Largest error, relative to the largest value."""
    oracle = oracle.double()
    largest = oracle.abs().max().clamp(min=1e-30)

    def error_of(x: Tensor) -> Tensor:
        return (_like(x, oracle) - oracle).abs().max() / largest

    return _gate(name, actual, plain, error_of)


def gate_rows(
    name: str, actual: Tensor, oracle: Tensor, plain: Tensor, allowance: float = ALLOWANCE
) -> Gate:
    """Error of a row relative to the row, since long rows have small values; root mean square.

    The largest of a few rows would be a matter of luck, and one row that is wrong shows in the
    mean, too.
    """
    oracle = oracle.double()
    size = torch.linalg.vector_norm(oracle, dim=-1).clamp(min=1e-30)

    def error_of(x: Tensor) -> Tensor:
        errors = torch.linalg.vector_norm(_like(x, oracle) - oracle, dim=-1) / size
        return errors.square().mean().sqrt()

    return _gate(name, actual, plain, error_of, allowance)


def gate_norm(name: str, actual: Tensor, oracle: Tensor, plain: Tensor) -> Gate:
    """Norm of the error, relative to that of the whole: for what many layers have rounded."""
    size = torch.linalg.vector_norm(oracle, dtype=torch.float64).clamp(min=1e-30)

    def error_of(x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(_like(x, oracle) - oracle, dtype=torch.float64) / size

    return _gate(name, actual, plain, error_of)


def _like(x: Tensor, oracle: Tensor) -> Tensor:
    return x.detach().to(oracle)


def _gate(
    name: str,
    actual: Tensor,
    plain: Tensor,
    error_of: Callable[[Tensor], Tensor],
    allowance: float = ALLOWANCE,
) -> Gate:
    budget = allowance * error_of(plain).item() + torch.finfo(actual.dtype).eps
    return Gate(name, error_of(actual).item(), budget)


def defined_rows(query: Tensor, key: Tensor, value: Tensor, routes: Tensor, window: int) -> Tensor:
    """Rows [B, T, H, P] of routes [B, T], by the definitions of the experts."""
    rows = naive_full_attention(query, key, value, causal=True)
    local = naive_local_attention(query, key, value, window=window, causal=True)
    rows = torch.where((routes == LOCAL)[..., None, None], local, rows)
    linear = naive_linear_attention(query, key, value, causal=True)
    return torch.where((routes == LINEAR)[..., None, None], linear, rows)


def small_gates(
    forward: Forward,
    shape: OpShape,
    mix: Mix,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    gradients: bool,
    definition: Forward | None = None,
) -> list[Gate]:
    """Rows, and gradients if asked for, of a short sequence against their definition.

    Default: that of the experts in their routes.
    """
    T = min(SMALL_LENGTH, max(shape.T, 2))
    small = OpShape(SMALL_BATCH, T, shape.H, shape.P, shape.window)
    data = make_heads(small, dtype=dtype, device=device, seed=seed)
    routes = mix.draw(small.B, small.T, seed=seed, device=device)

    def rows_and_gradients(
        function: Forward, like: torch.dtype, where: torch.device
    ) -> dict[str, Tensor]:
        query, key, value = (
            x.detach().to(where, like).requires_grad_(gradients) for x in data.heads
        )
        rows = function(query, key, value, routes.to(where))
        found = {"rows": rows.detach()}
        if gradients:
            upstream = data.upstream.to(where, like)
            grads = torch.autograd.grad(rows, (query, key, value), upstream)
            found |= dict(zip(("d_query", "d_key", "d_value"), grads, strict=True))
        return found

    define = partial(defined_rows, window=shape.window) if definition is None else definition
    cpu = torch.device("cpu")
    actual = rows_and_gradients(forward, dtype, device)
    oracle = rows_and_gradients(define, torch.float64, cpu)
    plain = rows_and_gradients(define, dtype, cpu)
    return [gate(f"{name}, T={T}", actual[name], oracle[name], plain[name]) for name in oracle]


def sampled_gates(
    rows: Tensor,
    data: OpData,
    routes: Tensor,
    window: int,
    *,
    seed: int,
    d_query: Tensor | None = None,
    experts: tuple[int, ...] = (FULL, LOCAL, LINEAR),
    allowance: float = ALLOWANCE,
    linear: tuple[str, Rows] | None = None,
) -> list[Gate]:
    """Rows of the shape that is timed, and the gradient of their queries, against SDPA and so on.

    Args:
        rows: What is judged, ``[B, T, H, P]``.
        data: What it came from.
        routes: Expert of every token ``[B, T]``.
        window: Reach of local rows.
        seed: Of the draw.
        d_query: Gradient of the queries, if that is to be judged too.
        experts: Those whose rows are judged.
        allowance: How many times the error of plain PyTorch is allowed.
        linear: Name and definition of another expert in place of the linear one.
    """
    linear_name, linear_rows = linear or ("linear", partial(attend_rows, is_linear=True))
    names = {FULL: "full", LOCAL: "local", LINEAR: linear_name}
    gates = []
    generator = torch.Generator().manual_seed(seed)
    B = len(routes)
    for expert in experts:
        for b in sorted({0, B - 1}):
            listed = (routes[b] == expert).nonzero().flatten()
            if not len(listed):
                continue
            order = torch.randperm(len(listed), generator=generator)[:SAMPLED_ROWS]
            at = listed[order.to(listed.device)]
            first = (at - window).clamp(min=0) if expert == LOCAL else torch.zeros_like(at)
            query = data.query[b, at].detach()
            key, value = data.key[b].detach(), data.value[b].detach()
            upstream = data.upstream[b, at]
            reach = {"first": first, "last": at}
            define = linear_rows if expert == LINEAR else partial(attend_rows, is_linear=False)
            # SDPA has no linear attention
            by_torch = define if expert == LINEAR else sdpa_rows
            oracle, d_oracle = _with_gradient(
                partial(define, key=key.double(), value=value.double(), **reach),
                query.double(),
                upstream.double(),
            )
            plain, d_plain = _with_gradient(
                partial(by_torch, key=key, value=value, **reach), query, upstream
            )
            what = f"sampled {names[expert]} rows"
            gates.append(gate_rows(what, rows[b, at], oracle, plain, allowance))
            if d_query is not None:
                # a row of one key has no gradient but rounding
                at_least_two = at > 0
                found, exact, rounded = (
                    x[at_least_two] for x in (d_query[b, at], d_oracle, d_plain)
                )
                if len(found):
                    gates.append(gate_rows(f"d_query of {what}", found, exact, rounded, allowance))
    return _worst_by_name(gates)


def value_gradient_gate(d_value: Tensor, upstream: Tensor) -> Gate:
    """The weights of a row sum to one, so the values' gradients sum to that of the rows.

    True of every expert and cheap at any length: a list that was left out shows.
    """
    expected = upstream.double().unflatten(2, (d_value.shape[2], -1)).sum(dim=(1, 3))
    found = d_value.double().sum(dim=1)  # [B, K, P]
    largest = expected.abs().max().clamp(min=1e-30)
    # rounding of every value's gradient, and of the sum of every row's weights
    eps = torch.finfo(d_value.dtype).eps
    size = sum(x.double().square().sum(dim=1).max().sqrt() for x in (d_value, upstream))
    error = (found - expected).abs().max() / largest
    return Gate("sum of d_value", error.item(), float(4.0 * eps * size / largest))


def attend_rows(
    query: Tensor, key: Tensor, value: Tensor, first: Tensor, last: Tensor, *, is_linear: bool
) -> Tensor:
    """Attention of single rows.

    Args:
        query: ``[M, H, P]``.
        key: ``[S, K, P]``.
        value: ``[S, K, P]``.
        first: First key each row sees ``[M]``.
        last: Last key each row sees ``[M]``.
        is_linear: Features in place of the softmax.
    """
    visible = _visible(first, last, key.shape[0])
    q = query.unflatten(1, (key.shape[1], -1))  # [M, K, G, P]
    if is_linear:
        scores = torch.einsum("mkgp,skp->kgms", F.elu(q) + 1.0, F.elu(key) + 1.0) * visible
        weights = scores / scores.sum(dim=-1, keepdim=True)
    else:
        scores = torch.einsum("mkgp,skp->kgms", q, key) * query.shape[-1] ** -0.5
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("kgms,skp->mkgp", weights, value).flatten(1, 2)


def state_space_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor,
    last: Tensor,
    *,
    step: Tensor,
    rate: Tensor,
    skip: Tensor,
) -> Tensor:
    """As :func:`attend_rows`, of a state-space model: sums of all before, as far as they are left.

    Steps ``[S, K]`` or more of them, rates ``[K]`` above 0, skip ``[H]``.
    """
    S, K = key.shape[:2]
    step, rate, skip = (x.double().to(query.device) for x in (step[:S], rate, skip))
    passed = (step * rate).cumsum(dim=0)
    left = (passed - passed[last].unsqueeze(1)).clamp(max=0.0).exp()  # [M, S, K]
    factors = (left * step).permute(2, 0, 1).unsqueeze(1) * _visible(first, last, S)
    q = query.unflatten(1, (K, -1))  # [M, K, G, P]
    weights = torch.einsum("mkgp,skp->kgms", q, key) * factors.to(query.dtype)
    rows = torch.einsum("kgms,skp->mkgp", weights, value)
    own = skip.to(query.dtype).view(K, -1, 1) * value[last].unsqueeze(2)
    return (rows + own).flatten(1, 2)


def sdpa_rows(query: Tensor, key: Tensor, value: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """As :func:`attend_rows` with a softmax, by PyTorch's own attention."""
    rows = F.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        key.transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        attn_mask=_visible(first, last, key.shape[0]).unsqueeze(0).unsqueeze(0),
        # fewer kernels have it
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return rows.squeeze(0).transpose(0, 1)


def _visible(first: Tensor, last: Tensor, S: int) -> Tensor:
    s = torch.arange(S, device=first.device)
    return (s >= first[:, None]) & (s <= last[:, None])


def _with_gradient(
    function: Callable[[Tensor], Tensor], query: Tensor, upstream: Tensor
) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        query = query.requires_grad_()
        rows = function(query)
        (gradient,) = torch.autograd.grad(rows, query, upstream)
    return rows.detach(), gradient


def _worst_by_name(gates: list[Gate]) -> list[Gate]:
    """One gate for each name, that which is nearest to its budget or furthest beyond it."""

    def excess(one: Gate) -> float:
        ratio = one.error / one.budget
        # no comparison with a NaN holds
        return math.inf if math.isnan(ratio) else ratio

    worst: dict[str, Gate] = {}
    for one in gates:
        if one.name not in worst or excess(one) > excess(worst[one.name]):
            worst[one.name] = one
    return list(worst.values())
