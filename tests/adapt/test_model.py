"""An adapted model is the model it was, with routers: nothing else of it changes."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from meta_attention import adapt
from meta_attention.adapt import AdaptConfig, collect_routing, freeze_base, routed_as, routers_of
from meta_attention.errors import ConfigError
from meta_attention.testing.pretrained import (
    DECODERS,
    FAMILIES,
    build_base,
    draw_tokens,
    pad_rows,
    predict,
    randomise_controllers,
)

LENGTHS = [20, 13, 7]
# PyTorch's own kernels differ among themselves by as much
EXACT = {"rtol": 0.0, "atol": 1e-5}


def assert_same(actual, expected, mask):
    """Equal on tokens, and no prediction is another."""
    actual, expected = actual[mask.bool()], expected[mask.bool()]
    torch.testing.assert_close(actual, expected, **EXACT)
    assert torch.equal(actual.argmax(dim=-1), expected.argmax(dim=-1))


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_new_router_changes_no_prediction(name, side):
    ids, mask = draw_tokens(3, max(LENGTHS)), torch.ones(3, max(LENGTHS), dtype=torch.long)
    if side != "none":
        ids, mask = pad_rows(ids, LENGTHS, side)
    model = build_base(name)
    expected = predict(model, ids, attention_mask=mask)
    adapt(model, window_size=4)
    with collect_routing(model) as record:
        actual = predict(model, ids, attention_mask=mask)
    assert record.routed_cost == 1.0
    assert_same(actual, expected, mask)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_the_teacher_is_the_base_whatever_routers_believe(name):
    ids, mask = pad_rows(draw_tokens(3, max(LENGTHS)), LENGTHS, "left")
    model = build_base(name)
    expected = predict(model, ids, attention_mask=mask)
    randomise_controllers(adapt(model, window_size=4))
    assert (predict(model, ids, attention_mask=mask) - expected).abs().max() > 0.1
    with routed_as(model, "full"):
        assert_same(predict(model, ids, attention_mask=mask), expected, mask)


@pytest.mark.parametrize("lengths", [[16, 16], [16, 5]], ids=["whole", "padded on the left"])
@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_a_cache_of_the_base_serves_the_adapted_model(name, lengths):
    """Prompt, a chunk and single tokens, all on full: what the base says in one pass."""
    ids, mask = pad_rows(draw_tokens(2, 16), lengths, "left")
    model = build_base(name)
    expected = predict(model, ids, attention_mask=mask)
    adapt(model, window_size=4)
    outputs, cache, seen = [], None, 0
    for chunk in ids.split([7, 5, 1, 1, 1, 1], dim=1):
        seen += chunk.shape[1]
        out = model(chunk, attention_mask=mask[:, :seen], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        outputs.append(out.logits)
    assert_same(torch.cat(outputs, dim=1), expected, mask)


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "bert"])
def test_small_models_have_biases_that_count(name):
    biases = [p for key, p in build_base(name).named_parameters() if key.endswith("bias")]
    assert biases
    assert all(bias.any() for bias in biases)


@torch.no_grad()
def test_layers_that_are_not_chosen_stay_as_they_are():
    ids, mask = pad_rows(draw_tokens(3, max(LENGTHS)), LENGTHS, "left")
    base = build_base("llama")
    expected = predict(base, ids, attention_mask=mask)
    model = adapt(build_base("llama"), layers=[1], window_size=2, num_sinks=0)
    assert [router.layer_idx for router in routers_of(model)] == [1]
    with routed_as(model, "local"):
        changed = predict(model, ids, attention_mask=mask)
    assert (changed - expected)[mask.bool()].abs().max() > 0.1
    # a chunk after a cache, where a mask is needed though nothing is padded
    cache, outputs = None, []
    for chunk in draw_tokens(2, 12).split([5, 7], dim=1):
        out = model(chunk, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        outputs.append(out.logits)
    plain = predict(base, draw_tokens(2, 12))
    torch.testing.assert_close(torch.cat(outputs, dim=1), plain, **EXACT)


def test_layers_with_a_window_of_their_own_are_left_alone():
    model = adapt(build_base("gemma3"))
    assert [router.layer_idx for router in routers_of(model)] == [1]
    with pytest.raises(ConfigError, match=r"full attention, among \[1\], got 0"):
        adapt(build_base("gemma3"), layers=[0])
    both = ["sliding_attention"] * 2
    with pytest.raises(ConfigError, match=r"all layers of this model have a .* that has some$"):
        adapt(build_base("gemma3", layer_types=both))


@pytest.mark.parametrize("name", ["mistral", "phi3"])
@torch.no_grad()
def test_one_window_for_all_layers_is_taken_off_where_it_hides_nothing(name, tmp_path):
    """Mistral 7B 0.1 and Phi-3 of 4k have such a window."""
    base, ids = build_base(name, sliding_window=8), draw_tokens(2, 12)
    with pytest.raises(
        ConfigError, match=r"no text is longer than the window of 8 .* sliding_window=None"
    ):
        adapt(base)
    base.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, sliding_window=None).eval()
    adapt(model, window_size=4)
    short = ids[:, :8]
    torch.testing.assert_close(predict(model, short), predict(base, short), **EXACT)
    # what is longer is another model's: nothing is promised there
    assert (predict(model, ids) - predict(base, ids)).abs().max() > 0.1


@torch.no_grad()
def test_a_window_as_long_as_any_text_is_none():
    """Phi-3 of long contexts has one; attention still sees everything."""
    model, ids = build_base("phi3", sliding_window=64), draw_tokens(2, 20)
    expected = predict(model, ids)
    adapt(model, window_size=4)
    assert len(routers_of(model)) == 2
    torch.testing.assert_close(predict(model, ids), expected, **EXACT)


@pytest.mark.parametrize("routing", ["hard", "soft"])
def test_gradients_reach_all_of_the_routers_and_nothing_else(routing):
    model = adapt(build_base("llama"), window_size=2, num_sinks=1, routing=routing).train()
    freeze_base(model)
    randomise_controllers(model)
    with collect_routing(model) as record:
        model(draw_tokens(2, 16)).logits.square().mean().backward()
    assert record.kl > 0
    for name, parameter in model.named_parameters():
        if ".router." in name:
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 0, name
        else:
            assert parameter.grad is None, name


def test_the_objective_has_a_gradient_of_its_own():
    model = adapt(build_base("llama"), window_size=2)
    freeze_base(model)
    with collect_routing(model) as record:
        model(draw_tokens(2, 16))
    (record.kl + record.projected_cost).backward()
    for router in routers_of(model):
        assert router.controller.mlp[-1].bias.grad.abs().min() > 0


def test_gradient_checkpointing_changes_no_gradient():
    gradients = []
    for checkpointing in (False, True):
        model = adapt(build_base("llama"), window_size=2, training_weights="mean").train()
        freeze_base(model)
        randomise_controllers(model)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        with collect_routing(model) as record:
            loss = model(draw_tokens(2, 16)).logits.square().mean()
        (loss + record.kl).backward()
        gradients.append([p.grad for r in routers_of(model) for p in r.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(checkpointed, plain)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_rounded_base_keeps_its_controllers_exact(when):
    model = build_base("llama")
    if when == "before":
        model.bfloat16()
    adapt(model, experts=("full", "local", "gated_full"), window_size=4)
    if when == "after":
        model.bfloat16()
    for router in routers_of(model):
        assert {p.dtype for p in router.controller.parameters()} == {torch.float32}
        assert {b.dtype for b in router.controller.buffers()} == {torch.float32}
        assert router.experts[2].gate.weight.dtype == torch.bfloat16
    with torch.no_grad():
        out = model(draw_tokens(2, 8), use_cache=True)
        out = model(draw_tokens(2, 1), past_key_values=out.past_key_values)
    assert out.logits.dtype == torch.bfloat16
    assert out.logits.isfinite().all()


def test_it_trains_under_autocast():
    model = adapt(build_base("llama"), experts=("full", "local", "linear"), window_size=4).train()
    freeze_base(model)
    with torch.autocast("cpu", torch.bfloat16), collect_routing(model) as record:
        loss = model(draw_tokens(2, 16)).logits.float().square().mean() + record.kl
    loss.backward()
    for router in routers_of(model):
        for name, parameter in router.named_parameters():
            assert parameter.grad.isfinite().all(), name


@torch.no_grad()
def test_a_copy_is_a_model_of_its_own():
    model = adapt(build_base("llama"), window_size=2)
    randomise_controllers(model)
    twin, ids = copy.deepcopy(model), draw_tokens(2, 12)
    expected = model(ids).logits
    with routed_as(twin, "local"), collect_routing(twin) as record:
        twin(ids)
        assert torch.equal(model(ids).logits, expected)
    assert list(record.layers) == [0, 1]
    assert torch.equal(twin(ids).logits, expected)


def test_weights_of_the_base_keep_their_names():
    base = build_base("llama")
    names = set(base.state_dict())
    adapted = adapt(base)
    assert names < set(adapted.state_dict())
    assert all(".router." in name for name in set(adapted.state_dict()) - names)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"expert": ("full",)}, "unknown setting of adapt 'expert'; did you mean 'experts'"),
        ({"experts": ("full", "lokal")}, "unknown expert 'lokal'"),
        ({"experts": 5}, "experts must be a list of expert names"),
        ({"experts": ("local",)}, "start_expert must be one of experts"),
        ({"layers": []}, "layers must be a list of layer indices"),
        ({"layers": "all"}, "layers must be a list of layer indices"),
        ({"layers": [2]}, r"among \[0, 1\], got 2"),
        ({"window_size": 0}, "window_size must be a whole number >= 1"),
        ({"num_sinks": -1}, "num_sinks must be"),
        ({"routing": "hardly"}, "routing must be one of"),
        ({"config": AdaptConfig(), "window_size": 3}, "a config or settings, not both"),
    ],
)
def test_a_mistake_is_named_and_leaves_the_model_as_it_was(settings, message):
    model = build_base("llama")
    with pytest.raises(ConfigError, match=message):
        adapt(model, **settings)
    assert model.config._attn_implementation == "sdpa"
    adapt(model)


def test_what_cannot_be_adapted_is_refused():
    with pytest.raises(ConfigError, match="takes a Transformers model, got a Linear"):
        adapt(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="adapted already"):
        adapt(adapt(build_base("llama")))
    with pytest.raises(ConfigError, match="'bert' is bidirectional, but this model is not"):
        adapt(build_base("bert", is_decoder=True))
    with pytest.raises(ConfigError, match="cross-attention"):
        adapt(build_base("gpt2", add_cross_attention=True))
    with pytest.raises(ConfigError, match="the model is not adapted"):
        routers_of(build_base("llama"))
