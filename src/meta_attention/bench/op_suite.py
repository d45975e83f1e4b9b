"""The attention op: from routing weights to merged rows, forward and backward.

Routed time is all of it: plan, softmax experts and linear expert, into one buffer. Peers are given
what favours them.
"""

from dataclasses import dataclass

from meta_attention.bench.data import Mix, OpShape
from meta_attention.bench.op_bench import ALL_FULL, KnownGates, ShapeBench
from meta_attention.bench.op_peers import (
    HYBRID_WINDOW,
    run_flex,
    run_hybrid,
    run_linear,
    run_state_space,
)
from meta_attention.bench.rows import BACKWARD, BOTH, CUDNN, FLASH, FORWARD, Row
from meta_attention.bench.session import Session

QUARTERS, TENTH, FIFTH = Mix(25, 25, 50), Mix(10, 30, 60), Mix(20, 80, 0)


@dataclass(frozen=True, slots=True)
class OpPlan:
    """Which shapes and mixes are measured, and by whom."""

    shapes: tuple[tuple[OpShape, tuple[Mix, ...]], ...]
    suite: str = "op"
    works: tuple[str, ...] = (FORWARD, BACKWARD, BOTH)
    baselines: tuple[str, ...] = (FLASH, CUDNN)
    # FlexAttention compiles for every shape and mix, which takes longest of all
    flex_mixes: tuple[Mix, ...] = (QUARTERS,)
    flex_lengths: tuple[int, ...] = ()
    flex_backward_lengths: tuple[int, ...] = ()
    hybrid_window: int | None = HYBRID_WINDOW
    linear_lengths: tuple[int, ...] = ()

    def has_all_peers(self, shape: OpShape) -> bool:
        """Head widths other than that of the first shape are held against PyTorch only."""
        return shape.P == self.shapes[0][0].P

    def flex_works(self, shape: OpShape) -> tuple[str, ...]:
        """What FlexAttention is measured on."""
        if not self.has_all_peers(shape):
            return ()
        if shape.T in self.flex_backward_lengths:
            return self.works
        return (FORWARD,) if shape.T in self.flex_lengths else ()


_MIXES = (ALL_FULL, QUARTERS, TENTH, FIFTH)

# those with the most targets first, in case time runs out
DEFAULT = OpPlan(
    shapes=(
        (OpShape(2, 16384), _MIXES),
        (OpShape(1, 65536), _MIXES),
        (OpShape(8, 4096), _MIXES),
        (OpShape(1, 32768), _MIXES),
        (OpShape(2, 16384, H=16, P=64), (ALL_FULL, QUARTERS)),
    ),
    flex_lengths=(16384,),
    linear_lengths=(16384, 65536),
)
QUICK = OpPlan(
    shapes=((OpShape(2, 4096), (ALL_FULL, QUARTERS)), (OpShape(1, 16384), (QUARTERS, FIFTH))),
    flex_mixes=(QUARTERS,),
    flex_lengths=(4096,),
    linear_lengths=(4096,),
)


def run_op(session: Session, plan: OpPlan = DEFAULT) -> list[Row]:
    """Routed attention against PyTorch's, FlexAttention, a static hybrid and fla."""
    rows: list[Row] = []
    known_gates: KnownGates = {}
    benches = []
    for shape, mixes in plan.shapes:
        bench = ShapeBench(
            session,
            plan.suite,
            shape,
            works=plan.works,
            baselines=plan.baselines,
            known_gates=known_gates,
        )
        benches.append((bench, mixes))
        rows += bench.run_baselines()
        for mix in mixes:
            rows += bench.run_routed(mix)
    # the other peers last, should time run out
    for bench, mixes in benches:
        flex_works = plan.flex_works(bench.shape)
        for mix in mixes:
            if mix in plan.flex_mixes:
                rows += run_flex(bench, mix, flex_works)
        if not plan.has_all_peers(bench.shape):
            continue
        if plan.hybrid_window is not None:
            rows += run_hybrid(bench, plan.hybrid_window, flex_works)
        if bench.shape.T in plan.linear_lengths:
            rows += run_linear(bench) + run_state_space(bench)
    return rows
