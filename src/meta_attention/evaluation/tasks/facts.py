"""Facts in plain words, hidden in real text and asked for at its end: for pretrained models.

``needle`` and ``multi_key`` of ``retrieval`` are learnt; this asks a model for what it can do
already. Somewhere in the text stands "The special code of the blue harbour is 48213.", at its end
"What is the special code of the blue harbour? The special code of the blue harbour is". The answer
is right if greedy decoding writes all of its digits. One pass tells: as long as the digits are
right, greedy decoding reads the tokens that the pass was given.

The fact asked for lies at a given depth, 0 being the beginning of the text. With more ``facts``,
others of the same form lie anywhere, and which one is meant is part of the question;
``distractors`` are sentences of another form that have numbers, too.

Shapes: B batch, T tokens of a sequence.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from meta_attention.errors import ConfigError, DataError
from meta_attention.evaluation.perplexity import Advance, evaluating
from meta_attention.evaluation.tasks.base import Ids

COLOURS = ("blue", "red", "green", "golden", "silver", "black", "white", "grey", "purple", "brown")
PLACES = ("harbour", "garden", "tower", "bridge", "castle", "forest", "island", "market", "school")
NAMES = tuple(f"{colour} {place}" for place, colour in product(PLACES, COLOURS))
OPENING = "The special code of the {} is"
QUESTION = "What is the special code of the {}?"
DISTRACTOR = " In the {} they once counted {} barrels."
# how far a fact may move so that it stands between two sentences, in tokens
NEARBY = 100
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True, slots=True)
class FactExample:
    """One sequence; its last tokens are the answer."""

    input_ids: Ids  # [T]
    answer_length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FactTask:
    """Codes hidden in text, one of them asked for at its end.

    Args:
        text: Tokens to hide them in, one document after the other.
        encode: Text to tokens, without special ones.
        length: Tokens of a sequence with its answer, T.
        facts: Sentences that tell a code; one is asked for.
        distractors: Sentences that have a number and tell no code.
        digits: Of a code.
        frame: Tokens before the text, and between the question and the answer's sentence: what a
            chat template puts there.
        is_end: ``[V]``, tokens that end a sentence; facts go after one where one is near.
    """

    text: Ids
    encode: Callable[[str], Ids]
    length: int
    facts: int = 1
    distractors: int = 0
    digits: int = 5
    frame: tuple[Ids, Ids] = field(
        default_factory=lambda: (np.zeros(0, np.int64), np.zeros(0, np.int64))
    )
    is_end: npt.NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.facts <= len(NAMES) - self.distractors or self.distractors < 0:
            raise ConfigError(
                f"facts must be >= 1 and with distractors at most {len(NAMES)}, got {self.facts} "
                f"and {self.distractors}"
            )
        if not 1 <= self.digits <= 18:
            raise ConfigError(f"digits of a code must be between 1 and 18, got {self.digits}")
        # drawn once to know how long sentences are; names differ by a token or two
        sample = self._sentences(np.random.default_rng(0))
        needed = sum(len(part) + 4 for part in (*self.frame, *sample[0], *sample[1])) + 16
        if self.length < needed:
            raise ConfigError(
                f"a sequence of {self.facts} facts and {self.distractors} distractors must have >= "
                f"{needed} tokens, got {self.length}; raise the length (--lengths), have fewer of "
                "them, or ask for no facts (--questions 0)"
            )
        if len(self.text) < self.length:
            raise DataError(
                f"the text to hide facts in must have >= {self.length} tokens, got "
                f"{len(self.text)}; add text or lower the length"
            )

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        text: Ids,
        *,
        length: int,
        is_chat: bool = False,
        **sizes: int,
    ) -> "FactTask":
        """The task for a tokenizer.

        Args:
            tokenizer: Of the model that is asked.
            text: Its tokens of a text.
            length: Tokens of a sequence.
            is_chat: Ask through the tokenizer's chat template.
            sizes: ``facts``, ``distractors`` and ``digits``.
        """

        def encode(text: str, **options: Any) -> Ids:
            ids = tokenizer(text, add_special_tokens=False, verbose=False, **options)["input_ids"]
            return np.array(ids, dtype=np.int64)

        before, after = _chat_frame(tokenizer) if is_chat else (_opening(tokenizer), "\n")
        frame = (encode(before), encode(after))
        return cls(
            text=text,
            encode=encode,
            length=length,
            frame=frame,
            is_end=_sentence_ends(tokenizer),
            **sizes,
        )

    def draw(self, random: np.random.Generator, depth: float) -> FactExample:
        """A sequence whose fact asked for lies at ``depth``, between 0 and 1, of the text."""
        hidden, ending, answer_length = self._sentences(random)
        size = self.length - len(self.frame[0]) - sum(map(len, (*hidden, *ending)))
        begin = int(random.integers(len(self.text) - size + 1))
        text = self.text[begin : begin + size]
        cuts = [self._between_sentences(text, round(depth * size))]
        cuts += [
            self._between_sentences(text, int(at))
            for at in random.integers(size + 1, size=len(hidden) - 1)
        ]
        # facts that fall together stay in the order they were drawn in
        order = np.argsort(cuts, kind="stable")
        pieces = np.split(text, [cuts[index] for index in order])
        parts = [self.frame[0], pieces[0]]
        for index, piece in zip(order, pieces[1:], strict=True):
            parts += [hidden[index], piece]
        ids = np.concatenate([*parts, *ending]).astype(np.int64)
        assert len(ids) == self.length
        return FactExample(ids, answer_length)

    def _sentences(self, random: np.random.Generator) -> tuple[list[Ids], list[Ids], int]:
        """What is hidden, the fact asked for first; what stands at the end; the answer's size."""
        names = [NAMES[i] for i in random.permutation(len(NAMES))[: self.facts + self.distractors]]
        low, high = 10 ** (self.digits - 1), 10**self.digits
        codes = random.permutation(np.unique(random.integers(low, high, size=4 * len(names) + 8)))
        if len(codes) < len(names):
            raise ConfigError(
                f"{len(names)} codes of {self.digits} digits are too many; add digits"
            )
        answers = [self.encode(f" {code}") for code in codes[: self.facts]]
        openings = [OPENING.format(name) for name in names]
        hidden = [
            np.concatenate([self.encode(f" {opening}"), answer, self.encode(".")])
            for opening, answer in zip(openings, answers, strict=False)
        ]
        hidden += [
            self.encode(DISTRACTOR.format(name, code))
            for name, code in zip(names[self.facts :], codes[self.facts :], strict=False)
        ]
        ending = [
            self.encode(f"\n\n{QUESTION.format(names[0])}"),
            self.frame[1],
            self.encode(openings[0]),
            answers[0],
        ]
        return hidden, ending, len(answers[0])

    def _between_sentences(self, text: Ids, at: int) -> int:
        """The place nearest to ``at`` where a sentence has ended, or ``at`` if none is near."""
        if self.is_end is None:
            return at
        low = max(at - NEARBY, 0)
        ends = np.flatnonzero(self.is_end[text[low : at + NEARBY]]) + low + 1
        return int(ends[np.abs(ends - at).argmin()]) if len(ends) else at


