"""What the study of adapted models carries to a machine: a base, and text as its tokens.

A cache is a folder::

    manifest.json        what is in it, with sizes
    base/                config, tokenizer, and the weights in parts of at most 14 MiB
    train.bin            documents of all sources in turn, an end token after each
    valid.bin test.bin   sequences [N, T] of held-out documents, one after the other

Tokens are uint16 where the vocabulary allows it. Weights are bfloat16; ``open_base`` puts the parts
together and checks that they are what was written.
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from study_jobs import say
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from meta_attention.adapt import load_base, load_tokenizer
from meta_attention.errors import DataError
from meta_attention.evaluation.compare import cut_sequences
from meta_attention.training.corpus import read_corpus
from meta_attention.training.data import Blocks
from meta_attention.training.packing import PackedDataset
from meta_attention.training.tokenizer import encode_documents, token_bytes

MANIFEST, WEIGHTS = "manifest.json", "model.safetensors"
PART_BYTES = 14 * 2**20
# a token of English is shorter than this on average
BYTES_PER_TOKEN = 6


@dataclass(frozen=True, slots=True)
class AdaptCache:
    """A prepared folder."""

    folder: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> "AdaptCache":
        path = folder / MANIFEST
        if not path.is_file():
            raise DataError(
                f"a cache must have a {MANIFEST}, but {folder} has none; make it with: python "
                "benchmarks/study_adapt.py prepare --train FILE... --valid FILE... --test FILE... "
                f"--out {folder}"
            )
        return cls(folder, json.loads(path.read_text()))

    @property
    def length(self) -> int:
        return self.manifest["length"]

    @property
    def base_name(self) -> str:
        return self.manifest["base"]

    def tokens(self, split: str) -> Any:
        """Of ``"train"``, ``"valid"`` or ``"test"``, one after the other."""
        row = self.manifest["tokens"][split]
        return np.fromfile(self.folder / row["file"], np.dtype(row["dtype"]))

    def sequences(self, split: str) -> Tensor:
        """Held-out text ``[N, T]``."""
        return torch.from_numpy(self.tokens(split).astype(np.int64)).view(-1, self.length)

    def blocks(self, tokenizer: PreTrainedTokenizerFast, length: int) -> Blocks:
        """Text to train a router on, and to evaluate it on meanwhile."""
        sizes = token_bytes(tokenizer)

        def packed(split: str, starts: Sequence[int]) -> PackedDataset:
            ids = self.tokens(split)
            begins = np.asarray(starts, np.int64)
            # of pieces of documents nothing is known but their tokens
            own = np.add.reduceat(sizes[ids].astype(np.int64), begins)
            return PackedDataset(ids, begins, own, sizes, length)

        names = ", ".join(self.manifest["sources"]["train"])
        valid = ", ".join(self.manifest["sources"]["valid"])
        rows = self.manifest["tokens"]
        return Blocks(
            tokenizer,
            packed("train", rows["train"]["document_starts"]),
            packed("valid", [0]),
            names,
            valid,
        )


def prepare(
    base: str,
    train: Sequence[Path],
    valid: Sequence[Path],
    test: Sequence[Path],
    out: Path,
    *,
    train_tokens: int,
    length: int,
    num_test: int,
    num_valid: int,
) -> dict[str, Any]:
    """Write a cache.

    Args:
        base: Name or folder of the base model.
        train: Files or folders of text to train on; each gives an equal part.
        valid: Of other text: layers, thresholds and the best step of a training are chosen by it.
        test: Of text that nothing is chosen by, of other documents again.
        out: Where the cache goes.
        train_tokens: Tokens of training, all sources together.
        length: Tokens of a held-out sequence.
        num_test: Sequences that variants are measured on.
        num_valid: Sequences of the other.
    """
    for path in (*train, *valid, *test):
        if not path.exists():
            raise DataError(f"a source must be a file or a folder that exists, got {str(path)!r}")
    # of GGUF, Transformers warns of any other precision
    model, tokenizer = load_base(base, dtype=torch.float32), load_tokenizer(base)
    model.to(torch.bfloat16)  # type: ignore[arg-type]  # Transformers wraps it out of its type
    out.mkdir(parents=True, exist_ok=True)
    weights = write_base(model, tokenizer, out / "base")
    dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32

    rows: dict[str, dict[str, Any]] = {}
    documents = [
        read_corpus([str(path)], max_bytes=BYTES_PER_TOKEN * train_tokens // len(train)).documents
        for path in train
    ]
    rows["train"] = _write_train(
        tokenizer, documents, out / "train.bin", train_tokens, np.dtype(dtype)
    )
    for split, paths, count in (("valid", valid, num_valid), ("test", test, num_test)):
        text = read_corpus([str(path) for path in paths]).documents
        ids = cut_sequences(model, tokenizer, text, length=length, count=count).numpy()
        if len(ids) < count:
            raise DataError(
                f"text to hold out for {split} must fill {count} sequences of {length} tokens, got "
                f"{len(ids)}; add text, or lower the number of sequences or --length"
            )
        ids.astype(dtype).tofile(out / f"{split}.bin")
        rows[split] = {"file": f"{split}.bin", "sequences": len(ids), "tokens": ids.size}
    for row in rows.values():
        row |= {"dtype": np.dtype(dtype).name, "bytes": (out / row["file"]).stat().st_size}
    manifest = {
        "base": base if not Path(base).exists() else Path(base).resolve().name,
        "length": length,
        "vocab_size": len(tokenizer),
        "weights": weights,
        "sources": {
            split: [f"{path.resolve().parent.name}/{path.name}" for path in paths]
            for split, paths in (("train", train), ("valid", valid), ("test", test))
        },
        "tokens": rows,
    }
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    for name, row in rows.items():
        say(f"{row['file']}: {row['tokens']:,} tokens of {name}, {row['bytes'] / 2**20:.1f} MiB")
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    say(f"{out}: {size / 2**20:.1f} MiB, weights in {len(weights['parts'])} parts")
    return manifest


def write_base(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> dict[str, Any]:
    """Save a model and its tokenizer, its weights cut into parts; what ``open_base`` checks."""
    shutil.rmtree(folder, ignore_errors=True)
    # one file: a tensor may be larger than a part
    model.save_pretrained(folder, max_shard_size="100GB")
    tokenizer.save_pretrained(folder)
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).unlink()
    names = []
    for number, begin in enumerate(range(0, len(data), PART_BYTES)):
        names.append(f"{WEIGHTS}.part{number:02}")
        (folder / names[-1]).write_bytes(data[begin : begin + PART_BYTES])
    return {"parts": names, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def open_base(cache: AdaptCache, given: Path | None = None) -> Path:
    """Folder of the base, the cache's or one given, with its weights put together."""
    folder, weights = given or cache.folder / "base", cache.manifest["weights"]
    path = folder / WEIGHTS
    is_whole = path.is_file() and path.stat().st_size == weights["bytes"]
    if is_whole or (given is not None and not any(folder.glob(f"{WEIGHTS}.part*"))):
        return folder
    try:
        data = b"".join((folder / name).read_bytes() for name in weights["parts"])
    except OSError as error:
        raise DataError(f"a part of the base is missing: {error}; copy the cache anew") from None
    if hashlib.sha256(data).hexdigest() != weights["sha256"]:
        raise DataError(f"the parts of {path} are not what was written; copy the cache anew")
    path.write_bytes(data)
    return folder


def _write_train(
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[Sequence[str]],
    path: Path,
    max_tokens: int,
    dtype: np.dtype[Any],
) -> dict[str, Any]:
    """Documents of the sources in turn, each source with an equal part; the last may be cut."""
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    end = np.array([tokenizer.eos_token_id], dtype)
    each = max_tokens // len(sources)
    by_source = []
    for documents in sources:
        left, parts = each, []
        for ids in encode_documents(tokenizer, documents):
            parts.append(np.concatenate([ids.astype(dtype), end])[:left])
            left -= len(parts[-1])
            if not left:
                break
        by_source.append(parts)
    turns = range(max(map(len, by_source)))
    ordered = [parts[turn] for turn in turns for parts in by_source if turn < len(parts)]
    np.concatenate(ordered).tofile(path)
    sizes = [len(ids) for ids in ordered]
    starts = np.cumsum([0, *sizes[:-1]])
    return {"file": path.name, "tokens": sum(sizes), "document_starts": starts.tolist()}
