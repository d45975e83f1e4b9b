"""Routing inside another model keeps the invariants of our own layer."""

from copy import deepcopy

import pytest
import torch

from meta_attention import adapt
from meta_attention.adapt import attention, collect_routing, routed_as, router, routers_of
from meta_attention.adapt.router import Inputs, unrotate
from meta_attention.errors import ConfigError
from meta_attention.evaluation.adapted_flops import count_adapted, executed_routes
from meta_attention.evaluation.beliefs import watch_beliefs
from meta_attention.evaluation.forcing import force_expert
from meta_attention.layers import execution
from meta_attention.ops.rotary import rotate
from meta_attention.testing.pretrained import (
    DECODERS,
    build_base,
    draw_tokens,
    pad_rows,
    predict,
    randomise_controllers,
)

ALL = ("full", "local", "linear")
WIDE = ("full", "local:8", "local")
CLOSE = {"rtol": 0.0, "atol": 5e-5}


def make_routed(name="llama", **settings):
    model = adapt(build_base(name), **({"experts": ALL, "window_size": 4} | settings))
    randomise_controllers(model)
    return model


@pytest.mark.parametrize("granularity", ["token", "kv_head"])
@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_what_follows_changes_nothing_before_it(name, granularity):
    model, ids = make_routed(name, route_granularity=granularity), draw_tokens(2, 20)
    other = ids.clone()
    other[:, 11:] = draw_tokens(2, 9, seed=5)
    with collect_routing(model) as record:
        whole = predict(model, ids)
    routes = {i: out.routes.expert for i, out in record.layers.items()}
    for changed, length in ((other, 11), (ids[:, :13], 13)):
        with collect_routing(model) as record:
            actual = predict(model, changed)
        torch.testing.assert_close(actual[:, :length], whole[:, :length], **CLOSE)
        for index, out in record.layers.items():
            assert torch.equal(out.routes.expert[:, :length], routes[index][:, :length])


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_and_other_rows_change_nothing(side):
    model, ids, lengths = make_routed(), draw_tokens(3, 20), [20, 13, 7]
    padded, mask = pad_rows(ids, lengths, side)
    actual = predict(model, padded, attention_mask=mask)
    for row, length in enumerate(lengths):
        alone = predict(model, ids[row : row + 1, :length])
        torch.testing.assert_close(actual[row][mask[row].bool()], alone[0], **CLOSE)


@pytest.mark.parametrize("granularity", ["token", "kv_head"])
@torch.no_grad()
def test_hard_routing_executes_only_what_it_routed(granularity, monkeypatch):
    model = make_routed(route_granularity=granularity)
    ids, mask = pad_rows(draw_tokens(2, 20), [20, 11], "left")
    plans = []

    def plan_and_note(*args, **kwargs):
        plans.append(plan_routes(*args, **kwargs))
        return plans[-1]

    def refuse(*args, **kwargs):
        raise AssertionError("all experts ran on all tokens")

    plan_routes = execution.plan_routes
    monkeypatch.setattr(execution, "plan_routes", plan_and_note)
    monkeypatch.setattr(execution.ExpertExecution, "on_all", refuse)
    with collect_routing(model) as record:
        model(ids, attention_mask=mask)
    assert len(plans) == 2
    shares = torch.zeros(len(ALL))
    for plan, out in zip(plans, record.layers.values(), strict=True):
        chosen = torch.nn.functional.one_hot(out.routes.expert, len(ALL))
        if chosen.dim() == 3:
            chosen = chosen.unsqueeze(2)
        executed = (chosen * mask[:, :, None, None]).sum(dim=1)  # [B, G, E]
        assert torch.equal(plan.counts.long(), executed)
        shares += executed.float().sum(dim=(0, 1))
    assert shares.min() > 0, "a test of routes that all tokens share"


