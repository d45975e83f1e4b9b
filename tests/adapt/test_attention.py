"""What a model asks of its attention is done, or refused by name."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DynamicCache, PreTrainedTokenizerFast, pipeline

from meta_attention import adapt
from meta_attention.adapt import collect_routing, routed_as
from meta_attention.errors import ConfigError, ShapeError
from meta_attention.testing.pretrained import (
    VOCABULARY,
    build_base,
    draw_tokens,
    pad_rows,
    predict,
    randomise_controllers,
)

TEMPLATE = (
    "{% for m in messages %}{{ 'w50' if m.role == 'user' else 'w51' }} {{ m.content }} w52 "
    "{% endfor %}{% if add_generation_prompt %}w51{% endif %}"
)


@torch.no_grad()
def test_masks_beyond_padding_are_refused():
    model, ids = adapt(build_base("llama")), draw_tokens(1, 8)
    with pytest.raises(ConfigError, match=r"attention_mask \[B, S\].* got one of 4 axes"):
        model(ids, attention_mask=torch.ones(1, 1, 8, 8, dtype=torch.bool).tril())
    with pytest.raises(ConfigError, match="documents packed into a row"):
        model(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]), use_cache=False)
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ShapeError, match="must be of all 10 tokens, the cached ones included"):
        model(ids[:, :2], attention_mask=torch.ones(1, 2), past_key_values=cache)
    # what the base can do without routing, it still does
    with routed_as(model, "full"):
        model(ids, attention_mask=torch.ones(1, 1, 8, 8, dtype=torch.bool).tril())


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_the_base_runs_as_it_did_below(implementation):
    model, ids = build_base("llama"), draw_tokens(2, 12)
    model.set_attn_implementation(implementation)
    expected = predict(model, ids)
    adapt(model, layers=[1])
    name = {"sdpa": "meta_attention", "eager": "meta_attention_eager"}[implementation]
    assert model.config._attn_implementation == name
    torch.testing.assert_close(predict(model, ids), expected, rtol=0.0, atol=1e-5)


@torch.no_grad()
def test_rows_of_nothing_but_padding_are_finite():
    model = adapt(build_base("llama"), experts=("full", "local", "linear"), window_size=3)
    randomise_controllers(model)
    ids, mask = draw_tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1] = 0
    expected = predict(model, ids[:1])
    actual = predict(model, ids, attention_mask=mask)
    assert actual.isfinite().all()
    torch.testing.assert_close(actual[:1], expected, rtol=0.0, atol=1e-5)


@torch.no_grad()
def test_one_token_alone_has_only_itself_to_see():
    model, ids = build_base("llama"), draw_tokens(3, 1)
    expected = predict(model, ids)
    adapt(model, window_size=3)
    for expert in ("full", "local"):
        with routed_as(model, expert):
            torch.testing.assert_close(predict(model, ids), expected, rtol=0.0, atol=1e-5)


@torch.no_grad()
def test_kernels_and_reference_route_alike():
    """Prompt, chunk and single tokens through a cache, with padding, sinks, scale and soft-cap."""
    ids, mask = pad_rows(draw_tokens(2, 14), [14, 9], "left")
    outputs = []
    for impl in ("reference", "triton"):
        model = build_base("gemma2", head_dim=16)
        adapt(model, experts=("full", "local", "linear"), window_size=3, num_sinks=2, impl=impl)
        randomise_controllers(model)
        cache, parts, at = DynamicCache(config=model.config), [], 0
        for size in (7, 6, 1):
            part = ids[:, at : at + size]
            at += size
            parts.append(model(part, attention_mask=mask[:, :at], past_key_values=cache).logits)
        outputs.append(torch.cat(parts, dim=1)[mask.bool()])
    torch.testing.assert_close(*outputs, rtol=0.0, atol=5e-5)


@pytest.fixture
def tokenizer():
    """Of words, padded on the left, with a template for chats."""
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="w0",
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        chat_template=TEMPLATE,
    )


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@torch.no_grad()
def test_chats_of_a_template_are_answered_together_as_alone(name, tokenizer):
    chats = [
        [
            {"role": "user", "content": "w5 w9 w7 w22 w8 w13"},
            {"role": "assistant", "content": "w6 w30 w31 w17"},
            {"role": "user", "content": "w41 w12"},
        ],
        [{"role": "user", "content": "w4 w14"}],
    ]
    asked = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    batch = tokenizer.apply_chat_template(chats, padding=True, **asked)
    assert batch["input_ids"][1].tolist() == [0] * 14 + [50, 4, 14, 52, 51]
    assert batch["attention_mask"].sum(dim=1).tolist() == [19, 5]

    model, options = build_base(name), {"max_new_tokens": 8, "do_sample": False}
    written = model.generate(**batch, **options)
    adapt(model, window_size=3, num_sinks=1)
    # a new router writes what the base does
    assert torch.equal(model.generate(**batch, **options), written)
    randomise_controllers(model)
    with collect_routing(model) as record:
        model(**batch)
    assert set(record.layers[1].routes.expert[batch["attention_mask"].bool()].tolist()) == {0, 1}
    together = model.generate(**batch, **options)[:, batch["input_ids"].shape[1] :]
    assert not torch.equal(together, written[:, batch["input_ids"].shape[1] :])
    write = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    for chat, answer in zip(chats, together, strict=True):
        one = tokenizer.apply_chat_template(chat, **asked)
        alone = model.generate(**one, **options)[0, one["input_ids"].shape[1] :]
        assert torch.equal(answer, alone)
        turns = write(chat, max_length=None, **options)[0]["generated_text"]
        assert turns[:-1] == chat
        assert turns[-1] == {"role": "assistant", "content": tokenizer.decode(alone)}
    assert not torch.equal(*together)


def test_a_pipeline_takes_an_adapted_model(tokenizer):
    model = adapt(build_base("llama"), window_size=3)
    randomise_controllers(model)
    write = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    texts = ["w5 w9 w7 w22 w8 w13", "w4 w3"]
    options = {"max_new_tokens": 5, "max_length": None, "do_sample": False}
    together = write(texts, batch_size=2, **options)
    alone = [write(text, **options) for text in texts]
    assert [out[0]["generated_text"] for out in together] == [
        out[0]["generated_text"] for out in alone
    ]
