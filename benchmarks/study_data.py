"""Text of the study: one BPE tokenizer and token files, small enough to be copied to a machine.

A cache is a folder: ``manifest.json``, ``tokenizer/``, ``CORPUS.train.bin`` and
``CORPUS.valid.bin`` (uint16, an end token after every document), and ``CORPUS.valid.txt`` and
``CORPUS.test.txt`` of corpora that are evaluated by word, such as WikiText.
"""

import hashlib
import itertools
import json
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from meta_attention.errors import DataError
from meta_attention.training.corpus import Corpus, read_corpus, split_corpus, utf8_length
from meta_attention.training.tokenizer import build_tokenizer, encode_documents

MANIFEST = "manifest.json"
# a token of English is shorter than this on average, so enough text is read and not much more
BYTES_PER_TOKEN = 6
VALID_SHARE = 0.05  # of the training tokens, at most
# sources of these names are code, in which names come back from far away, so that models learn
# to look for them: of Python's own library, 30 MB on every machine, and with that of all packages
# installed beside this one, 200 MB with what the tests need
PYTHON_LIBRARY, PYTHON_PACKAGES = "python-library", "python-packages"
SHORT_FILE = 2000  # characters


@dataclass(frozen=True, slots=True)
class Cache:
    """A prepared folder."""

    folder: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> "Cache":
        path = folder / MANIFEST
        if not path.is_file():
            raise DataError(
                f"a cache must have a {MANIFEST}, but {folder} has none; make it with: python "
                f"benchmarks/study_text.py prepare --data FOLDER... --out {folder}"
            )
        return cls(folder, json.loads(path.read_text()))

    @property
    def vocab_size(self) -> int:
        return self.manifest["vocab_size"]

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return PreTrainedTokenizerFast.from_pretrained(self.folder / "tokenizer")

    def tokens(self, split: str, device: str) -> dict[str, Tensor]:
        """Token ids of each corpus, int32, in the memory of the device."""
        return {
            row["corpus"]: torch.from_numpy(
                np.fromfile(self.folder / row["file"], np.uint16).astype(np.int32)
            ).to(device)
            for row in self.manifest["tokens"]
            if row["split"] == split
        }

    def word_texts(self) -> Iterator[tuple[str, str, int]]:
        """Name, text and number of words of what is evaluated by word."""
        for row in self.manifest["texts"]:
            yield row["name"], (self.folder / row["file"]).read_text("utf-8"), row["words"]


def draw_sequences(text: Tensor, number: int, length: int) -> Tensor:
    """From anywhere in a text of token ids [N]: [number, length], int64."""
    starts = torch.randint(len(text) - length + 1, (number, 1)).to(text.device, non_blocking=True)
    return text[starts + torch.arange(length, device=text.device)].long()


def prepare(sources: list[Path], out: Path, *, vocab: int, max_tokens: int) -> dict[str, Any]:
    """Train a tokenizer and write the token files.

    Args:
        sources: Folders or files, or ``python-library`` for the code of Python's own, or
            ``python-packages`` for that and all that is installed. Files of a folder are told apart
            by ``train``, ``valid`` and ``test`` in their names; a source with none of these is
            split, and one without training text is evaluated by word.
        out: Where the cache goes.
        vocab: Size of the vocabulary.
        max_tokens: Of training, all corpora together, each with an equal part.
    """
    if not 258 <= vocab <= 1 << 16:
        raise DataError(f"vocab must be between 258 and 65536, which fit 16 bits, got {vocab}")
    if max_tokens < 1:
        raise DataError(f"max_tokens must be >= 1, got {max_tokens}")
    splits = {source.stem: _files_by_split(source) for source in sources}
    if len(splits) < len(sources):
        raise DataError(f"sources must differ in their names, got {[s.name for s in sources]}")
    trained = [name for name, files in splits.items() if files.get("train")]
    if not trained:
        raise DataError("one source at least must have text to train on")
    tokens_each = max_tokens // len(trained)

    texts: dict[str, dict[str, Corpus]] = {}
    for name in trained:
        texts[name] = _read(splits[name], tokens_each)
        _say(f"{name}: {texts[name]['train'].num_bytes / 1e6:.1f} MB of training text read")
    documents = [text for corpora in texts.values() for text in corpora["train"].documents]
    tokenizer = build_tokenizer(f"bpe:{vocab}", Corpus("all", documents))
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out / "tokenizer")
    _say(f"tokenizer of {len(tokenizer)} tokens trained")

    rows = []
    for name, corpora in texts.items():
        for split, corpus in corpora.items():
            most = tokens_each if split == "train" else max(1, round(VALID_SHARE * tokens_each))
            file = f"{name}.{split}.bin"
            row = _write_tokens(tokenizer, corpus, out / file, most)
            rows.append({"corpus": name, "split": split, "file": file} | row)
            _say(f"{file}: {row['tokens']:,} tokens of {row['bytes'] / 1e6:.1f} MB")
    manifest = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "tokens": rows,
        "texts": [
            _write_words(f"{name}.{split}", files[split], out)
            for name, files in splits.items()
            if name not in trained
            for split in ("valid", "test")
            if files.get(split)
        ],
    }
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    _say(f"{out}: {size / 1e6:.1f} MB")
    return manifest


