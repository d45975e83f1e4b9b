"""Text to token ids: bytes, characters, BPE trained on the corpus, or a pretrained tokenizer.

The tokenizers built here save and load like any other of Transformers. ``<|endoftext|>`` ends a
document and starts a text generated from nothing; ``<|pad|>`` is a token of its own, so that a
padded position is never mistaken for an end. Text that happens to contain these names stays text:
only packing writes a boundary.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from meta_attention.errors import ConfigError, DataError
from meta_attention.training.corpus import Corpus

EOS_TOKEN, PAD_TOKEN, UNK_TOKEN = "<|endoftext|>", "<|pad|>", "<unk>"
DEFAULT_VOCAB_SIZE = 8192

Ids = npt.NDArray[np.integer[Any]]

# characters of text: what a BPE is trained on, cut into pieces; what is encoded in one call
_BPE_SAMPLE, _BPE_PIECE = 20_000_000, 1 << 16
_BATCH, _PIECE = 1 << 21, 1 << 14
# cutting here changes no token of a byte-level BPE: its words end before and after the line end
_SAFE_CUT = re.compile(r"(?<=\S\n)(?=\S)")


def build_tokenizer(spec: str, corpus: Corpus) -> PreTrainedTokenizerFast:
    """A tokenizer with a document boundary (``eos_token``) and padding on the left.

    Args:
        spec: ``"bytes"``, ``"characters"`` (of the corpus; others become ``<unk>``), ``"bpe"`` or
            ``"bpe:SIZE"`` (byte-level, trained on the corpus; ``SIZE`` includes the special
            tokens), or a folder or hub name that Transformers can load.
        corpus: Text to take the characters or the merges from.
    """
    kind, _, size = spec.partition(":")
    if kind == "bpe" and (not size or size.isdecimal()):
        return _train_bpe(corpus, int(size or DEFAULT_VOCAB_SIZE))
    if spec == "bytes":
        return _build_bytes()
    if spec == "characters":
        return _build_characters(corpus)
    return _load(spec)


def build_words(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words between spaces: ids in the order given, no other word known."""
    backend = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNK_TOKEN)
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _wrap(backend, unk_token=UNK_TOKEN)


def encode_document(tokenizer: PreTrainedTokenizerFast, text: str) -> Ids:
    """Token ids of one text, without special tokens and without a limit on its length."""
    return next(encode_documents(tokenizer, [text]))


def encode_documents(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]) -> Iterator[Ids]:
    """Token ids of each text; long and short ones share the cores."""
    encode = _symbol_encoder(tokenizer, len(tokenizer))
    if encode is not None:
        yield from map(encode, texts)
        return
    backend, dtype = tokenizer.backend_tokenizer, token_dtype(tokenizer)
    # a pretrained tokenizer may come with a maximal length, which would cut documents short
    backend.no_truncation()
    backend.no_padding()
    parts: list[Ids] = []
    for batch in _batches(_pieces(backend, texts)):
        # here and not above: any use of the tokenizer between two batches may reset it
        backend.encode_special_tokens = True
        encodings = backend.encode_batch_fast([text for text, _ in batch], add_special_tokens=False)
        for (_, is_last), encoding in zip(batch, encodings, strict=True):
            parts.append(np.array(encoding.ids, dtype))
            if is_last:
                yield np.concatenate(parts)
                parts = []


def token_dtype(tokenizer: PreTrainedTokenizerFast) -> np.dtype[np.integer[Any]]:
    """Smallest type that holds every id."""
    return np.dtype(np.uint16 if max(tokenizer.get_vocab().values()) < 1 << 16 else np.int32)


def token_bytes(tokenizer: PreTrainedTokenizerFast) -> npt.NDArray[np.uint32]:
    """UTF-8 bytes each id stands for [V]; the boundary stands for none.

    Exact for byte-level vocabularies and for characters. For others, which mark spaces or words
    in their own way, an estimate.
    """
    vocab = tokenizer.get_vocab()
    added = tokenizer.added_tokens_encoder
    is_byte_level = isinstance(tokenizer.backend_tokenizer.decoder, decoders.ByteLevel)
    lengths = np.zeros(max(vocab.values()) + 1, np.uint32)
    for token, index in vocab.items():
        lengths[index] = len(token if is_byte_level and token not in added else token.encode())
    lengths[tokenizer.eos_token_id] = 0
    return lengths


def look_up(table: Ids, index: Ids) -> Ids:
    """``table[index]`` for long arrays: in parts that stay in the cache, several times faster."""
    found = np.empty(len(index), table.dtype)
    for start in range(0, len(index), 1 << 16):
        part = slice(start, start + (1 << 16))
        np.take(table, index[part], out=found[part], mode="clip")
    return found


def _build_bytes() -> PreTrainedTokenizerFast:
    """Ids 0 to 255 are the bytes themselves."""
    vocab = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _wrap(backend)


