"""Text in which something far back must be found again, made of the training text itself.

The next word of a book is mostly told by the words just before it: a window everywhere costs a
pretrained model little there, and most of its ability to look things up. A router learns to keep
that only where it is needed. So a share of the blocks is changed, in two ways by turns:

- copies: passages of the block stand in it once more, further on;
- facts: short sentences that give a name something, one to a line, and later lines that ask for it.

A block is a function of the seed and its index alone, so any order and a resumed run see the same.

Shapes: T length of a block.
"""

import re
from collections.abc import Sequence
from itertools import product
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from meta_attention.adapt.router import routers_of
from meta_attention.errors import DataError
from meta_attention.evaluation.tasks.base import Ids
from meta_attention.experts import SoftmaxExpert

Kind = Literal["text", "copies", "facts"]

# tokens of a passage, and the shares of a block that copies take
PASSAGE = (16, 128)
COPIES = (0.05, 0.15)
# to place passages that do not fall on others
MOST_TRIES = 100
# share of a block that facts and questions take
FACTS = 0.15

# Neither wording nor names nor values are those of ``evaluation/tasks/facts.py``, which tests what
# is learnt here: it tells codes of five digits of coloured places, and these are people's things,
# words and numbers of other lengths. A test compares the two.
SENTENCES = (
    ("{name} chose {value}.", "And what did {name} choose? {name} chose {value}."),
    ("{name} -> {value}", "again: {name} -> {value}"),
    ("A parcel for {name}: {value}.", "The parcel for {name} held {value}."),
    ("{name} (see {value}) wrote first.", "Of those who wrote, {name} (see {value})."),
    ('"Call me {value}," said {name}.', '{name} had said: "Call me {value},"'),
    ("[{name} = {value}]", "as before, [{name} = {value}]"),
)
FIRST = (
    "Agnes Boris Clara Dmitri Edith Farid Greta Hugo Ingrid Jonas Karin Leon Mabel Nadia Oscar "
    "Petra Quentin Rosa Samuel Tilda Ursula Victor Wanda Yusuf"
)
LAST = (
    "Abbot Barlow Carver Dalton Ellis Fenner Gibson Hobbs Irving Jarvis Keller Lowell Mercer "
    "Norton Ogden Potter Quigley Ramsey Sutton Thorne Upton Vance Wilder York"
)
NAMES = tuple(f"{first} {last}" for first, last in product(FIRST.split(), LAST.split()))
THINGS = (
    "almonds amber anchors barley bells bottles butter buttons candles carpets cedar chalk cheese "
    "cinnamon clocks copper cotton feathers flutes ginger gloves hammers honey ink ivory kettles "
    "lanterns lemons linen maps marbles mirrors mustard nails needles onions oysters paper pearls "
    "pepper plums pottery ribbons ropes saddles salt scissors shells silk soap spoons sugar tea "
    "thimbles timber tobacco turnips umbrellas velvet violins walnuts wax wheat wool"
)
WORDS = tuple(THINGS.split())
# lengths of numbers; half of all values are words
DIGITS = (2, 3, 4, 6)
NUM_NUMBERS = 1000


# a name or a value in a sentence, and whether a space stands before it
FIELD = re.compile(r"( ?\{(?:name|value)\})")


