"""Counted operations of adapted models: what the definition says, row by row and key by key."""

import pytest
import torch
from transformers.masking_utils import sliding_window_causal_mask_function

from meta_attention import adapt
from meta_attention.adapt import collect_routing, routed_as
from meta_attention.errors import ConfigError, ShapeError
from meta_attention.evaluation.adapted_flops import (
    base_windows,
    count_adapted,
    executed_routes,
)
from meta_attention.testing.pretrained import (
    build_base,
    draw_tokens,
    pad_rows,
    randomise_controllers,
)

WINDOW, SINKS, T = 4, 2, 20


def make_routed(name="llama", **settings):
    given = {"window_size": WINDOW, "num_sinks": SINKS} | settings
    model = adapt(build_base(name), **given)
    randomise_controllers(model)
    return model


def run(model, ids, **inputs):
    with torch.no_grad(), collect_routing(model) as record:
        model(ids, **inputs)
    return record


def seen_keys(expert, position, first=0):
    """Keys of a causal row whose text begins at ``first``."""
    keys = range(first, position + 1)
    if expert == "full":
        return len(keys)
    return sum(position - key <= WINDOW or key - first < SINKS for key in keys)


def flops_of_keys(model, keys):
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 4.0 * config.num_attention_heads * head_dim * keys


@pytest.mark.parametrize("granularity", ["token", "kv_head"])
def test_executed_routes_are_counted_key_by_key(granularity):
    model = make_routed(route_granularity=granularity)
    counted = count_adapted(
        model, executed_routes(record := run(model, draw_tokens(2, T))), batch=2, length=T
    )
    for index, out in record.layers.items():
        expert = out.routes.expert.reshape(2, T, -1)
        rows = expert.flatten().tolist()
        assert len(set(rows)) == 2, "routes must differ, or nothing is tested"
        groups = expert.shape[2]
        positions = torch.arange(T).view(1, T, 1).expand_as(expert).flatten().tolist()
        keys = sum(seen_keys(("full", "local")[e], t) for e, t in zip(rows, positions, strict=True))
        expected = flops_of_keys(model, keys / groups)
        assert counted.routed_by_layer[index] == pytest.approx(expected)
    whole = flops_of_keys(model, 2 * 2 * T * (T + 1) / 2)
    assert counted.base.attention == pytest.approx(whole)
    assert 0.0 < counted.attention_share < 1.0
    assert counted.attention_share == pytest.approx(sum(counted.routed_by_layer) / whole)
    assert counted.routed.controller > 0.0 == counted.base.controller
    assert counted.routed.projections == counted.base.projections > 0.0


def test_padding_is_not_counted():
    model = make_routed()
    ids, mask = pad_rows(draw_tokens(2, T), [T, 13], "left")
    whole = executed_routes(run(model, ids, attention_mask=mask))
    both = count_adapted(model, whole, batch=2, length=T, mask=mask.bool())
    apart = count_adapted(model, executed_routes(run(model, ids[:1])), batch=1, length=T)
    apart += count_adapted(
        model, executed_routes(run(model, ids[1:, T - 13 :])), batch=1, length=13
    )
    assert both.routed_by_layer == pytest.approx(apart.routed_by_layer)
    assert both.base_by_layer == pytest.approx(apart.base_by_layer)


def test_layers_with_a_window_are_counted_as_what_they_are():
    model = make_routed("gemma2")
    assert base_windows(model) == [4, None]
    inside = sliding_window_causal_mask_function(model.config.sliding_window)
    at = torch.arange(T)
    keys = sum(bool(inside(0, 0, q, k)) for q in at for k in at)
    counted = count_adapted(model, {}, batch=1, length=T)
    assert counted.base_by_layer[0] == pytest.approx(flops_of_keys(model, keys))
    assert counted.base_by_layer[1] == pytest.approx(flops_of_keys(model, T * (T + 1) / 2))
    # with nothing routed it is the base, and no controller is asked
    assert counted.routed == counted.base
    assert counted.attention_share == 1.0


def test_a_static_choice_costs_what_its_layers_cost():
    model, ids = make_routed(), draw_tokens(1, T)
    with routed_as(model, {0: "full", 1: "local"}):
        record = run(model, ids)
    assert sorted(record.layers) == [1]
    counted = count_adapted(model, executed_routes(record), batch=1, length=T)
    local = sum(seen_keys("local", t) for t in range(T))
    assert counted.share_by_layer == pytest.approx((1.0, local / (T * (T + 1) / 2)))


def test_a_shorter_text_costs_what_its_own_run_costs():
    model, ids = make_routed(), draw_tokens(1, T)
    prefix = executed_routes(run(model, ids), 11)
    own = executed_routes(run(model, ids[:, :11]))
    a, b = (count_adapted(model, routes, batch=1, length=11) for routes in (prefix, own))
    assert a == b


def test_cached_tokens_are_read_and_not_counted_again():
    model, ids = make_routed(), draw_tokens(1, T)
    record = run(model, ids)
    whole = count_adapted(model, executed_routes(record), batch=1, length=T)
    first = count_adapted(model, executed_routes(record, 15), batch=1, length=15)
    rest = {i: out.routes.weights[:, 15:] for i, out in record.layers.items()}
    last = count_adapted(model, rest, batch=1, length=5, past=15)
    assert (first + last).routed_by_layer == pytest.approx(whole.routed_by_layer)
    assert (first + last).base_by_layer == pytest.approx(whole.base_by_layer)


def test_routes_of_other_layers_or_shapes_are_refused():
    model = make_routed("gemma2")
    routes = executed_routes(run(model, draw_tokens(1, T)))
    with pytest.raises(ConfigError, match="adapted layers"):
        count_adapted(model, {0: routes[1]}, batch=1, length=T)
    with pytest.raises(ShapeError, match=r"for \[1, 19\] tokens"):
        count_adapted(model, routes, batch=1, length=T - 1)
    with pytest.raises(ConfigError, match="not adapted"):
        count_adapted(build_base("llama"), {}, batch=1, length=T)


@pytest.mark.gpu
def test_counts_on_a_gpu_are_those_of_a_cpu():
    model = make_routed()
    routes = executed_routes(run(model, draw_tokens(2, T)))
    expected = count_adapted(model, routes, batch=2, length=T)
    there = {index: weights.cuda() for index, weights in routes.items()}
    assert count_adapted(model.cuda(), there, batch=2, length=T) == expected