@pytest.mark.parametrize(("at", "reads"), [(1, True), (3, True), (4, False), (8, False), (9, True)])
@torch.no_grad()
def test_local_tokens_read_sinks_and_window_and_nothing_else(at, reads):
    """The last of 14 tokens sees 4 before it and 4 sinks: positions 0-3 and 9-13."""
    model = adapt(build_base("llama", num_hidden_layers=1), window_size=4)
    ids = draw_tokens(1, 14)

    def change(module, args, output):
        output = output.clone()
        output[:, at] += 10.0
        return output

    with routed_as(model, "local"):
        before = model(ids).logits[:, -1]
        model.model.layers[0].self_attn.v_proj.register_forward_hook(change)
        after = model(ids).logits[:, -1]
    assert torch.equal(before, after) != reads


@torch.no_grad()
def test_every_way_to_route_is_another():
    model, ids = make_routed(), draw_tokens(2, 20)
    ways = ["full", "soft", "hard", "local", "linear", {0: "local", 1: "full"}]
    outputs = []
    for way in ways:
        with routed_as(model, way):
            outputs.append(model(ids).logits)
    for i, a in enumerate(outputs):
        for b in outputs[:i]:
            assert (a - b).abs().max() > 1e-3
    # the config's own way, afterwards too
    assert torch.equal(model(ids).logits, outputs[2])


def test_ways_that_do_not_exist_are_refused():
    model = make_routed()
    for way, message in (
        ("fast", "routing must be one of"),
        ("gated", "uncertainty_threshold"),
        ({7: "local"}, r"among the adapted \[0, 1\], got 7"),
    ):
        with pytest.raises(ConfigError, match=message), routed_as(model, way):
            pass


def by_head(first, second):
    """Both layers of the small models have two key-value heads."""
    return {0: (first, second), 1: (first, second)}


@torch.no_grad()
def test_heads_may_have_an_expert_each():
    model = adapt(
        build_base("llama", num_hidden_layers=1), window_size=4, route_granularity="kv_head"
    )
    ids, found = draw_tokens(2, 20), {}
    attention = model.model.layers[0].self_attn
    attention.o_proj.register_forward_pre_hook(lambda _, args: found.update(rows=args[0].clone()))

    def rows(way):
        with routed_as(model, {0: way}):
            model(ids)
        return found["rows"].unflatten(-1, (2, -1))  # [B, T, G, heads of a group * P]

    full, local, mixed = rows("full"), rows("local"), rows(["full", "local"])
    torch.testing.assert_close(mixed[:, :, 0], full[:, :, 0], **CLOSE)
    torch.testing.assert_close(mixed[:, :, 1], local[:, :, 1], **CLOSE)
    assert (mixed - full).abs().max() > 1e-3
    # heads that are alike are a layer's one way: the base's own, where that is full
    assert torch.equal(rows(("full", "full")), full)
    assert torch.equal(rows(("local", "local")), local)


def decode_after(model, ids, prompt):
    """Logits of a prompt of so many tokens, and of the rest one at a time."""
    out = model(ids[:, :prompt])
    steps = [out.logits]
    for at in range(prompt, ids.shape[1]):
        out = model(ids[:, at : at + 1], past_key_values=out.past_key_values)
        steps.append(out.logits)
    return torch.cat(steps, dim=1)


@torch.no_grad()
def test_decoding_by_head_equals_one_pass():
    model = make_routed(experts=WIDE, route_granularity="kv_head")
    ids = draw_tokens(2, 20)
    with routed_as(model, by_head("local:8", "local")), collect_routing(model) as record:
        whole = model(ids).logits
        shares = executed_routes(record)
        steps = decode_after(model, ids, 15)
    torch.testing.assert_close(steps, whole, **CLOSE)
    # one head in two has either window; sinks are seen besides
    counted = count_adapted(model, shares, batch=2, length=20)
    keys = sum(min(t + 1, 9) + max(min(4, t - 8), 0) for t in range(20))
    keys += sum(min(t + 1, 5) + max(min(4, t - 4), 0) for t in range(20))
    assert counted.attention_share == pytest.approx(keys / 2 / sum(range(1, 21)))