class TextBlocks(Protocol):
    """Blocks of one length, as ``PackedDataset`` has them."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Tensor]: ...


class RecallBlocks(Dataset[dict[str, Tensor]]):
    """Blocks of a text, some of them changed so that what is far back must be found again.

    Args:
        blocks: The text.
        tokenizer: What it was tokenised by.
        share: Share of the blocks that are changed; the others are as they were.
        window: What is found again lies further back than this.
        seed: Determines which blocks are changed, and how.
    """

    def __init__(
        self,
        blocks: TextBlocks,
        tokenizer: PreTrainedTokenizerBase,
        *,
        share: float,
        window: int,
        seed: int = 0,
    ) -> None:
        self.blocks, self.window, self.seed = blocks, window, seed
        self.num_changed = round(share * len(blocks))
        # a rank for every block, in an order of their own: the first are changed, by turns
        self.ranks = np.random.default_rng(seed).permutation(len(blocks))
        if not self.num_changed:
            return
        self.lines = FactLines(tokenizer)
        length = len(blocks[0]["input_ids"])
        needed = window + 2 + max(self.lines.longest, 2 * PASSAGE[0])
        if length < needed:
            raise DataError(
                f"recall_share must have blocks of >= {needed} tokens, with this tokenizer and a "
                f"window of {window}, got {length}; raise the length, or set recall_share to 0"
            )

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        block, kind = self.blocks[index], self.kind_of(index)
        if kind == "text":
            return block
        random = np.random.default_rng([self.seed, index])
        change = self._copies if kind == "copies" else self._facts
        ids = torch.from_numpy(change(block["input_ids"].numpy(), random))
        return {"input_ids": ids, "labels": ids.clone()}

    def kind_of(self, index: int) -> Kind:
        """What becomes of a block."""
        rank = int(self.ranks[index])
        if rank >= self.num_changed:
            return "text"
        return "copies" if rank % 2 == 0 else "facts"

    def _copies(self, text: Ids, random: np.random.Generator) -> Ids:
        """Passages of a block in place of later ones."""
        T, ids = len(text), text.copy()
        longest = min(PASSAGE[1], max(PASSAGE[0], T // 8), T - self.window - 1)
        left, is_copy = int(random.uniform(*COPIES) * T), np.zeros(T, np.bool_)
        passages: list[tuple[int, int, int]] = []
        for _ in range(MOST_TRIES):
            if passages and left < PASSAGE[0]:
                break
            most = max(PASSAGE[0], min(longest, left))
            size = int(random.integers(PASSAGE[0], most + 1))
            source, at = self._places(T - size, random, least=size)
            if not is_copy[at : at + size].any():
                is_copy[at : at + size] = True
                passages.append((at, source, size))
                left -= size
        # from left to right: what is copied then stands for good
        for at, source, size in sorted(passages):
            ids[at : at + size] = ids[source : source + size]
        return ids

    def _facts(self, text: Ids, random: np.random.Generator) -> Ids:
        """Lines among the text that tell something, and later ones that ask for it."""
        # so much text is left that what is asked for lies beyond the window
        most = min(int(FACTS * len(text)), len(text) - self.window - 1)
        pairs = self.lines.draw(random, most)
        lines = [line for pair in pairs for line in pair]
        size = len(text) - sum(map(len, lines))
        cuts = [place for _ in pairs for place in self._places(size, random)]
        order = np.argsort(cuts, kind="stable")
        pieces = np.split(text[:size], [cuts[index] for index in order])
        parts = [pieces[0]]
        for index, piece in zip(order, pieces[1:], strict=True):
            parts += [lines[index], piece]
        return np.concatenate(parts)

    def _places(self, last: int, random: np.random.Generator, least: int = 1) -> tuple[int, int]:
        """Two places up to ``last``, at any distance beyond the window."""
        distance = int(random.integers(max(self.window + 1, least), last + 1))
        begin = int(random.integers(last - distance + 1))
        return begin, begin + distance


class FactLines:
    """Lines that tell and ask, put together from parts that were tokenised once.

    Args:
        tokenizer: What tokenises them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        def encode(texts: Sequence[str]) -> list[Ids]:
            ids = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
            return [np.array(row, np.int64) for row in ids]

        random = np.random.default_rng(0)
        digits = random.choice(DIGITS, NUM_NUMBERS)
        numbers = [str(random.integers(10 ** (n - 1), 10**n)) for n in digits]
        pools = {"{name}": NAMES, "{value}": (*WORDS, *numbers)}
        self.pools = {
            space + field: encode([space + text for text in texts])
            for field, texts in pools.items()
            for space in ("", " ")
        }
        # a field is left as it is written; words around it are tokens
        self.sentences: list[list[list[str | Ids]]] = [
            [
                [x if x in self.pools else encode([x])[0] for x in FIELD.split(f"\n{line}\n") if x]
                for line in pair
            ]
            for pair in SENTENCES
        ]
        sizes = {field: max(map(len, pool)) for field, pool in self.pools.items()}
        self.longest = max(
            sum(sizes[x] if isinstance(x, str) else len(x) for line in pair for x in line)
            for pair in self.sentences
        )
        """Tokens of a line that tells and one that asks, at most."""

    def draw(self, random: np.random.Generator, num_tokens: int) -> list[tuple[Ids, Ids]]:
        """Lines that tell and lines that ask, in pairs; at least one, then as many as fit."""
        pairs: list[tuple[Ids, Ids]] = []
        for name in random.permutation(len(NAMES)):
            is_word = random.random() < 0.5
            value = (
                random.integers(len(WORDS))
                if is_word
                else len(WORDS) + random.integers(NUM_NUMBERS)
            )
            chosen = {"{name}": name, "{value}": value}
            told, asked = (
                np.concatenate(
                    [self.pools[x][chosen[x.strip()]] if isinstance(x, str) else x for x in line]
                )
                for line in self.sentences[random.integers(len(self.sentences))]
            )
            num_tokens -= len(told) + len(asked)
            if pairs and num_tokens < 0:
                break
            pairs.append((told, asked))
        return pairs


def narrowest_window(model: nn.Module) -> int:
    """Of the experts of an adapted model; 0 where none has one."""
    experts = [expert for router in routers_of(model) for expert in router.experts]
    windows = [expert.window for expert in experts if isinstance(expert, SoftmaxExpert)]
    return min((window for window in windows if window is not None), default=0)
