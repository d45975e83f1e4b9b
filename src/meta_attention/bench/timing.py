"""Clocks: events on a GPU with its cache flushed before every run, the wall clock on a CPU."""

import statistics
import time
from collections.abc import Callable

import torch

from meta_attention.bench.rows import Timing

Call = Callable[[], object]

MIB = 2**20

# more than any GPU's level-2 cache holds
FLUSH_BYTES = 256 * MIB

# calls beside those that are counted: to warm up and to estimate, and before one is captured
WARM_UP = 4
GRAPH_WARM_UP = 3


class Clock:
    """Times calls on one device.

    Args:
        device: Where the calls run.
        budget_ms: How long to go on measuring one call, about; each measurement is made twice.
        min_runs: Fewest runs of a measurement, however long they take.
        max_runs: Most runs of a measurement.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        budget_ms: float = 100.0,
        min_runs: int = 5,
        max_runs: int = 100,
    ) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self.budget_ms = budget_ms
        self.min_runs = min_runs
        self.max_runs = max_runs
        self._flush = (
            torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device) if self.is_cuda else None
        )

    @property
    def can_capture(self) -> bool:
        """Whether the device has graphs to replay."""
        return self.is_cuda

    def time(self, call: Call) -> Timing:
        """Median and spread, from warmed-up runs; the whole measurement is made twice."""
        # the first run compiles
        for _ in range(WARM_UP - 2):
            call()
        estimate = statistics.median(self._runs(call, 2))
        wanted = int(self.budget_ms / max(estimate, 1e-6))
        runs = max(self.min_runs, min(self.max_runs, wanted))
        first, second = self._runs(call, runs), self._runs(call, runs)
        both = sorted(first + second)
        return Timing(
            median_ms=statistics.median(both),
            low_ms=_quantile(both, 0.2),
            high_ms=_quantile(both, 0.8),
            repeat_ms=statistics.median(second),
            runs=len(both),
        )

    def time_graph(self, call: Call) -> Timing:
        """As :meth:`time`, replayed from a CUDA graph: without what launching costs."""
        torch.cuda.synchronize(self.device)
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(GRAPH_WARM_UP):
                call()
        torch.cuda.current_stream(self.device).wait_stream(side)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            # kept until the graph is gone: it writes here
            output = call()
        try:
            return self.time(graph.replay)
        finally:
            torch.cuda.synchronize(self.device)
            graph.reset()
            del output

    def peak_mib(self, call: Call) -> float | None:
        """Most memory a call holds beyond what was held before it; None on a CPU."""
        if not self.is_cuda:
            return None
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        output = call()
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        del output
        return (peak - before) / MIB

    def _runs(self, call: Call, count: int) -> list[float]:
        """Milliseconds of ``count`` runs."""
        if self._flush is None:
            times = []
            for _ in range(count):
                start = time.perf_counter()
                call()
                times.append((time.perf_counter() - start) * 1e3)
            return times
        starts, ends = (
            [torch.cuda.Event(enable_timing=True) for _ in range(count)] for _ in range(2)
        )
        for start_event, end_event in zip(starts, ends, strict=True):
            self._flush.zero_()
            start_event.record()
            call()
            end_event.record()
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]


def measure_ceilings(clock: Clock, *, size: int = 8192, copied: int = 2**30) -> dict[str, float]:
    """What this device reaches on what it does best, to hold other figures against.

    Args:
        clock: Of the device.
        size: Rows and columns of the bfloat16 matrices multiplied.
        copied: Bytes copied; they are read and written.
    """
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=clock.device) for _ in range(2))
    product = torch.empty_like(a)
    matmul_ms = clock.time(lambda: torch.matmul(a, b, out=product)).median_ms
    source = torch.ones(copied, dtype=torch.int8, device=clock.device)
    target = torch.empty_like(source)
    copy_ms = clock.time(lambda: target.copy_(source)).median_ms
    return {
        "matmul_tflops_per_s": 2.0 * size**3 / matmul_ms / 1e9,
        "copy_gbytes_per_s": 2.0 * copied / copy_ms / 1e6,
    }


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[round(share * (len(ordered) - 1))]