def test_ways_by_head_that_do_not_exist_are_refused():
    by_token, by_head_model = make_routed(), make_routed(route_granularity="kv_head")
    for model, way, message in (
        (by_token, ("full", "local"), "route_granularity='kv_head', got 2 and 'token'"),
        (by_head_model, ("full",) * 3, "names by head must be 2"),
        (by_head_model, ("full", "hard"), "routing must be one of full, linear, local, got 'hard'"),
    ):
        with pytest.raises(ConfigError, match=message), routed_as(model, {0: way}):
            pass


@pytest.mark.parametrize("granularity", ["token", "kv_head"])
@torch.no_grad()
def test_a_middle_window_is_an_expert_of_its_own(granularity):
    model, ids = make_routed(experts=WIDE, route_granularity=granularity), draw_tokens(2, 20)
    # as dear as their windows
    full, wide, narrow = routers_of(model)[0].controller.costs.tolist()
    assert full == 1.0
    assert wide > narrow
    with collect_routing(model) as record:
        whole = model(ids).logits
    assert all(out.routes.expert.unique().tolist() == [0, 1, 2] for out in record.layers.values())
    with routed_as(model, "local:8"):
        through = model(ids).logits
    same = adapt(build_base("llama"), window_size=8)
    with routed_as(same, "local"):
        torch.testing.assert_close(through, same(ids).logits, **CLOSE)
    steps = decode_after(model, ids, 12)
    torch.testing.assert_close(steps, whole, **CLOSE)


@torch.no_grad()
def test_gated_routing_is_hard_where_the_controller_is_sure():
    model = make_routed(
        routing="gated", uncertainty_signal="mean_entropy", uncertainty_threshold=0.6
    )
    with collect_routing(model) as record:
        model(draw_tokens(2, 20))
    hard = torch.stack([out.routes.hard for out in record.layers.values()])
    assert 0.1 < hard.float().mean() < 0.9


@torch.no_grad()
def test_a_record_is_of_the_last_call_and_leaves_padding_out():
    model, ids = make_routed(), draw_tokens(2, 20)
    with collect_routing(model) as record:
        with pytest.raises(ConfigError, match="nothing was routed"):
            record.kl  # noqa: B018
        model(ids[:1])
        costs = record.projected_cost
        padded, mask = pad_rows(ids, [20, 6], "left")
        model(padded, attention_mask=mask)
        assert record.layers[0].routes.weights.shape == (2, 20, 3)
    model(ids)
    # what is said of a row alone and of the same row with another, weighed by tokens
    with collect_routing(model) as second:
        model(ids[1:, :6])
    expected = (20 * costs + 6 * second.projected_cost) / 26
    torch.testing.assert_close(record.projected_cost, expected)
    assert 0.0 < record.routing_entropy < 1.0
    assert 0.0 < record.routed_cost < 1.0


def test_training_draws_routes_and_evaluation_does_not():
    model, ids = make_routed(), draw_tokens(2, 20)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model(ids).logits)
        model.train()
        assert not torch.equal(model(ids).logits, model(ids).logits)


def make_direct(device, **settings):
    """A model whose controllers run as kernels; the rest is slow where these are interpreted."""
    model = make_routed(**settings).to(device)
    for each in routers_of(model):
        each.controller.config = deepcopy(each.controller.config)
        each.controller.config.impl = "triton"
    return model


def count_direct(monkeypatch):
    """Calls of layers that went from tokens to routes at once, as they are made."""
    calls = []

    def note(*args):
        calls.append(route_directly(*args))
        return calls[-1]

    route_directly = router.route_directly
    monkeypatch.setattr(router, "route_directly", note)
    return calls


