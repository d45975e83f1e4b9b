"""Decoding an adapted model gives what one pass gives, with any cache of Transformers."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

from meta_attention import adapt
from meta_attention.adapt import collect_routing, routed_as
from meta_attention.errors import CacheError
from meta_attention.testing.pretrained import (
    DECODERS,
    build_base,
    draw_tokens,
    pad_rows,
    randomise_controllers,
)

ALL = ("full", "local", "linear")
LENGTHS = [20, 13, 7]
CLOSE = {"rtol": 0.0, "atol": 5e-5}
CHUNKS = {"tokens": [1] * 20, "prompt": [12] + [1] * 8, "chunks": [5, 6, 1, 8]}


def make_routed(name="llama", **settings):
    model = adapt(build_base(name), **({"experts": ALL, "window_size": 4} | settings))
    randomise_controllers(model)
    return model


def positions(mask):
    """Counted from each row's first token, as generate does."""
    return (mask.cumsum(dim=1) - 1).clamp(min=0)


def run(model, ids, mask, chunks, cache=None):
    """Logits and routes of a text given in parts."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    logits, routes, at = [], [], 0
    for size in chunks:
        end = at + size
        with collect_routing(model) as record:
            out = model(
                ids[:, at:end],
                attention_mask=mask[:, :end],
                position_ids=positions(mask)[:, at:end],
                past_key_values=cache,
                use_cache=True,
            )
        logits.append(out.logits)
        routes.append(torch.stack([out.routes.weights for out in record.layers.values()]))
        at = end
    return torch.cat(logits, dim=1), torch.cat(routes, dim=2)


def assert_decodes(model, ids, mask, chunks, cache=None):
    with collect_routing(model) as record:
        expected = model(ids, attention_mask=mask, position_ids=positions(mask)).logits
    weights = torch.stack([out.routes.weights for out in record.layers.values()])
    actual, routes = run(model, ids, mask, chunks, cache)
    is_token = mask.bool()
    torch.testing.assert_close(actual[is_token], expected[is_token], **CLOSE)
    torch.testing.assert_close(routes[:, is_token], weights[:, is_token], **CLOSE)


@pytest.mark.parametrize("routing", ["hard", "soft"])
@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_token_by_token_is_one_pass(name, routing):
    ids, mask = pad_rows(draw_tokens(3, max(LENGTHS)), LENGTHS, "left")
    for experts in (("full", "local"), ALL):
        model = make_routed(name, routing=routing, experts=experts)
        assert_decodes(model, ids, mask, CHUNKS["tokens"])


@pytest.mark.parametrize("granularity", ["token", "kv_head"])
@pytest.mark.parametrize("chunks", ["prompt", "chunks"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
@torch.no_grad()
def test_any_cutting_of_the_text_is_one_pass(name, chunks, granularity):
    model = make_routed(name, route_granularity=granularity)
    ids, mask = pad_rows(draw_tokens(3, max(LENGTHS)), LENGTHS, "left")
    assert_decodes(model, ids, mask, CHUNKS[chunks])


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@torch.no_grad()
def test_a_state_space_is_one_pass(name, chunks):
    ids, mask = pad_rows(draw_tokens(3, max(LENGTHS)), LENGTHS, "left")
    model = make_routed(name, experts=("full", "ssm", "local"))
    assert_decodes(model, ids, mask, CHUNKS[chunks])
    with routed_as(model, "ssm"):
        assert_decodes(model, ids, mask, CHUNKS[chunks])


@torch.no_grad()
def test_a_static_cache_gives_the_same():
    ids, mask = pad_rows(draw_tokens(3, max(LENGTHS)), LENGTHS, "left")
    for experts in (("full", "local"), ALL):
        model = make_routed(experts=experts)
        cache = StaticCache(config=model.config, max_cache_len=32)
        assert_decodes(model, ids, mask, CHUNKS["chunks"], cache)
        cache.reset()
        assert_decodes(model, ids, mask, CHUNKS["prompt"], cache)


@torch.no_grad()
def test_a_static_cache_without_padding_knows_how_far_it_is_filled():
    """Also for layers that are not adapted, and with a mask as long as the cache."""
    ids = draw_tokens(2, 12)
    for settings in ({}, {"layers": [1], "experts": ("full", "local")}):
        model = make_routed(**settings)
        expected = model(ids).logits
        for mask in (None, torch.ones(2, 32, dtype=torch.long)):
            cache = StaticCache(config=model.config, max_cache_len=32)
            parts = [
                model(part, past_key_values=cache, attention_mask=mask).logits
                for part in ids.split([5, 5, 1, 1], dim=1)
            ]
            torch.testing.assert_close(torch.cat(parts, dim=1), expected, **CLOSE)


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_a_static_cache_gives_the_same_with_all_that_a_family_has(name):
    """Windows of layers that are not adapted, soft-caps, positions; text that goes on, too."""
    ids, mask = pad_rows(draw_tokens(3, max(LENGTHS)), LENGTHS, "left")
    settings = {"experts": ("full", "local:8", "local"), "num_sinks": 2}
    model = make_routed(name, **settings, route_granularity="kv_head")
    cache = StaticCache(config=model.config, max_cache_len=max(LENGTHS))
    for chunks in ([4, 1, 1, 6, 1, 7], CHUNKS["tokens"]):
        assert_decodes(model, ids, mask, chunks, cache)
        cache.reset()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_a_prompt_of_one_token_sees_no_room_in_a_static_cache(implementation):
    """Nor do layers that are not routed."""
    base, ids = build_base("llama"), draw_tokens(2, 3)
    base.set_attn_implementation(implementation)
    model = adapt(base, experts=("full", "local"), window_size=4, layers=[1])
    for way in ("hard", "full"):
        for mask in (None, torch.ones(2, 32, dtype=torch.long)):
            cache = StaticCache(config=model.config, max_cache_len=32)
            with routed_as(model, way):
                expected = model(ids).logits
                parts = [
                    model(part, past_key_values=cache, attention_mask=mask).logits
                    for part in ids.split(1, dim=1)
                ]
            torch.testing.assert_close(torch.cat(parts, dim=1), expected, **CLOSE)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.no_grad()
def test_every_step_may_be_routed_otherwise(kind):
    """Keys of a first layer are the same whatever its routes."""
    model = adapt(build_base("llama", num_hidden_layers=1), window_size=3, num_sinks=1)
    randomise_controllers(model)
    ids, mask = pad_rows(draw_tokens(2, 14), [14, 9], "left")
    given = {"attention_mask": mask, "position_ids": positions(mask)}
    cache = (
        StaticCache(config=model.config, max_cache_len=16)
        if kind == "static"
        else DynamicCache(config=model.config)
    )
    ways = [("full", 6), ("hard", 1), ("local", 1), ("full", 1), ("soft", 1), ("hard", 3)]
    at = 0
    for way, size in [*ways, ("local", 1)]:
        new = slice(at, at + size)
        part = {"attention_mask": mask[:, : new.stop], "position_ids": positions(mask)[:, new]}
        with routed_as(model, way):
            actual = model(ids[:, new], past_key_values=cache, **part).logits
            expected = model(ids, **given).logits[:, new]
        is_token = mask[:, new].bool()
        torch.testing.assert_close(actual[is_token], expected[is_token], **CLOSE)
        at = new.stop
    assert at == ids.shape[1]


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
@torch.no_grad()
def test_generate_is_greedy_steps_of_one_pass(name):
    model = make_routed(name)
    ids, mask = pad_rows(draw_tokens(2, 9), [9, 5], "left")
    cached = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert cached.shape == (2, 17)
    whole = torch.cat([mask, torch.ones(2, 8, dtype=torch.long)], dim=1)
    logits = model(cached, attention_mask=whole, position_ids=positions(whole)).logits
    assert torch.equal(logits[:, 8:-1].argmax(dim=-1), cached[:, 9:])


@torch.no_grad()
def test_beams_carry_their_states_along():
    """Beam search with a cache finds what it finds without."""
    model = make_routed()
    ids, mask = pad_rows(draw_tokens(2, 9), [9, 5], "left")
    options = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False, "attention_mask": mask}
    cached = model.generate(ids, **options)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **options))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
@torch.no_grad()
def test_every_way_to_generate_writes_the_same(name):
    """Beams and chunks of a prompt with a static cache, tokens that are guessed and taken back."""
    model = make_routed(name, experts=("full", "local"), route_granularity="kv_head")
    ids, mask = pad_rows(draw_tokens(2, 9), [9, 5], "left")
    beams = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False, "attention_mask": mask}
    expected = model.generate(ids, use_cache=False, **beams)
    assert torch.equal(model.generate(ids, cache_implementation="static", **beams), expected)
    one = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids[:1], **one)
    chunks = {"prefill_chunk_size": 4}
    for way in (chunks, chunks | {"cache_implementation": "static"}):
        assert torch.equal(model.generate(ids[:1], **one, **way), expected)
    guessed = model.generate(ids[:1], **one, prompt_lookup_num_tokens=3)
    assert torch.equal(guessed, expected)


@torch.no_grad()
def test_rows_can_be_selected_and_repeated():
    model, ids = make_routed(), draw_tokens(3, 12)
    cache = DynamicCache(config=model.config)
    model(ids[:, :8], past_key_values=cache)
    expected = model(ids[:, 8:], past_key_values=copy.deepcopy(cache)).logits
    rows = torch.tensor([2, 0])
    cache.batch_select_indices(rows)
    cache.batch_repeat_interleave(2)
    actual = model(ids[rows, 8:].repeat_interleave(2, dim=0), past_key_values=cache).logits
    torch.testing.assert_close(actual, expected[rows].repeat_interleave(2, dim=0), **CLOSE)


@torch.no_grad()
def test_a_cache_that_was_reset_is_new():
    model, ids = make_routed(), draw_tokens(2, 12)
    cache = DynamicCache(config=model.config)
    expected = model(ids, past_key_values=cache).logits
    cache.reset()
    torch.testing.assert_close(model(ids, past_key_values=cache).logits, expected, **CLOSE)


@torch.no_grad()
def test_softmax_experts_can_forget_tokens_and_states_cannot():
    ids = draw_tokens(2, 12)
    model = make_routed(experts=("full", "local"))
    cache = DynamicCache(config=model.config)
    model(ids[:, :10], past_key_values=cache)
    cache.crop(-4)
    actual = model(ids[:, 6:], past_key_values=cache).logits
    torch.testing.assert_close(actual, model(ids).logits[:, 6:], **CLOSE)

    model = make_routed()
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    with pytest.raises(CacheError, match="cannot forget tokens"):
        cache.crop(-4)


@torch.no_grad()
def test_states_of_tokens_that_were_not_routed_are_missed():
    model, ids = make_routed(), draw_tokens(2, 12)
    cache = DynamicCache(config=model.config)
    with routed_as(model, "full"):
        model(ids, past_key_values=cache)
    with pytest.raises(CacheError, match="holds 12 tokens, of which the recurrent experts have"):
        model(ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize("num_new", [1, 3])
@torch.no_grad()
def test_a_row_does_not_go_on_after_padding(num_new):
    ids, mask = pad_rows(draw_tokens(2, 9), [9, 5], "right")
    longer = torch.cat([mask, torch.ones(2, num_new, dtype=torch.long)], dim=1)
    for experts in (("full", "local"), ALL):
        model = make_routed(experts=experts)
        static = StaticCache(config=model.config, max_cache_len=16)
        for cache in (DynamicCache(config=model.config), static):
            model(ids, attention_mask=mask, past_key_values=cache)
            with pytest.raises(CacheError, match="pad prompts on the left"):
                model(ids[:, :num_new], attention_mask=longer, past_key_values=cache)
        # what it left behind is no part of another text
        static.reset()
        assert_decodes(model, *pad_rows(ids, [9, 5], "left"), [6, 1, 2], static)


def test_decoding_with_a_gradient_is_decoding_without():
    model, ids = make_routed(), draw_tokens(2, 12)
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
    cache = DynamicCache(config=model.config)
    for token in ids.split(1, dim=1):
        last = model(token, past_key_values=cache).logits
    torch.testing.assert_close(last[:, 0], expected, **CLOSE)
    last.sum().backward()
