"""The window of a log: means over its own steps, and the time of these."""

import pytest
import torch

from meta_attention.evaluation.routing import RoutingTally
from meta_attention.training import log_window
from meta_attention.training.capture import StepResult
from meta_attention.training.log_window import LogWindow


def step_of(task_loss, weights=None):
    figures = torch.tensor([task_loss])
    return StepResult(figures[0], ("task_loss",), figures, weights, None, None)


def on_one_process(tensor, reduction):
    return tensor


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(log_window.time, "perf_counter", lambda: now[0])
    return now


def test_a_window_has_means_over_its_own_steps_and_their_time(clock):
    window = LogWindow(RoutingTally([("full", "local")], [torch.tensor([1.0, 0.2])]))
    on_full = torch.tensor([1.0, 0.0]).expand(1, 4, 2)
    window.start_clock()
    for task_loss in (1.0, 3.0):
        clock[0] += 1.0
        window.start_clock()  # it goes already
        window.add(step_of(task_loss, [on_full]), num_tokens=4)
    with window.clock_stopped():
        clock[0] += 50.0
    first = window.close(2, on_one_process, num_processes=3)
    assert first.figures == {"task_loss": 2.0}
    assert first.tokens_per_s == pytest.approx(3 * 8 / 2.0)
    assert (first.routing.projected_cost, first.routing.num_tokens) == (1.0, 8)

    clock[0] += 50.0  # between two windows
    window.start_clock()
    clock[0] += 1.0
    window.add(step_of(5.0, [on_full.flip(-1)]), num_tokens=4)
    second = window.close(3, on_one_process, num_processes=1)
    assert second.figures == {"task_loss": 5.0}
    assert second.tokens_per_s == pytest.approx(4.0)
    assert second.routing.projected_cost == pytest.approx(0.2)
