"""A checkpoint on disk, and a way to run one command on it."""

from importlib import import_module
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from meta_attention import MetaAttentionConfig, MetaAttentionForCausalLM
from meta_attention.training.corpus import Corpus
from meta_attention.training.tokenizer import build_tokenizer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    tokenizer = build_tokenizer("bytes", Corpus("none", [""]))
    config = MetaAttentionConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        window_size=4,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    MetaAttentionForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def run():
    """Run one command by its name; errors raised on purpose come back as ``exception``."""

    def invoke(name, *arguments, **options):
        module = import_module(f"meta_attention.cli.{name}")
        app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
        app.command(name, epilog=module.EXAMPLES)(getattr(module, name))
        return CliRunner().invoke(app, [str(a) for a in arguments], **options)

    return invoke
