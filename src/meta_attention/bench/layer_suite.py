"""One routed attention layer, and how much of its time goes into choosing experts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from meta_attention.bench.data import Mix, fix_routes
from meta_attention.bench.modules import build_layer, draw_layers, twin_gates
from meta_attention.bench.op_suite import QUARTERS
from meta_attention.bench.rows import FULL_ONLY, ROUTED, Gate, Row
from meta_attention.bench.session import Session, Work, join_notes
from meta_attention.bench.timing import Call
from meta_attention.config import MetaAttentionConfig
from meta_attention.evaluation.flops import count_layer
from meta_attention.layers import BayesianMetaAttentionLayer, attention, execution

SUITE = "layer"
WORK = "forward"

# what a layer calls for the sake of routing, beside its controller
ROUTING_CALLS = {
    "choose_routes": "policy",
    "plan_routes": "plan",
    "route_merge": "merge",
    "take_chosen": "merge",
}


@dataclass(frozen=True, slots=True)
class LayerPlan:
    B: int = 2
    T: int = 16384
    H: int = 8
    P: int = 128
    window: int = 256
    small_T: int = 600
    mix: Mix = QUARTERS


@dataclass(frozen=True, slots=True)
class Part:
    """Milliseconds of one part of a layer, launched and replayed from a CUDA graph."""

    launched_ms: float
    graph_ms: float | None


DEFAULT = LayerPlan()
QUICK = LayerPlan(B=1, T=4096)


def run_layer(session: Session, plan: LayerPlan = DEFAULT) -> list[Row]:
    """A hard-routed layer next to a static one of full attention."""
    shape = {"B": plan.B, "T": plan.T, "D": plan.H * plan.P, "H": plan.H, "P": plan.P}
    rows = []
    static = session.row(SUITE, FULL_ONLY, WORK, shape, None)
    rows.append(session.measure(static, partial(_static_work, session, plan)))
    session.keep(static, rows, [FULL_ONLY])
    routed = session.row(SUITE, ROUTED, WORK, shape, plan.mix)
    parts: dict[str, Part] = {}
    session.measure(routed, partial(_routed_work, session, plan, parts))
    if routed.ms is not None:
        _share_out(routed, parts)
    rows.append(session.keep(routed, rows, [FULL_ONLY]))
    return rows


def _config(plan: LayerPlan, experts: tuple[str, ...]) -> MetaAttentionConfig:
    return MetaAttentionConfig(
        hidden_size=plan.H * plan.P,
        num_attention_heads=plan.H,
        head_dim=plan.P,
        num_hidden_layers=1,
        window_size=plan.window,
        max_position_embeddings=max(plan.T, plan.small_T),
        experts=experts,
        routing="hard",
    )


def _inputs(session: Session, plan: LayerPlan, T: int) -> Tensor:
    generator = torch.Generator(session.device).manual_seed(session.seed)
    x = torch.randn(plan.B, T, plan.H * plan.P, generator=generator, device=session.device)
    return x.to(session.dtype)


def _build(
    session: Session, plan: LayerPlan, experts: tuple[str, ...]
) -> BayesianMetaAttentionLayer:
    return build_layer(
        _config(plan, experts), dtype=session.dtype, device=session.device, seed=session.seed
    )


def _static_work(session: Session, plan: LayerPlan) -> Work:
    layer, x = _build(session, plan, ("full",)), _inputs(session, plan, plan.T)
    flops = count_layer(layer.config, torch.ones(plan.B, plan.T, 1)).layer
    return Work(_without_gradient(lambda: layer(x).output), flops=flops, also_in_graph=True)


def _routed_work(session: Session, plan: LayerPlan, parts: dict[str, Part]) -> Work:
    layer, x = _build(session, plan, plan.mix.experts), _inputs(session, plan, plan.T)
    (routes,) = draw_layers(plan.mix, 1, plan.B, plan.T, seed=session.seed, device=session.device)
    gates = _gates(session, plan, layer, x, routes)
    fix_routes(layer, [routes])
    if all(gate.is_passed for gate in gates):
        parts.update(_time_parts(session, layer, x))
    flops = count_layer(layer.config, plan.mix.weights(routes.cpu())).layer
    call = _without_gradient(lambda: layer(x).output)
    return Work(call, gates, flops=flops, also_in_graph=True)


def _gates(
    session: Session, plan: LayerPlan, layer: nn.Module, x: Tensor, routes: Tensor
) -> list[Gate]:
    def run(states: Tensor, module: nn.Module) -> dict[str, Tensor]:
        # controllers are of another precision
        like = module.get_submodule("projections.0.q_proj").get_parameter("weight")
        with torch.no_grad():
            return {"output": module(states.to(like)).output}

    T = min(plan.small_T, plan.T)
    small = x[:, :T]
    return [
        *twin_gates(
            layer,
            [routes[:, :T]],
            partial(run, small),
            oracle_device=torch.device("cpu"),
            label=f"T={T}",
        ),
        *twin_gates(
            layer,
            [routes],
            partial(run, x),
            oracle_device=session.device,
            label=f"T={plan.T}",
        ),
    ]


def _time_parts(session: Session, layer: BayesianMetaAttentionLayer, x: Tensor) -> dict[str, Part]:
    """Times of what routing adds to a layer, each part alone."""
    calls: dict[str, list[Call]] = {}
    with torch.no_grad():
        with _recorded_calls(calls):
            layer(x)
        B, T, _ = x.shape
        position_ids = torch.arange(T, device=x.device).expand(B, -1)
        controller = layer.controller
        calls["controller"] = [lambda: controller(x, position_ids)]
        return {
            name: _sum_parts([_time_part(session, call) for call in some])
            for name, some in calls.items()
        }


def _time_part(session: Session, call: Call) -> Part:
    launched_ms = session.clock.time(call).median_ms
    if not session.clock.is_cuda:
        return Part(launched_ms, None)
    try:
        return Part(launched_ms, session.clock.time_graph(call).median_ms)
    # not everything can be captured; then there is no such time
    except Exception:
        return Part(launched_ms, None)


def _sum_parts(parts: Sequence[Part]) -> Part:
    graph_ms = [part.graph_ms for part in parts if part.graph_ms is not None]
    launched_ms = sum(part.launched_ms for part in parts)
    return Part(launched_ms, sum(graph_ms) if len(graph_ms) == len(parts) else None)


def _share_out(row: Row, parts: dict[str, Part]) -> None:
    """What share of a layer's time routing is.

    Small kernels launched alone are mostly launches, which in a layer hide behind large ones: so
    both are taken from CUDA graphs where there are any.
    """
    whole = _sum_parts(list(parts.values()))
    total, how = row.ms, "launched one by one"
    times = {name: part.launched_ms for name, part in parts.items()}
    if row.graph_ms is not None and whole.graph_ms is not None:
        total, how = row.graph_ms, "in CUDA graphs"
        times = {name: part.graph_ms or 0.0 for name, part in parts.items()}
    assert total is not None
    row.routing_share = sum(times.values()) / total
    spent = ", ".join(f"{name} {ms / total:.1%}" for name, ms in times.items())
    row.note = join_notes(row.note, f"routing, {how}: {spent}")


@contextmanager
def _recorded_calls(calls: dict[str, list[Call]]) -> Iterator[None]:
    """Record what a layer calls for the sake of routing, so that it can be called again."""
    originals = [
        (module, name, getattr(module, name))
        for module in (attention, execution)
        for name in ROUTING_CALLS
        if hasattr(module, name)
    ]

    def recorder(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def record(*args: object, **kwargs: object) -> object:
            calls.setdefault(ROUTING_CALLS[name], []).append(partial(function, *args, **kwargs))
            return function(*args, **kwargs)

        return record

    try:
        for module, name, function in originals:
            setattr(module, name, recorder(name, function))
        yield
    finally:
        for module, name, function in originals:
            setattr(module, name, function)


def _without_gradient(function: Callable[[], Tensor]) -> Call:
    def call() -> Tensor:
        with torch.no_grad():
            return function()

    return call
