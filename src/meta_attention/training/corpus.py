"""Where training text comes from: files, folders, globs, hub datasets, or Python's own manual.

A corpus is a list of documents in a fixed order. Reading changes no character: what cannot be
read exactly is refused, with the file and the place.
"""

import gzip
import hashlib
import io
import json
import lzma
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from glob import glob
from itertools import pairwise
from pathlib import Path

from meta_attention.errors import ConfigError, DataError

_KNOWN_FILES = ".txt, .jsonl or wiki.*.tokens, plain or with .gz, .xz or .zst"
_READABLE = re.compile(r"(\.txt|\.jsonl|^wiki\..*\.tokens)(\.gz|\.xz|\.zst)?$", re.IGNORECASE)
# owner/name, owner/name:split or owner/name:config:split; without an owner the split is needed
_HUB_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*|\w[\w.-]*(?=:))(:[\w.+-]+){0,2}")
# an article of WikiText: a heading between blank lines. The lines are what sets it apart from
# " = 1 rad / s and a nominal impedance k = " within one
_TITLE = r" ?= (?!=).* = ?\n ?\n"
_FIRST_ARTICLE = re.compile(rf"(?: ?\n)*({_TITLE})")
_NEXT_ARTICLE = re.compile(rf"^ ?\n(?={_TITLE})", re.MULTILINE)
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents in a fixed order, and what to call them in a report."""

    name: str
    documents: list[str]

    @property
    def num_bytes(self) -> int:
        """Bytes of the text in UTF-8."""
        return sum(map(utf8_length, self.documents))


def utf8_length(text: str) -> int:
    """Bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def embedded_corpus() -> Corpus:
    """Python's language reference: half a megabyte of English on every machine, no download."""
    from pydoc_data.topics import topics

    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    name = f"Python {version} language reference (pydoc_data.topics)"
    return Corpus(name, [topics[key] for key in sorted(topics)])


def read_corpus(sources: Sequence[str] = (), *, max_bytes: int | None = None) -> Corpus:
    """Read every document of every source; with no source, the embedded corpus.

    Args:
        sources: Each is a folder (all ``.txt`` and ``.jsonl`` files below it, sorted by path), a
            file, a glob, or the name of a hub dataset: ``owner/name``, ``owner/name:split`` or
            ``owner/name:config:split``. A ``.txt`` file is one document, unless it holds WikiText,
            which is split at its articles. A ``.jsonl`` file has one document a line, in the field
            ``text``. A file that two sources name is read once. Empty documents are left out.
        max_bytes: Stop after this much text: at the end of a document if that keeps at least half
            of it, else within the document.
    """
    if max_bytes is not None and max_bytes < 1:
        raise ConfigError(f"max_bytes must be >= 1, got {max_bytes}")
    if isinstance(sources, str):
        sources = (sources,)
    if sources:
        name, texts = ", ".join(sources), _read_sources(sources, is_cut=max_bytes is not None)
    else:
        embedded = embedded_corpus()
        name, texts = embedded.name, iter(embedded.documents)
    documents = list(_take(texts, max_bytes))
    if not documents:
        raise DataError(f"a corpus must contain text, got none in {name}")
    return Corpus(name, documents)


def split_corpus(corpus: Corpus, *, holdout: float = 0.05) -> tuple[Corpus, Corpus]:
    """Training and held-out part, the same on every machine.

    Documents are held out in the order of the hash of their text as long as they fit into the
    share asked for; a text that occurs twice stays on one side. Where that holds out less than
    half of the share, as with one document or a few long ones, the tail of the longest document
    fills it up.
    """
    if not 0.0 < holdout < 1.0:
        raise ConfigError(f"holdout must be in (0, 1), got {holdout}")
    copies: dict[bytes, list[int]] = {}
    for index, text in enumerate(corpus.documents):
        copies.setdefault(hashlib.sha256(text.encode()).digest(), []).append(index)
    total = sum(map(len, corpus.documents))  # characters
    target = min(max(1, round(holdout * total)), total - 1)

    held, chosen = 0, set()
    for digest in sorted(copies):
        size = sum(len(corpus.documents[index]) for index in copies[digest])
        if held + size <= target:
            held += size
            chosen.update(copies[digest])
    train = [text for i, text in enumerate(corpus.documents) if i not in chosen]
    valid = [text for i, text in enumerate(corpus.documents) if i in chosen]
    if 2 * held < target:
        longest = max(range(len(train)), key=lambda i: len(train[i]))
        cut = max(1, len(train[longest]) - (target - held))
        valid += filter(None, [train[longest][cut:]])
        train[longest] = train[longest][:cut]
    if not valid:
        raise DataError(
            f"{corpus.name} must have text to train on and text to hold out, got {total} "
            f"characters in {len(corpus.documents)} documents"
        )
    return Corpus(corpus.name, train), Corpus(f"{corpus.name}, held out", valid)


def cut_corpus(corpus: Corpus, num_bytes: int | None) -> Corpus:
    """The beginning of a corpus, to the byte; all of it where it has no more, or for None."""
    if num_bytes is None:
        return corpus
    documents: list[str] = []
    left = num_bytes
    for text in corpus.documents:
        part = text.encode()[:left].decode(errors="ignore")
        documents += filter(None, [part])
        left -= utf8_length(part)
        if part != text:
            break
    return Corpus(corpus.name, documents)


