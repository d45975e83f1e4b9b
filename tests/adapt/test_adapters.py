"""Adapters: saved here, loaded anywhere, refused by any other model."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from meta_attention import adapt
from meta_attention.adapt import (
    collect_routing,
    load_adapter,
    read_card,
    routers_of,
    save_adapter,
)
from meta_attention.adapt.adapters import spread
from meta_attention.errors import ConfigError, DataError, OtherBaseError
from meta_attention.testing.pretrained import (
    build_base,
    draw_tokens,
    predict,
    randomise_controllers,
)

SETTINGS = {"experts": ("full", "local", "linear", "ssm"), "window_size": 3, "layers": [1]}

ELSEWHERE = """
import sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM
from meta_attention.adapt import load_adapter

for folder in Path(sys.argv[1]).iterdir():
    model = load_adapter(AutoModelForCausalLM.from_pretrained(folder / "base"), folder / "adapter")
    with torch.no_grad():
        torch.save(model(torch.load(folder / "ids.pt")).logits, folder / "logits.pt")
"""


@pytest.fixture
def saved(tmp_path):
    """A model with random routers, and the folder of its adapter."""
    model = adapt(build_base("llama"), **SETTINGS)
    randomise_controllers(model)
    metadata = {"loss": 1.5, "attention_cost": 0.2}
    return model, save_adapter(model, tmp_path / "adapter", base="tiny", metadata=metadata)


def test_a_fresh_process_predicts_the_same(tmp_path):
    """Of plain layers, of matrices the other way round, and of soft-caps beside windows."""
    ids, expected = draw_tokens(2, 20), {}
    for name in ("llama", "gpt2", "gemma2"):
        folder = tmp_path / name
        build_base(name).save_pretrained(folder / "base")
        model = adapt(build_base(name), **SETTINGS)
        randomise_controllers(model)
        save_adapter(model, folder / "adapter")
        torch.save(ids, folder / "ids.pt")
        with torch.no_grad():
            expected[name] = predict(model, ids)
    # as many threads as here: they say in which order sums are taken
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(tmp_path)],
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | threads,
        timeout=120,
    )
    for name, logits in expected.items():
        assert torch.equal(torch.load(tmp_path / name / "logits.pt"), logits), name


def test_the_card_says_what_it_is_for(saved):
    _, folder = saved
    card = read_card(folder)
    assert card["base"]["name"] == "tiny"
    assert card["base"]["family"] == "llama"
    assert card["metadata"] == {"loss": 1.5, "attention_cost": 0.2}
    assert card["settings"]["layers"] == [1]
    assert set(card["versions"]) == {"meta_attention", "transformers", "torch"}
    assert {name.split(".")[1] for name in load_file(folder / "adapter.safetensors")} == {"1"}


def test_a_folder_is_not_named_by_where_it_lies(tmp_path):
    build_base("llama").save_pretrained(tmp_path / "tiny-llama")
    model = adapt(AutoModelForCausalLM.from_pretrained(tmp_path / "tiny-llama"))
    assert read_card(save_adapter(model, tmp_path / "a"))["base"]["name"] == "tiny-llama"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@torch.no_grad()
def test_a_rounded_base_is_the_same_base(saved, dtype):
    """And its routes are, too, but for tokens between two experts."""
    model, folder = saved
    rounded = load_adapter(build_base("llama").to(dtype), folder)
    with collect_routing(model) as here, collect_routing(rounded) as there:
        model(draw_tokens(4, 30))
        rounded(draw_tokens(4, 30))
    a, b = (record.layers[1].routes.expert for record in (here, there))
    assert (a == b).float().mean() > 0.95
    for router in routers_of(rounded):
        assert router.controller.mlp[0].weight.dtype == torch.float32


@pytest.mark.parametrize("size", [1, 5, 28_311_552])
def test_a_sample_reaches_from_the_first_value_to_the_last(size):
    places = spread(size, 8)
    assert (places[0], places[-1], len(places)) == (0, size - 1, 8)
    assert places == sorted(places)


def test_another_base_is_refused(saved):
    model, folder = saved
    with pytest.raises(ConfigError, match="for tiny: its family is llama, but the") as family:
        load_adapter(build_base("qwen3"), folder)
    with pytest.raises(ConfigError, match=r"its shape is .*'hidden_size': 32.*: 64") as shape:
        load_adapter(build_base("llama", hidden_size=64), folder, allow_other_base=True)
    for caught in (family, shape):
        assert str(caught.value).endswith(
            "; load the base it was trained for, or train one for this model"
        )
    other = build_base("llama", seed=1)
    with pytest.raises(OtherBaseError, match=r"of other weights than this model .* or pass allow_"):
        load_adapter(other, folder)
    more = build_base("llama", vocab_size=70)
    with pytest.raises(OtherBaseError, match=r"its vocab_size is 61, but the model's is 70; load "):
        load_adapter(more, folder)
    # and it was left as it was
    loaded = load_adapter(other, folder, allow_other_base=True)
    for a, b in zip(routers_of(model), routers_of(loaded), strict=True):
        assert torch.equal(a.controller.mlp[0].weight, b.controller.mlp[0].weight)


def test_a_trained_copy_is_another_base(saved):
    _, folder = saved
    model = build_base("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * parameter.abs().mean() * torch.randn_like(parameter)
    with pytest.raises(ConfigError, match="of other weights"):
        load_adapter(model, folder)


def test_broken_adapters_are_named(saved, tmp_path):
    _, folder = saved
    card, tensors = folder / "adapter.json", load_file(folder / "adapter.safetensors")
    with pytest.raises(DataError, match=r"nowhere has no adapter\.json"):
        load_adapter(build_base("llama"), tmp_path / "nowhere")
    first = next(iter(tensors))
    save_file({**tensors, first: tensors[first][:1]}, folder / "adapter.safetensors")
    model = build_base("llama")
    with pytest.raises(DataError, match=f"does not fit its card at {first}"):
        load_adapter(model, folder)
    # the model is as it was, so that the adapter can be loaded once it is whole
    save_file(tensors, folder / "adapter.safetensors")
    load_adapter(model, folder)
    (folder / "adapter.safetensors").write_bytes(b"not tensors")
    with pytest.raises(DataError, match=r"adapter\.safetensors cannot be read"):
        load_adapter(build_base("llama"), folder)
    text = json.loads(card.read_text())
    card.write_text(json.dumps(text | {"format": 99}))
    with pytest.raises(DataError, match="must be of format 1, got 99"):
        read_card(folder)
    card.write_text("{")
    with pytest.raises(DataError, match="is not JSON"):
        read_card(folder)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("settings", {"experts": 5}, "cannot be: experts must be a list of expert names"),
        ("settings", {"window_size": "wide"}, "settings that cannot be: window_size must be a"),
        ("settings", {"windows": 3}, "settings that cannot be: unknown setting of adapt 'windows'"),
        ("weights", "x y", "must have numbers of the base's embed_tokens.weight, got 'x y'"),
        ("weights", 5, "must have numbers of the base's embed_tokens.weight, got 5"),
    ],
    ids=str,
)
def test_a_card_with_values_that_cannot_be_is_one_sentence(part, value, message, saved):
    _, folder = saved
    file = folder / "adapter.json"
    card = json.loads(file.read_text())
    if part == "settings":
        card["settings"] |= value
    else:
        card["base"]["weights"]["embed_tokens.weight"] = value
    file.write_text(json.dumps(card))
    with pytest.raises(DataError, match=message) as caught:
        load_adapter(build_base("llama"), folder)
    assert str(caught.value).endswith("save the adapter anew")
    assert "\n" not in str(caught.value)


def test_metadata_is_plain(tmp_path):
    with pytest.raises(ConfigError, match="metadata must be plain JSON"):
        save_adapter(adapt(build_base("llama")), tmp_path, metadata={"loss": torch.ones(1)})
