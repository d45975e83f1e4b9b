"""Needles in text: facts scattered over a stretch of it, asked for at its end.

A fact is a sentence, ``The code of amber is "4821".``, put between two tokens of the text. The
sequence ends with the sentences asked for, and only their digits are labelled. Between the last
fact and the first question lies more text than any window reaches across, so nothing near a
question tells its answer.

``needle`` has one fact, ``multi_key`` several, of which some are asked for: which one is meant is
then part of the question.

``needs_full`` marks the tokens before the digits asked for. A token earlier in the question may
look the code up in their place, and local attention carry it on: against these labels, precision
and recall are then lower than deserved. Only in ``recall`` is need a matter of one token.

Shapes: T tokens of a sequence.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from meta_attention.errors import ConfigError, DataError
from meta_attention.evaluation.tasks.base import NOT_ASKED, Example, Ids

WORDS = str.split(
    "amber anchor apple arrow autumn barrel basket beacon bridge butter candle canyon castle "
    "cedar cherry circle cloud copper coral cotton desert dragon eagle ember engine falcon feather "
    "forest garden ginger glacier hammer harbor hazel honey island ivory jacket jungle kettle "
    "ladder lantern lemon magnet maple marble meadow mirror needle olive orchard oyster paper "
    "pepper pillow planet pocket river rocket saddle silver spider thunder tiger tunnel valley "
    "velvet violet walnut willow window winter"
)
OPENING, CLOSING = ' The code of {} is "', '".'
# every character of a fact, for a vocabulary that is taken from the text
ALPHABET = " ".join([OPENING, CLOSING, "0123456789", *WORDS])


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalTask:
    """Codes hidden in text and asked for at its end.

    Args:
        text: Tokens to hide them in, one document after the other.
        encode: Text to tokens.
        reach: How far local attention sees through all layers; facts lie beyond.
        length: Tokens of a sequence, T.
        facts: Sentences hidden.
        questions: How many of them are asked for.
        digits: Of a code.
    """

    text: Ids
    encode: Callable[[str], Ids]
    reach: int
    length: int = 512
    facts: int = 1
    questions: int = 1
    digits: int = 4
    openings: list[Ids] = field(init=False, repr=False)
    closing: Ids = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.questions <= self.facts <= len(WORDS):
            raise ConfigError(
                f"questions must be between 1 and facts, and facts at most {len(WORDS)}, got "
                f"{self.questions} questions of {self.facts} facts"
            )
        if self.digits < 1:
            raise ConfigError(f"digits of a code must be >= 1, got {self.digits}")
        if len(self.text) < self.length:
            raise DataError(
                f"the text to hide facts in must have >= {self.length} tokens, got "
                f"{len(self.text)}; add text or lower the length"
            )
        object.__setattr__(self, "openings", [self.encode(OPENING.format(w)) for w in WORDS])
        object.__setattr__(self, "closing", self.encode(CLOSING))
        # a code has at most one token per digit and byte-level tokenizers take no more
        sentence = max(map(len, self.openings)) + self.digits + len(self.closing)
        needed = sentence * (self.facts + self.questions) + self.reach + 1
        if self.length < needed:
            raise ConfigError(
                f"a sequence must have >= {needed} tokens for {self.facts} facts and "
                f"{self.questions} questions beyond the reach of {self.reach}, got {self.length}; "
                "raise length, or lower facts, questions or the window"
            )

    @property
    def source(self) -> bytes:
        sizes = [self.reach, self.length, self.facts, self.questions, self.digits]
        text = np.ascontiguousarray(self.text, dtype="<i8")
        return f"{sizes} {hashlib.sha256(text.tobytes()).hexdigest()}".encode()

    def held_out(self) -> Self:
        return self

    def draw(self, random: np.random.Generator) -> Example:
        words = random.permutation(len(WORDS))[: self.facts]
        codes = random.integers(10, size=(self.facts, self.digits))
        answers = [self.encode("".join(map(str, code))) for code in codes.tolist()]
        sentences = [
            [self.openings[word], answer, self.closing]
            for word, answer in zip(words, answers, strict=True)
        ]
        asked = random.permutation(self.facts)[: self.questions]
        questions = [part for index in asked for part in sentences[index]]
        hidden = [np.concatenate(sentence) for sentence in sentences]

        # what facts and questions leave is text; the last fact comes before the last of it
        size = self.length - sum(map(len, hidden)) - sum(map(len, questions))
        begin = int(random.integers(len(self.text) - size + 1))
        text = self.text[begin : begin + size]
        cuts = np.sort(random.integers(size - self.reach + 1, size=self.facts))
        pieces = np.split(text, cuts)
        parts = [part for pair in zip(pieces, hidden, strict=False) for part in pair]
        ids = np.concatenate([*parts, pieces[-1], *questions])

        labels = np.full(self.length, NOT_ASKED)
        needs_full = np.zeros(self.length, np.bool_)
        end = self.length
        for part, is_answer in reversed(list(zip(questions, self._is_answer(), strict=True))):
            if is_answer:
                labels[end - len(part) : end] = part
                needs_full[end - len(part) - 1 : end - 1] = True
            end -= len(part)
        return Example(ids, labels, needs_full)

    def _is_answer(self) -> list[bool]:
        """Of the parts of all questions: opening, code, closing."""
        return [False, True, False] * self.questions