@pytest.mark.parametrize(
    "settings",
    [{}, {"route_granularity": "kv_head"}, {"controller": "prior_free"}],
    ids=["token", "kv_head", "prior_free"],
)
@torch.no_grad()
def test_routes_are_the_same_without_a_posterior(settings, kernel_device, monkeypatch):
    model = make_direct(kernel_device, **settings)
    ids, mask = (x.to(kernel_device) for x in pad_rows(draw_tokens(2, 20), [20, 13], "left"))
    calls = count_direct(monkeypatch)
    direct = model(ids, attention_mask=mask).logits
    assert len(calls) == 2
    with collect_routing(model) as record:
        asked = model(ids, attention_mask=mask).logits
    assert len(calls) == 2
    for weights, out in zip(calls, record.layers.values(), strict=True):
        assert torch.equal(weights, out.routes.weights)
        assert weights.flatten(0, -2).sum(dim=0).min() > 0
    assert torch.equal(direct, asked)


@pytest.mark.parametrize("granularity", ["token", "kv_head"])
@torch.no_grad()
def test_decoding_without_a_posterior_equals_one_pass(granularity, kernel_device, monkeypatch):
    model = make_direct(kernel_device, route_granularity=granularity)
    ids = draw_tokens(2, 18).to(kernel_device)
    calls = count_direct(monkeypatch)
    whole = model(ids).logits
    steps = decode_after(model, ids, 13)
    torch.testing.assert_close(steps, whole, **CLOSE)
    # layer by layer, of 7 calls
    assert len(calls) == 14
    for layer in range(2):
        one_pass, *parts = calls[layer::2]
        assert torch.equal(torch.cat(parts, dim=1), one_pass)


@torch.no_grad()
def test_posteriors_are_there_where_they_are_used(kernel_device, monkeypatch):
    model = make_direct(kernel_device, routing="gated", uncertainty_threshold=0.05)
    ids = draw_tokens(1, 12).to(kernel_device)
    calls = count_direct(monkeypatch)
    for way in ("gated", "soft", "local", "full"):
        with routed_as(model, way):
            model(ids)
    with routed_as(model, "hard"):
        with force_expert(model, [0, 1], 1):
            model(ids)
        with watch_beliefs(model) as beliefs:
            model(ids)
        assert sorted(beliefs) == [0, 1]
        model.train()
        model(ids)
        model.eval()
        with torch.enable_grad():
            model(ids)
        assert not calls
        model(ids)
        assert len(calls) == 2
    with routed_as(model, {0: "hard", 1: "soft"}):
        model(ids)
    assert len(calls) == 3


@pytest.mark.parametrize("width", [8, 4])
def test_unrotated_heads_are_those_before_rotation(width):
    """Also where tables are scaled, as in YaRN, and where only some channels are rotated."""
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    angle = torch.rand(2, 5, width // 2, dtype=torch.float64).repeat(1, 1, 2)
    cos, sin = 1.3 * angle.cos(), 1.3 * angle.sin()
    rotated = torch.cat([rotate(x[..., :width], cos, sin), x[..., width:]], dim=-1)
    torch.testing.assert_close(unrotate(rotated, cos, sin), x)


@torch.no_grad()
def test_the_linear_expert_sees_heads_without_positions():
    """Of a text that is one token again and again, all rows are alike."""
    model = make_routed(experts=("full", "linear"))
    layer = model.model.layers[0].self_attn
    seen = []
    layer.router.experts[1].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with routed_as(model, "soft"):
        model(torch.full((1, 9), 7))
    query = layer.q_proj(model.model.layers[0].input_layernorm(model.model.embed_tokens.weight[7]))
    expected = query.view(1, 1, 4, 8).expand(1, 9, 4, 8)
    torch.testing.assert_close(seen[0].query, expected, **CLOSE)


@torch.no_grad()
def test_controllers_count_positions_from_the_first_token():
    model, seen = make_routed(), []
    routers_of(model)[0].controller.register_forward_pre_hook(
        lambda module, args: seen.append(args[1].tolist())
    )
    ids, mask = pad_rows(draw_tokens(2, 5), [5, 3], "left")
    cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
    longer = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)
    model(ids[:, :1], attention_mask=longer, past_key_values=cache)
    assert seen == [[[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]], [[5], [3]]]


