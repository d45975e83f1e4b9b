"""The order of blocks: whole batches, another in every epoch, the same everywhere."""

import pytest

from meta_attention.errors import DataError
from meta_attention.training.sampler import BlockSampler


def test_an_epoch_is_whole_batches_of_different_blocks():
    sampler = BlockSampler(range(19), batch_size=4, seed=0)
    order = list(sampler)
    assert len(order) == len(sampler) == 16
    assert sampler.steps_per_epoch == 4
    assert len(set(order)) == 16
    assert set(order) <= set(range(19))


def test_order_depends_on_seed_and_epoch_only():
    def order(seed, epoch):
        sampler = BlockSampler(range(40), batch_size=4, seed=seed)
        sampler.epoch = epoch
        return tuple(sampler)

    assert order(0, 3) == order(0, 3)
    assert len({order(seed, epoch) for seed in range(3) for epoch in range(3)}) == 9


def test_every_block_is_seen_in_time():
    sampler = BlockSampler(range(7), batch_size=4, seed=0)
    seen = set()
    for sampler.epoch in range(10):
        seen |= set(sampler)
    assert seen == set(range(7))


def test_too_few_blocks_for_a_batch_are_refused():
    with pytest.raises(DataError, match="must fill a batch of 8 blocks, got 7; add text"):
        BlockSampler(range(7), batch_size=8, seed=0)
