"""Full, local and linear attention agree with their definitions, gradients included."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meta_attention.errors import BackendUnavailableError, ConfigError, ShapeError
from meta_attention.ops.full_attention import full_attention
from meta_attention.ops.linear_attention import linear_attention
from meta_attention.ops.local_attention import local_attention
from meta_attention.testing import (
    assert_within_error_budget,
    naive_full_attention,
    naive_linear_attention,
    naive_local_attention,
)


def linear_rows(*heads, **kwargs):
    rows, _ = linear_attention(*heads, **kwargs)
    return rows


OPS: dict[str, Any] = {
    "full": (full_attention, naive_full_attention),
    "linear": (linear_rows, naive_linear_attention),
    "local": (local_attention, naive_local_attention),
}


SCORES = {"scale": 0.3, "softcap": 3.0}


def pair(op: str, window: int, num_sinks: int = 0, **scores: float | None):
    """The function under test and its definition, with what there is of the arguments bound."""
    tested, definition = OPS[op]
    if op == "linear":
        return tested, definition
    bound: dict[str, Any] = scores
    if op == "local":
        bound = {"window": window, "num_sinks": num_sinks, **scores}
    return partial(tested, **bound), partial(definition, **bound)


def make_heads(B, T, H, K, P, dtype=torch.float64):
    generator = torch.Generator().manual_seed(B * 1000 + T)
    return [torch.randn(B, T, n, P, generator=generator).to(dtype) for n in (H, K, K)]


def make_mask(padding: str, B: int, T: int) -> Tensor | None:
    """Row b has b + 1 positions of padding; with "all", row 0 has nothing else."""
    if padding == "none":
        return None
    position = torch.arange(T).expand(B, T)
    count = torch.arange(1, B + 1)[:, None].clamp(max=T - 1)
    mask = position >= count if padding == "left" else position < T - count
    if padding == "all":
        mask[0] = False
    return mask


def run(function, heads, **kwargs) -> dict[str, Tensor]:
    """Rows and the gradients of a fixed weighted sum of them."""
    inputs = [x.clone().requires_grad_() for x in heads]
    rows = function(*inputs, **kwargs)
    upstream = torch.linspace(-1, 1, rows.numel()).view_as(rows).to(rows.dtype)
    grads = torch.autograd.grad(rows, inputs, upstream)
    return dict(zip(("rows", "d_query", "d_key", "d_value"), (rows.detach(), *grads), strict=True))


@pytest.mark.parametrize("op", OPS)
@given(
    B=st.integers(1, 3),
    T=st.sampled_from([1, 2, 63, 64, 65, 130, 500]),
    K=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3]),
    P=st.sampled_from([1, 8, 32]),
    window=st.sampled_from([1, 7, 64, 100, 1000]),
    causal=st.booleans(),
    padding=st.sampled_from(["none", "left", "right", "all"]),
    num_sinks=st.sampled_from([0, 0, 3, 80, 1000]),
    scale=st.sampled_from([None, None, 0.7]),
    softcap=st.sampled_from([None, None, 2.0]),
)
def test_op_equals_its_definition_in_float64(
    op, B, T, K, group, P, window, causal, padding, num_sinks, scale, softcap
):
    tested, definition = pair(op, window, num_sinks, scale=scale, softcap=softcap)
    heads = make_heads(B, T, K * group, K, P)
    mask = make_mask(padding, B, T)
    actual = run(tested, heads, causal=causal, mask=mask)
    expected = run(definition, heads, causal=causal, mask=mask)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize(
    ("op", "scores"),
    [*((op, {}) for op in OPS), ("full", SCORES), ("local", {"num_sinks": 4} | SCORES)],
    ids=str,
)
def test_op_is_as_accurate_as_plain_pytorch(op, scores, causal, dtype):
    tested, definition = pair(op, window=33, **scores)
    heads = make_heads(2, 200, 4, 2, 32, dtype)
    oracle = run(definition, [x.double() for x in heads], causal=causal)
    plain = run(definition, heads, causal=causal)
    actual = run(tested, heads, causal=causal)
    for name in oracle:
        assert_within_error_budget(f"{op} {name}", actual[name], oracle[name], plain[name])


def test_full_attention_with_padding_is_the_same_across_query_blocks():
    # longer than one block of queries, so the mask is built in parts
    heads = make_heads(1, 2050, 1, 1, 4)
    mask = torch.arange(2050).ge(3)[None]
    for causal in (True, False):
        actual = full_attention(*heads, causal=causal, mask=mask)
        expected = naive_full_attention(*heads, causal=causal, mask=mask)
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("op", ["linear", "local"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_long_sequences_are_the_same_across_segments(op, causal, monkeypatch):
    """With small segments a short sequence has several, the last one not full."""
    tested, definition = pair(op, window=70, num_sinks=5)
    monkeypatch.setattr(f"meta_attention.ops.{op}_attention.reference.SEGMENT", 128)
    heads = make_heads(2, 450, 4, 2, 8)
    mask = make_mask("left", 2, 450)
    actual = run(tested, heads, causal=causal, mask=mask)
    expected = run(definition, heads, causal=causal, mask=mask)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("T", [1, 2, 63, 130])
@pytest.mark.parametrize("past", [1, 64, 200])
@pytest.mark.parametrize("padding", ["none", "left", "all"])
@pytest.mark.parametrize("op", OPS)
def test_the_last_queries_alone_give_the_last_rows(op, padding, past, T):
    """What decoding and prompts in chunks rely on."""
    tested, _ = pair(op, window=70, num_sinks=past % 7)
    query, key, value = make_heads(2, past + T, 4, 2, 8)
    mask = make_mask(padding, 2, past + T)
    whole = tested(query, key, value, causal=True, mask=mask)
    if op == "linear":
        first, last = (None, None) if mask is None else (mask[:, :past], mask[:, past:])
        heads = [x[:, :past] for x in (query, key, value)]
        _, state = linear_attention(*heads, causal=True, mask=first)
        heads = [x[:, past:] for x in (query, key, value)]
        rows, _ = linear_attention(*heads, causal=True, mask=last, initial_state=state)
    else:
        rows = tested(query[:, past:], key, value, causal=True, mask=mask)
    torch.testing.assert_close(rows, whole[:, past:], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("op", OPS)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=6),
    padding=st.integers(0, 70),
    segment=st.sampled_from([64, 4096]),
    num_sinks=st.sampled_from([0, 0, 4]),
)
def test_packed_documents_do_not_see_each_other(op, lengths, padding, segment, num_sinks):
    tested, definition = pair(op, window=33, num_sinks=num_sinks)
    documents = [torch.full((n,), i + 1) for i, n in enumerate(lengths)]
    mask = torch.cat([torch.zeros(padding, dtype=torch.long), *documents])[None]
    heads = make_heads(1, mask.shape[1], 4, 2, 8)
    with pytest.MonkeyPatch.context() as patch:
        if op != "full":
            patch.setattr(f"meta_attention.ops.{op}_attention.reference.SEGMENT", segment)
        actual = run(tested, heads, causal=True, mask=mask)
    expected = run(definition, heads, causal=True, mask=mask)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-9, atol=1e-9)
    # and each document alone gives the same rows
    alone = [
        tested(*(x[:, mask[0] == i + 1] for x in heads), causal=True) for i in range(len(lengths))
    ]
    torch.testing.assert_close(
        actual["rows"][:, padding:], torch.cat(alone, 1), rtol=1e-9, atol=1e-9
    )


def test_linear_attention_says_where_its_past_belongs():
    query, key, value = make_heads(1, 6, 2, 2, 4)
    with pytest.raises(ShapeError, match="the tokens before them are in initial_state"):
        linear_attention(query[:, 4:], key, value, causal=True)
    with pytest.raises(ConfigError, match="only when causal"):
        linear_attention(query, key, value, causal=False, mask=torch.ones(1, 6, dtype=torch.long))


@pytest.mark.parametrize("shift", [30.0, 60.0, 200.0])
def test_linear_attention_survives_features_that_underflow(shift):
    heads = [x.requires_grad_() for x in make_heads(1, 70, 2, 2, 4, torch.float32)]
    query, key, value = heads
    rows = linear_rows(query - shift, key - shift, value, causal=True)
    assert rows.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(rows.sum(), heads))


def test_linear_attention_is_exact_for_queries_far_below_zero():
    query, key, value = make_heads(1, 70, 2, 2, 4, torch.float32)
    # exp(-100) is 0 in float32, but below 0 a common shift of a query's features cancels
    rows = linear_rows(query - 100.0, key, value, causal=True)
    shifted = query.double() - query.double().amax(dim=-1, keepdim=True)
    exact = naive_linear_attention(shifted, key.double(), value.double(), causal=True)
    torch.testing.assert_close(rows.double(), exact, rtol=1e-4, atol=1e-4)


def test_linear_attention_sums_past_the_range_of_float16():
    # 4096 keys of 64 features near 30 sum to far more than 65504
    query = key = torch.full((1, 4096, 1, 64), 30.0, dtype=torch.float16)
    value = torch.ones_like(query)
    rows = linear_rows(query, key, value, causal=True)
    torch.testing.assert_close(rows, value)


@pytest.mark.parametrize("op", ["linear", "local"])
def test_no_tensor_grows_with_the_square_of_the_length(op):
    tested, _ = pair(op, window=16)
    T = 20_000
    largest = LargestTensor()
    with largest:
        tested(*make_heads(1, T, 2, 2, 16, torch.float32), causal=True)
    assert largest.numel < T * 2 * 16 * 8


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the size of the largest tensor any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.numel = max(self.numel, leaf.numel())
        return out


@pytest.mark.parametrize("op", OPS)
def test_triton_asked_for_by_name_is_not_replaced(op):
    """Kernels have no float64, so asking for one raises; nor do they run on a CPU as they are."""
    tested, _ = pair(op, window=4)
    with pytest.raises(BackendUnavailableError, match=r"computes in .*, got torch.float64"):
        tested(*make_heads(1, 4, 1, 1, 4), causal=True, impl="triton")


@pytest.mark.parametrize("op", OPS)
def test_kernels_on_a_cpu_need_the_interpreter(op, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    tested, _ = pair(op, window=4)
    with pytest.raises(BackendUnavailableError, match="needs CUDA tensors, got cpu"):
        tested(*make_heads(1, 4, 1, 1, 4, torch.float32), causal=True, impl="triton")


@pytest.mark.parametrize("op", OPS)
def test_unknown_implementation_lists_the_known(op):
    tested, _ = pair(op, window=4)
    with pytest.raises(ConfigError, match="auto, reference, triton, got 'cuda'"):
        tested(*make_heads(1, 4, 1, 1, 4), causal=True, impl="cuda")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": (2, 5, 8)}, r"query must be \[B, T, H, P\], got \[2, 5, 8\]"),
        ({"key": (2, 4, 2, 8)}, r"key must be .* S >= 5, K, 8\] .* got \[2, 4, 2, 8\]"),
        ({"key": (3, 5, 2, 8)}, r"key must be .* got \[3, 5, 2, 8\]"),
        ({"value": (2, 5, 2, 4)}, r"value must be .* got \[2, 5, 2, 4\]"),
        ({"value": (2, 5, 4, 8)}, r"one shape, got \[2, 5, 2, 8\] and \[2, 5, 4, 8\]"),
        ({"query": (2, 5, 3, 8)}, r"multiple of key-value heads, got query \[2, 5, 3, 8\]"),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_wrong_shapes_are_named(op, change, message):
    tested, _ = pair(op, window=4)
    shapes = {"query": (2, 5, 4, 8), "key": (2, 5, 2, 8), "value": (2, 5, 2, 8)} | change
    with pytest.raises(ShapeError, match=message):
        tested(*(torch.zeros(shape) for shape in shapes.values()), causal=True)


def test_wrong_masks_are_named():
    heads = make_heads(2, 5, 4, 2, 8)
    with pytest.raises(ShapeError, match=r"mask must be \[B, T\] = \[2, 5\].* got \[2, 6\]"):
        full_attention(*heads, causal=True, mask=torch.ones(2, 6, dtype=torch.bool))
    with pytest.raises(ShapeError, match="boolean or whole numbers"):
        full_attention(*heads, causal=True, mask=torch.ones(2, 5))


def test_window_below_one_is_refused():
    with pytest.raises(ConfigError, match="window must be >= 1, got 0"):
        local_attention(*make_heads(1, 4, 1, 1, 4), window=0, causal=True)


@pytest.mark.parametrize("padding", ["none", "left"])
def test_sinks_are_the_first_tokens_of_a_row_and_count_once(padding):
    """By weights: a value of 1 at one position shows how much of a row comes from there."""
    T, window, num_sinks = 90, 8, 3
    query = key = torch.zeros(1, T, 1, T, dtype=torch.float64)  # all scores are alike
    value = torch.eye(T, dtype=torch.float64).view(1, T, 1, T)
    mask = make_mask(padding, 1, T)
    first = 0 if mask is None else 1
    weights = local_attention(
        query, key, value, window=window, causal=True, mask=mask, num_sinks=num_sinks
    )[0, :, 0]
    for t in range(first, T):
        seen = sorted({*range(max(first, t - window), t + 1), *range(first, first + num_sinks)})
        seen = [s for s in seen if s <= t]
        expected = torch.zeros(T, dtype=torch.float64)
        expected[seen] = 1 / len(seen)
        torch.testing.assert_close(weights[t], expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_sinks": -1}, "num_sinks must be >= 0, got -1"),
        ({"scale": 0.0}, "scale must be finite and > 0, or None, got 0.0"),
        ({"softcap": float("inf")}, "softcap must be finite and > 0, or None, got inf"),
    ],
)
def test_wrong_scores_are_named(change, message):
    with pytest.raises(ConfigError, match=message):
        local_attention(*make_heads(1, 4, 1, 1, 4), window=2, causal=True, **change)


@pytest.mark.parametrize("op", [full_attention, linear_attention])
def test_heads_on_another_device_are_refused(op):
    query, key, value = torch.randn(3, 1, 4, 2, 8)
    with pytest.raises(ShapeError, match="value must be on the device of query, cpu, got meta"):
        op(query, key, value.to("meta"), causal=True)