def _build_characters(corpus: Corpus) -> PreTrainedTokenizerFast:
    is_used = np.zeros(0x110000, bool)
    for text in corpus.documents:
        is_used[_code_points(text)] = True
    vocab = {chr(code): index for index, code in enumerate(np.flatnonzero(is_used))}
    backend = Tokenizer(
        models.BPE(vocab=vocab | {UNK_TOKEN: len(vocab)}, merges=[], unk_token=UNK_TOKEN)
    )
    backend.decoder = decoders.Fuse()
    return _wrap(backend, unk_token=UNK_TOKEN)


def _train_bpe(corpus: Corpus, vocab_size: int) -> PreTrainedTokenizerFast:
    if vocab_size < 258:
        raise ConfigError(
            f"a BPE vocabulary must have >= 258 tokens, 256 bytes and 2 special, got {vocab_size}"
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 2,
        initial_alphabet=_byte_symbols(),
        show_progress=False,
    )
    backend.train_from_iterator(_sample(corpus.documents), trainer)
    return _wrap(backend)


def _sample(documents: list[str]) -> Iterator[str]:
    """Pieces spread evenly over all documents, ``_BPE_SAMPLE`` characters or somewhat fewer."""
    stride = -(-sum(map(len, documents)) // _BPE_SAMPLE)
    number = 0
    for text in documents:
        for start in range(0, len(text), _BPE_PIECE):
            if number % stride == 0:
                yield text[start : start + _BPE_PIECE]
            number += 1


def _wrap(backend: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=EOS_TOKEN,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        padding_side="left",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        **special,
    )


def _load(name: str) -> PreTrainedTokenizerFast:
    known = "tokenizer must be bytes, characters, bpe, bpe:SIZE, or a folder or hub name"
    path = Path(name).expanduser()
    # neither is worth a minute of waiting for the hub
    kind = re.split("[:_-]", name.lower())[0]
    slips = difflib.get_close_matches(kind, ("bytes", "byte", "characters", "char", "bpe"), 1, 0.8)
    if not path.exists() and slips:
        raise ConfigError(f"{known}, got {name!r}")
    if not path.exists() and path.parent != Path() and path.parent.is_dir():
        raise ConfigError(f"{known}, but there is no folder {name!r}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path if path.exists() else name, padding_side="left"
        )
    # the hub, the network and each file format raise errors of their own
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{known}, but {name!r} cannot be loaded: {reason}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise DataError(
            f"a pretrained tokenizer must have a tokenizer.json, but {name!r} is a "
            f"{type(tokenizer).__name__}"
        )
    if tokenizer.eos_token is None:
        tokenizer.add_special_tokens({"eos_token": EOS_TOKEN})
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


# the second argument makes a tokenizer that has grown a new one
@lru_cache(maxsize=8)
def _symbol_encoder(tokenizer: PreTrainedTokenizerFast, _: int) -> Callable[[str], Ids] | None:
    """A table look-up where every token is one byte or one character; else None.

    Gives the ids of the tokenizer itself. Recognised by structure, so a tokenizer that was saved
    and loaded is as fast as a new one.
    """
    backend = tokenizer.backend_tokenizer
    symbols = backend.get_vocab(with_added_tokens=False)
    unknown = symbols.pop(UNK_TOKEN, None)
    words = backend.pre_tokenizer
    if (
        not isinstance(backend.model, models.BPE)
        or backend.normalizer is not None
        or any(len(symbol) > 1 for symbol in symbols)
        or not all(token.special for token in tokenizer.added_tokens_decoder.values())
    ):
        return None
    dtype = token_dtype(tokenizer)
    if isinstance(words, pre_tokenizers.ByteLevel) and not words.add_prefix_space:
        if set(symbols) != set(_byte_symbols()):
            return None
        byte_ids = np.array([symbols[symbol] for symbol in _byte_symbols()], dtype)
        return lambda text: look_up(byte_ids, np.frombuffer(text.encode(), np.uint8))
    if words is None and unknown is not None:
        character_ids = np.full(0x110000, unknown, dtype)
        character_ids[[ord(symbol) for symbol in symbols]] = list(symbols.values())
        return lambda text: look_up(character_ids, _code_points(text))
    return None


def _byte_symbols() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: GPT-2's table."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = count(256)
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def _code_points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def _pieces(backend: Tokenizer, texts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Texts, the long ones cut where that changes no token, and whether a piece is the last."""
    words = backend.pre_tokenizer
    can_cut = (
        isinstance(words, pre_tokenizers.ByteLevel)
        and words.use_regex
        and not words.add_prefix_space
        and backend.normalizer is None
    )
    for text in texts:
        start = 0
        while can_cut and (cut := _SAFE_CUT.search(text, start + _PIECE)):
            yield text[start : cut.start()], False
            start = cut.start()
        yield text[start:], True


def _batches(pieces: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[0])
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
