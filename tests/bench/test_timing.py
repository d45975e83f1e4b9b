"""The clock."""

import time

import pytest
import torch

from meta_attention.bench.timing import Clock, measure_ceilings

CPU = torch.device("cpu")


def test_a_call_takes_as_long_as_it_takes():
    timing = Clock(CPU, budget_ms=20.0, min_runs=3).time(lambda: time.sleep(0.002))
    assert 2.0 <= timing.low_ms <= timing.median_ms <= timing.high_ms
    assert timing.repeat_ms >= 2.0


def test_runs_are_bounded():
    calls = []
    timing = Clock(CPU, budget_ms=1e9, min_runs=1, max_runs=4).time(lambda: calls.append(1))
    # two to warm up, two to estimate
    assert (timing.runs, len(calls)) == (8, 12)
    timing = Clock(CPU, budget_ms=0.0, min_runs=3).time(lambda: time.sleep(0.001))
    assert timing.runs == 6


def test_ceilings_are_rates():
    clock = Clock(CPU, budget_ms=0.0, min_runs=2)
    ceilings = measure_ceilings(clock, size=64, copied=2**16)
    assert set(ceilings) == {"matmul_tflops_per_s", "copy_gbytes_per_s"}
    assert all(rate > 0 for rate in ceilings.values())


def test_a_cpu_has_no_peak():
    assert Clock(CPU).peak_mib(lambda: None) is None


@pytest.mark.gpu
def test_graphs_and_peaks_on_a_gpu():
    clock = Clock(torch.device("cuda"), budget_ms=5.0)
    x = torch.ones(2**20, device="cuda")
    assert clock.time_graph(lambda: x + 1).median_ms > 0
    assert clock.peak_mib(lambda: x + 1) == pytest.approx(4.0)
