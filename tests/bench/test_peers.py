"""Peers compute what routed attention computes, so that their times can be compared."""

import sys
import types
import warnings

import pytest
import torch
import torch.nn.functional as F

from meta_attention.bench import peers
from meta_attention.bench.data import Mix, OpShape, make_heads
from meta_attention.bench.gates import defined_rows
from meta_attention.bench.rows import DEFAULT_SDPA, FLASH
from meta_attention.testing import naive_linear_attention

CPU = torch.device("cpu")


@pytest.mark.parametrize("T", [300, 256])
@pytest.mark.parametrize("mix", [Mix(25, 25, 50), Mix(20, 80, 0), Mix(0, 100, 0)], ids=str)
def test_flex_attention_sees_the_same_keys(mix, T):
    shape = OpShape(2, T, H=2, P=16, window=40)
    data = make_heads(shape, dtype=torch.float32, device=CPU, seed=0)
    routes = mix.draw(2, T, seed=0, device=CPU)
    # lists of different lengths in the rows of the batch
    routes[1, : T // 2] = 1
    planned = peers.plan_flex(routes, shape.window)
    q, k, v = (x.detach() for x in data.heads)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = peers.build_flex(CPU)(
            planned.gather(q), k.transpose(1, 2), v.transpose(1, 2), planned.mask
        )
    found = planned.scatter(rows, q)
    expected = defined_rows(q, k, v, routes, shape.window)
    expected = expected * (routes < 2)[..., None, None]
    torch.testing.assert_close(found, expected)


def test_flex_blocks_are_no_more_than_needed():
    # full attention of 4 blocks sees 1 + 2 + 3 + 4 blocks, those of the diagonal in part
    mask = peers.plan_flex(torch.zeros(1, 512, dtype=torch.long), 64).mask
    assert mask.kv_num_blocks.flatten().tolist() == [1, 1, 1, 1]
    assert mask.full_kv_num_blocks.flatten().tolist() == [0, 1, 2, 3]
    # local rows see their own block and the one before it
    mask = peers.plan_flex(torch.ones(1, 512, dtype=torch.long), 64).mask
    assert mask.kv_num_blocks.flatten().tolist() == [1, 2, 2, 2]
    assert mask.full_kv_num_blocks.flatten().tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("backend", [FLASH, DEFAULT_SDPA])
def test_sdpa_takes_grouped_heads_as_they_are(backend):
    q, k = torch.randn(2, 10, 4, 16), torch.randn(2, 10, 2, 16)
    rows = peers.sdpa(backend, q, k, k)
    grouped = k.repeat_interleave(2, dim=2)
    expected = defined_rows(q, grouped, grouped, torch.zeros(2, 10), 4)
    torch.testing.assert_close(rows, expected)


def test_fla_is_asked_for_the_same_attention(monkeypatch):
    def chunk_linear_attn(q, k, v, scale, normalize):
        scores = torch.einsum("bthp,bshp->bhts", q * scale, k).tril()
        weights = scores / scores.sum(dim=-1, keepdim=True)
        return torch.einsum("bhts,bshp->bthp", weights, v), None

    for name in ("fla", "fla.ops", "fla.ops.linear_attn"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(
        sys.modules["fla.ops.linear_attn"], "chunk_linear_attn", chunk_linear_attn, raising=False
    )
    q, k, v = F.normalize(torch.randn(3, 2, 12, 2, 8))
    expected = naive_linear_attention(q, k, v, causal=True)
    torch.testing.assert_close(peers.fla_linear_attention(q, k, v), expected)
