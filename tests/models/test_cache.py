"""Decode equals prefill, and what a cache can and cannot do."""

import pytest
import torch

from meta_attention import (
    Expert,
    MetaAttentionCache,
    MetaAttentionStaticCache,
    register_expert,
)
from meta_attention.errors import CacheError, ConfigError, ShapeError

EXPERT_SETS = {
    "paper": {},
    "own projections": {"shared_projections": False},
    "gated and local": {"experts": ("gated_full", "local")},
    "linear only": {"experts": ("linear",)},
    "local only": {"experts": ("local",)},
    "linear and local": {"experts": ("linear", "local")},
    "static hybrid": {"layer_experts": [["local"], ["linear"], ["full"]]},
    "mixed": {"layer_experts": [["local"], ["full", "linear", "local"], ["linear", "local"]]},
    "prior-free": {"controller": "prior_free"},
    "values by head": {
        "controller": "value",
        "price": 0.01,
        "routing": "hard",
        "route_granularity": "kv_head",
        "recurrence": 2,
    },
    "without rotation": {"use_rope": False},
    "hard": {"routing": "hard"},
    "hard, two windows": {
        "routing": "hard",
        "layer_experts": [["local:2"], ["local:3", "full", "local:9"], ["local", "local:1"]],
        "expert_costs": "flops",
    },
    "hard, own projections": {"routing": "hard", "shared_projections": False},
    "gated": {"routing": "gated", "uncertainty_threshold": 0.22},
    "hard, gated_full": {
        "routing": "hard",
        "experts": ("gated_full", "linear", "local"),
        "expert_costs": (0.5, 0.5, 0.5),
    },
    "gated, all experts": {
        "routing": "gated",
        "uncertainty_threshold": 0.2,
        "experts": ("local", "gated_full", "full", "linear"),
        "expert_costs": (0.3, 1.0, 1.0, 0.2),
    },
    "gated, prior-free": {
        "routing": "gated",
        "controller": "prior_free",
        "uncertainty_signal": "mean_entropy",
        "uncertainty_threshold": 1.0,
    },
    "by head": {
        "route_granularity": "kv_head",
        "layer_experts": [["local"], ["full", "linear", "local"], ["gated_full", "local"]],
    },
    "hard, by head": {
        "route_granularity": "kv_head",
        "routing": "hard",
        "expert_costs": (0.5, 0.5, 0.5),
    },
    "gated, by head, all experts": {
        "route_granularity": "kv_head",
        "num_key_value_heads": 4,
        "routing": "gated",
        "uncertainty_threshold": 0.2,
        "experts": ("local", "gated_full", "full", "linear"),
        "expert_costs": (0.3, 1.0, 1.0, 0.2),
    },
    "sinks": {"num_sinks": 2, "routing": "hard", "expert_costs": (0.5, 0.5, 0.5)},
    "sinks, all experts": {
        "num_sinks": 3,
        "routing": "gated",
        "uncertainty_threshold": 0.2,
        "experts": ("local", "gated_full", "full", "linear"),
        "expert_costs": (0.3, 1.0, 1.0, 0.2),
    },
    "sinks, by head": {
        "num_sinks": 9,
        "route_granularity": "kv_head",
        "layer_experts": [["local"], ["full", "linear", "local"], ["gated_full", "local"]],
    },
    "sinks, own projections": {"num_sinks": 1, "shared_projections": False},
    "ssm only": {"experts": ("ssm",), "expert_costs": (0.2,)},
    "hard, ssm, convolved": {
        "routing": "hard",
        "experts": ("full", "ssm", "local"),
        "expert_costs": (0.5, 0.5, 0.5),
        "short_conv": 3,
    },
    "gated, by head, two states": {
        "route_granularity": "kv_head",
        "routing": "gated",
        "uncertainty_threshold": 0.2,
        "experts": ("ssm", "gated_full", "linear", "local"),
        "expert_costs": (0.2, 1.0, 0.2, 0.3),
    },
    "ssm, own projections": {
        "experts": ("ssm", "full"),
        "expert_costs": (0.2, 1.0),
        "shared_projections": False,
    },
    "convolved": {"short_conv": 3, "attention_bias": True},
    "convolved, hard": {"short_conv": 4, "routing": "hard", "expert_costs": (0.5, 0.5, 0.5)},
    "convolved, own projections": {"short_conv": 2, "shared_projections": False},
    "depth": {"depth_capacity": 0.5, "depth_layers": (0, 1, 2)},
    "depth, hard, convolved": {
        "depth_capacity": 0.4,
        "depth_layers": (0, 2),
        "depth_routing": "threshold",
        "routing": "hard",
        "expert_costs": (0.5, 0.5, 0.5),
        "short_conv": 3,
        "num_sinks": 1,
    },
    "depth, by head, windows": {
        "depth_capacity": 0.6,
        "depth_layers": (0, 1, 2),
        "route_granularity": "kv_head",
        "layer_experts": [["local"], ["full", "linear", "local"], ["gated_full", "local:2"]],
        "expert_costs": "flops",
    },
    "recurrence, hard, by head": {
        "recurrence": 3,
        "routing": "hard",
        "route_granularity": "kv_head",
        "expert_costs": (0.5, 0.5, 0.5),
    },
    "recurrence, depth": {"recurrence": 2, "depth_capacity": 0.5, "depth_layers": (0, 1, 2)},
    "depth, own projections": {
        "depth_capacity": 0.5,
        "depth_layers": (1, 2),
        "controller": "prior_free",
        "shared_projections": False,
    },
}
# logits are as large as 6, and one pass is itself 1e-5 from what it is in float64
CLOSE = {"rtol": 1e-5, "atol": 3e-5}
CACHES = {
    "growing": MetaAttentionCache,
    "static": lambda config: MetaAttentionStaticCache(config, max_cache_len=26),
}
CHUNKS = {
    "token by token": [1] * 24,
    "prompt, then tokens": [17] + [1] * 7,
    "chunks": [7, 1, 9, 7],
    "within a window": [3, 21],
}


