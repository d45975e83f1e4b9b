"""Documents packed into blocks of one length, with their boundaries kept.

Every document is tokenised once, followed by the end-of-text token, and written behind the last;
the whole is cut into blocks. A dataset is map-style and the same on every machine, which is all
that Transformers' Trainer needs: it shuffles the blocks with its seed, gives each rank its share
and resumes by skipping the blocks it has seen. A block is a slice of one array in memory, so
loading is never the slow part and needs no worker processes.

Shapes: T length of a block, V vocabulary.
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from meta_attention.errors import ConfigError, DataError
from meta_attention.training.corpus import Corpus, utf8_length
from meta_attention.training.tokenizer import Ids, encode_documents, look_up, token_bytes

Positions = npt.NDArray[np.int64]

# label that the loss leaves out
IGNORED = -100


class PackedDataset(Dataset[dict[str, Tensor]]):
    """Blocks of ``length`` tokens, as ``input_ids`` and ``labels``; the model shifts the labels.

    With ``isolate_documents`` a block also has ``document_ids`` that number its documents
    from 1, and no document is asked to predict the first token of the next.
    """

    def __init__(
        self,
        tokens: Ids,
        document_starts: Positions,
        document_bytes: Positions,
        bytes_of_token: npt.NDArray[np.uint32],
        length: int,
        *,
        isolate_documents: bool = False,
    ) -> None:
        kept = len(tokens) // length * length
        self.tokens = tokens[:kept]
        """All tokens of all blocks, in order."""
        self.document_starts = document_starts[document_starts < kept]
        """Position in ``tokens`` of the first token of each document."""
        self.length = length
        self.isolate_documents = isolate_documents
        self.dropped_tokens = len(tokens) - kept
        """Tokens at the end that did not fill a block."""

        # sums between any two starts of a document or block. Where a token's bytes are only an
        # estimate, the scale makes them add up to the bytes of the document
        starts = np.arange(0, len(tokens), length)
        cuts = np.union1d(document_starts, starts)
        sums = _sum_between(cuts, tokens, bytes_of_token)
        estimate = np.add.reduceat(sums, np.searchsorted(cuts, document_starts))
        scale = document_bytes / np.maximum(estimate, 1)
        covered = np.cumsum(sums * scale[_document_of(cuts, document_starts)])
        ends = np.append(np.searchsorted(cuts, starts[1:]), len(cuts)) - 1
        self.block_bytes = np.diff(np.rint(covered[ends]).astype(np.int64), prepend=0)[: len(self)]
        """UTF-8 bytes of text in each block."""

        # the first token of a block, or of an isolated document, is not predicted
        free = starts[: len(self)]
        if isolate_documents:
            free = np.union1d(free, self.document_starts)
        documents = _document_of(free, document_starts)
        free_bytes = bytes_of_token[self.tokens[free]] * scale[documents]
        self.num_target_tokens = kept - len(free)
        """Tokens the loss is taken over."""
        self.num_target_bytes = self.num_bytes - round(float(free_bytes.sum()))
        """UTF-8 bytes the loss is taken over."""

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        begin = index * self.length
        ids = torch.from_numpy(self.tokens[begin : begin + self.length].astype(np.int64))  # [T]
        block = {"input_ids": ids, "labels": ids.clone()}
        if self.isolate_documents:
            low, high = np.searchsorted(self.document_starts, [begin, begin + self.length])
            first = torch.from_numpy(self.document_starts[low:high] - begin)
            block["labels"][first] = IGNORED
            number = torch.zeros_like(ids)
            number[first] = 1
            number[0] = 1
            block["document_ids"] = number.cumsum(0)
        return block

    @property
    def num_tokens(self) -> int:
        """Tokens in all blocks."""
        return len(self.tokens)

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of text in all blocks."""
        return int(self.block_bytes.sum())

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all that the blocks contain: a resumed run can refuse other data."""
        digest = hashlib.sha256(f"{self.length} {self.isolate_documents} ".encode())
        digest.update(self.tokens.astype(self.tokens.dtype.newbyteorder("<"), copy=False).data)
        if self.isolate_documents:
            digest.update(self.document_starts.astype("<i8", copy=False).data)
        return digest.hexdigest()

    def facts(self) -> dict[str, Any]:
        """What the record of a run says of its data."""
        return {
            "fingerprint": self.fingerprint,
            "blocks": len(self),
            "tokens": self.num_tokens,
            "bytes": self.num_bytes,
        }

    def bits_per_byte(self, loss: float) -> float:
        """Mean loss per predicted token, in nats, as bits per byte of the text it predicts."""
        return loss / float(np.log(2)) * self.num_target_tokens / self.num_target_bytes


def pack(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerFast,
    length: int,
    *,
    isolate_documents: bool = False,
) -> PackedDataset:
    """Tokenise a corpus and cut it into blocks.

    Args:
        corpus: Documents to pack, in their order.
        tokenizer: Its ``eos_token`` follows every document.
        length: Tokens in a block, T.
        isolate_documents: Tokens of one document do not see another in the same block.
    """
    if length < 2:
        raise ConfigError(f"length must be >= 2, got {length}: one token predicts nothing")
    boundary = tokenizer.eos_token_id
    if boundary is None:
        raise ConfigError("tokenizer must have an eos_token, got none: it ends every document")
    parts, lengths, sizes = [], [], []
    with _progress(sum(map(len, corpus.documents))) as advance:
        ids = encode_documents(tokenizer, corpus.documents)
        for text, document in zip(corpus.documents, ids, strict=True):
            parts += [document, np.array([boundary], document.dtype)]
            lengths.append(len(document) + 1)
            sizes.append(utf8_length(text))
            advance(len(text))
    tokens = np.concatenate(parts)
    if len(tokens) < length:
        raise DataError(
            f"{corpus.name} must fill a block of {length} tokens, got {len(tokens)}; add text or "
            "shorten the blocks"
        )
    return PackedDataset(
        tokens,
        np.cumsum([0, *lengths[:-1]]),
        np.array(sizes),
        token_bytes(tokenizer),
        length,
        isolate_documents=isolate_documents,
    )


def spread_blocks(
    dataset: PackedDataset, number: int, size: int, device: torch.device
) -> Iterator[Tensor]:
    """Ids of so many blocks, or of all, from all over the text, ``[B, T]`` with B up to a size."""
    number = min(number, len(dataset))
    # from the middle of so many parts
    chosen = ((torch.arange(number) + 0.5) * len(dataset) / number).long()
    for part in chosen.split(size):
        yield torch.stack([dataset[int(i)]["input_ids"] for i in part]).to(device)


def _document_of(positions: Positions, document_starts: Positions) -> Positions:
    return np.searchsorted(document_starts, positions, side="right") - 1


def _sum_between(cuts: Positions, tokens: Ids, bytes_of_token: npt.NDArray[np.uint32]) -> Positions:
    """Bytes from each cut to the next, without a second array as long as the tokens."""
    sums = []
    for part in range(0, len(cuts), 1024):
        begin, *later = cuts[part : part + 1025 : 1024]
        lengths = look_up(bytes_of_token, tokens[begin : later[0] if later else None])
        sums.append(np.add.reduceat(lengths, cuts[part : part + 1024] - begin, dtype=np.int64))
    return np.concatenate(sums)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, from the second second on."""
    from rich.console import Console
    from rich.progress import Progress

    progress = Progress(console=Console(stderr=True), transient=True)
    task = progress.add_task("tokenising", total=total)
    done, due = 0, time.monotonic() + 1

    def advance(characters: int) -> None:
        nonlocal done, due
        done += characters
        if time.monotonic() > due:
            progress.start()
            progress.update(task, completed=done)
            due += 0.1

    try:
        yield advance
    finally:
        # stopping a bar that never started would print an empty line
        if progress.live.is_started:
            progress.stop()