@dataclass(frozen=True, slots=True)
class FactResult:
    """How many answers are right, and how probable they were."""

    accuracy: float
    """Share of the answers of which all tokens are right."""
    token_accuracy: float
    """Share of the answers' tokens that are most probable given those before."""
    log_probability: float
    """Of the whole answer in nats, mean over sequences. Finer than accuracy."""
    num_sequences: int
    length: int
    by_depth: Mapping[str, Mapping[str, float]]
    """``accuracy`` and ``log_probability`` by depth."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_facts(
    model: PreTrainedModel,
    task: FactTask,
    *,
    depths: Sequence[float] = DEPTHS,
    per_depth: int = 4,
    seed: int = 0,
    batch_size: int = 1,
    advance: Advance = lambda done, total: None,
) -> FactResult:
    """Ask a causal language model, routed or any other.

    Args:
        model: The model, on the device and in the dtype to measure.
        task: What is asked.
        depths: Where the facts asked for lie.
        per_depth: Sequences for each depth.
        seed: Another seed, other sequences; the same for every model.
        batch_size: Sequences in one call.
        advance: Called with the sequences asked so far and in all.
    """
    if not depths or not all(0.0 <= depth <= 1.0 for depth in depths):
        raise ConfigError(f"depths must be between 0 and 1, got {list(depths)}")
    if per_depth < 1:
        raise ConfigError(f"sequences for each depth must be >= 1, got {per_depth}")
    places = [depth for depth in depths for _ in range(per_depth)]
    rows: list[list[float]] = []  # right, share of tokens right, log-probability
    with evaluating(model):
        for start in range(0, len(places), batch_size):
            batch = [
                task.draw(np.random.default_rng([seed, start + i]), depth)
                for i, depth in enumerate(places[start : start + batch_size])
            ]
            ids = torch.from_numpy(np.stack([example.input_ids for example in batch]))
            ids = ids.to(model.device)
            longest = max(example.answer_length for example in batch)
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=longest + 1).logits
            for row, example in enumerate(batch):
                n = example.answer_length
                answer = ids[row, -n:]
                log_probs = logits[row, -n - 1 : -1].float().log_softmax(dim=-1)
                is_right = log_probs.argmax(dim=-1) == answer
                judged = (
                    is_right.all().float(),
                    is_right.float().mean(),
                    log_probs.gather(-1, answer[:, None]).sum(),
                )
                rows.append(torch.stack(judged).tolist())
            advance(len(rows), len(places))
    figures, at = np.array(rows), np.array(places)
    accuracy, token_accuracy, log_probability = figures.mean(axis=0).tolist()
    return FactResult(
        accuracy,
        token_accuracy,
        log_probability,
        len(rows),
        task.length,
        {
            f"{depth:g}": {
                "accuracy": float(figures[at == depth, 0].mean()),
                "log_probability": float(figures[at == depth, 2].mean()),
            }
            for depth in dict.fromkeys(depths)
        },
    )


def _opening(tokenizer: PreTrainedTokenizerBase) -> str:
    """What the tokenizer puts before every text, if anything."""
    first = tokenizer("a")["input_ids"][:1]
    is_special = bool(first) and first[0] == tokenizer.bos_token_id
    return str(tokenizer.bos_token) if is_special else ""


def _chat_frame(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """What a chat template puts before and after what the user says."""
    if not tokenizer.chat_template:
        raise ConfigError("the tokenizer has no chat template; ask without one")
    mark = "<<here>>"
    text: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
    )
    before, _, after = str(text).partition(mark)
    return before, after


def _sentence_ends(tokenizer: PreTrainedTokenizerBase) -> npt.NDArray[np.bool_]:
    """[V], tokens that end in a full stop, a question or an exclamation mark."""
    size = max(tokenizer.get_vocab().values()) + 1
    # byte-level vocabularies spell these as themselves
    tokens = tokenizer.convert_ids_to_tokens(list(range(size)))
    return np.array([(token or "")[-1:] in tuple(".?!") for token in tokens])
