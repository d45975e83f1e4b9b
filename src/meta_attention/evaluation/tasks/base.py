"""What a task with known need is: tokens, questions among them, and who needs full attention.

A task draws one sequence at a time from a generator of random numbers. A dataset gives every
sequence its own generator, seeded by its index: any of them can be had in any order, on any
process, and again.

Shapes: T tokens of a sequence.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from meta_attention.errors import ConfigError

Ids = npt.NDArray[np.integer[Any]]

# label where nothing is asked
NOT_ASKED = -100


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence. Labels are those of a language model: ``labels[t + 1]`` is what t is asked."""

    input_ids: Ids  # [T]
    labels: Ids  # [T], NOT_ASKED where there is no question
    needs_full: npt.NDArray[np.bool_]  # [T]: asked, and the answer lies out of a window's reach


class Task(Protocol):
    """Draws sequences of one length."""

    @property
    def length(self) -> int: ...

    def draw(self, random: np.random.Generator) -> Example: ...

    def held_out(self) -> Self:
        """The task as it is evaluated, where training has easier sequences as well."""
        ...

    @property
    def source(self) -> bytes:
        """What the task is made from beside its numbers: equal for equal sequences only."""
        ...


class TaskDataset(Dataset[dict[str, Tensor]]):
    """Sequences as ``input_ids``, ``labels`` and ``needs_full`` ``[T]``, made when asked for.

    Args:
        task: What draws them.
        size: How many there are. As many as training takes in all is an endless supply: none is
            seen twice.
        seed: Another seed, other sequences.
        held_out: To evaluate on: sequences that no training set of any seed has, in the form
            that is evaluated.
    """

    def __init__(self, task: Task, size: int, seed: int = 0, *, held_out: bool = False) -> None:
        if size < 1:
            raise ConfigError(f"a task must have >= 1 sequences, got {size}")
        self.task = task.held_out() if held_out else task
        self.size = size
        self.seed = seed
        self.is_held_out = held_out

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.size:
            raise IndexError(f"sequence {index} of {self.size}")
        example = self.task.draw(np.random.default_rng([self.seed, self.is_held_out, index]))
        return {
            "input_ids": torch.from_numpy(example.input_ids.astype(np.int64, copy=False)),
            "labels": torch.from_numpy(example.labels.astype(np.int64, copy=False)),
            "needs_full": torch.from_numpy(example.needs_full),
        }

    def batch(self, start: int, size: int) -> dict[str, Tensor]:
        """Sequences side by side, ``[B, T]`` each; fewer at the end."""
        rows = [self[index] for index in range(start, min(start + size, len(self)))]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of what the sequences are made from and of the first ones."""
        digest = hashlib.sha256(f"{self.seed} {self.is_held_out} {self.size} ".encode())
        digest.update(self.task.source)
        for index in range(min(8, self.size)):
            for values in self[index].values():
                digest.update(values.numpy().tobytes())
        return digest.hexdigest()

    def facts(self) -> dict[str, Any]:
        """What the record of a run says of its data."""
        return {
            "fingerprint": self.fingerprint,
            "blocks": len(self),
            "tokens": len(self) * self.task.length,
        }
