"""Routed attention on a CPU, by the PyTorch implementations. Only ratios mean anything."""

from dataclasses import replace

from meta_attention.bench.data import OpShape
from meta_attention.bench.op_suite import QUARTERS, OpPlan, run_op
from meta_attention.bench.rows import DEFAULT_SDPA, FORWARD, Row
from meta_attention.bench.session import Session

THREADS = 2

DEFAULT = OpPlan(
    suite="cpu",
    shapes=((OpShape(1, 8192, H=8, P=64), (QUARTERS,)),),
    works=(FORWARD,),
    baselines=(DEFAULT_SDPA,),
    hybrid_window=None,
)
QUICK = replace(DEFAULT, shapes=((OpShape(1, 2048, H=8, P=64), (QUARTERS,)),))


def run_cpu(session: Session, plan: OpPlan = DEFAULT) -> list[Row]:
    """Routed attention against PyTorch's full attention, forward."""
    return run_op(session, plan)
