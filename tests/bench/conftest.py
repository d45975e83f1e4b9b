"""A run at tiny sizes, on the CPU and as if on a GPU."""

import pytest
import torch

from meta_attention.bench.rows import Results
from meta_attention.bench.session import Session
from meta_attention.bench.timing import Clock

CPU = torch.device("cpu")


class GraphClock(Clock):
    """Stands in for a GPU's: graphs can be replayed, and memory is measured."""

    def __init__(self, **options):
        super().__init__(CPU, **options)
        self.is_cuda = True

    def time_graph(self, call):
        return self.time(call)

    def peak_mib(self, call):
        call()
        return 64.0


@pytest.fixture
def results():
    return Results({"device": "none", "date": "today"}, {})


@pytest.fixture
def session(results):
    clock = Clock(CPU, budget_ms=0.0, min_runs=2, max_runs=2)
    return Session(CPU, torch.float32, results, clock=clock)


@pytest.fixture
def gpu_session(results, monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    results.ceilings = {"matmul_tflops_per_s": 700.0, "copy_gbytes_per_s": 4000.0}
    clock = GraphClock(budget_ms=0.0, min_runs=2, max_runs=2)
    return Session(CPU, torch.float32, results, clock=clock)
