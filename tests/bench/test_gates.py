"""The gates let what is right pass, and nothing else."""

import pytest
import torch

from meta_attention.bench.data import Mix, OpShape, make_heads
from meta_attention.bench.gates import (
    defined_rows,
    gate,
    gate_norm,
    sampled_gates,
    small_gates,
    state_space_rows,
    value_gradient_gate,
)
from meta_attention.bench.op_bench import routed_rows
from meta_attention.testing import naive_state_space

CPU = torch.device("cpu")
MIX = Mix(25, 25, 50)
SHAPE = OpShape(2, 150, H=2, P=16, window=20)


def small(forward, dtype=torch.float32, gradients=True):
    return small_gates(
        forward, SHAPE, MIX, dtype=dtype, device=CPU, seed=0, gradients=gradients
    )  # fmt: skip


def routed(q, k, v, routes):
    return routed_rows(q, k, v, MIX.weights(routes), SHAPE.window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_routed_attention_passes_at_a_small_shape(dtype):
    gates = small(routed, dtype)
    assert [g.name.partition(",")[0] for g in gates] == ["rows", "d_query", "d_key", "d_value"]
    assert all(g.is_passed for g in gates), gates


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "wrong",
    [
        lambda q, k, v, r: defined_rows(q, k, v, r, SHAPE.window - 1),
        lambda q, k, v, r: defined_rows(q, k, v, r.roll(1, 1), SHAPE.window),
        lambda q, k, v, r: defined_rows(q, k, v, r, SHAPE.window) * float("nan"),
        lambda q, k, v, r: defined_rows(q * 1.05, k, v, r, SHAPE.window),
    ],
    ids=["window", "routes", "nan", "scale"],
)
def test_a_wrong_implementation_fails_at_a_small_shape(wrong, dtype):
    assert not all(g.is_passed for g in small(wrong, dtype, gradients=False))


def test_a_wrong_gradient_fails():
    def wrong(q, k, v, r):
        return routed(q, k.detach() + 0.9 * (k - k.detach()), v, r)

    passed = {g.name.partition(",")[0]: g.is_passed for g in small(wrong)}
    assert passed == {"rows": True, "d_query": True, "d_key": False, "d_value": True}


def test_rows_of_a_state_space_are_those_of_its_recurrence():
    heads = (torch.randn(1, 40, count, 16).double() for count in (4, 2, 2))
    query, key, value = heads
    parts = {"rate": torch.rand(2).double() * 9.0, "skip": torch.randn(4).double()}
    step = torch.rand(50, 2).double()
    expected, _ = naive_state_space(query, key, value, step=step[None, :40], **parts)
    at = torch.tensor([0, 7, 39])
    reach = {"first": torch.zeros_like(at), "last": at}
    rows = state_space_rows(query[0, at], key[0], value[0], **reach, step=step, **parts)
    torch.testing.assert_close(rows, expected[0, at])


def timed(dtype=torch.float32):
    data = make_heads(SHAPE, dtype=dtype, device=CPU, seed=1)
    routes = MIX.draw(SHAPE.B, SHAPE.T, seed=1, device=CPU)
    rows = routed(*data.heads, routes)
    gradients = torch.autograd.grad(rows, data.heads, data.upstream)
    return data, routes, rows.detach(), gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_sampled_rows_pass_and_name_their_expert(dtype):
    data, routes, rows, (d_query, _, d_value) = timed(dtype)
    gates = sampled_gates(rows, data, routes, SHAPE.window, seed=0, d_query=d_query)
    gates.append(value_gradient_gate(d_value, data.upstream))
    assert all(g.is_passed for g in gates), gates
    assert {g.name for g in gates} == {
        "sampled full rows",
        "sampled local rows",
        "sampled linear rows",
        "d_query of sampled full rows",
        "d_query of sampled local rows",
        "d_query of sampled linear rows",
        "sum of d_value",
    }


def test_sampled_rows_of_the_wrong_window_fail_alone():
    data, routes, rows, _ = timed()
    gates = sampled_gates(rows, data, routes, SHAPE.window + 1, seed=0)
    assert {g.name for g in gates if not g.is_passed} == {"sampled local rows"}


def test_sampled_rows_that_are_not_numbers_fail():
    data, routes, rows, (d_query, _, _) = timed()
    rows[0, routes[0] == 1] = float("nan")
    gates = sampled_gates(rows, data, routes, SHAPE.window, seed=0, d_query=2 * d_query)
    failed = {g.name for g in gates if not g.is_passed}
    assert "sampled local rows" in failed
    assert "sampled full rows" not in failed
    assert {name for name in failed if name.startswith("d_query")} == {
        f"d_query of sampled {name} rows" for name in ("full", "local", "linear")
    }


def test_a_list_left_out_of_the_value_gradient_shows():
    data, routes, _, (_, _, d_value) = timed()
    upstream = data.upstream * (routes != 2)[..., None, None]
    assert value_gradient_gate(d_value, data.upstream).is_passed
    assert not value_gradient_gate(d_value, upstream).is_passed


def test_budgets_follow_plain_pytorch():
    oracle = torch.tensor([1.0, 2.0]).double()
    found = gate("x", torch.tensor([1.0, 2.2]), oracle, torch.tensor([1.0, 2.1]))
    assert found.error == pytest.approx(0.1)
    assert found.budget == pytest.approx(0.1, rel=1e-3)
    norm = gate_norm("x", torch.tensor([1.0, 2.2]), oracle, torch.tensor([1.0, 2.0]))
    assert norm.error == pytest.approx(0.2 / 5**0.5)
    assert not norm.is_passed
