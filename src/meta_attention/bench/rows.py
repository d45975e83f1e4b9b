"""A measurement as plain data: what ran, whether it was right, how long it took."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from meta_attention.errors import DataError

SCHEMA = 1

ROUTED = "routed"
FLASH = "SDPA flash"
CUDNN = "SDPA cuDNN"
DEFAULT_SDPA = "SDPA default"
FULL_ONLY = "full only"
SOFT = "routed soft"

FORWARD = "forward"
BACKWARD = "backward"
BOTH = "forward + backward"

Status = Literal["measured", "failed", "missing", "skipped"]


@dataclass(frozen=True, slots=True)
class Gate:
    """How far an output is from what it should be. Errors are relative to the largest value."""

    name: str
    error: float
    budget: float

    @property
    def is_passed(self) -> bool:
        # a NaN passes no comparison
        return self.error <= self.budget


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one call."""

    median_ms: float
    low_ms: float  # 20th percentile
    high_ms: float  # 80th percentile
    repeat_ms: float  # median when the whole measurement is made again
    runs: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """A figure next to its target; not met nor missed where it could not be measured."""

    quantity: str
    target: str
    value: float | None
    is_met: bool | None


@dataclass(slots=True, kw_only=True)
class Row:
    """One thing measured, or why it was not."""

    suite: str
    name: str  # who does the work: ROUTED or a peer
    work: str
    shape: dict[str, int]
    dtype: str
    mix: str | None = None  # percent of the tokens on full, local and linear
    status: Status = "measured"
    reason: str | None = None
    gates: list[Gate] = field(default_factory=list)
    timing: Timing | None = None
    graph_ms: float | None = None  # replayed from a CUDA graph: no launches
    tflop: float | None = None
    tflops_per_s: float | None = None
    ceiling_share: float | None = None  # of a large matrix product in this run
    gbytes: float | None = None  # that must be read and written
    gbytes_per_s: float | None = None
    bandwidth_share: float | None = None  # of a large copy in this run
    peak_mib: float | None = None
    memory_ratio: float | None = None  # to the baseline's peak
    speedups: dict[str, float] = field(default_factory=dict)  # a peer's time over this one's
    baseline: str | None = None  # the fastest of the peers that count as baselines
    speedup: float | None = None  # against the baseline
    routing_share: float | None = None  # of a layer's time, spent on choosing experts
    verdicts: list[Verdict] = field(default_factory=list)
    note: str | None = None
    is_comparable: bool = True  # False: the times of a shared CPU mean nothing elsewhere

    @property
    def ms(self) -> float | None:
        return None if self.timing is None else self.timing.median_ms

    def to_dict(self) -> dict[str, Any]:
        return _without_nan(asdict(self))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Row":
        """The row that :meth:`to_dict` wrote."""
        timing = values.get("timing")
        nested = {
            # an error that is no number was written as null
            "gates": [
                Gate(g["name"], _or_nan(g["error"]), _or_nan(g["budget"])) for g in values["gates"]
            ],
            "verdicts": [Verdict(**verdict) for verdict in values["verdicts"]],
            "timing": None if timing is None else Timing(**timing),
        }
        row = cls(**(values | nested))
        if row.status not in get_args(Status):
            raise ValueError(f"status {row.status!r}")
        return row


def compare(row: Row, peers: Sequence[Row], *, baselines: Sequence[str]) -> Row:
    """Fill in how a row stands to peers of the same run.

    Args:
        row: A measured row, changed in place; one that was not is left as it is.
        peers: Rows of the same work on the same data.
        baselines: Names of the peers of which the fastest is the baseline.
    """
    if row.ms is None:
        return row
    measured = {peer.name: peer.ms for peer in peers if peer.ms is not None}
    row.speedups = {name: ms / row.ms for name, ms in measured.items()}
    best = fastest([peer for peer in peers if peer.name in baselines])
    if best is not None:
        row.baseline, row.speedup = best.name, row.speedups[best.name]
        if row.peak_mib is not None and best.peak_mib:
            row.memory_ratio = row.peak_mib / best.peak_mib
    return row


def fastest(rows: Sequence[Row]) -> Row | None:
    """The one of smallest time among those that have one."""
    timed = [(row.ms, row) for row in rows if row.ms is not None]
    return min(timed, key=lambda pair: pair[0])[1] if timed else None


@dataclass(slots=True)
class Results:
    """Everything a run leaves behind. Written anew after every row, so that nothing is lost."""

    machine: dict[str, Any]
    arguments: dict[str, Any]
    ceilings: dict[str, float] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    is_complete: bool = False
    path: Path | None = None

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.save()

    def save(self) -> None:
        if self.path is None:
            return
        # a reader never sees half a file
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(self.to_json() + "\n", "utf-8")
        os.replace(part, self.path)

    def to_json(self) -> str:
        document = {
            "schema": SCHEMA,
            "machine": self.machine,
            "arguments": self.arguments,
            "ceilings": self.ceilings,
            "is_complete": self.is_complete,
            "rows": [row.to_dict() for row in self.rows],
        }
        return json.dumps(_without_nan(document), indent=1, allow_nan=False)


def load_results(path: Path) -> Results:
    """Results as :meth:`Results.save` wrote them."""
    try:
        document = json.loads(path.read_text("utf-8"))
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema {document['schema']!r}, not {SCHEMA}")
        rows = [Row.from_dict(row) for row in document["rows"]]
        return Results(
            document["machine"],
            document["arguments"],
            document["ceilings"],
            rows,
            document["is_complete"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} must be results written by 'meta-attention bench --json', got "
            f"{type(error).__name__}: {error}"
        ) from error


def _without_nan(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
