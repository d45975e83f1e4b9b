"""LoRA beside the routers, through PEFT, where that is installed."""

import importlib.util
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from meta_attention import adapt
from meta_attention.adapt import load_adapter, read_card, routed_as, save_adapter
from meta_attention.adapt.lora import (
    CONFIG_FILE,
    TENSOR_FILE,
    add_lora,
    lora_parameters,
    projections_of,
    without_lora,
)
from meta_attention.adapt.training import RouterSettings, train_router
from meta_attention.errors import BackendUnavailableError, ConfigError, DataError
from meta_attention.testing.pretrained import (
    DECODERS,
    build_base,
    draw_tokens,
    randomise_controllers,
)
from meta_attention.training.corpus import Corpus
from meta_attention.training.logs import read_metrics
from meta_attention.training.tokenizer import build_tokenizer

HAS_PEFT = importlib.util.find_spec("peft") is not None
needs_peft = pytest.mark.skipif(not HAS_PEFT, reason="peft is not installed")
EXPECTED = {"gpt2": ["c_attn", "c_proj"], "phi3": ["o_proj", "qkv_proj"]}


@pytest.fixture
def run(tmp_path):
    """Train a little, with LoRA; the model, the record and the folder."""
    tokenizer = build_tokenizer("bytes", Corpus("none", [""]))

    def train(family="llama", routes=None, **given):
        base = build_base(family, vocab_size=len(tokenizer))
        short = {"model": "tiny", "length": 32, "window_size": 4, "num_sinks": 1, "steps": 3}
        # blocks of 32 tokens have no room for what is to be found again
        short |= {"batch_size": 2, "max_bytes": 4000, "target_cost": 0.6, "recall_share": 0.0}
        short |= {"lora_rank": 2}
        settings = RouterSettings.of(short | {"log_every": 1, "lora_lr": 0.05} | given)
        record = train_router(base, tokenizer, settings, tmp_path / "a", routes=routes)
        return base.cpu(), record, tmp_path / "a"

    return train


@pytest.mark.parametrize("family", DECODERS)
def test_all_projections_of_attention_and_no_others_are_found(family):
    model = adapt(build_base(family))
    names = projections_of(model)
    found = sorted({name.rsplit(".", 1)[1] for name in names})
    assert found == EXPECTED.get(family, ["k_proj", "o_proj", "q_proj", "v_proj"])
    assert not any("router" in name or "mlp" in name for name in names)
    for name in names:
        assert model.get_submodule(name).weight.dim() == 2


def test_without_peft_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr("meta_attention.adapt.lora.find_spec", lambda name: None)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'meta-attention\[adapters\]'"):
        add_lora(adapt(build_base("llama")), 2)


def test_given_routes_leave_nothing_else_to_learn(run):
    with pytest.raises(ConfigError, match="nothing learns but LoRA: give a lora_rank"):
        run(routes="local", lora_rank=0)


