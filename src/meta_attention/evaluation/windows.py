"""A text of any length as windows a model can take, every token scored in one of them.

The first window scores all its tokens but the first. Each later one reaches ``stride`` tokens
further and scores the ones that are new to it, given the rest of the window; the last reaches as
far as the text does. A token is thus scored with at least ``length - stride`` tokens before it, or
all there are. Documents do not see each other.

Shapes: N tokens of a document, B windows of a batch, T their length, M tokens scored in a batch.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from meta_attention.errors import ConfigError, DataError

# without a length asked for: long enough for most of the gain, short enough for most memories
DEFAULT_LENGTH = 1024


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A text as the model reads it."""

    ids: Tensor  # [N] int64
    num_bytes: Tensor  # [N] int64, UTF-8 bytes of text each token stands for
    ends: list[int]  # [N], the character of the text each token ends before


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens from ``begin`` to before ``end``, of which those from ``first`` on are scored."""

    begin: int
    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class WindowBatch:
    """Windows side by side, shorter ones padded on the right."""

    input_ids: Tensor  # [B, T]
    attention_mask: Tensor | None  # [B, T]; None: no padding
    is_target: Tensor  # [B, T] bool: the token is scored here; M of them
    is_new: Tensor  # [B, T] bool: no earlier window has the token; targets and first tokens
    num_bytes: int  # of the targets

    @property
    def is_predictor(self) -> Tensor:
        """[B, T] bool: the next token is scored here; M of them, in the order of the targets."""
        return self.is_target.roll(-1, dims=1)


def tokenize(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str
) -> TokenizedText:
    """Tokens of a text, without special ones, and the bytes each stands for."""
    if not tokenizer.is_fast:
        raise DataError(
            "the tokenizer must have a tokenizer.json, as only these say which part of a text a "
            f"token stands for; got a {type(tokenizer).__name__}"
        )
    encoding = tokenizer(
        text,
        add_special_tokens=False,
        # text that spells a special token is text
        split_special_tokens=True,
        truncation=False,
        return_offsets_mapping=True,
        verbose=False,
    )
    ids = encoding["input_ids"]
    vocab_size = model.config.get_text_config().vocab_size
    if ids and max(ids) >= vocab_size:
        raise DataError(
            f"the tokenizer must be the model's own, got token {max(ids)} where the model knows "
            f"{vocab_size}"
        )
    ends = _token_ends(encoding["offset_mapping"], len(text))
    sizes = [len(token) for token in tokenizer.convert_ids_to_tokens(ids)]
    if sum(sizes) != len(text.encode()):
        # not a vocabulary that spells every byte as one character: go by the parts of the text
        sizes = [
            len(text[begin:end].encode()) for begin, end in zip([0, *ends], ends, strict=False)
        ]
    return TokenizedText(
        torch.tensor(ids, dtype=torch.int64), torch.tensor(sizes, dtype=torch.int64), ends
    )


def tokenize_documents(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Sequence[str],
    *,
    max_tokens: int | None = None,
) -> list[TokenizedText]:
    """Tokens of every document that has something to score, up to ``max_tokens`` in all."""
    if max_tokens is not None and max_tokens < 2:
        raise ConfigError(f"max_tokens must be >= 2, got {max_tokens}: one token predicts nothing")
    documents: list[TokenizedText] = []
    left = math.inf if max_tokens is None else max_tokens
    for part in [text] if isinstance(text, str) else text:
        if left < 2:
            break
        document = tokenize(model, tokenizer, part)
        n = int(min(len(document.ids), left))
        if n > 1:
            cut = TokenizedText(document.ids[:n], document.num_bytes[:n], document.ends[:n])
            documents.append(cut)
            left -= n
    if not sum(int(document.num_bytes[1:].sum()) for document in documents):
        raise DataError(
            "a text to score must have at least two tokens, got fewer: the first is only context"
        )
    return documents


def num_targets(documents: Sequence[TokenizedText]) -> int:
    """Tokens that are scored."""
    return sum(len(document.ids) - 1 for document in documents)


def choose_windows(
    model: PreTrainedModel, length: int | None = None, stride: int | None = None
) -> tuple[int, int]:
    """Length and stride: those asked for if the model can take them, else the defaults."""
    if not getattr(model.config, "causal", True):
        raise ConfigError(
            "scoring a text needs causal=True: this model sees the tokens it would predict"
        )
    longest = getattr(model.config, "max_position_embeddings", None)
    if length is None:
        length = min(DEFAULT_LENGTH, longest or DEFAULT_LENGTH)
    if length < 2 or (longest is not None and length > longest):
        raise ConfigError(
            f"length must be between 2 and the model's max_position_embeddings = {longest}, "
            f"got {length}"
        )
    if stride is None:
        stride = max(length // 2, 1)
    if not 1 <= stride < length:
        raise ConfigError(
            f"stride must be between 1 and length - 1 = {length - 1}, got {stride}: the first new "
            "token of a window needs one before it"
        )
    return length, stride


def plan_windows(num_tokens: int, length: int, stride: int) -> Iterator[Window]:
    """Windows that score each of ``num_tokens`` tokens but the first once."""
    end = min(length, num_tokens)
    if end > 1:
        yield Window(0, 1, end)
    while end < num_tokens:
        first, end = end, min(end + stride, num_tokens)
        yield Window(end - length, first, end)


def window_batches(
    documents: Sequence[TokenizedText],
    length: int,
    stride: int,
    batch_size: int,
    device: torch.device | str,
) -> Iterator[WindowBatch]:
    """All windows of all documents, those of like length together, the longest first."""
    if batch_size < 1:
        raise ConfigError(f"batch_size must be >= 1, got {batch_size}")
    windows = [
        (document, window)
        for document in documents
        for window in plan_windows(len(document.ids), length, stride)
    ]
    windows.sort(key=lambda pair: -len(pair[1]))
    for start in range(0, len(windows), batch_size):
        yield _batch(windows[start : start + batch_size], device)


def _batch(pairs: list[tuple[TokenizedText, Window]], device: torch.device | str) -> WindowBatch:
    B, T = len(pairs), max(len(window) for _, window in pairs)
    ids = torch.zeros(B, T, dtype=torch.int64)
    is_token, is_target, is_new = (torch.zeros(B, T, dtype=torch.bool) for _ in range(3))
    num_bytes = 0
    for row, (document, window) in enumerate(pairs):
        size, first = len(window), window.first - window.begin
        ids[row, :size] = document.ids[window.begin : window.end]
        is_token[row, :size] = True
        is_target[row, first:size] = True
        # the first token of a document is not scored, but no other window has it
        is_new[row, 0 if window.first == 1 else first : size] = True
        num_bytes += int(document.num_bytes[window.first : window.end].sum())
    mask = None if is_token.all() else is_token.to(device, torch.int64)
    return WindowBatch(ids.to(device), mask, is_target.to(device), is_new.to(device), num_bytes)


def _token_ends(offsets: Sequence[tuple[int, int]], num_characters: int) -> list[int]:
    """Where each token ends, such that the parts between are the whole text.

    Tokenizers may leave the space before a word out of its offsets, and give all tokens of a
    character that takes several the same ones; the last of these ends it.
    """
    ends, position = [], 0
    starts = [begin for begin, _ in offsets[1:]]
    for (_, end), next_begin in zip(offsets, [*starts, num_characters], strict=False):
        position = max(position, min(end, next_begin))
        ends.append(position)
    if ends:
        ends[-1] = num_characters
    return ends
