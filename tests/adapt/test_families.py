"""Another kind of model is a few lines."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
)

from meta_attention import adapt
from meta_attention.adapt import Family, families, known_families, register_family, routers_of
from meta_attention.errors import ConfigError
from meta_attention.testing.pretrained import (
    FAMILIES,
    build_base,
    draw_tokens,
    predict,
    randomise_controllers,
)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """Families as they are at first: an example of the docs may have added one."""
    own = {name: f for name, f in families._FAMILIES.items() if name != "gpt_neox"}
    monkeypatch.setattr(families, "_FAMILIES", own)


def build_neox():
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=61,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=64,
            initializer_range=0.2,
        )
    ).eval()


def test_every_family_promised_is_known():
    assert {build_base(name).config.model_type for name in FAMILIES} == set(known_families())


def test_an_unknown_architecture_says_what_to_do():
    with pytest.raises(
        ConfigError, match="'gpt_neox' cannot be adapted; supported are bert, "
    ) as e:
        adapt(build_neox())
    assert "register_family(Family('gpt_neox'" in str(e.value)
    for name in known_families():
        assert name in str(e.value)


@torch.no_grad()
def test_of_a_model_of_images_and_text_the_text_model_is_adapted(tmp_path):
    text = FAMILIES["gemma3"][1].to_dict() | {"vocab_size": 70}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    vision |= {"num_hidden_layers": 1, "image_size": 8, "patch_size": 4}
    tokens = {"image_token_index": 65, "boi_token_index": 66, "eoi_token_index": 67}
    whole = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **tokens)
    ).eval()
    ids = draw_tokens(2, 20)
    expected = whole(ids).logits
    with pytest.raises(ConfigError, match=r"adapt the text model in it, .* 'gemma3_text': docs/"):
        adapt(whole)
    # as docs/adapt.md has it
    model = Gemma3ForCausalLM(whole.config.text_config)
    model.model, model.lm_head = whole.model.language_model, whole.lm_head
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    adapt(loaded, window_size=4)
    torch.testing.assert_close(loaded(ids).logits, expected, rtol=0.0, atol=1e-5)


@torch.no_grad()
def test_a_registered_family_is_adapted():
    register_family(Family("gpt_neox", attention="attention"))
    model, ids = build_neox(), draw_tokens(2, 16)
    expected = predict(model, ids)
    adapt(model, experts=("full", "local", "linear"), window_size=4)
    torch.testing.assert_close(predict(model, ids), expected, rtol=0.0, atol=1e-5)
    assert len(routers_of(model)) == 2
    randomise_controllers(model)
    expected, cache = predict(model, ids), DynamicCache(config=model.config)
    parts = [model(part, past_key_values=cache).logits for part in ids.split([9, 6, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=0.0, atol=5e-5)