@needs_peft
@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
def test_the_base_stays_and_the_adapter_brings_both(family, run):
    model, record, folder = run(family)
    ids = draw_tokens(2, 20)
    base = build_base(family, vocab_size=model.config.vocab_size)
    weights = dict(base.named_parameters())
    for name, parameter in model.named_parameters():
        if ".router." not in name and ".lora_" not in name:
            assert torch.equal(parameter, weights[name.replace(".base_layer.", ".")])
    assert all(p.abs().max() > 0 for p in lora_parameters(model))
    assert record["parameters"] > sum(p.numel() for p in lora_parameters(model))
    assert (folder / "lora" / "adapter_config.json").is_file()
    config = json.loads((folder / "lora" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny"
    assert read_card(folder)["lora"]
    assert "`lora/`" in (folder / "README.md").read_text()
    loaded = load_adapter(base, folder)
    assert type(loaded) is type(model)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model.eval()(ids).logits)
        with without_lora(loaded):
            plain = loaded(ids).logits
        assert not torch.allclose(plain, loaded(ids).logits)


@needs_peft
def test_lora_by_itself_is_an_adapter_of_peft(run):
    import peft

    model, _, folder = run()
    ids = draw_tokens(2, 20)
    alone = peft.PeftModel.from_pretrained(
        build_base("llama", vocab_size=model.config.vocab_size), folder / "lora"
    )
    with torch.no_grad(), routed_as(model.eval(), "full"):
        torch.testing.assert_close(alone(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)


@needs_peft
def test_the_teacher_is_the_base_without_lora(run):
    """However far LoRA goes, what it is compared with stays."""
    losses = []
    for lora_lr in (1e-6, 0.5):
        _, record, folder = run(lora_lr=lora_lr)
        losses.append([row["base_loss"] for row in read_metrics(folder) if row["kind"] == "train"])
        changed = record["metrics"]["divergence"]
        shutil.rmtree(folder)
    assert losses[0] == losses[1]
    assert changed > 0.1


@needs_peft
def test_with_given_routes_only_lora_learns(run):
    model, record, _ = run(routes={0: "local", 1: "full"})
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert learning
    assert all(".lora_" in name for name in learning)
    share = record["metrics"]["layers"]["0"]["share"]
    assert share == {"full": 0.0, "local:16": 0.0, "local": 1.0}


@needs_peft
def test_an_adapter_is_refused_where_peft_is_missing(run, monkeypatch):
    model, _, folder = run()
    base = build_base("llama", vocab_size=model.config.vocab_size)
    with monkeypatch.context() as missing:
        missing.setattr("meta_attention.adapt.lora.find_spec", lambda name: None)
        with pytest.raises(BackendUnavailableError, match="which was trained with LoRA, needs the"):
            load_adapter(base, folder)
    # nothing was changed: once it is installed, the same model takes it
    assert lora_parameters(load_adapter(base, folder))


@needs_peft
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
@pytest.mark.parametrize("content", [None, b"{broken"], ids=["missing", "broken"])
def test_a_lora_that_cannot_be_read_leaves_the_model_as_it_was(run, name, content):
    model, _, folder = run()
    base = build_base("llama", vocab_size=model.config.vocab_size)
    path = folder / "lora" / name
    whole = path.read_bytes()
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(DataError, match=r"the LoRA in .* cannot be read"):
        load_adapter(base, folder)
    path.write_bytes(whole)
    assert lora_parameters(load_adapter(base, folder))


def of_another_rank(tensors, config):
    return {n: torch.cat([x, x], dim=int("lora_B" in n)) for n, x in tensors.items()}, config


def without_some(tensors, config):
    return dict(list(tensors.items())[:3]), config


def with_others(tensors, config):
    return tensors | {f"{name}.more": x.clone() for name, x in tensors.items()}, config


def for_other_modules(tensors, config):
    return tensors, config | {"target_modules": ["nowhere"]}


@needs_peft
@pytest.mark.parametrize("breaks", [of_another_rank, without_some, with_others, for_other_modules])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_lora_that_does_not_fit_leaves_the_model_as_it_was(family, breaks, tmp_path):
    model = adapt(build_base(family), window_size=4)
    add_lora(model, 2)
    save_adapter(model, tmp_path)
    files = [tmp_path / "lora" / name for name in (TENSOR_FILE, CONFIG_FILE)]
    whole = [file.read_bytes() for file in files]
    tensors, config = breaks(load_file(files[0]), json.loads(files[1].read_text()))
    save_file(tensors, files[0], metadata={"format": "pt"})
    files[1].write_text(json.dumps(config))
    base = build_base(family)
    with pytest.raises(DataError, match=r"does not fit .*copy or save the adapter anew$") as caught:
        load_adapter(base, tmp_path)
    assert "\n" not in str(caught.value)
    for file, content in zip(files, whole, strict=True):
        file.write_bytes(content)
    assert lora_parameters(load_adapter(base, tmp_path))


@needs_peft
def test_an_adapter_without_lora_forgets_one_that_was_there(run):
    model, _, folder = run()
    plain = adapt(build_base("llama", vocab_size=model.config.vocab_size), window_size=4)
    randomise_controllers(plain)
    save_adapter(plain, folder)
    loaded = load_adapter(build_base("llama", vocab_size=model.config.vocab_size), folder)
    assert not lora_parameters(loaded)
