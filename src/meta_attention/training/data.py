"""Text as a run sees it: read, split, tokenised and packed."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from meta_attention.errors import DataError
from meta_attention.training.corpus import Corpus, read_corpus, split_corpus
from meta_attention.training.packing import PackedDataset, pack
from meta_attention.training.recipes import Settings
from meta_attention.training.tokenizer import build_tokenizer

# of the text is held out where there is no other to evaluate on, but not more bytes than these
HOLDOUT, HOLDOUT_BYTES = 0.05, 1_000_000


@dataclass(frozen=True, slots=True)
class Blocks:
    """Text as the model sees it."""

    tokenizer: PreTrainedTokenizerFast
    train: PackedDataset
    valid: PackedDataset | None
    name: str
    valid_name: str | None

    def to_dict(self) -> dict[str, Any]:
        def facts(name: str | None, blocks: PackedDataset | None) -> dict[str, Any] | None:
            if blocks is None:
                return None
            return {
                "name": name,
                "fingerprint": blocks.fingerprint,
                "blocks": len(blocks),
                "tokens": blocks.num_tokens,
                "bytes": blocks.num_bytes,
            }

        return {
            "data": facts(self.name, self.train),
            "eval_data": facts(self.valid_name, self.valid),
        }


def read_blocks(settings: Settings, saved: Path | None) -> Blocks:
    """Read, split, tokenise and pack; the tokenizer is the saved one where there is one."""
    corpus = read_corpus(settings.data, max_bytes=settings.max_bytes)
    valid: Corpus | None = None
    if settings.eval_every and settings.eval_data:
        valid = read_corpus(settings.eval_data, max_bytes=settings.max_bytes)
    elif settings.eval_every:
        holdout = min(HOLDOUT, HOLDOUT_BYTES / corpus.num_bytes)
        corpus, valid = split_corpus(corpus, holdout=holdout)
    spec = settings.tokenizer
    if saved is not None and (saved / "tokenizer.json").is_file():
        spec = str(saved)
    tokenizer = build_tokenizer(spec, corpus)

    def packed(text: Corpus) -> PackedDataset:
        isolate = settings.isolate_documents
        return pack(text, tokenizer, settings.length, isolate_documents=isolate)

    train = packed(corpus)
    return Blocks(
        tokenizer,
        train,
        None if valid is None else packed(valid),
        corpus.name,
        None if valid is None else valid.name,
    )


def check_same_text(record: Mapping[str, Any], blocks: Blocks) -> None:
    """Raise unless blocks hold the text that the record of a run describes."""
    for name, now in blocks.to_dict().items():
        before = record.get(name)
        # a run may be resumed with or without evaluation
        if before and now and before["fingerprint"] != now["fingerprint"]:
            raise DataError(
                f"the {name} of a resumed run must be the text it began with, but {now['name']} "
                f"({now['tokens']} tokens) is not {before['name']} ({before['tokens']} tokens) "
                "any more"
            )
