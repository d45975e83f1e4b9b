"""Controllers that know when a token was last seen: in a whole model, and as a text grows."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from meta_attention import BayesianMetaAttentionLayer, MetaAttentionCache, MetaAttentionStaticCache
from meta_attention.errors import CacheError, ConfigError, ShapeError

HARD = {
    "recurrence": 3,
    "routing": "hard",
    "route_granularity": "kv_head",
    "expert_costs": (0.5, 0.5, 0.5),
}
CACHES = {
    "growing": MetaAttentionCache,
    "static": lambda config: MetaAttentionStaticCache(config, max_cache_len=64),
}


def few_tokens(B=2, T=40, seed=0):
    """So few that runs of three come again."""
    return torch.randint(2, 5, (B, T), generator=torch.Generator().manual_seed(seed))


def routes_of(model, ids, **kwargs):
    with torch.no_grad():
        out = model(ids, output_routing=True, **kwargs)
    return torch.stack([w.argmax(dim=-1) for w in out.routing_weights]), out.logits


def test_routes_follow_what_was_seen_before(make_model):
    model, ids = make_model(**HARD), few_tokens()
    seen, _ = routes_of(model, ids)
    for block in model.model.layers:
        torch.nn.init.zeros_(block.attention.recurrence.weight)
    blind, _ = routes_of(model, ids)
    assert not torch.equal(seen, blind)
    # and a new embedding says nothing, so that a model begins as one without
    without = make_model(**(HARD | {"recurrence": None}))
    without.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(routes_of(without, ids)[0], blind)


MORE = {
    "plain": {},
    "residuals": {"residual": "block_attention", "residual_blocks": 2},
    "depth, residuals": {"residual": "attention", "depth_capacity": 0.5, "depth_layers": (0, 2)},
}


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("chunks", [[1] * 40, [23] + [1] * 17, [5, 1, 20, 14]], ids=str)
@pytest.mark.parametrize("padding", [0, 7])
@pytest.mark.parametrize("cache", CACHES)
def test_decode_equals_prefill_where_runs_come_again(make_model, cache, padding, chunks, more):
    model, ids = make_model(**HARD, **MORE[more]).double(), few_tokens()
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    routes, logits = routes_of(model, ids, attention_mask=mask, use_cache=False)
    memory, start, parts = CACHES[cache](model.config), 0, []
    for size in chunks:
        stop = start + size
        parts.append(
            routes_of(
                model,
                ids[:, start:stop],
                attention_mask=mask[:, :stop],
                past_key_values=memory,
                use_cache=True,
            )
        )
        start = stop
    is_token = mask.bool()
    assert torch.equal(torch.cat([r for r, _ in parts], dim=2)[:, is_token], routes[:, is_token])
    torch.testing.assert_close(
        torch.cat([x for _, x in parts], dim=1)[is_token], logits[is_token], rtol=1e-6, atol=1e-8
    )


def test_a_prefix_is_routed_alike_whatever_follows(make_model):
    model, ids = make_model(**HARD), few_tokens()
    other = torch.cat([ids[:, :20], few_tokens(seed=1)[:, 20:]], dim=1)
    assert torch.equal(routes_of(model, ids)[0][:, :, :20], routes_of(model, other)[0][:, :, :20])


def test_packed_documents_are_as_they_would_be_alone(make_model):
    model, ids = make_model(**HARD), few_tokens(B=1)
    documents = torch.tensor([[1] * 15 + [2] * 25])
    packed, _ = routes_of(model, ids, document_ids=documents)
    alone = [routes_of(model, part)[0] for part in ids.split([15, 25], dim=1)]
    assert torch.equal(packed, torch.cat(alone, dim=2))


@pytest.mark.parametrize("cache", CACHES)
def test_beams_take_their_tokens_along(make_model, cache):
    model, ids = make_model(**HARD), few_tokens()
    memory = CACHES[cache](model.config)
    routes_of(model, ids[:, :30], past_key_values=memory)
    swap = torch.tensor([1, 0])
    memory.reorder_cache(swap)
    routes, _ = routes_of(model, ids[swap, 30:31], past_key_values=memory)
    expected, _ = routes_of(model, ids[swap, :31])
    assert torch.equal(routes, expected[:, :, 30:])


@pytest.mark.parametrize("cache", CACHES)
def test_what_is_cropped_was_never_seen(make_model, cache):
    softmax = HARD | {"experts": ("full", "gated_full"), "expert_costs": (0.5, 0.5)}
    model, ids = make_model(**softmax), few_tokens()
    memory = CACHES[cache](model.config)
    routes_of(model, ids[:, :30], past_key_values=memory)
    memory.crop(-12)
    routes, _ = routes_of(model, ids[:, 30:35], past_key_values=memory)
    whole = torch.cat([ids[:, :18], ids[:, 30:35]], dim=1)
    assert torch.equal(routes, routes_of(model, whole)[0][:, :, 18:])


@pytest.mark.parametrize("cache", CACHES)
def test_a_cache_that_was_reset_has_seen_nothing(make_model, cache):
    model, ids = make_model(**HARD), few_tokens()
    memory = CACHES[cache](model.config)
    expected, _ = routes_of(model, ids[:, :9], past_key_values=memory)
    memory.reset()
    assert torch.equal(routes_of(model, ids[:, :9], past_key_values=memory)[0], expected)


@pytest.mark.parametrize("more", MORE)
def test_it_reaches_every_kind_of_block(make_model, more):
    model, ids = make_model(**HARD, **MORE[more]).train(), few_tokens()
    model(ids, labels=ids).loss.backward()
    for block in model.model.layers:
        assert block.attention.recurrence.weight.grad.abs().sum() > 0


def test_checkpointing_gives_the_same_gradient(make_model):
    model, ids = make_model(**HARD).train(), few_tokens()

    def gradient():
        torch.manual_seed(0)
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return model.model.layers[1].attention.recurrence.weight.grad.clone()

    plain = gradient()
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(gradient(), plain)


def test_it_is_saved_and_loaded(make_model, tmp_path):
    model, ids = make_model(**HARD), few_tokens()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(routes_of(loaded, ids)[0], routes_of(model, ids)[0])
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.model.layers[0].attention.recurrence.weight.dtype == torch.float32


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
    ("refused", "error"),
    [
        ({"document_ids": torch.ones(2, 5, dtype=torch.long)}, ConfigError),
        ({"position_ids": torch.zeros(2, 4, dtype=torch.long)}, ShapeError),
    ],
    ids=["documents", "positions"],
)
def test_tokens_of_a_refused_call_were_never_seen(make_model, cache, refused, error):
    model, ids = make_model(**(HARD | {"use_rope": False})), few_tokens()
    memory = CACHES[cache](model.config)
    routes_of(model, ids[:, :20], past_key_values=memory)
    with pytest.raises(error):
        routes_of(model, ids[:, 30:35], past_key_values=memory, **refused)
    rest = [
        routes_of(model, ids[:, a:b], past_key_values=memory)[0]
        for a, b in ((20, 29), (29, 30), (30, 40))
    ]
    assert torch.equal(torch.cat(rest, dim=2), routes_of(model, ids)[0][:, :, 20:])


def test_a_static_cache_that_refused_a_gradient_has_seen_nothing(make_model):
    model, ids = make_model(**HARD), few_tokens()
    memory = CACHES["static"](model.config)
    with pytest.raises(CacheError, match="no gradients"):
        model(ids, past_key_values=memory)
    assert torch.equal(routes_of(model, ids, past_key_values=memory)[0], routes_of(model, ids)[0])


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("recurrence", [None, 2])
def test_a_cache_that_keeps_no_such_tokens_is_refused(make_model, cache, recurrence):
    model = make_model(**HARD)
    other = make_model(**(HARD | {"recurrence": recurrence}))
    with pytest.raises(ConfigError, match=f"recurrence=3, got one for {recurrence}"):
        model(few_tokens(), past_key_values=CACHES[cache](other.config))


@pytest.mark.parametrize("cache", CACHES)
def test_no_tokens_are_refused(make_model, cache):
    model = make_model(**HARD)
    with pytest.raises(ShapeError, match="T above 0"):
        model(few_tokens()[:, :0], past_key_values=CACHES[cache](model.config))


def test_tokens_may_be_of_any_whole_numbers(make_model):
    model, ids = make_model(**HARD), few_tokens()
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    for kind in ("dynamic", "static"):
        found = model.generate(
            ids.int(), max_new_tokens=5, do_sample=False, cache_implementation=kind
        )
        assert torch.equal(found, expected)


def test_nothing_of_a_static_history_moves(make_model):
    model, ids = make_model(**HARD), few_tokens()
    memory = CACHES["static"](model.config)
    routes_of(model, ids[:, :20], past_key_values=memory)
    where = memory.history.tokens.data_ptr()
    memory.reorder_cache(torch.tensor([1, 0]))
    routes_of(model, ids[:, 20:21], past_key_values=memory)
    memory.reset()
    routes_of(model, ids[:, :3], past_key_values=memory)
    assert memory.history.tokens.data_ptr() == where


def test_a_controller_sees_it_in_float32_in_a_half_precision_model(make_model):
    model, ids = make_model(**HARD).bfloat16(), few_tokens()
    seen = []
    controller = model.model.layers[1].attention.controller
    controller.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    routes_of(model, ids)
    assert seen == [torch.float32]


def test_a_model_can_be_loaded_for_longer_texts(make_model, tmp_path):
    model, ids = make_model(**HARD), few_tokens()
    model.save_pretrained(tmp_path)
    longer = AutoModelForCausalLM.from_pretrained(tmp_path, max_position_embeddings=256)
    weights = [m.model.layers[1].attention.recurrence.weight for m in (model, longer)]
    assert torch.equal(*weights)
    assert routes_of(longer, ids.repeat(1, 6))[0].shape[2] == 240


def test_static_layers_have_none(make_model):
    model = make_model(recurrence=2, layer_experts=[["local"], ["full", "local"], ["full"]])
    has = [block.attention.recurrence is not None for block in model.model.layers]
    assert has == [False, True, False]


def test_errors_say_what_is_needed(make_model):
    model = make_model(**HARD)
    with pytest.raises(ShapeError, match="needs input_ids"):
        model(inputs_embeds=torch.zeros(1, 3, 32))
    layer = BayesianMetaAttentionLayer(model.config)
    with pytest.raises(ShapeError, match=r"recurrence must be \[B, T, N\] = \[1, 3, 3\]"):
        layer(torch.zeros(1, 3, 32))
    with pytest.raises(ConfigError, match="recurrence must be at most 8, got 9"):
        make_model(recurrence=9)
    with pytest.raises(ConfigError, match="recurrence must be a whole number >= 1"):
        make_model(recurrence=0)
