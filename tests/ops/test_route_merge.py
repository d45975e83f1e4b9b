"""route_merge: the weighted sum, and nothing from experts that did not run."""

import pytest
import torch

from meta_attention.errors import BackendUnavailableError, ShapeError
from meta_attention.ops.route_merge import route_merge


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


def test_triton_asked_for_by_name_is_not_replaced():
    with pytest.raises(BackendUnavailableError, match="route_merge has no Triton kernel"):
        route_merge(torch.ones(1, 1, 1), [torch.ones(1, 1, 1)], impl="triton")
