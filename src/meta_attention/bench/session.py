"""One run: its clock, its deadline, and what becomes of a measurement."""

import gc
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from meta_attention.bench.rows import Gate, Results, Row, compare
from meta_attention.bench.targets import judge
from meta_attention.bench.timing import Call, Clock

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Work:
    """What a row measures, ready to run."""

    call: Call
    gates: Sequence[Gate] = ()
    flops: float | None = None
    num_bytes: float | None = None  # that must be read and written
    in_graph: bool = False  # time it replayed from a CUDA graph, and only so
    also_in_graph: bool = False  # time it so, too
    note: str | None = None


class Session:
    """Measures rows one after the other, and keeps them.

    Args:
        device: Where it runs.
        dtype: Precision of what is measured.
        results: Where rows are kept.
        clock: Times the calls; default: one for the device.
        seed: Of all random numbers.
        time_limit: Seconds after which nothing new is started.
        say: Told of every row as it comes.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        results: Results,
        *,
        clock: Clock | None = None,
        seed: int = 0,
        time_limit: float = math.inf,
        say: Say = lambda line: None,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.results = results
        self.clock = Clock(device) if clock is None else clock
        self.seed = seed
        self.time_limit = time_limit
        self.say = say
        self.started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def row(self, suite: str, name: str, work: str, shape: dict[str, int], mix: object) -> Row:
        """A row to be measured."""
        return Row(
            suite=suite,
            name=name,
            work=work,
            shape=shape,
            dtype=str(self.dtype).removeprefix("torch."),
            mix=None if mix is None else str(mix),
            is_comparable=self.device.type == "cuda",
        )

    def measure(self, row: Row, prepare: Callable[[], Work]) -> Row:
        """Fill in a row: first what is wrong with it, then, if nothing is, its time.

        An exception is a finding like any other: the reason why there is no time.

        Args:
            row: Changed in place, and not yet kept: see :meth:`keep`.
            prepare: Makes what is to be timed, and judges it.
        """
        if self.seconds > self.time_limit:
            row.status = "skipped"
            row.reason = f"the time limit of {self.time_limit:.0f} s had passed"
            return row
        try:
            # peers warn of what they do not like, and then fail or not
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._fill(row, prepare())
        except Exception as error:
            row.status, row.reason = "failed", one_line(error)
            row.timing = row.graph_ms = row.peak_mib = None
            # what it held is caught in the cycles of its traceback
            del error
            gc.collect()
        if self.clock.is_cuda:
            torch.cuda.empty_cache()
        return row

    def _fill(self, row: Row, work: Work) -> None:
        row.gates, row.note = list(work.gates), work.note
        wrong = [gate for gate in work.gates if not gate.is_passed]
        if wrong:
            row.status = "failed"
            row.reason = "; ".join(
                f"{gate.name}: error {gate.error:.2e} exceeds {gate.budget:.2e}" for gate in wrong
            )
            return
        row.peak_mib = self.clock.peak_mib(work.call)
        row.timing = (self.clock.time_graph if work.in_graph else self.clock.time)(work.call)
        if work.also_in_graph and self.clock.is_cuda:
            try:
                row.graph_ms = self.clock.time_graph(work.call).median_ms
            except Exception as error:
                row.note = join_notes(row.note, f"no CUDA graph: {one_line(error)}")
        self.rate(row, work.flops, work.num_bytes)

    def rate(self, row: Row, flops: float | None, num_bytes: float | None) -> None:
        """Operations and bytes per second, and how near they are to what the device can do."""
        if row.ms is None:
            return
        ceilings = self.results.ceilings
        if flops is not None:
            row.tflop = flops / 1e12
            row.tflops_per_s = flops / row.ms / 1e9
            if "matmul_tflops_per_s" in ceilings:
                row.ceiling_share = row.tflops_per_s / ceilings["matmul_tflops_per_s"]
        if num_bytes is not None:
            row.gbytes = num_bytes / 1e9
            row.gbytes_per_s = num_bytes / row.ms / 1e6
            if "copy_gbytes_per_s" in ceilings:
                row.bandwidth_share = row.gbytes_per_s / ceilings["copy_gbytes_per_s"]

    def keep(self, row: Row, peers: Sequence[Row] = (), baselines: Sequence[str] = ()) -> Row:
        """Compare a row with its peers and its targets, and store it."""
        judge(compare(row, peers, baselines=baselines))
        self.results.add(row)
        self.say(f"[{self.seconds:4.0f} s] {describe(row)}")
        return row


def describe(row: Row) -> str:
    """One line of progress. The times of a shared CPU are left out."""
    sizes = " ".join(f"{axis}={size}" for axis, size in row.shape.items())
    parts = [row.suite, sizes, row.mix or "", row.work, row.name]
    text = " ".join(part for part in parts if part)
    if row.ms is None:
        return f"{text}: {row.status}, {row.reason}"
    figures = [f"{row.ms:.3f} ms"] if row.is_comparable else []
    if row.speedup is not None:
        figures.append(f"{row.speedup:.2f}x {row.baseline}")
    if row.bandwidth_share is not None:
        figures.append(f"{row.bandwidth_share:.0%} of bandwidth")
    if row.routing_share is not None:
        figures.append(f"routing {row.routing_share:.1%}")
    if row.gates:
        figures.append(f"error {max(gate.error for gate in row.gates):.1e}")
    return f"{text}: {', '.join(figures) or 'measured'}"


def join_notes(*notes: str | None) -> str | None:
    return "; ".join(note for note in notes if note) or None


def one_line(error: Exception) -> str:
    """What an exception says, in a line that fits a table."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else text[:297] + "..."
