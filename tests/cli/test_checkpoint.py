"""Loading a checkpoint and reading a text: what goes wrong is one clear sentence."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from meta_attention.cli.checkpoint import load_checkpoint, read_text
from meta_attention.errors import (
    BackendUnavailableError,
    ConfigError,
    DataError,
    MetaAttentionError,
)


def test_model_and_tokenizer_come_back_ready_to_use(checkpoint):
    model, tokenizer = load_checkpoint(checkpoint, "cpu", "bfloat16")
    assert not model.training
    assert model.dtype is torch.bfloat16
    assert model.model.layers[0].attention.controller.mlp[0].weight.dtype is torch.float32
    assert tokenizer("ab")["input_ids"] == [97, 98]


def broken(checkpoint, folder, change):
    """A copy of the checkpoint with one thing wrong."""
    path = folder / "broken"
    shutil.copytree(checkpoint, path)
    change(path)
    return path


def rename_model(path):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))


def widen(path):
    config = json.loads((path / "config.json").read_text())
    config["intermediate_size"] *= 2
    (path / "config.json").write_text(json.dumps(config))


def drop_a_weight(path):
    weights = load_file(path / "model.safetensors")
    weights.pop("lm_head.weight")
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: (path / "config.json").unlink(), "has no config.json"),
        (lambda path: (path / "config.json").write_text("{"), "must be readable JSON"),
        (rename_model, "got 'llama'"),
        (lambda path: (path / "model.safetensors").unlink(), "whole checkpoint"),
        (lambda path: (path / "model.safetensors").write_bytes(b"abc"), "whole checkpoint"),
        (lambda path: (path / "tokenizer.json").unlink(), "whole checkpoint"),
        (drop_a_weight, "such as lm_head.weight"),
        (widen, "of another shape, such as model.layers.0.mlp"),
    ],
)
def test_a_folder_that_is_not_a_checkpoint_is_refused(change, message, checkpoint, tmp_path):
    with pytest.raises(ConfigError, match=message) as caught:
        load_checkpoint(broken(checkpoint, tmp_path, change), "cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(checkpoint):
    with pytest.raises(BackendUnavailableError, match="use cpu"):
        load_checkpoint(checkpoint, "cuda")


def test_text_comes_from_one_place_and_is_not_empty(tmp_path):
    file, empty, binary = (tmp_path / name for name in ("a.txt", "b.txt", "c.txt"))
    file.write_bytes("caf\u00e9\r\n".encode())
    empty.write_bytes(b"")
    binary.write_bytes(b"ab\xff")
    assert read_text("abc", None) == "abc"
    assert read_text(None, file) == "caf\u00e9\r\n"
    for text, path, message in (
        (None, None, "exactly one of --text and --text-file"),
        ("a", file, "exactly one"),
        ("", None, "must not be empty"),
        (None, empty, "must not be empty"),
        (None, binary, "byte 0xff at offset 2"),
        (None, tmp_path / "none.txt", "can be read"),
        (None, tmp_path, "can be read"),
        ("\udcff", None, "must be UTF-8"),
    ):
        with pytest.raises(DataError, match=message) as caught:
            read_text(text, path)
        assert isinstance(caught.value, MetaAttentionError)
