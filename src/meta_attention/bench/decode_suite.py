"""One decoding step of a batch over a long cache: what must be read decides how long it takes.

Rows of full attention read all keys and values, local ones their window; the linear state of every
row is read and written whatever its route, since a later token may need it.

Shapes: B rows, S positions of the cache, H heads, K key-value heads, P head width.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from meta_attention.bench.data import EXPERTS, FULL, LINEAR, LOCAL, Mix
from meta_attention.bench.gates import ALLOWANCE, PEER_ALLOWANCE, attend_rows, gate_rows, sdpa_rows
from meta_attention.bench.op_bench import ALL_FULL
from meta_attention.bench.op_suite import FIFTH, QUARTERS
from meta_attention.bench.peers import sdpa
from meta_attention.bench.rows import CUDNN, DEFAULT_SDPA, FLASH, ROUTED, Gate, Row
from meta_attention.bench.session import Session, Work
from meta_attention.ops.routed_decode import LinearStep, routed_decode

SUITE = "decode"
STEP, GRAPH = "step", "step, graph"
PEERS = (FLASH, CUDNN, DEFAULT_SDPA)

SMALL_ROWS, SMALL_CAPACITY = 6, 700
SAMPLED_ROWS = 2  # of each expert, of the batch that is timed


@dataclass(frozen=True, slots=True)
class DecodeShape:
    B: int = 32
    S: int = 32768
    H: int = 32
    K: int = 8
    P: int = 128
    window: int = 256

    def to_dict(self) -> dict[str, int]:
        return {"B": self.B, "S": self.S, "H": self.H, "K": self.K, "P": self.P}


@dataclass(frozen=True, slots=True)
class DecodePlan:
    shapes: tuple[DecodeShape, ...]
    mixes: tuple[Mix, ...] = (QUARTERS, FIFTH, ALL_FULL)


DEFAULT = DecodePlan((DecodeShape(), DecodeShape(H=8)))
QUICK = DecodePlan((DecodeShape(B=8, S=8192),), mixes=(QUARTERS,))


@dataclass(frozen=True, slots=True)
class DecodeData:
    query: Tensor  # [B, H, P]
    key: Tensor  # [B, K, S, P]
    value: Tensor  # [B, K, S, P]
    length: Tensor  # [B] positions filled
    new_key: Tensor  # [B, K, P], as the linear expert has it
    new_value: Tensor  # [B, K, P]
    state: Tensor  # [B, K, P, P + 1] float32

    def linear_step(self) -> LinearStep:
        """The linear expert's part, with a state of its own: steps change it."""
        return LinearStep(LINEAR, self.query, self.new_key, self.new_value, self.state.clone())


def run_decode(session: Session, plan: DecodePlan = DEFAULT) -> list[Row]:
    """A routed step against PyTorch's attention of one query, launched and from a CUDA graph."""
    rows: list[Row] = []
    works = (STEP, GRAPH) if session.clock.is_cuda else (STEP,)
    for shape in plan.shapes:
        data = make_cache(shape, session)
        for work in works:
            peers = [
                session.measure(
                    session.row(SUITE, name, work, shape.to_dict(), None),
                    partial(_sdpa_work, name, data, work == GRAPH),
                )
                for name in PEERS
            ]
            rows += [session.keep(peer, peers, PEERS) for peer in peers]
            for mix in plan.mixes:
                row = session.row(SUITE, ROUTED, work, shape.to_dict(), mix)
                prepare = partial(_routed_work, session, shape, data, mix, work == GRAPH)
                rows.append(session.keep(session.measure(row, prepare), peers, PEERS))
        del data
    return rows


def make_cache(shape: DecodeShape, session: Session, *, is_full: bool = True) -> DecodeData:
    """A random cache, full or, with rows of different lengths, not quite."""
    generator = torch.Generator(session.device).manual_seed(session.seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=session.device, dtype=session.dtype)

    B, S, H, K, P = shape.B, shape.S, shape.H, shape.K, shape.P
    length = torch.full((B,), S, device=session.device, dtype=torch.int32)
    if not is_full:
        length -= 7 * torch.arange(B, device=session.device, dtype=torch.int32)
    # what 64 tokens leave behind
    keys, values = F.elu(draw(B, K, 64, P)) + 1.0, F.pad(draw(B, K, 64, P), (0, 1), value=1.0)
    state = keys.float().transpose(2, 3) @ values.float()
    return DecodeData(
        draw(B, H, P),
        draw(B, K, S, P),
        draw(B, K, S, P),
        length,
        draw(B, K, P),
        draw(B, K, P),
        state.contiguous(),
    )


def bytes_of_step(shape: DecodeShape, routes: Tensor, itemsize: int, *, has_state: bool) -> float:
    """Bytes that a step must read and write; queries and rows are left out, they are few."""
    full = int((routes == FULL).sum())
    local = int((routes == LOCAL).sum())
    positions = full * shape.S + local * min(shape.window + 1, shape.S)
    cache = 2.0 * positions * shape.K * shape.P * itemsize
    # float32, read and written
    states = 2.0 * shape.B * shape.K * shape.P * (shape.P + 1) * 4
    return cache + (states if has_state else 0.0)