def split_wikitext(text: str) -> list[str]:
    """Articles of a WikiText file, which joined are the file; any other text as it is."""
    first = _FIRST_ARTICLE.match(text)
    if first is None:
        return [text]
    starts = [match.start() for match in _NEXT_ARTICLE.finditer(text, first.start(1))]
    return [text[start:end] for start, end in pairwise([0, *starts, len(text)])]


def _take(texts: Iterable[str], max_bytes: int | None) -> Iterator[str]:
    taken = 0
    for text in filter(None, texts):
        size = 0 if max_bytes is None else utf8_length(text)
        if max_bytes is not None and taken + size > max_bytes:
            if 2 * taken < max_bytes:
                yield from filter(
                    None, [text.encode()[: max_bytes - taken].decode(errors="ignore")]
                )
            return
        taken += size
        yield text


def _read_sources(sources: Sequence[str], *, is_cut: bool) -> Iterator[str]:
    # all names are looked up before the first, perhaps large, file is read
    found = [(source, _find_files(source)) for source in sources]
    seen = set()
    for source, paths in found:
        if not paths:
            yield from _read_hub(source, streaming=is_cut)
        for path in paths:
            if path.resolve() not in seen:
                seen.add(path.resolve())
                yield from _read_file(path)


def _find_files(source: str) -> list[Path]:
    """Files of a source in order; none if it can only be the name of a hub dataset."""
    path = Path(source).expanduser()
    if path.is_file() and not _READABLE.search(path.name):
        raise DataError(f"a corpus file must be {_KNOWN_FILES}, got {source!r}")
    matches = [path] if path.exists() else [Path(name) for name in glob(str(path), recursive=True)]
    files = {
        file
        for match in matches
        for file in (match.rglob("*") if match.is_dir() else (match,))
        if _READABLE.search(file.name) and file.is_file()
    }
    if matches and not files:
        raise DataError(f"{source!r} must contain files ending in {_KNOWN_FILES}, got none")
    # a name below a folder that exists is a file that does not, no reason to ask the hub
    is_local = _READABLE.search(source) or (path.parent != Path() and path.parent.is_dir())
    if not matches and (is_local or not _HUB_NAME.fullmatch(source)):
        raise DataError(f"a corpus must exist, but no file, folder or glob matches {source!r}")
    return sorted(files, key=Path.as_posix)


def _read_file(path: Path) -> Iterator[str]:
    try:
        with _open(path) as stream:
            if ".jsonl" in path.name.lower():
                yield from _read_jsonl(stream, path)
            else:
                yield from split_wikitext(_decode(stream.read(), path))
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path} must be readable to its end, got: {error}") from error


def _open(path: Path) -> io.BufferedIOBase:
    match path.suffix.lower():
        case ".gz":
            return gzip.open(path)
        case ".xz":
            return lzma.open(path)
        case ".zst":
            return _open_zst(path)
        case _:
            return path.open("rb")


def _read_jsonl(stream: Iterable[bytes], path: Path) -> Iterator[str]:
    offset = 0
    for number, raw in enumerate(stream, start=1):
        line = _decode(raw, path, offset)
        offset += len(raw)
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path} line {number} must be JSON, got: {error}") from error
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            got = f"fields {list(record)}" if isinstance(record, dict) else type(record).__name__
            raise DataError(
                f'{path} line {number} must be an object with a string "text", got {got}'
            )
        if _SURROGATE.search(text):
            raise DataError(f"{path} line {number} must be Unicode text, got half a surrogate pair")
        yield text


def _decode(data: bytes, path: Path, offset: int = 0) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} must be UTF-8 text, got byte 0x{data[error.start]:02x} at offset "
            f"{offset + error.start}; convert it first"
        ) from error
    # a byte order mark is no text
    return text if offset else text.removeprefix("\ufeff")


def _open_zst(path: Path) -> io.BufferedIOBase:
    if sys.version_info >= (3, 14):
        from compression import zstd

        return zstd.open(path)
    try:
        import zstandard  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise DataError(
            f"{path} needs the package zstandard; run: pip install 'meta-attention[data]'"
        ) from error
    # zstandard.open takes a file that was cut short for a whole one, so each frame is checked
    data, frames = path.read_bytes(), []
    while data:
        frame = zstandard.ZstdDecompressor().decompressobj()
        try:
            frames.append(frame.decompress(data))
        except zstandard.ZstdError as error:
            raise OSError(error) from error
        if not frame.eof:
            raise EOFError("compressed file ended before the end-of-stream marker was reached")
        data = frame.unused_data
    return io.BytesIO(b"".join(frames))


def _read_hub(source: str, *, streaming: bool) -> Iterator[str]:
    try:
        import datasets  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise DataError(
            f"no file, folder or glob matches {source!r}; if it is a hub dataset, "
            "run: pip install 'meta-attention[data]'"
        ) from error
    name, *config, split = source.split(":") if ":" in source else (source, "train")
    try:
        rows = datasets.load_dataset(name, *config, split=split, streaming=streaming)
        texts: Iterable[str] = (row["text"] for row in rows)
        if name.endswith("wikitext"):
            # its rows are lines, and its empty rows were blank lines
            texts = split_wikitext("".join(text or " \n" for text in texts))
        yield from texts
    # the hub, the network and each file format raise errors of their own
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(
            f"no file, folder or glob matches {source!r}, and as a hub dataset with a text field "
            f"it cannot be read, got {reason}"
        ) from error
