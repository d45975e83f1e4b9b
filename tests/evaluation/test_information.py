"""Mutual information, counted and on examples that were not counted."""

import math

import pytest
import torch

from meta_attention.errors import ShapeError
from meta_attention.evaluation.information import (
    count_both,
    entropy,
    heldout_information,
    mutual_information,
)

IDS = torch.randint(50, (400, 50), generator=torch.Generator().manual_seed(17))
IS_FIRST = (torch.arange(400) % 2 == 0)[:, None].expand_as(IDS)


def test_a_function_of_the_cause_is_explained_whole():
    routes = IDS % 3
    expected = entropy(torch.bincount(routes.flatten()).double()).item()
    assert mutual_information(IDS, routes) == pytest.approx(expected, abs=1e-9)
    heldout = heldout_information(IDS, routes, IS_FIRST)
    assert heldout.entropy == pytest.approx(expected, abs=1e-3)
    # what smoothing keeps back of 200 examples of each cause
    assert 0.98 < heldout.share <= 1.0


def test_of_independent_things_counts_remember_and_heldout_halves_do_not():
    ids = torch.randint(5000, (400, 50))
    routes = torch.randint(3, (400, 50))
    assert mutual_information(ids, routes) > 0.15
    assert heldout_information(ids, routes, IS_FIRST).information < 0.0
    assert mutual_information(IDS % 2, routes) < 0.001


def test_half_known_is_half_explained():
    # of half of the ids the route is known, of the others it is a coin
    routes = torch.where(IDS < 25, IDS % 2, torch.randint(2, IDS.shape))
    assert heldout_information(IDS, routes, IS_FIRST).share == pytest.approx(0.5, abs=0.03)


def test_there_is_nothing_to_explain_in_constant_routes():
    heldout = heldout_information(IDS, torch.zeros_like(IDS), IS_FIRST)
    assert heldout.information == pytest.approx(0.0, abs=1e-12)
    assert heldout.share == 0.0
    assert mutual_information(IDS, torch.zeros_like(IDS)) == 0.0


def test_a_cause_of_one_half_only_counts_too():
    ids = torch.tensor([[0, 1, 1], [2, 2, 0]])
    heldout = heldout_information(ids, ids % 2, torch.tensor([[True] * 3, [False] * 3]))
    assert math.isfinite(heldout.information)


def test_counts_and_entropy_are_their_definitions():
    counts = count_both(torch.tensor([0, 0, 2]), torch.tensor([1, 1, 0]))
    assert counts.tolist() == [[0.0, 2.0], [0.0, 0.0], [1.0, 0.0]]
    assert entropy(torch.tensor([2.0, 2.0])).item() == pytest.approx(math.log(2.0))
    assert entropy(torch.zeros(3)).item() == 0.0


def test_shapes_must_agree():
    with pytest.raises(ShapeError, match="one shape"):
        mutual_information(IDS, IDS[0])
    with pytest.raises(ShapeError, match="is_first"):
        heldout_information(IDS, IDS, IS_FIRST[0])
    with pytest.raises(ShapeError, match="an example"):
        mutual_information(IDS[:0], IDS[:0])
