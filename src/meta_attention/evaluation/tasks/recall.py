"""Associative recall with copies as distractors: who needs full attention is known exactly.

A sequence is a list of key-value pairs, a stretch of noise that no window reaches across, and
questions among more noise::

    k3 v8 k0 v5 ...  n1 n4 n2 ...  k0  n3 n1 n4 copy n2 k3 n1 ...
    '--- pairs ---'  '-- noise --' '1'          '2'     '1'

Half of the questions are far recalls (1): a key, asked for its value, which stands in the list and
nowhere else. The others are copies (2): ``copy`` is asked for the token that stands
``copy_distance`` before it. Both look like questions, and only the first need more than a window.
A question is a single token, so nothing can be looked up ahead for it, and its answer is not
written behind it, so that none helps another.

Shapes: T tokens of a sequence.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from meta_attention.errors import ConfigError
from meta_attention.evaluation.tasks.base import NOT_ASKED, Example

COPY = 0  # id of the token that asks for a copy


@dataclass(frozen=True, kw_only=True, slots=True)
class RecallTask:
    """Multi-query associative recall.

    Args:
        window: How far local attention sees in one layer; copies lie within.
        reach: How far it sees through all layers; recalls lie beyond.
        length: Tokens of a sequence, T.
        pairs: Key-value pairs of a sequence.
        fewest_pairs: Training sequences have this many to ``pairs``, evenly on a log scale: recall
            of many is learnt from recall of few. Sequences to evaluate on have ``pairs``.
        recalls: Questions for a value, each for another key; where a training sequence has fewer
            pairs, keys are asked again.
        copies: Questions for a copy.
        copy_distance: From a ``copy`` back to the token it asks for.
        keys, values, noise: Tokens of each kind in the vocabulary.
    """

    window: int
    reach: int
    length: int = 512
    pairs: int = 128
    fewest_pairs: int = 4
    recalls: int = 32
    copies: int = 32
    copy_distance: int = 7
    keys: int = 256
    values: int = 128
    noise: int = 32

    def __post_init__(self) -> None:
        for name in ("pairs", "fewest_pairs", "recalls", "keys", "values", "noise"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of task recall must be >= 1, got {getattr(self, name)}")
        if self.copies < 0:
            raise ConfigError(f"copies of task recall must be >= 0, got {self.copies}")
        if self.pairs > min(self.keys, self.values):
            raise ConfigError(
                f"pairs of task recall must be at most keys and values, got {self.pairs} pairs of "
                f"{self.keys} keys and {self.values} values: each is in a sequence once"
            )
        if self.fewest_pairs > self.pairs or self.recalls > self.pairs:
            raise ConfigError(
                f"fewest_pairs and recalls of task recall must be at most pairs = {self.pairs}, "
                f"got {self.fewest_pairs} and {self.recalls}"
            )
        if not 1 <= self.copy_distance <= self.window:
            raise ConfigError(
                "copy_distance of task recall must be within the window of local attention, got "
                f"{self.copy_distance} and a window of {self.window}"
            )
        if self.reach < self.window:
            raise ConfigError(
                f"reach of task recall must be at least its window, got {self.reach} and "
                f"{self.window}"
            )
        # the last token is asked nothing
        needed = self.first_question + self.recalls + self.copies + 1
        if self.length < needed:
            raise ConfigError(
                f"a sequence of task recall must have >= {needed} tokens for {self.pairs} pairs, "
                f"{self.recalls} recalls and {self.copies} copies beyond the reach of "
                f"{self.reach}, got {self.length}; raise length or lower these"
            )

    @property
    def first_question(self) -> int:
        """Where questions begin: no window reaches from here into the pairs."""
        return 2 * self.pairs + self.reach

    @property
    def words(self) -> list[str]:
        """The vocabulary, in the order of the ids."""
        kinds = {"k": self.keys, "v": self.values, "n": self.noise}
        return ["copy", *(f"{kind}{i}" for kind, count in kinds.items() for i in range(count))]

    @property
    def source(self) -> bytes:
        return repr(self).encode()

    def held_out(self) -> Self:
        return replace(self, fewest_pairs=self.pairs)

    def draw(self, random: np.random.Generator) -> Example:
        first_key = COPY + 1
        first_value = first_key + self.keys
        first_noise = first_value + self.values
        ids = first_noise + random.integers(self.noise, size=self.length)

        # as many sequences with 4 to 8 pairs as with 64 to 128
        few, many = math.log(self.fewest_pairs), math.log(self.pairs + 1)
        count = min(int(math.exp(random.uniform(few, many)) + 1e-9), self.pairs)
        keys = first_key + random.permutation(self.keys)[:count]
        values = first_value + random.permutation(self.values)[:count]
        places = 2 * random.permutation(self.pairs)[:count]
        ids[places], ids[places + 1] = keys, values

        # all places but the last, which has no next token to label
        asking = self.first_question + random.permutation(self.length - 1 - self.first_question)
        recalling = asking[: self.recalls]
        copying = asking[self.recalls : self.recalls + self.copies]
        asked = random.permutation(count)[np.arange(self.recalls) % count]
        ids[recalling] = keys[asked]
        ids[copying] = COPY

        labels = np.full(self.length, NOT_ASKED)
        labels[recalling + 1] = values[asked]
        labels[copying + 1] = ids[copying - self.copy_distance]
        needs_full = np.zeros(self.length, np.bool_)
        needs_full[recalling] = True
        return Example(ids, labels, needs_full)