@torch.no_grad()
def test_one_call_does_not_see_the_padding_of_another():
    model, ids = make_routed(), draw_tokens(2, 12)
    (first, left), (second, right) = (pad_rows(ids, [12, 7], side) for side in ("left", "right"))
    expected = predict(model, second, attention_mask=right)
    model(first, attention_mask=left)
    assert torch.equal(predict(model, second, attention_mask=right), expected)
    # the same tensor, changed in place
    assert not torch.equal(left, right)
    mask = left.bool()
    model(first, attention_mask=mask)
    mask.copy_(right)
    assert torch.equal(predict(model, second, attention_mask=mask), expected)


def test_nothing_of_padding_reaches_a_gradient():
    router = routers_of(make_routed(experts=("full", "local")))[0].train()
    query, mask = torch.randn(1, 4, 6, 8), torch.tensor([[False, False, True, True, True, True]])
    x = torch.randn(1, 6, 32).masked_fill(~mask.unsqueeze(-1), float("nan"))
    inputs = Inputs(x, None, None)
    rows = router(inputs, query, query[:, :2], query[:, 2:], mask, scale=None, softcap=None)
    assert (rows[0, :2] == 0.0).all()
    rows.square().sum().backward()
    for name, parameter in router.named_parameters():
        assert parameter.grad.isfinite().all(), name


@torch.no_grad()
def test_calls_that_overlap_do_not_mix():
    """As those of two threads do, between what a module is called with and its attention."""
    model, ids = make_routed(experts=("full", "local")), draw_tokens(2, 12)
    others, mask = pad_rows(draw_tokens(2, 12, seed=7), [12, 8], "left")
    expected, apart = model(ids).logits, model(others, attention_mask=mask).logits
    meanwhile = []

    def call_another(module, args, output):
        if not meanwhile:
            meanwhile.append(None)
            meanwhile[0] = model(others, attention_mask=mask).logits

    for layer in model.model.layers:
        with layer.self_attn.q_proj.register_forward_hook(call_another):
            assert torch.equal(model(ids).logits, expected)
        assert torch.equal(meanwhile.pop(), apart)


@torch.no_grad()
def test_heads_have_one_precision_under_autocast(monkeypatch):
    """Kernels refuse others; the base rotates queries and keys in float32 there."""
    seen = []

    def note(query, key, value, *args, **kwargs):
        seen.append({query.dtype, key.dtype, value.dtype})
        return routed_attention(query, key, value, *args, **kwargs)

    routed_attention = execution.routed_attention
    monkeypatch.setattr(execution, "routed_attention", note)
    model = make_routed()
    with torch.autocast("cpu", torch.bfloat16):
        for use_cache in (False, True):
            model(draw_tokens(2, 12), use_cache=use_cache)
    assert seen == [{torch.bfloat16}] * 4


def test_keys_that_come_from_nowhere_are_refused():
    router = routers_of(make_routed())[0]
    heads = torch.zeros(1, 4, 6, 8)
    inputs = Inputs(torch.zeros(1, 3, 32), None, None)
    with pytest.raises(ConfigError, match="6 keys came for 3 tokens without a cache"):
        router(inputs, heads[:, :, :3], heads[:, :2], heads[:, :2], None, scale=None, softcap=None)


def test_an_attention_function_on_its_own_is_refused():
    module, heads = make_routed().model.layers[0].self_attn, torch.zeros(1, 4, 3, 8)
    with pytest.raises(ConfigError, match="must be called itself"):
        attention.attend(module, heads, heads[:, :2], heads[:, :2], None, below="sdpa")