def python_code(source: str, max_bytes: int) -> Corpus:
    """Files of Python code, none of them short, in an order that has nothing to do with names.

    Which there are depends on the version of Python, on whether its tests are installed, and on
    what else is. Packages have files that are nearly copies of others, so what is held out of them
    is less new than of the library.
    """
    library, packages = (Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib"))
    found = [p for p in library.rglob("*.py") if "site-packages" not in p.parts]
    if source == PYTHON_PACKAGES:
        found += packages.rglob("*.py")
    # many a file stands in several packages
    texts = {path.read_text("utf-8", errors="replace") for path in found if path.is_file()}
    long = (text for text in texts if len(text) >= SHORT_FILE)
    documents = sorted(long, key=lambda text: hashlib.sha256(text.encode()).digest())
    ends = itertools.accumulate(map(utf8_length, documents))
    return Corpus(
        source, [text for text, end in zip(documents, ends, strict=True) if end <= max_bytes]
    )


def _files_by_split(source: Path) -> dict[str, list[str]]:
    if str(source) in (PYTHON_LIBRARY, PYTHON_PACKAGES) and not source.exists():
        return {"train": [str(source)]}
    if not source.exists():
        raise DataError(f"a source must be a file or a folder that exists, got {str(source)!r}")
    paths = sorted(source.iterdir()) if source.is_dir() else [source]
    found = {
        split: [str(path) for path in paths if split in path.name]
        for split in ("train", "valid", "test")
    }
    return found if any(found.values()) else {"train": [str(source)]}


def _read(files: dict[str, list[str]], max_tokens: int) -> dict[str, Corpus]:
    most = BYTES_PER_TOKEN * max_tokens
    if files["train"] in ([PYTHON_LIBRARY], [PYTHON_PACKAGES]):
        train = python_code(files["train"][0], most)
    else:
        train = read_corpus(files["train"], max_bytes=most)
    if not files.get("valid"):
        train, valid = split_corpus(train, holdout=VALID_SHARE)
    else:
        valid_bytes = max(1, round(VALID_SHARE * max_tokens)) * BYTES_PER_TOKEN
        valid = read_corpus(files["valid"], max_bytes=valid_bytes)
    return {"train": train, "valid": valid}


def _write_tokens(
    tokenizer: PreTrainedTokenizerFast, corpus: Corpus, path: Path, max_tokens: int
) -> dict[str, int]:
    """Write at most ``max_tokens``; the last document may be cut."""
    end = np.array([tokenizer.eos_token_id], np.uint16)
    num_tokens = num_bytes = 0
    with path.open("wb") as file:
        encoded = encode_documents(tokenizer, corpus.documents)
        for text, ids in zip(corpus.documents, encoded, strict=False):
            whole = np.concatenate([ids.astype(np.uint16), end])
            kept = whole[: max_tokens - num_tokens]
            kept.tofile(file)
            num_tokens += len(kept)
            num_bytes += round(utf8_length(text) * len(kept) / len(whole))
            if num_tokens >= max_tokens:
                break
    return {"tokens": num_tokens, "bytes": num_bytes}


def _write_words(name: str, files: list[str], out: Path) -> dict[str, Any]:
    """Copy a text and count its words as WikiText does: the end of a line is one."""
    text = "".join(read_corpus(files).documents)
    (out / f"{name}.txt").write_text(text, "utf-8")
    words = len(text.split()) + text.count("\n")
    _say(f"{name}.txt: {words:,} words, line ends included")
    return {"name": name, "file": f"{name}.txt", "words": words}


def _say(line: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True)
