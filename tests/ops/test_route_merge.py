"""route_merge: the weighted sum, and nothing from experts that did not run."""

import pytest
import torch

from meta_attention.errors import BackendUnavailableError, ShapeError
from meta_attention.ops.route_merge import route_merge, take_chosen
from meta_attention.testing import assert_within_error_budget


def test_merge_is_the_weighted_sum():
    weights = torch.rand(2, 5, 3, dtype=torch.float64).softmax(dim=-1)
    rows = torch.randn(3, 2, 5, 8, dtype=torch.float64)
    expected = torch.einsum("bte,ebtd->btd", weights, rows)
    torch.testing.assert_close(route_merge(weights, list(rows)), expected)


def test_unused_expert_may_hold_garbage():
    weights = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    rows = torch.full((2, 1, 2, 4), float("nan"))
    rows[0, 0, 0], rows[1, 0, 1] = 1.0, 2.0
    merged = route_merge(weights, list(rows))
    assert merged[0, :, 0].tolist() == [1.0, 2.0]


def test_a_weight_of_zero_has_the_gradient_of_its_row():
    weights = torch.tensor([[[1.0, 0.0]]], requires_grad=True)
    rows = [torch.full((1, 1, 4), 2.0), torch.full((1, 1, 4), 3.0)]
    (gradient,) = torch.autograd.grad(route_merge(weights, rows).sum(), weights)
    assert gradient.tolist() == [[[8.0, 12.0]]]


def test_half_precision_rows_are_summed_in_float32():
    weights = torch.full((1, 1, 3), 1 / 3)
    rows = [torch.full((1, 1, 1), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    assert route_merge(weights, rows).item() == 86.0


def test_wrong_shapes_are_named():
    with pytest.raises(ShapeError, match=r"weights \[2, 5, 3\] .* rows\[0\] \[2, 4, 8\]"):
        route_merge(torch.ones(2, 5, 3), [torch.ones(2, 4, 8)] * 3)
    with pytest.raises(ShapeError, match="for 2 expert rows"):
        route_merge(torch.ones(2, 5, 3), [torch.ones(2, 5, 8)] * 2)


def run(weights, rows, **kwargs):
    """Merged rows and the gradients of a fixed weighted sum of them."""
    weights, rows = weights.clone().requires_grad_(), rows.clone().requires_grad_()
    merged = route_merge(weights, list(rows), **kwargs)
    upstream = torch.linspace(-1, 1, merged.numel(), device=merged.device).view_as(merged)
    gradients = torch.autograd.grad(merged, (weights, rows), upstream.to(merged.dtype))
    return dict(zip(("merged", "d_weights", "d_rows"), (merged.detach(), *gradients), strict=True))


@pytest.mark.parametrize("only_listed", [False, True], ids=["all", "listed"])
@pytest.mark.parametrize("D", [1, 48, 1500])
def test_kernel_agrees_with_the_reference(D, only_listed, kernel_device):
    weights = torch.rand(2, 5, 3) * (torch.rand(2, 5, 3) > 0.4)
    rows = torch.randn(3, 2, 5, D)
    exact = run(weights.double(), rows.double(), only_listed=only_listed, impl="reference")
    plain = run(weights, rows, only_listed=only_listed, impl="reference")
    weights, rows = weights.to(kernel_device), rows.to(kernel_device)
    for name, actual in run(weights, rows, only_listed=only_listed, impl="triton").items():
        assert_within_error_budget(name, actual.cpu(), exact[name], plain[name])


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_rows_that_were_not_computed_are_not_read_gradients_included(impl, kernel_device):
    weights = torch.tensor([[[1.0, 0.0], [0.25, 0.75]]], device=kernel_device)
    rows = torch.randn(2, 1, 2, 4, device=kernel_device)
    rows[1, 0, 0] = float("nan")
    for name, tensor in run(weights, rows, only_listed=True, impl=impl).items():
        assert tensor.isfinite().all(), name


def test_a_hard_route_hands_its_weight_the_gradient_of_the_chosen_row():
    weights = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]], requires_grad=True)
    rows = torch.randn(1, 2, 4, requires_grad=True)
    merged = take_chosen(weights, rows)
    upstream = torch.randn_like(rows)
    d_weights, d_rows = torch.autograd.grad(merged, (weights, rows), upstream)
    assert torch.equal(merged, rows)
    assert torch.equal(d_rows, upstream)
    expected = (upstream * rows).sum(dim=-1, keepdim=True) * weights
    torch.testing.assert_close(d_weights, expected)


def test_triton_asked_for_by_name_is_not_replaced():
    rows = [torch.ones(1, 1, 1, dtype=torch.float64)]
    with pytest.raises(BackendUnavailableError, match=r"route_merge .* got torch.float64"):
        route_merge(torch.ones(1, 1, 1), rows, impl="triton")
