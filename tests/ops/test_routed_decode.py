"""One decoding step: every row gets what its route asks for, and reads no more than that."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from meta_attention.errors import BackendUnavailableError, ConfigError, ShapeError
from meta_attention.ops.linear_attention import linear_attention
from meta_attention.ops.routed_decode import LinearStep, routed_decode
from meta_attention.testing import (
    assert_within_error_budget,
    naive_full_attention,
    naive_linear_attention,
    naive_local_attention,
    naive_state_space,
)

FULL, LINEAR, LOCAL = 0, 1, 2
WINDOW = 70
WINDOWS = {FULL: None, LOCAL: WINDOW}
IMPLS = ["reference", "triton"]
ROUTES = {
    "full": (1.0, 0.0, 0.0),
    "linear": (0.0, 1.0, 0.0),
    "local": (0.0, 0.0, 1.0),
    "soft": (0.5, 0.2, 0.3),
    "two": (0.0, 0.4, 0.6),
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Case:
    """Every token of every row; the last is the one decoded."""

    query: Tensor  # [B, H, P]
    key: Tensor  # [B, T, K, P]
    value: Tensor  # [B, T, K, P]
    linear_query: Tensor  # [B, H, P]
    linear_key: Tensor  # [B, T, K, P]
    linear_value: Tensor  # [B, T, K, P]
    weights: Tensor  # [B, G, E]
    start: Tensor  # [B] int32

    def to(self, dtype: torch.dtype) -> "Case":
        return replace(
            self,
            **{
                name: getattr(self, name).to(dtype)
                for name in ("query", "key", "value", "linear_query", "linear_key", "linear_value")
            },
        )

    @property
    def mask(self) -> Tensor:
        """[B, T], false for the padding on the left."""
        return torch.arange(self.key.shape[1])[None] >= self.start[:, None]


def make_case(T, K=2, group=2, P=32, routes=tuple(ROUTES), starts=None, per_head=False):
    """Row b takes the b-th route; with ``per_head``, its key-value heads take one each."""
    B = len(routes)
    generator = torch.Generator().manual_seed(T)
    heads = [
        torch.randn(*shape, P, generator=generator)
        for shape in ((B, K * group), (B, T, K), (B, T, K)) * 2
    ]
    weights = torch.tensor([ROUTES[name] for name in routes])[:, None]
    if per_head:
        weights = torch.cat([weights.roll(k, dims=0) for k in range(K)], dim=1)
    start = torch.tensor([0] * B if starts is None else starts, dtype=torch.int32)
    return Case(*heads, weights, start)


def by_definition(case, num_sinks=0, **scores):
    """Rows [B, H, P]: every expert for every token, by its formula, and the last one kept."""
    T, K = case.key.shape[1:3]
    query, linear_query = (
        q[:, None].expand(-1, T, -1, -1) for q in (case.query, case.linear_query)
    )
    softmax = (query, case.key, case.value)
    linear = (linear_query, case.linear_key, case.linear_value)
    rows = {
        FULL: naive_full_attention(*softmax, causal=True, mask=case.mask, **scores),
        LINEAR: naive_linear_attention(*linear, causal=True, mask=case.mask),
        LOCAL: naive_local_attention(
            *softmax, window=WINDOW, causal=True, mask=case.mask, num_sinks=num_sinks, **scores
        ),
    }
    groups = case.weights.expand(-1, K, -1).to(query.dtype)  # [B, K, E]
    per_head = groups.repeat_interleave(query.shape[2] // K, dim=1)  # [B, H, E]
    return sum(per_head[..., e, None] * rows[e][:, -1] for e in rows)


def state_of(case: Case, T: int) -> Tensor:
    """The linear expert's state after T tokens, as the layer's prefill leaves it."""
    key, value = case.linear_key[:, :T], case.linear_value[:, :T]
    query = case.linear_query[:, None].expand(-1, T, -1, -1)
    dtype = torch.promote_types(query.dtype, torch.float32)
    heads = (x.to(dtype) for x in (query, key, value))
    _, state = linear_attention(*heads, causal=True, mask=case.mask[:, :T])
    return state


def decode(
    case, impl, *, spare=7, windows=WINDOWS, linear=True, is_token=None, device=DEVICE, **scores
):
    """Rows and the state after the step; ``spare`` positions of the cache are not filled.

    ``linear`` may be a step of its own.
    """
    B, T, K, P = case.key.shape
    caches = []
    for heads in (case.key, case.value):
        cache = torch.full((B, K, T + spare, P), float("nan"), dtype=heads.dtype)
        cache[:, :, :T] = heads.transpose(1, 2)
        caches.append(cache.to(device))
    step = linear if isinstance(linear, LinearStep) else None
    if linear is True:
        dtype = torch.promote_types(case.query.dtype, torch.float32)
        state = torch.zeros(B, K, P, P + 1, dtype=dtype) if T == 1 else state_of(case, T - 1)
        new = [case.linear_query, case.linear_key[:, -1], case.linear_value[:, -1]]
        step = LinearStep(LINEAR, *(x.to(device) for x in (*new, state)))
    rows = routed_decode(
        case.query.to(device),
        *caches,
        case.weights.to(device),
        windows,
        length=torch.tensor(T, dtype=torch.int32, device=device),
        start=case.start.to(device) if case.start.any() else None,
        is_token=None if is_token is None else is_token.to(device),
        linear=step,
        **scores,
        impl=impl,
    )
    return rows.cpu(), None if step is None else step.state.cpu()


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Short rows have several splits, and several tiles in each, as long ones do."""
    kernel = "meta_attention.ops.routed_decode.kernel"
    monkeypatch.setattr(f"{kernel}.TILE_BYTES", 4096)
    monkeypatch.setattr(f"{kernel}.SPLIT_KEYS", 64)
    monkeypatch.setattr(f"{kernel}.MERGE_SIZE", 256)


