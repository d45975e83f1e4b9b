"""Text as a run sees it: read, split, tokenised and packed."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from meta_attention.errors import DataError
from meta_attention.evaluation.tasks import TaskDataset
from meta_attention.training.corpus import Corpus, cut_corpus, read_corpus, split_corpus
from meta_attention.training.model_settings import Settings
from meta_attention.training.packing import PackedDataset, pack
from meta_attention.training.tokenizer import build_tokenizer

# of the text is held out where there is no other to evaluate on, but not more bytes than these
HOLDOUT, HOLDOUT_BYTES = 0.05, 1_000_000


@dataclass(frozen=True, slots=True)
class Blocks:
    """Text as the model sees it."""

    tokenizer: PreTrainedTokenizerFast
    train: PackedDataset | TaskDataset
    valid: PackedDataset | TaskDataset | None
    name: str
    valid_name: str | None

    def to_dict(self) -> dict[str, Any]:
        train = {"name": self.name} | self.train.facts()
        valid = None if self.valid is None else {"name": self.valid_name} | self.valid.facts()
        return {"data": train, "eval_data": valid}


def read_blocks(settings: Settings, saved: Path | None) -> Blocks:
    """Read, split, tokenise and pack; the tokenizer is the saved one where there is one."""
    corpus, valid = read_texts(settings)
    tokenizer = build_tokenizer(tokenizer_spec(settings, saved), corpus)

    def packed(text: Corpus) -> PackedDataset:
        isolate = settings.isolate_documents
        return pack(text, tokenizer, settings.length, isolate_documents=isolate)

    # cut after the tokenizer was built, which then is that of all the text
    train = packed(cut_corpus(corpus, settings.train_bytes))
    return Blocks(
        tokenizer,
        train,
        None if valid is None else packed(valid),
        corpus.name,
        None if valid is None else valid.name,
    )


def read_texts(settings: Settings) -> tuple[Corpus, Corpus | None]:
    """Text to train on and, where a run evaluates, text to evaluate on."""
    corpus = read_corpus(settings.data, max_bytes=settings.max_bytes)
    if not settings.eval_every:
        return corpus, None
    if settings.eval_data:
        return corpus, read_corpus(settings.eval_data, max_bytes=settings.max_bytes)
    return hold_out(corpus)


def hold_out(corpus: Corpus) -> tuple[Corpus, Corpus]:
    """A corpus without the text that a run evaluates on, and that text."""
    return split_corpus(corpus, holdout=min(HOLDOUT, HOLDOUT_BYTES / corpus.num_bytes))


def tokenizer_spec(settings: Settings, saved: Path | None) -> str:
    """The saved tokenizer of a resumed run, or what the settings ask for."""
    is_saved = saved is not None and (saved / "tokenizer.json").is_file()
    return str(saved) if is_saved else settings.tokenizer


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