def one_pass(model, ids, mask=None):
    with torch.no_grad():
        return model(ids, attention_mask=mask, use_cache=False, output_routing=True)


def in_chunks(model, ids, sizes, mask=None, *, whole_mask=True, cache="growing"):
    """Logits and routes of every token, fed through a cache in chunks."""
    cache = CACHES[cache](model.config)
    outs, start = [], 0
    for size in sizes:
        stop = start + size
        given = None if mask is None else mask[:, 0 if whole_mask else start : stop]
        with torch.no_grad():
            outs.append(
                model(
                    ids[:, start:stop],
                    attention_mask=given,
                    past_key_values=cache,
                    use_cache=True,
                    output_routing=True,
                )
            )
        start = stop
    assert cache.get_seq_length() == ids.shape[1]
    logits = torch.cat([out.logits for out in outs], dim=1)
    weights = [
        torch.cat(parts, dim=1) for parts in zip(*(o.routing_weights for o in outs), strict=True)
    ]
    return logits, weights


def padding_of(kind, B=2, T=24):
    mask = torch.ones(B, T, dtype=torch.long)
    if kind == "left":
        mask[0, :9], mask[1, :1] = 0, 0
    elif kind == "right":
        mask[0, 11:], mask[1, 20:] = 0, 0
    return None if kind == "none" else mask


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("experts", EXPERT_SETS)
@pytest.mark.parametrize("cache", CACHES)
def test_decode_equals_prefill(make_model, tokens, cache, experts, chunks, padding):
    model, ids, mask = make_model(**EXPERT_SETS[experts]), tokens(), padding_of(padding)
    if "ssm" in model.config.experts:
        # which is not normalised, so that rounding grows as well
        model = model.double()
    whole = one_pass(model, ids, mask)
    logits, weights = in_chunks(model, ids, CHUNKS[chunks], mask, cache=cache)
    is_token = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    torch.testing.assert_close(logits[is_token], whole.logits[is_token], **CLOSE)
    for ours, expected in zip(weights, whole.routing_weights, strict=True):
        torch.testing.assert_close(ours[is_token], expected[is_token], rtol=1e-5, atol=1e-5)
        assert torch.equal(ours[is_token].argmax(-1), expected[is_token].argmax(-1))


def test_tokens_are_really_routed_apart(make_model, tokens):
    """The models of these tests route: otherwise equal routes would prove little."""
    weights = one_pass(make_model(), tokens()).routing_weights
    assert all(layer.std(dim=(0, 1)).max() > 0.02 for layer in weights)


def test_the_gate_of_these_tests_lets_some_tokens_through(make_model, tokens):
    for name in (
        "gated",
        "gated, all experts",
        "gated, prior-free",
        "gated, by head, all experts",
        "sinks, all experts",
        "gated, by head, two states",
    ):
        weights = one_pass(make_model(**EXPERT_SETS[name]), tokens()).routing_weights
        is_hard = torch.stack([(layer == 1).any(dim=-1) for layer in weights])
        assert 0.05 < is_hard.float().mean() < 0.95, name


