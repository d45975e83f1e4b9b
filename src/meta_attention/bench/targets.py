"""What the project promises, as data, and whether a row keeps it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from meta_attention.bench.rows import (
    BACKWARD,
    BOTH,
    CUDNN,
    FORWARD,
    FULL_ONLY,
    ROUTED,
    SOFT,
    Row,
    Verdict,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A bound on one figure of the rows it is for; what is left out matches any row."""

    suite: str
    quantity: str  # a figure of the row, or "speedup vs" one of its peers
    at_least: float | None = None
    at_most: float | None = None
    work: str | None = None
    mix: str | None = None
    shape: Mapping[str, int] = field(default_factory=dict)

    def is_for(self, row: Row) -> bool:
        return (
            row.name == ROUTED
            and row.suite == self.suite
            and self.work in (None, row.work)
            and self.mix in (None, row.mix)
            and all(row.shape.get(axis) == size for axis, size in self.shape.items())
        )

    @property
    def bound(self) -> str:
        sign, value = (">=", self.at_least) if self.at_most is None else ("<=", self.at_most)
        assert value is not None
        return f"{sign} {value:.0%}" if self.quantity.endswith("share") else f"{sign} {value:g}x"

    def judge(self, row: Row) -> Verdict:
        value = _figure(row, self.quantity)
        is_met = None
        if value is not None:
            is_met = value >= self.at_least if self.at_least is not None else True
            is_met = is_met and (self.at_most is None or value <= self.at_most)
        return Verdict(self.quantity, self.bound, value, is_met)


_16K, _32K, _64K = 16384, 32768, 65536

TARGETS = (
    Target(
        suite="op", work=FORWARD, mix="100/0/0", shape={"T": _16K, "P": 128},
        quantity=f"speedup vs {CUDNN}", at_least=0.92,
    ),
    Target(
        suite="op", work=BACKWARD, mix="100/0/0", shape={"T": _16K, "P": 128},
        quantity=f"speedup vs {CUDNN}", at_least=0.85,
    ),
    *(
        Target(
            suite="op", work=work, mix=mix, shape={"T": T, "P": 128}, quantity="speedup",
            at_least=bound,
        )
        for work, mix, T, bound in (
            (FORWARD, "25/25/50", 4096, 1.5),
            (FORWARD, "25/25/50", _16K, 3.0),
            (FORWARD, "25/25/50", _64K, 3.5),
            (FORWARD, "10/30/60", _16K, 4.5),
            (FORWARD, "10/30/60", _64K, 7.0),
            (FORWARD, "20/80/0", _32K, 3.5),
            (BOTH, "20/80/0", _32K, 2.5),
            (BOTH, "25/25/50", _16K, 2.5),
            (BOTH, "25/25/50", _64K, 3.2),
        )
    ),
    Target(suite="op", quantity="memory_ratio", work=FORWARD, at_most=1.1),
    Target(suite="op", quantity="memory_ratio", work=BOTH, at_most=1.1),
    Target(suite="layer", quantity="routing_share", at_most=0.03),
    Target(
        suite="model", shape={"T": _32K}, quantity=f"speedup vs {FULL_ONLY}", at_least=1.8
    ),
    Target(suite="model", shape={"T": _32K}, quantity=f"speedup vs {SOFT}", at_least=4.0),
    Target(
        suite="decode", work="step, graph", mix="25/25/50", shape={"S": _32K},
        quantity="speedup", at_least=3.0,
    ),
    Target(
        suite="decode", work="step, graph", mix="25/25/50", shape={"S": _32K},
        quantity="bandwidth_share", at_least=0.7,
    ),
    Target(suite="cpu", mix="25/25/50", shape={"T": 8192}, quantity="speedup", at_least=2.0),
)  # fmt: skip


def judge(row: Row) -> Row:
    """Put the targets that are for a row next to its figures."""
    row.verdicts = [target.judge(row) for target in TARGETS if target.is_for(row)]
    return row


def _figure(row: Row, quantity: str) -> float | None:
    if quantity.startswith("speedup vs "):
        return row.speedups.get(quantity.removeprefix("speedup vs "))
    value: float | None = getattr(row, quantity)
    return value
