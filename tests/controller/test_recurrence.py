"""When a token was last seen: as defined, also of padded, packed and growing rows."""

import pytest
import torch

from meta_attention import MetaAttentionConfig
from meta_attention.controller import RecurrenceEmbedding, last_seen
from meta_attention.controller.recurrence import newest_last_seen


def by_definition(row, num_lengths):
    """Of a list of tokens: for each, distances of the runs that end with it."""
    distances = []
    for t in range(len(row)):
        of_token = []
        for n in range(1, num_lengths + 1):
            ends = [s for s in range(n - 1, t) if row[s - n + 1 : s + 1] == row[t - n + 1 : t + 1]]
            of_token.append(t - ends[-1] if ends and t >= n - 1 else 0)
        distances.append(of_token)
    return distances


def draw(*shape, vocab=4, seed=0):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def test_a_token_was_last_seen_where_it_last_stood():
    ids = torch.tensor([[7, 8, 7, 8, 9, 8]])
    alone, of_two = last_seen(ids, 2)[0].T.tolist()
    assert alone == [0, 0, 2, 2, 0, 2]
    assert of_two == [0, 0, 0, 2, 0, 0]


@pytest.mark.parametrize("num_lengths", [1, 3, 8])
@pytest.mark.parametrize("vocab", [1, 2, 4, 1 << 40])
def test_distances_are_as_defined(num_lengths, vocab):
    ids = draw(3, 40, vocab=vocab)
    expected = [by_definition(row, num_lengths) for row in ids.tolist()]
    assert last_seen(ids, num_lengths).tolist() == expected


def test_padding_has_no_distance_and_lies_between_no_tokens():
    ids = draw(4, 30)
    is_token = draw(4, 30, vocab=3, seed=1) > 0
    is_token[3] = False
    found = last_seen(ids, 3, is_token)
    assert not found[~is_token].any()
    for row, keep, distances in zip(ids, is_token, found, strict=True):
        assert distances[keep].tolist() == by_definition(row[keep].tolist(), 3)


def test_nothing_is_found_in_another_document():
    ids = draw(1, 30)
    documents = torch.tensor([[1] * 9 + [2] * 12 + [3] * 9])
    parts = [last_seen(part, 3) for part in ids.split([9, 12, 9], dim=1)]
    assert torch.equal(last_seen(ids, 3, None, documents), torch.cat(parts, dim=1))


def test_what_follows_changes_nothing():
    ids = draw(2, 50)
    assert torch.equal(last_seen(ids, 3)[:, :20], last_seen(ids[:, :20], 3))


@pytest.mark.parametrize("padding", [0, 5])
def test_the_newest_token_is_told_as_all_are(padding):
    ids = draw(2, 30)
    is_token = torch.arange(30).expand(2, 30) >= padding
    expected = last_seen(ids, 3, is_token)
    tokens = torch.full((2, 40), 99)  # with room that holds anything
    tokens[:, :30] = ids.masked_fill(~is_token, -1)
    for t in range(30):
        found = newest_last_seen(tokens, torch.tensor([t]), 3)
        assert torch.equal(found, expected[:, t : t + 1]), t


def make_embedding(**settings):
    config = MetaAttentionConfig(
        hidden_size=8, num_attention_heads=2, max_position_embeddings=64, recurrence=2, **settings
    )
    return RecurrenceEmbedding(config)


def test_a_new_embedding_adds_nothing():
    distances = torch.tensor([[[0, 0], [5, 64]]])
    assert not make_embedding()(distances).any()


def test_distances_between_powers_of_two_are_one_to_it():
    embedding = make_embedding()
    torch.nn.init.normal_(embedding.weight)

    def row(distance):
        return embedding(torch.tensor([[[distance, 0]]]))

    assert torch.equal(row(4), row(7))
    assert torch.equal(row(33), row(63))
    different = [row(d) for d in (0, 1, 2, 4, 8, 16, 32, 64)]
    assert len({tuple(x.flatten().tolist()) for x in different}) == 8
    # runs of each length count for themselves
    assert not torch.equal(row(4), embedding(torch.tensor([[[0, 4]]])))


def test_it_stays_in_float32():
    assert make_embedding().bfloat16().weight.dtype == torch.float32
