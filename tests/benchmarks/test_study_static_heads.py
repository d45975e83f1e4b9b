"""All static choices of experts for heads, and the frontier of the best."""

import pytest
import torch
from study_static_heads import ComparedModel, Point, divergence_at, frontier, search
from transformers import LlamaConfig, LlamaForCausalLM

from meta_attention import adapt


def point(share: float, divergence: float) -> Point:
    return Point((), share, divergence)


def test_frontier_is_what_no_mixture_of_two_others_beats():
    kept = [point(0.1, 1.0), point(0.3, 0.4), point(1.0, 0.0)]
    above_the_line, dearer_and_worse = point(0.2, 0.71), point(0.4, 0.5)
    assert frontier([dearer_and_worse, *reversed(kept), above_the_line]) == kept
    below_the_line = point(0.2, 0.69)
    assert frontier([*kept, below_the_line]) == [kept[0], below_the_line, *kept[1:]]


def test_between_points_a_frontier_is_a_line_and_beyond_them_it_ends():
    points = [point(0.1, 1.0), point(0.3, 0.4)]
    assert divergence_at(points, 0.15) == pytest.approx(0.85)
    assert divergence_at(points, 0.05) == 1.0
    assert divergence_at(points, 0.9) == 0.4


@pytest.fixture(scope="module")
def static() -> ComparedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.5,
    )
    model = adapt(
        LlamaForCausalLM(config),
        experts=("full", "local"),
        window_size=2,
        num_sinks=0,
        route_granularity="kv_head",
    )
    return ComparedModel(model, torch.randint(32, (2, 24)))


def test_every_choice_is_there_once(static):
    choices = static.choices()
    assert len(choices) == len(set(choices)) == 2**4


def test_all_heads_on_full_are_the_base_and_each_narrowed_one_costs_less(static):
    full, one = (("full",) * 2,) * 2, (("full", "local"), ("full",) * 2)
    base, narrowed = static.measure(full), static.measure(one)
    assert base.attention_share == 1.0
    assert base.divergence == pytest.approx(0.0, abs=1e-6)
    # 69 of the 300 pairs of 24 tokens are at most two apart
    assert narrowed.attention_share == pytest.approx((3 + 69 / 300) / 4)
    assert narrowed.divergence > 1e-4


def test_search_finds_the_frontier_of_all_choices(static):
    every = [static.measure(choice) for choice in static.choices()]
    assert search(static, static, keep=1.0) == frontier(every)
    # the best are among those that lie lowest
    assert search(static, static, keep=0.75) == frontier(every)