def test_a_mask_of_the_new_tokens_alone_will_do(make_model, tokens):
    model, ids, mask = make_model(), tokens(), padding_of("left")
    whole, _ = in_chunks(model, ids, CHUNKS["chunks"], mask)
    new, _ = in_chunks(model, ids, CHUNKS["chunks"], mask, whole_mask=False)
    assert torch.equal(whole, new)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("sizes", [[9], [1] * 9, [1, 1, 4, 1, 2]], ids=str)
def test_padding_is_remembered_when_later_calls_leave_the_mask_out(
    make_model, tokens, cache, sizes
):
    model, ids, mask = make_model(), tokens(), padding_of("left")
    cache = CACHES[cache](model.config)
    with torch.no_grad():
        model(ids[:, :15], attention_mask=mask[:, :15], past_key_values=cache, use_cache=True)
        logits = [
            model(part, past_key_values=cache, use_cache=True).logits
            for part in ids[:, 15:].split(sizes, dim=1)
        ]
    expected = one_pass(model, ids, mask).logits[:, 15:]
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cache", CACHES)
def test_a_row_may_begin_after_the_prompt(make_model, tokens, cache):
    """All of its prompt is padding: its first token is a decoding step."""
    model, ids = make_model(), tokens()
    mask = torch.ones_like(ids)
    mask[0, :15] = 0
    cache = CACHES[cache](model.config)
    with torch.no_grad():
        model(ids[:, :15], attention_mask=mask[:, :15], past_key_values=cache, use_cache=True)
        steps = [model(ids[:, t, None], past_key_values=cache).logits for t in range(15, 24)]
    expected = one_pass(model, ids, mask).logits[:, 15:]
    torch.testing.assert_close(torch.cat(steps, dim=1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("state", ["linear", "ssm"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("masks", ["for all", "for the prompt"])
def test_right_padded_prompts_go_on(make_model, tokens, masks, cache, state):
    """Prompts of different lengths, padded on the right, then tokens for all rows.

    Not with local attention: its window counts positions, those of padding between two tokens too.
    """
    model, ids = make_model(experts=("full", state), expert_costs=(1.0, 0.2)), tokens()
    mask = torch.ones_like(ids)
    mask[0, 10:16] = 0
    cache, parts = CACHES[cache](model.config), []
    with torch.no_grad():
        model(ids[:, :16], attention_mask=mask[:, :16], past_key_values=cache)
        for t in range(16, 24):
            given = mask[:, : t + 1] if masks == "for all" else None
            parts.append(model(ids[:, t, None], attention_mask=given, past_key_values=cache).logits)
    alone = torch.cat([ids[:1, :10], ids[:1, 16:]], dim=1)
    expected = one_pass(model, alone).logits[:, 10:]
    torch.testing.assert_close(torch.cat(parts, dim=1)[:1], expected, rtol=1e-5, atol=1e-5)


def test_a_convolution_remembers_no_more_than_it_sees(make_model, tokens):
    model = make_model(experts=("full",), short_conv=3)
    cache = MetaAttentionCache(model.config)
    with torch.no_grad():
        model(tokens(), past_key_values=cache, use_cache=True)
    for layer in cache.layers:
        [inputs] = layer.states.values()
        assert inputs.shape == (2, 2, 32 + 2 * 16)
        assert inputs.untyped_storage().size() == inputs.numel() * inputs.element_size()


def test_a_window_keeps_no_more_than_it_sees(make_model, tokens):
    model = make_model(layer_experts=[["local"], ["full", "local"], ["linear"]])
    cache = MetaAttentionCache(model.config)
    with torch.no_grad():
        model(tokens(), past_key_values=cache, use_cache=True)
    local, mixed, linear = cache.layers
    assert local.keys.shape[2] == model.config.window_size
    assert mixed.keys.shape[2] == 24
    assert linear.keys is None
    assert {layer.get_seq_length() for layer in cache.layers} == {24}


def test_sinks_keep_all_keys_and_can_be_cropped(make_model, tokens):
    model, ids = make_model(experts=("local",), num_sinks=2), tokens()
    cache = MetaAttentionCache(model.config)
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache, use_cache=True)
        assert cache.layers[0].keys.shape[2] == 20
        cache.crop(-3)
        logits = model(ids[:, 17:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(logits, one_pass(model, ids).logits[:, 17:], **CLOSE)


def test_sinks_do_not_let_a_row_go_on_after_padding(make_model, tokens):
    """The window still counts positions."""
    model, ids = make_model(experts=("local",), num_sinks=2), tokens()
    mask = torch.ones_like(ids)
    mask[0, 10:16] = 0
    with pytest.raises(CacheError, match="must not go on after padding"):
        model(ids, attention_mask=mask, past_key_values=MetaAttentionCache(model.config))


def test_recurrent_state_is_float32_in_a_half_precision_model(make_model, tokens):
    model = make_model().bfloat16()
    cache = MetaAttentionCache(model.config)
    with torch.no_grad():
        model(tokens(), past_key_values=cache, use_cache=True)
    assert cache.layers[0].states["linear"].dtype == torch.float32
    assert cache.layers[0].keys.dtype == torch.bfloat16


def test_reorder_select_and_repeat_follow_the_rows(make_model, tokens):
    model, ids, mask = make_model(), tokens(B=3), padding_of("none")
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    order = torch.tensor([2, 0, 0])

    def continue_from(change, rows):
        cache = MetaAttentionCache(model.config)
        with torch.no_grad():
            model(ids[:, :15], attention_mask=mask[:, :15], past_key_values=cache, use_cache=True)
            change(cache)
            return model(ids[rows, 15:], past_key_values=cache, use_cache=True).logits

    expected = one_pass(model, ids, mask).logits[:, 15:]
    reordered = continue_from(lambda c: c.reorder_cache(order), order)
    selected = continue_from(lambda c: c.batch_select_indices(order[:2]), order[:2])
    repeated = continue_from(lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2])
    torch.testing.assert_close(reordered, expected[order], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(selected, expected[order[:2]], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(repeated, expected.repeat_interleave(2, dim=0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("kept", [15, 4, 0])
def test_softmax_caches_crop(make_model, tokens, kept, padding, cache):
    model, ids = make_model(experts=("full", "local"), expert_costs=(1.0, 0.3)), tokens()
    mask = padding_of(padding)
    cache = CACHES[cache](model.config)
    with torch.no_grad():
        model(
            ids[:, :20],
            attention_mask=None if mask is None else mask[:, :20],
            past_key_values=cache,
        )
        model(ids[:, 20:21], past_key_values=cache)
        cache.crop(kept - 21)
        assert cache.get_seq_length() == kept
        steps = [
            model(
                ids[:, t, None],
                attention_mask=None if mask is None else mask[:, t, None],
                past_key_values=cache,
            ).logits
            for t in range(kept, 24)
        ]
    is_token = torch.ones_like(ids[:, kept:]) if mask is None else mask[:, kept:]
    ours, expected = torch.cat(steps, dim=1), one_pass(model, ids, mask).logits[:, kept:]
    torch.testing.assert_close(ours[is_token.bool()], expected[is_token.bool()], **CLOSE)


@pytest.mark.parametrize(
    "experts",
    [
        {},
        {"experts": ("local",)},
        {"experts": ("linear",)},
        {"experts": ("full",), "short_conv": 3},
    ],
)
def test_states_that_cannot_forget_say_so_and_stay_whole(make_model, tokens, experts):
    model, ids = make_model(**experts), tokens()
    cache = MetaAttentionCache(model.config)
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache, use_cache=True)
        with pytest.raises(CacheError, match="cannot forget tokens"):
            cache.crop(-3)
        assert not cache.is_croppable
        out = model(ids[:, 20:], past_key_values=cache, use_cache=True)
    expected = one_pass(model, ids).logits[:, 20:]
    torch.testing.assert_close(out.logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [3, -25])
def test_crop_takes_minus_what_there_is(make_model, tokens, count):
    model = make_model(experts=("full",))
    cache = MetaAttentionCache(model.config)
    with torch.no_grad():
        model(tokens(), past_key_values=cache, use_cache=True)
    with pytest.raises(CacheError, match="at most 24, got"):
        cache.crop(count)


@pytest.mark.parametrize("cache", CACHES)
def test_reset_starts_over(make_model, tokens, cache):
    model, ids = make_model(), tokens()
    cache = CACHES[cache](model.config)
    with torch.no_grad():
        model(tokens(seed=1), attention_mask=padding_of("left"), past_key_values=cache)
        cache.reset()
        out = model(ids, past_key_values=cache, use_cache=True)
    torch.testing.assert_close(out.logits, one_pass(model, ids).logits, rtol=1e-5, atol=1e-5)


def test_more_tokens_than_positions_are_refused(make_model, tokens):
    model = make_model(max_position_embeddings=30)
    cache = MetaAttentionCache(model.config)
    with torch.no_grad():
        model(tokens(), past_key_values=cache, use_cache=True)
        with pytest.raises(ShapeError, match="max_position_embeddings = 30, got 34 tokens"):
            model(tokens(T=10), past_key_values=cache, use_cache=True)


def test_a_mask_of_another_length_is_refused(make_model, tokens):
    model = make_model()
    cache = MetaAttentionCache(model.config)
    with torch.no_grad():
        model(tokens(), past_key_values=cache, use_cache=True)
        with pytest.raises(ShapeError, match=r"\[2, 3\] or, .* 24 cached tokens, \[2, 27\], got"):
            model(tokens(T=3), attention_mask=torch.ones(2, 9), past_key_values=cache)


def test_a_refused_call_leaves_the_cache_as_it_was(make_model, tokens):
    model, ids = make_model(max_position_embeddings=30), tokens()
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    cache = MetaAttentionCache(model.config)
    with torch.no_grad():
        model(ids[:, :20], attention_mask=mask[:, :20], past_key_values=cache)
        with pytest.raises(ShapeError, match="got 44 tokens"):
            model(ids, attention_mask=torch.ones(2, 44).long(), past_key_values=cache)
        out = model(ids[:, 20:], past_key_values=cache)
    expected = one_pass(model, ids, mask).logits[:, 20:]
    torch.testing.assert_close(out.logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("masks", ["for all", "for the prompt"])
@pytest.mark.parametrize("experts", [{}, {"experts": ("full",), "short_conv": 3}], ids=str)
def test_a_window_refuses_a_row_that_goes_on_after_padding(
    make_model, tokens, experts, masks, cache
):
    model, ids = make_model(**experts), tokens()
    mask = torch.ones_like(ids)
    mask[0, 10:16] = 0
    cache = CACHES[cache](model.config)
    with torch.no_grad():
        model(ids[:, :16], attention_mask=mask[:, :16], past_key_values=cache)
        given = mask[:, :17] if masks == "for all" else None
        with pytest.raises(CacheError, match="pad prompts on the left"):
            model(ids[:, 16:17], attention_mask=given, past_key_values=cache)
        assert cache.get_seq_length() == 16
        # the row that was padded is dropped: the other one goes on
        if isinstance(cache, MetaAttentionStaticCache):
            cache.reorder_cache(torch.tensor([1, 1]))
        else:
            cache.batch_select_indices(torch.tensor([1]))
        B = 2 if isinstance(cache, MetaAttentionStaticCache) else 1
        out = model(ids[1:, 16:17].expand(B, -1), past_key_values=cache)
    expected = one_pass(model, ids[1:]).logits[:, 16:17].expand(B, -1, -1)
    torch.testing.assert_close(out.logits, expected, rtol=1e-5, atol=1e-5)


def test_a_cache_of_another_model_is_refused(make_model, tokens):
    other = MetaAttentionCache(make_model(num_hidden_layers=1).config)
    with pytest.raises(ConfigError, match="must have 3 layers, got 1"):
        make_model()(tokens(), past_key_values=other)


def test_a_foreign_cache_is_refused(make_model, tokens):
    from transformers import DynamicCache

    cache = DynamicCache()
    with pytest.raises(ConfigError, match="must be a MetaAttentionCache, got a DynamicCache"):
        make_model()(tokens(), past_key_values=cache)


def test_a_bidirectional_model_has_no_cache(make_model, tokens):
    model = make_model(causal=False)
    assert model(tokens()).past_key_values is None
    with pytest.raises(ConfigError, match="a cache needs causal=True"):
        model(tokens(), past_key_values=MetaAttentionCache(model.config))


def test_an_expert_that_reads_unrotated_keys_decodes_too(make_model, tokens):
    @register_expert("test_unrotated")
    class Unrotated(Expert):
        uses_rope = False
        paper_cost = 0.5

        def forward(self, heads, x, mask):
            from meta_attention.ops.full_attention import full_attention

            return full_attention(heads.query, heads.key, heads.value, causal=True, mask=mask)

    model, ids = make_model(experts=("full", "test_unrotated", "linear")), tokens()
    logits, _ = in_chunks(model, ids, CHUNKS["chunks"])
    torch.testing.assert_close(logits, one_pass(model, ids).logits, rtol=1e-5, atol=1e-5)