def check_against_definition(case, impl, **scores):
    rows, state = decode(case, impl, **scores)
    oracle, plain = by_definition(case.to(torch.float64), **scores), by_definition(case, **scores)
    assert_within_error_budget("rows", rows, oracle, plain)
    T = case.key.shape[1]
    expected = state_of(case.to(torch.float64), T)
    assert_within_error_budget("state", state, expected, state_of(case, T))


@pytest.mark.parametrize("T", [63, 65, 130, 300])
@pytest.mark.parametrize("impl", IMPLS)
def test_every_route_is_as_accurate_as_plain_pytorch(impl, T):
    check_against_definition(make_case(T), impl)


def check_state_space(case, sizes, impl, spare=7):
    """A step of a state-space model, beside the other experts and by the same routes.

    Its step sizes ``[B, T, K]`` times keys must be exact in the dtype of the case.
    """
    H, K = case.query.shape[1], sizes.shape[2]
    generator = torch.Generator().manual_seed(1)
    rate, skip = torch.rand(K, generator=generator), torch.randn(H, generator=generator)

    def define(case, T):
        """Rows of the tokens so far, and the state after them."""
        step, *rates = (x.to(case.query.dtype) for x in (sizes[:, :T], rate, skip))
        query = case.linear_query[:, None].expand(-1, T, -1, -1)
        heads = (query, case.linear_key[:, :T], case.linear_value[:, :T])
        given = {"step": step, "rate": rates[0], "skip": rates[1]}
        return naive_state_space(*heads, **given, mask=case.mask[:, :T])

    def merge(case, rows):
        others = by_definition(replace(case, weights=case.weights * torch.tensor([1.0, 0.0, 1.0])))
        return others + case.weights[..., LINEAR, None].to(rows.dtype) * rows[:, -1]

    T = sizes.shape[1]
    # states are float32 at least
    exact, single = case.to(torch.float64), case.to(torch.float32)
    before = torch.nn.functional.pad(define(single, T - 1)[1], (0, 1))
    new = (case.linear_query, case.linear_key[:, -1], case.linear_value[:, -1])
    query, key, value = (x.to(DEVICE) for x in new)
    step = LinearStep(
        LINEAR,
        query,
        key * sizes[:, -1, :, None].to(key),
        value,
        before.to(DEVICE),
        decay=(-sizes[:, -1] * rate).to(DEVICE),
        skip=skip.to(DEVICE),
        normalise=False,
    )
    rows, state = decode(case, impl, spare=spare, linear=step)
    assert rows.dtype == case.query.dtype
    expected, after = define(exact, T)
    plain, plain_after = define(single, T)
    plain = merge(case, plain.to(rows.dtype))
    assert_within_error_budget("rows", rows, merge(exact, expected), plain)
    assert_within_error_budget("state", state[..., :-1], after, plain_after)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(("K", "group", "P"), [(2, 2, 32), (1, 3, 48)])