def _sdpa_work(name: str, data: DecodeData, in_graph: bool) -> Work:
    # [B, T, H, P], as views: the cache stays as it is
    heads = (data.query.unsqueeze(1), data.key.transpose(1, 2), data.value.transpose(1, 2))

    def call() -> Tensor:
        with torch.no_grad():
            return sdpa(name, *heads, causal=False).squeeze(1)

    routes = torch.full(data.length.shape, FULL, device=data.length.device)
    num_bytes = float(data.key.numel() + data.value.numel()) * data.key.element_size()
    return Work(
        call,
        _row_gates(call(), data, routes, 0, PEER_ALLOWANCE),
        num_bytes=num_bytes,
        in_graph=in_graph,
    )


def _routed_work(
    session: Session, shape: DecodeShape, data: DecodeData, mix: Mix, in_graph: bool
) -> Work:
    routes = mix.share_out(shape.B, seed=session.seed, device=session.device)
    small = DecodeShape(SMALL_ROWS, min(SMALL_CAPACITY, shape.S), shape.H, shape.K, shape.P)
    small_data = make_cache(small, session, is_full=False)
    small_routes = torch.arange(small.B, device=session.device) % len(mix.experts)
    gates = [
        *_step_gates(small_data, small_routes, mix, shape.window, f"S={small.S}"),
        *_step_gates(data, routes, mix, shape.window, f"S={shape.S}"),
    ]
    step = data.linear_step() if mix.linear else None
    weights = mix.weights(routes)
    call = partial(_step, data, weights, shape.window, step)
    num_bytes = bytes_of_step(shape, routes, data.key.element_size(), has_state=step is not None)
    return Work(call, gates, num_bytes=num_bytes, in_graph=in_graph)


def _step(data: DecodeData, weights: Tensor, window: int, linear: LinearStep | None) -> Tensor:
    return routed_decode(
        data.query,
        data.key,
        data.value,
        weights,
        {FULL: None, LOCAL: window},
        length=data.length,
        linear=linear,
    )


def _step_gates(data: DecodeData, routes: Tensor, mix: Mix, window: int, label: str) -> list[Gate]:
    """Rows and states of one step, by their definitions."""
    step = data.linear_step() if mix.linear else None
    rows = _step(data, mix.weights(routes), window, step)
    gates = _row_gates(rows, data, routes, window)
    if step is not None:
        after, plain = (_state_after(data, dtype) for dtype in (torch.float64, data.key.dtype))
        gates.append(gate_rows("states", step.state, after, plain))
    return [Gate(f"{one.name}, {label}", one.error, one.budget) for one in gates]


def _row_gates(
    rows: Tensor,
    data: DecodeData,
    routes: Tensor,
    window: int,
    allowance: float = ALLOWANCE,
) -> list[Gate]:
    """A few rows [B, H, P] of every expert."""
    gates = []
    for expert, name in enumerate(EXPERTS):
        actual, oracle, plain = [], [], []
        for b in (routes == expert).nonzero().flatten()[:SAMPLED_ROWS].tolist():
            actual.append(rows[b])
            if expert == LINEAR:
                oracle.append(_linear_row(data, b, torch.float64))
                plain.append(_linear_row(data, b, data.query.dtype))
                continue
            last = data.length[b : b + 1] - 1
            reach = {
                "first": (last - window).clamp(min=0) if expert == LOCAL else 0 * last,
                "last": last,
            }
            q = data.query[b : b + 1]
            k, v = data.key[b].transpose(0, 1), data.value[b].transpose(0, 1)
            oracle.append(
                attend_rows(q.double(), k.double(), v.double(), **reach, is_linear=False)[0]
            )
            plain.append(sdpa_rows(q, k, v, **reach)[0])
        if actual:
            found, exact, rounded = (torch.stack(x) for x in (actual, oracle, plain))
            gates.append(gate_rows(f"{name} rows", found, exact, rounded, allowance))
    return gates


def _state_after(data: DecodeData, dtype: torch.dtype) -> Tensor:
    """States [B, K, P, P + 1] with the newest token in them; at least float32, as they are kept."""
    key = F.elu(data.new_key.to(dtype)) + 1.0
    value = F.pad(data.new_value.to(dtype), (0, 1), value=1.0)
    kept = torch.promote_types(dtype, torch.float32)
    return data.state.to(kept) + (key.unsqueeze(-1) * value.unsqueeze(-2)).to(kept)


def _linear_row(data: DecodeData, b: int, dtype: torch.dtype) -> Tensor:
    """The row [H, P] that the linear expert reads from its state."""
    state = _state_after(data, dtype)[b].to(dtype)  # [K, P, P + 1]
    features = F.elu(data.query[b].to(dtype)) + 1.0
    sums = torch.einsum("kgp,kpr->kgr", features.unflatten(0, (len(state), -1)), state)
    return (sums[..., :-1] / sums[..., -1:]).flatten(0, 1)
