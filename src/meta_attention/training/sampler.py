"""The order of training blocks: a function of seed and epoch, on any number of processes."""

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from meta_attention.errors import DataError


class BlockSampler(Sampler[int]):
    """Shuffled blocks, cut to whole batches.

    Every process draws the same order and takes its share of it, so that a run on two processes,
    or in accumulated parts, or resumed in the middle of an epoch sees the batches of an unbroken
    run on one. Blocks that fill no batch wait for the next epoch, in another order.

    Args:
        blocks: What is sampled from.
        batch_size: Blocks per step, over all processes and accumulated parts.
        seed: Together with ``epoch``, determines the order.
    """

    def __init__(self, blocks: Sized, batch_size: int, seed: int) -> None:
        if len(blocks) < batch_size:
            raise DataError(
                f"the training text must fill a batch of {batch_size} blocks, got {len(blocks)}; "
                "add text, or lower the batch size or the length of a block"
            )
        self.num_blocks = len(blocks)
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0

    @property
    def steps_per_epoch(self) -> int:
        return self.num_blocks // self.batch_size

    def __len__(self) -> int:
        return self.steps_per_epoch * self.batch_size

    def __iter__(self) -> Iterator[int]:
        # two numbers into one seed; the factor is a prime above any number of epochs
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        yield from torch.randperm(self.num_blocks, generator=generator)[: len(self)].tolist()