@pytest.mark.parametrize("impl", IMPLS)
def test_a_state_may_decay_and_be_skipped(impl, K, group, P, padded):
    case = make_case(100, K, group, P, starts=(0, 9, 99, 0, 50) if padded else None)
    sizes = torch.rand(len(ROUTES), 100, K, generator=torch.Generator().manual_seed(2))
    check_state_space(case, sizes, impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_first_token_sees_itself(impl):
    case = make_case(1)
    rows, state = decode(case, impl)
    linear = case.weights[..., LINEAR, None]  # [B, 1, 1]
    expected = (1.0 - linear) * case.value[:, 0] + linear * case.linear_value[:, 0]
    torch.testing.assert_close(rows, expected.repeat_interleave(2, dim=1))
    torch.testing.assert_close(state, state_of(case, 1))


@pytest.mark.parametrize(
    ("K", "group", "P"), [(1, 1, 32), (2, 3, 48), (1, 20, 16), (3, 1, 80), (1, 2, 256)]
)
@pytest.mark.parametrize("impl", IMPLS)
def test_any_heads_and_widths(impl, K, group, P):
    check_against_definition(make_case(130, K, group, P), impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_every_key_value_head_may_have_its_own_route(impl):
    check_against_definition(make_case(150, K=3, per_head=True), impl)


@pytest.mark.parametrize("route", ["full", "local", "linear"])
@pytest.mark.parametrize("impl", IMPLS)
def test_all_rows_may_take_one_expert(impl, route):
    check_against_definition(make_case(200, routes=(route,) * 3), impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_padding_on_the_left_is_not_seen(impl):
    # rows that start before, in and after the window, and in the middle of a tile
    case = make_case(200, starts=(3, 199, 150, 60, 129))
    for name in ("key", "value"):
        getattr(case, name)[~case.mask] = float("nan")
    rows, _ = decode(case, impl)
    clean = replace(case, key=case.key.nan_to_num(0.0), value=case.value.nan_to_num(0.0))
    oracle, plain = by_definition(clean.to(torch.float64)), by_definition(clean)
    assert_within_error_budget("rows", rows, oracle, plain)


@pytest.mark.parametrize(
    "scores",
    [
        {"num_sinks": 4},
        {"num_sinks": 100},  # more than a split
        {"num_sinks": 3, "scale": 0.4, "softcap": 2.0},
        {"softcap": 50.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("impl", IMPLS)
def test_sinks_scale_and_soft_cap(impl, scores):
    for T in (2, 73, 200):  # T = 73: the window leaves out two tokens
        check_against_definition(make_case(T, K=1), impl, **scores)
    # rows that start before, in and after the window: sinks are counted from there
    check_against_definition(make_case(200, K=1, starts=(3, 180, 150, 60, 126)), impl, **scores)


@pytest.mark.parametrize("impl", IMPLS)
def test_sinks_are_read_by_windows_alone_and_nothing_between(impl):
    T, start, num_sinks = 200, 5, 3
    case = make_case(T, K=1, starts=(start,) * 5)
    expected, _ = decode(case, impl, num_sinks=num_sinks)
    routes = list(ROUTES)
    local, linear, two = (routes.index(name) for name in ("local", "linear", "two"))
    without, _ = decode(case, impl)
    has_window = (case.weights[:, 0, LOCAL] > 0)[:, None, None]
    assert ((without != expected).any(dim=2, keepdim=True) == has_window).all()
    for cache in (case.key, case.value):
        cache[:, :start] = float("nan")
        cache[[local, two], start + num_sinks : T - 1 - WINDOW] = float("nan")
        cache[linear] = float("nan")
    rows, _ = decode(case, impl, num_sinks=num_sinks)
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_of_padding_are_zero_and_leave_their_state(impl):
    T = 100
    for route in ("linear", "soft"):
        case = make_case(T, K=1, routes=(route,) * 3, starts=(0, T, T + 5))
        rows, state = decode(case, impl)
        assert (rows[1:] == 0).all()
        assert (state[1:] == 0).all()
        assert (rows[0] != 0).any()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64], ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_rows_whose_newest_token_is_padding_are_zero_and_leave_their_state(impl, dtype):
    T = 100
    case = make_case(T, K=1)
    is_token = torch.tensor([1, 0, 1, 0, 1]).bool()
    rows, state = decode(case, impl, is_token=is_token.to(dtype))
    whole, after = decode(case, impl)
    assert (rows[~is_token] == 0).all()
    assert torch.equal(rows[is_token], whole[is_token])
    assert torch.equal(state[~is_token], state_of(case, T - 1)[~is_token])
    assert torch.equal(state[is_token], after[is_token])


@pytest.mark.parametrize("impl", IMPLS)
def test_a_row_reads_only_what_its_route_needs(impl):
    T = 200
    case = make_case(T)
    expected, _ = decode(case, impl)
    routes = list(ROUTES)
    local, linear, two = (routes.index(name) for name in ("local", "linear", "two"))
    for cache in (case.key, case.value):
        cache[[local, two], : T - 1 - WINDOW] = float("nan")
        cache[linear] = float("nan")
    for name in ("full", "local"):
        # their state is poisoned too, and not read
        case.linear_value[routes.index(name)] = float("nan")
    rows, state = decode(case, impl)
    assert torch.equal(rows, expected)
    assert state[[routes.index("full"), local]].isnan().any()
    assert state[[linear, two]].isfinite().all()


@pytest.mark.parametrize("impl", IMPLS)
def test_capacity_past_the_length_changes_nothing(impl):
    case = make_case(130, K=1)
    expected, _ = decode(case, impl, spare=0)
    for spare in (1, 300):
        rows, _ = decode(case, impl, spare=spare)
        # a larger cache has more splits to give to the same keys
        torch.testing.assert_close(rows, expected)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_step_can_be_repeated(impl):
    """The kernel's counters are back at zero, also for batches of other sizes in between."""
    case, other = make_case(200, K=1), make_case(65, K=3)
    rows, state = decode(case, impl)
    decode(other, impl)
    again, state_again = decode(case, impl)
    assert torch.equal(rows, again)
    assert torch.equal(state, state_again)


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_may_have_different_lengths(impl):
    case = make_case(200)
    key, value = (x.transpose(1, 2) for x in (case.key, case.value))  # a strided cache
    lengths = [200, 1, 130, 64, 90]
    rows = routed_decode(
        *(x.to(DEVICE) for x in (case.query, key, value, case.weights[:, 0])),
        {FULL: None, LOCAL: WINDOW},
        length=torch.tensor(lengths, device=DEVICE),
        impl=impl,
    ).cpu()
    for b, length in enumerate(lengths):
        alone = routed_decode(
            *(x[b : b + 1].to(DEVICE) for x in (case.query, key, value, case.weights)),
            WINDOWS,
            length=torch.tensor([length], device=DEVICE),
            impl="reference",
        )
        torch.testing.assert_close(rows[b : b + 1], alone.cpu())


@pytest.mark.parametrize("impl", IMPLS)
def test_experts_may_be_of_one_kind_only(impl):
    case = make_case(130, routes=("soft",) * 2)
    full, _ = decode(case, impl, windows={FULL: None}, linear=False)
    local, _ = decode(case, impl, windows={LOCAL: WINDOW}, linear=False)
    linear, _ = decode(case, impl, windows={})
    together, _ = decode(case, impl)
    torch.testing.assert_close(full + local + linear, together)


@pytest.mark.parametrize("impl", IMPLS)
def test_linear_rows_survive_features_that_underflow(impl):
    case = make_case(70, routes=("linear",) * 2)
    below = replace(case, linear_query=case.linear_query - 100.0)
    rows, _ = decode(below, impl)
    # below 0 a common shift of a query's features cancels
    shift = case.linear_query.amax(dim=-1, keepdim=True)
    exact = by_definition(replace(case, linear_query=case.linear_query - shift).to(torch.float64))
    torch.testing.assert_close(rows.double(), exact, rtol=1e-4, atol=1e-4)
    rows, _ = decode(replace(below, linear_key=case.linear_key - 200.0), impl)
    assert rows.isfinite().all()


@pytest.mark.parametrize("impl", IMPLS)
def test_many_splits_are_shared_out_when_programs_are_few(impl, monkeypatch):
    """Rows longer than MAX_SPLITS * SPLIT_KEYS have more keys to a split."""
    monkeypatch.setattr("meta_attention.ops.routed_decode.kernel.MAX_SPLITS", 3)
    check_against_definition(make_case(500, routes=("full", "soft")), impl)
    monkeypatch.setattr("meta_attention.ops.routed_decode.kernel.PROGRAMS", 1)
    check_against_definition(make_case(300, routes=("full", "soft")), impl)


def test_no_gradient_is_recorded():
    case = make_case(10)
    case.query.requires_grad_()
    rows, state = decode(case, "reference")
    assert not rows.requires_grad
    assert not state.requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "scores",
    [{}, {"num_sinks": 4}, {"num_sinks": 300, "scale": 0.1, "softcap": 30.0}],
    ids=str,
)
@pytest.mark.parametrize(("K", "group", "P"), [(2, 1, 128), (2, 4, 128), (1, 8, 64), (2, 2, 80)])
def test_kernel_is_as_accurate_in_half_precision(K, group, P, scores, dtype, monkeypatch):
    monkeypatch.undo()  # tiles of their real size
    case = make_case(1500, K, group, P, starts=(0, 5, 700, 64, 1400)).to(dtype)
    rows, state = decode(case, "triton", spare=3000, **scores)
    oracle, plain = by_definition(case.to(torch.float64), **scores), by_definition(case, **scores)
    assert rows.dtype == dtype
    assert_within_error_budget("rows", rows, oracle, plain)
    expected = state_of(case.to(torch.float64), 1500)
    assert_within_error_budget("state", state, expected, state_of(case.to(torch.float32), 1500))


@pytest.mark.parametrize(
    ("impl", "T", "dtype"),
    [
        # not bfloat16: the reference multiplies in it, and the interpreter cuts it off
        *((impl, 150, torch.float16) for impl in IMPLS),
        *(
            pytest.param("triton", 1500, dtype, marks=pytest.mark.gpu)
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize(("K", "group", "P"), [(2, 4, 128), (1, 8, 64), (2, 2, 80)])
def test_decay_and_skip_are_as_accurate_in_half_precision(K, group, P, impl, T, dtype, monkeypatch):
    monkeypatch.undo()  # tiles of their real size
    case = make_case(T, K, group, P, starts=(0, 5, T // 2, 64, T - 100)).to(dtype)
    generator = torch.Generator().manual_seed(2)
    # powers of two, by which keys are multiplied exactly
    sizes = 2.0 ** torch.randint(-3, 1, (len(ROUTES), T, K), generator=generator)
    check_state_space(case, sizes, impl, spare=2 * T)


@pytest.mark.gpu
def test_a_captured_step_follows_the_length(monkeypatch):
    monkeypatch.undo()
    T = 1200
    case = make_case(T, K=2, group=4, P=64).to(torch.bfloat16)
    key, value = (x.transpose(1, 2).contiguous().cuda() for x in (case.key, case.value))
    query, weights, start = (x.cuda() for x in (case.query, case.weights, case.start))
    new = [x.cuda() for x in (case.linear_query, case.linear_key[:, -1], case.linear_value[:, -1])]
    length = torch.tensor(T, dtype=torch.int32, device="cuda")

    def step(state, impl):
        linear = LinearStep(LINEAR, *new, state)
        return routed_decode(
            query,
            key,
            value,
            weights,
            WINDOWS,
            length=length,
            start=start,
            linear=linear,
            impl=impl,
        )

    first = state_of(case, T - 1).cuda()
    captured_state = first.clone()
    step(first.clone(), "triton")  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(captured_state, "triton")
    for filled in (1, 40, 600, 1199, T):
        length.fill_(filled)
        captured_state.copy_(first)
        graph.replay()
        eager_state = first.clone()
        eager = step(eager_state, "triton")
        assert torch.equal(captured, eager)
        assert torch.equal(captured_state, eager_state)
        reference = step(first.clone(), "reference")
        torch.testing.assert_close(captured, reference, rtol=2e-2, atol=2e-2)


def test_triton_asked_for_by_name_is_not_replaced(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendUnavailableError, match="needs CUDA tensors, got cpu"):
        decode(make_case(4), "triton", device="cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": (2, 1, 4, 8)}, r"query must be \[B, H, P\] .* got \[2, 1, 4, 8\]"),
        ({"key": (3, 2, 5, 8)}, r"key must be .* \[2, K, S, 8\] .* got \[3, 2, 5, 8\]"),
        ({"value": (2, 2, 6, 8)}, r"one shape, got \[2, 2, 5, 8\] and \[2, 2, 6, 8\]"),
        ({"query": (2, 3, 8)}, r"multiple of key-value heads, got query \[2, 3, 8\]"),
        ({"weights": (2, 4, 3)}, r"G = 1 or 2 .* got \[2, 4, 3\]"),
        ({"length": (3,)}, r"length must be \[\], \[1\] or \[B\] = \[2\], got \[3\]"),
        ({"start": (1,)}, r"start must be \[B\] = \[2\], got \[1\]"),
        ({"state": (2, 2, 8, 8)}, r"linear.state must be \[2, 2, 8, 9\] .* got \[2, 2, 8, 8\]"),
    ],
)
def test_wrong_shapes_are_named(change, message):
    shapes = {"query": (2, 4, 8), "key": (2, 2, 5, 8), "value": (2, 2, 5, 8), "weights": (2, 3)}
    shapes |= {"length": (), "start": (2,), "state": (2, 2, 8, 9)} | change
    x = {name: torch.zeros(shape) for name, shape in shapes.items()}
    step = [torch.zeros(2, n, 8) for n in (4, 2, 2)]
    with pytest.raises(ShapeError, match=message):
        routed_decode(
            *(x[name] for name in ("query", "key", "value", "weights")),
            WINDOWS,
            length=x["length"].int(),
            start=x["start"].int(),
            linear=LinearStep(LINEAR, *step, x["state"]),
        )


def test_wrong_dtypes_and_strides_are_named():
    query, key, weights = torch.zeros(1, 2, 8), torch.zeros(1, 2, 5, 8), torch.ones(1, 3)
    length = torch.tensor(5)
    with pytest.raises(ShapeError, match=r"key must be like query, torch\.float32 on cpu, got"):
        routed_decode(query, key.half(), key, weights, WINDOWS, length=length)
    strided = torch.zeros(1, 2, 8, 5).transpose(2, 3)
    with pytest.raises(ShapeError, match="value must be contiguous along its last axis"):
        routed_decode(query, key, strided, weights, WINDOWS, length=length)
    with pytest.raises(ShapeError, match=r"length must be of whole numbers, got torch\.float32"):
        routed_decode(query, key, key, weights, WINDOWS, length=length.float())
    step = LinearStep(LINEAR, query, query, query, torch.zeros(1, 2, 8, 9).half())
    with pytest.raises(ShapeError, match=r"linear\.state must be torch\.float32 and contig"):
        routed_decode(query, key, key, weights, WINDOWS, length=length, linear=step)


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ({}, "windows or linear must name at least one expert"),
        ({3: None}, "experts must have weights, 0 to 2, got index 3"),
        ({0: 0}, "window must be >= 1, got 0"),
    ],
)
def test_wrong_experts_are_named(windows, message):
    with pytest.raises(ConfigError, match=message):
        decode(make_case(4), "reference", windows=windows, linear=False)


def test_what_is_normalised_has_no_skip():
    query, key = torch.zeros(1, 2, 8), torch.zeros(1, 2, 5, 8)
    state, skip = torch.zeros(1, 2, 8, 9), torch.zeros(2)
    step = LinearStep(LINEAR, query, query, query, state, skip=skip)
    with pytest.raises(ConfigError, match="normalise=False where it has a skip"):
        routed_decode(
            query, key, key, torch.ones(1, 3), WINDOWS, length=torch.tensor(5), linear=step
        )
    step = replace(step, skip=None, decay=torch.zeros(2))
    with pytest.raises(ShapeError, match=r"linear.decay must be \[1, 2\] .* got \[2\]"):
        routed_decode(
            query, key, key, torch.ones(1, 3), WINDOWS, length=torch.tensor(5), linear=step
        )


def test_an_expert_is_of_one_kind():
    with pytest.raises(ConfigError, match="expert 1 must be in windows or linear, not in both"):
        decode(make_case(4), "reference", windows={LINEAR: None})
