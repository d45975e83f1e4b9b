"""The plan: every token of weight in its lists, in order, and nobody else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meta_attention.errors import ShapeError
from meta_attention.ops.route_plan import RANK_BLOCK, plan_routes


def expected_lists(weights, mask):
    """Positions of every list, by looping."""
    B, T, G, E = weights.shape
    return {
        (b, g, e): [
            t for t in range(T) if weights[b, t, g, e] > 0 and (mask is None or mask[b, t] != 0)
        ]
        for b in range(B)
        for g in range(G)
        for e in range(E)
    }


def check(plan, lists, T):
    for (b, g, e), positions in lists.items():
        one = plan.list_of(e)
        assert one.count[b, g] == len(positions)
        assert one.positions[b, g, : len(positions)].tolist() == positions
        borders = [*range(0, T, RANK_BLOCK), T]
        ranks = [sum(t < border for t in positions) for border in borders]
        assert one.ranks[b, g].tolist() == ranks
        assert one.is_listed(T)[b, :, g].nonzero().flatten().tolist() == positions


@given(
    B=st.integers(1, 2),
    T=st.sampled_from([1, 2, 63, 64, 65, 200]),
    G=st.sampled_from([1, 3]),
    E=st.integers(1, 4),
    density=st.sampled_from([0.0, 0.3, 1.0]),
    masked=st.sampled_from(["no", "boolean", "documents"]),
    seed=st.integers(0, 100),
)
def test_lists_are_the_tokens_of_weight_in_order(B, T, G, E, density, masked, seed):
    generator = torch.Generator().manual_seed(seed)
    weights = (torch.rand(B, T, G, E, generator=generator) < density).float()
    mask = None
    if masked != "no":
        mask = torch.randint(0, 3, (B, T), generator=generator)
        mask = mask.bool() if masked == "boolean" else mask
    plan = plan_routes(weights, mask=mask, is_exclusive=False, impl="reference")
    check(plan, expected_lists(weights, mask), T)


@pytest.mark.parametrize("masked", ["no", "boolean", "documents"])
@pytest.mark.parametrize("T", [1, 64, 65, 1023, 1024, 1025, 2500])
def test_kernel_makes_the_same_plan(T, masked, kernel_device):
    weights = torch.rand(2, T, 2, 3) * (torch.rand(2, T, 2, 3) < 0.3)
    mask = {"no": None, "boolean": torch.rand(2, T) < 0.7, "documents": torch.randint(3, (2, T))}
    on_device = None if mask[masked] is None else mask[masked].to(kernel_device)
    plan = plan_routes(weights.to(kernel_device), mask=on_device, is_exclusive=False, impl="triton")
    check(plan, expected_lists(weights, mask[masked]), T)


def test_weights_may_be_a_view():
    weights = torch.rand(3, 2, 40).permute(1, 2, 0)
    plan = plan_routes(
        weights, is_exclusive=False, impl="triton" if torch.cuda.is_available() else "reference"
    )
    assert plan.counts.tolist() == [[[40, 40, 40]]] * 2


def test_wrong_shapes_are_named():
    with pytest.raises(ShapeError, match=r"weights must be .*, got \[2, 5\]"):
        plan_routes(torch.ones(2, 5), is_exclusive=True)
    with pytest.raises(ShapeError, match="mask must be"):
        plan_routes(torch.ones(2, 5, 3), mask=torch.ones(2, 4).bool(), is_exclusive=True)
