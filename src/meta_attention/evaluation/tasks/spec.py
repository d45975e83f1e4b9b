"""A task by its name and sizes, as commands and records of runs write it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from meta_attention.errors import ConfigError
from meta_attention.evaluation.tasks.base import Ids
from meta_attention.evaluation.tasks.recall import RecallTask
from meta_attention.evaluation.tasks.retrieval import RetrievalTask

TASK_SIZES: dict[str, dict[str, int]] = {
    "recall": {
        "pairs": 128,
        "fewest_pairs": 4,
        "recalls": 32,
        "copies": 32,
        "copy_distance": 7,
        "keys": 256,
        "values": 128,
        "noise": 32,
    },
    "needle": {"digits": 4},
    "multi_key": {"facts": 6, "questions": 3, "digits": 4},
}
"""The tasks, and the sizes each can be given, with their defaults."""


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """A task, and the sizes that differ from the defaults."""

    name: str
    sizes: Mapping[str, int]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``"recall"`` or ``"recall:pairs=16,recalls=8"``."""
        name, _, rest = text.partition(":")
        if name not in TASK_SIZES:
            raise ConfigError(f"task must be one of {', '.join(TASK_SIZES)}, got {name!r}")
        sizes = {}
        for part in rest.split(",") if rest else ():
            size, _, value = part.partition("=")
            if size not in TASK_SIZES[name]:
                raise ConfigError(
                    f"sizes of task {name} must be of {', '.join(TASK_SIZES[name])}, got {part!r}"
                )
            if not value.isdecimal():
                raise ConfigError(f"sizes of a task must be NAME=NUMBER, got {part!r}")
            sizes[size] = int(value)
        return cls(name, sizes)

    def __str__(self) -> str:
        """The form that :meth:`parse` reads."""
        sizes = ",".join(f"{name}={value}" for name, value in self.sizes.items())
        return f"{self.name}:{sizes}" if sizes else self.name

    @property
    def is_text(self) -> bool:
        """Whether it is made of text, in place of a vocabulary of its own."""
        return self.name != "recall"

    def or_sizes_of(self, other: Self) -> Self:
        """With the sizes of another spec of the same task where this one has none."""
        return type(self)(self.name, {**other.sizes, **self.sizes})

    def build(
        self,
        *,
        length: int,
        window: int,
        layers: int,
        text: Ids | None = None,
        encode: Callable[[str], Ids] | None = None,
    ) -> RecallTask | RetrievalTask:
        """The task for a model.

        Args:
            length: Tokens of a sequence, T.
            window: How far local attention sees in a layer of the model.
            layers: How many there are: what one layer sees, the next passes on.
            text: Tokens of a text, for the tasks made of it.
            encode: Text to tokens, likewise.
        """
        sizes: dict[str, Any] = TASK_SIZES[self.name] | dict(self.sizes)
        sizes |= {"length": length, "reach": window * layers}
        if not self.is_text:
            return RecallTask(window=window, **sizes)
        assert text is not None
        assert encode is not None
        return RetrievalTask(text=text, encode=encode, **sizes)
