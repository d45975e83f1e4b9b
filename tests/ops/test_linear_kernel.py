"""Linear attention over query lists agrees with its definition, gradients included.

What a list leaves out is poisoned in every case: rows of the buffer, their gradients and padding
hold NaN, and none of it may be read.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from meta_attention.errors import BackendUnavailableError, ConfigError, ShapeError
from meta_attention.ops.linear_attention import linear_attention
from meta_attention.ops.route_plan import QueryList, plan_routes
from meta_attention.testing import assert_within_error_budget

NAN = float("nan")


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Case:
    """One problem; ``listed`` is which tokens are rows."""

    T: int
    B: int = 2
    H: int = 2
    K: int = 1
    P: int = 8
    padding: str = "none"
    documents: bool = False
    decay: bool = False
    normalise: bool = True
    initial: bool = False
    skip: bool = False
    listed: str = "none"

    def __str__(self) -> str:
        options = ("documents", "decay", "initial", "skip")
        words = [name for name in options if getattr(self, name)]
        words += [] if self.normalise else ["plain"]
        words += [] if self.padding == "none" else [f"{self.padding}-padding"]
        words += [] if self.listed == "none" else [f"list-{self.listed}"]
        return "-".join([f"T{self.T}", f"H{self.H}K{self.K}P{self.P}", *words])

    def mask(self) -> Tensor | None:
        if self.padding == "none" and not self.documents:
            return None
        position = torch.arange(self.T).expand(self.B, self.T)
        count = (torch.arange(self.B)[:, None] * 40 + 3).clamp(max=self.T - 1)
        is_token = torch.ones(self.B, self.T, dtype=torch.bool)
        if self.padding in ("left", "all"):
            is_token = position >= count
        elif self.padding == "right":
            is_token = position < self.T - count
        if self.padding == "all":
            is_token = is_token & (torch.arange(self.B) > 0)[:, None]
        if not self.documents:
            return is_token
        # one that ends in each chunk, one that spans several, one of a single token
        edges = torch.tensor([10, 11, 40, 100, 250])
        return ((position.unsqueeze(-1) >= edges).sum(dim=-1) + 1) * is_token

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.T)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        B, T, K, P = self.B, self.T, self.K, self.P
        found = {"query": normal(B, T, self.H, P), "key": normal(B, T, K, P)}
        found["value"] = normal(B, T, K, P)
        found = {name: x.to(dtype) for name, x in found.items()}
        if self.decay:
            found["decay"] = -0.3 * torch.rand(B, T, K, generator=generator)
        if self.initial:
            found["initial_state"] = normal(B, K, P, P + 1).abs()
        if self.skip:
            found["skip"] = normal(self.H)
        return found

    def weights(self) -> Tensor:
        """Of an expert on its tokens, [B, T, G, 1]."""
        groups = self.K if self.listed == "groups" else 1
        generator = torch.Generator().manual_seed(self.T + 1)
        weights = torch.rand(self.B, self.T, groups, 1, generator=generator) < 0.4
        if self.listed in ("empty", "all", "one", "last"):
            weights.fill_(self.listed == "all")
        if self.listed in ("one", "last"):
            weights[:, -1 if self.listed == "last" else self.T // 2] = True
        return weights.float()

    def is_row(self) -> Tensor:
        """[B, T, H, 1]"""
        mask = self.mask()
        weights = torch.ones(self.B, self.T, 1, 1) if self.listed == "none" else self.weights()
        is_row = weights.expand(-1, -1, self.K, -1).repeat_interleave(self.H // self.K, dim=2) > 0
        return is_row if mask is None else is_row & (mask != 0)[:, :, None, None]

    def queries(self) -> QueryList | None:
        if self.listed == "none":
            return None
        plan = plan_routes(self.weights(), mask=self.mask(), is_exclusive=True, impl="reference")
        found = plan.list_of(0)
        # what a list holds beyond its count is undefined
        beyond = torch.arange(self.T) >= found.count.unsqueeze(-1)
        return replace(found, positions=found.positions.masked_fill(beyond, 2**30))


def definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor | None = None,
    initial_state: Tensor | None = None,
    skip: Tensor | None = None,
    *,
    mask: Tensor | None,
    normalise: bool,
) -> tuple[Tensor, Tensor]:
    """T x T matrices, one line per formula."""
    B, T, H, P = query.shape
    K = key.shape[2]
    precise = torch.promote_types(query.dtype, torch.float32)
    is_token = torch.ones(B, T, dtype=torch.bool) if mask is None else mask != 0
    documents = torch.ones(B, T, dtype=torch.long)
    if mask is not None and mask.dtype != torch.bool:
        documents = mask.cummax(dim=1).values
    past = torch.zeros(B, T, K, dtype=precise)
    if decay is not None:
        past = (decay * is_token.unsqueeze(-1)).cumsum(dim=1)
    state = initial_state
    if state is None:
        state = torch.zeros(B, K, P, P + 1, dtype=precise)
    u, f = query, key
    if normalise:
        u, f = (torch.nn.functional.elu(x) + 1.0 for x in (query, key))
    f = f * is_token[:, :, None, None]
    v = torch.cat([value, torch.ones_like(value[..., :1])], dim=-1)
    group = H // K

    same = documents.unsqueeze(2) == documents.unsqueeze(1)
    visible = (same & torch.ones(T, T, dtype=torch.bool).tril()).unsqueeze(1)  # [B, 1, T, T]
    span = (past.unsqueeze(2) - past.unsqueeze(1)).permute(0, 3, 1, 2)  # [B, K, T, T]
    left = span.masked_fill(~visible, float("-inf")).exp().repeat_interleave(group, dim=1)
    f_heads, v_heads = (x.repeat_interleave(group, dim=2) for x in (f, v))
    scores = torch.einsum("bthp,bshp->bhts", u, f_heads) * left.to(u.dtype)
    sums = torch.einsum("bhts,bshr->bthr", scores, v_heads)
    reads = past.exp() * (documents == documents[:, :1]).unsqueeze(-1)
    first = torch.einsum("bthp,bhpr->bthr", u, state.to(u.dtype).repeat_interleave(group, dim=1))
    sums = sums + first * reads.repeat_interleave(group, dim=2).unsqueeze(-1).to(u.dtype)
    rows = sums[..., :-1]
    if normalise:
        rows = rows / sums[..., -1:].clamp(min=1e-30)
    if skip is not None:
        rows = rows + skip.to(u.dtype).unsqueeze(-1) * v_heads[..., :-1]

    adds = (past[:, -1:] - past).exp() * (documents == documents[:, -1:]).unsqueeze(-1)
    added = torch.einsum("btkp,btkr->bkpr", f * adds.unsqueeze(-1).to(f.dtype), v)
    kept = past[:, -1].exp() * (documents[:, :1] == documents[:, -1:])
    return rows * is_token[:, :, None, None], added.to(state.dtype) + state * kept[:, :, None, None]


def upstream(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(case.B, case.T, case.H, case.P, generator=generator)
    state = torch.randn(case.B, case.K, case.P, case.P + 1, generator=generator)
    return rows.to(dtype), state


def expect(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rows, state and gradients by the definition; rows that are not listed are zero."""
    inputs = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    rows, state = definition(**inputs, mask=case.mask(), normalise=case.normalise)
    rows = rows * case.is_row()
    d_rows, d_state = upstream(case, inputs["query"].dtype)
    grads = torch.autograd.grad(
        (rows, state), list(inputs.values()), (d_rows, d_state.to(state.dtype))
    )
    names = ["rows", "state", *(f"d_{name}" for name in inputs)]
    return dict(zip(names, (rows.detach(), state.detach(), *grads), strict=True))


def run(case: Case, inputs: dict[str, Tensor], impl: Any, device: str = "cpu") -> dict[str, Tensor]:
    """The same by the function under test, with NaN wherever it must not look."""
    mask, queries, is_row = case.mask(), case.queries(), case.is_row()
    d_rows, d_state = upstream(case, inputs["query"].dtype)
    if mask is not None:
        for name in set(inputs) - {"initial_state", "skip"}:
            is_padding = (mask == 0).view(*mask.shape, *(1 for _ in inputs[name].shape[2:]))
            inputs[name] = inputs[name].masked_fill(is_padding, NAN)
        mask = mask.to(device)
    if queries is not None:
        queries = QueryList(
            *(x.to(device) for x in (queries.positions, queries.count, queries.ranks))
        )
    buffer = torch.full_like(inputs["query"], NAN, device=device)
    inputs = {name: x.to(device).requires_grad_() for name, x in inputs.items()}
    rows, state = linear_attention(
        **inputs,
        causal=True,
        mask=mask,
        normalise=case.normalise,
        queries=queries,
        rows=buffer,
        impl=impl,
    )
    grads = torch.autograd.grad(
        (rows, state),
        list(inputs.values()),
        (d_rows.masked_fill(~is_row, NAN).to(device), d_state.to(state)),
    )
    rows = rows.detach().cpu()
    if queries is not None:
        assert rows.masked_select(~is_row).isnan().all()
        rows = rows.masked_fill(~is_row, 0.0)
    names = ["rows", "state", *(f"d_{name}" for name in inputs)]
    return dict(zip(names, (rows, state.detach().cpu(), *(g.cpu() for g in grads)), strict=True))


CASES = [
    Case(1, B=16, decay=True, initial=True),  # of few numbers the largest error is a matter of luck
    Case(63, listed="some"),
    Case(65, H=4, K=2, listed="groups", decay=True),
    Case(130, padding="left"),
    Case(130, padding="right", decay=True, initial=True, listed="some"),
    Case(130, padding="all", documents=True, listed="some"),
    Case(130, H=1, normalise=False, decay=True, initial=True, listed="some"),
    Case(140, H=2, K=2, P=20, normalise=False, padding="left"),
    Case(300, documents=True, initial=True),
    Case(300, B=1, H=3, documents=True, decay=True, initial=True, listed="some", padding="right"),
    Case(65, listed="empty", decay=True, initial=True),
    Case(65, H=4, K=2, listed="all", documents=True),
    Case(200, listed="one", decay=True, H=1),
    Case(70, H=4, K=2, normalise=False, decay=True, skip=True),
    Case(
        130,
        H=4,
        K=2,
        normalise=False,
        decay=True,
        initial=True,
        skip=True,
        padding="left",
        listed="groups",
    ),
    Case(
        140,
        B=1,
        normalise=False,
        documents=True,
        decay=True,
        skip=True,
        padding="right",
        listed="some",
    ),
]

MORE_CASES = [
    Case(
        T, listed=listed, padding=padding, documents=documents, decay=decay, H=4, K=2, initial=True
    )
    for T in (1, 64, 300)
    for listed in ("none", "some", "groups")
    for padding in ("none", "left", "right", "all")
    for documents in (False, True)
    for decay in (False, True)
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_is_as_accurate_as_plain_pytorch(case, device):
    inputs = case.inputs(torch.float32)
    oracle = expect(case, {name: x.double() for name, x in inputs.items()})
    plain = expect(case, inputs)
    actual = run(case, inputs, "triton", device)
    for name in oracle:
        budget = {"roundings": roundings(case)}
        assert_within_error_budget(name, actual[name], oracle[name], plain[name], **budget)


def roundings(case: Case) -> float:
    """In float32 a GPU adds the terms of a chunk one by one; in what order a CPU does, and plain
    PyTorch beside it, differs from processor to processor."""
    return min(case.T, 256) ** 0.5


@pytest.mark.parametrize("segment", [64, 128, 4096])
def test_reference_equals_the_definition_in_float64(segment, monkeypatch):
    monkeypatch.setattr("meta_attention.ops.linear_attention.reference.SEGMENT", segment)
    for case in CASES + MORE_CASES:
        inputs = {name: x.double() for name, x in case.inputs(torch.float32).items()}
        expected = expect(case, inputs)
        actual = run(case, inputs, "reference")
        for name in expected:
            torch.testing.assert_close(
                actual[name], expected[name], rtol=1e-9, atol=1e-9, msg=f"{case} {name}"
            )


@pytest.mark.gpu
@pytest.mark.parametrize("case", MORE_CASES, ids=str)
def test_kernel_is_accurate_in_every_combination(case):
    test_kernel_is_as_accurate_as_plain_pytorch(case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"listed": "some", "decay": True, "initial": True, "padding": "right"},
        {"listed": "groups", "documents": True},
        {"listed": "some", "normalise": False, "decay": True},
        {"listed": "some", "normalise": False, "decay": True, "skip": True, "padding": "left"},
    ],
    ids=["all", "decay", "documents", "plain", "skip"],
)
@pytest.mark.parametrize(
    ("dtype", "P"),
    [
        *((torch.bfloat16, P) for P in (16, 48, 64, 80, 128, 256)),
        *((torch.float16, P) for P in (64, 128, 256)),
        *((torch.float32, P) for P in (80, 256)),
    ],
    ids=str,
)
def test_kernel_is_accurate_at_every_precision_and_head_width(P, options, dtype):
    case = Case(700, H=4, K=2, P=P, **options)
    inputs = case.inputs(dtype)
    if not case.normalise:
        kept = ("decay", "skip")
        inputs = {name: x if name in kept else x * P**-0.25 for name, x in inputs.items()}
    oracle = expect(case, {name: x.double() for name, x in inputs.items()})
    plain = expect(case, inputs)
    actual = run(case, inputs, "triton", "cuda")
    budget = {"roundings": roundings(case) if dtype == torch.float32 else 1.0}
    for name in oracle:
        assert_within_error_budget(name, actual[name], oracle[name], plain[name], **budget)


# of what runs in Gluon on a Hopper GPU, and in Triton on others
WALKS = [
    *(Case(T, B=16 if T == 1 else 2, H=4, K=2, P=P) for T in (1, 63, 65) for P in (64, 128)),
    *(
        Case(1000, H=4, K=2, P=128, listed=listed, initial=True)
        for listed in ("none", "some", "groups", "empty", "all", "one", "last")
    ),
    Case(64, P=128, listed="all"),
    Case(300, H=3, K=3, P=64, listed="last"),
    Case(1000, H=6, K=2, P=64, listed="groups", initial=True),
    Case(4096, B=1, H=1, P=128, listed="some", initial=True),
    Case(4096, B=1, P=64),
    Case(700, H=2, K=2, P=128, normalise=False, initial=True),
    Case(700, H=4, K=2, P=64, normalise=False, listed="some"),
]


@pytest.fixture
def uninitialised_is_nan():
    """What is not written to a tensor that was made empty is NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.gpu
@pytest.mark.usefixtures("uninitialised_is_nan")
@pytest.mark.parametrize("case", WALKS, ids=str)
def test_walk_along_segments_is_accurate(case):
    inputs = case.inputs(torch.bfloat16)
    if not case.normalise:
        inputs = {name: x * case.P**-0.25 for name, x in inputs.items()}
    oracle = expect(case, {name: x.double() for name, x in inputs.items()})
    plain = expect(case, inputs)
    actual = run(case, inputs, "triton", "cuda")
    for name in oracle:
        assert_within_error_budget(name, actual[name], oracle[name], plain[name])


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["cache", "mixed", "odd"])
@pytest.mark.parametrize("listed", ["none", "some"])
def test_walk_gives_the_same_in_every_layout(listed, layout):
    """Heads before tokens with room for more, or only the values so, and odd strides of rows."""
    case = Case(200, H=4, K=2, P=128, listed=listed)
    inputs = case.inputs(torch.bfloat16)
    expected = run(case, dict(inputs), "triton", "cuda")
    for name in ("key", "value") if layout == "cache" else ("value",):
        x = inputs[name]
        room = torch.full((case.B, case.K, 300, case.P), NAN, dtype=x.dtype, device="cuda")
        room[:, :, : case.T] = x.transpose(1, 2)
        inputs[name] = room.transpose(1, 2)[:, : case.T]
    if layout == "odd":
        wide = torch.zeros(case.B, case.T, case.H, case.P + 3, dtype=torch.bfloat16, device="cuda")
        wide[..., 1:-2] = inputs["query"]
        inputs["query"] = wide[..., 1:-2]
    actual = run(case, inputs, "triton", "cuda")
    for name, x in expected.items():
        torch.testing.assert_close(actual[name], x, rtol=0.0, atol=0.0)


@pytest.mark.gpu
def test_walk_never_reads_the_next_sequence():
    """Whose first tokens follow the last ones of this in memory."""
    case = Case(100, B=1, H=4, K=2, P=128, initial=True)
    inputs = case.inputs(torch.bfloat16)
    expected = run(case, dict(inputs), "triton", "cuda")
    both = {}
    for name, x in inputs.items():
        both[name] = torch.cat([x, torch.full_like(x, NAN)]).cuda().requires_grad_()
    rows, state = linear_attention(**both, causal=True, impl="triton")
    d_rows, d_state = (torch.cat([x, x]).cuda() for x in upstream(case, torch.bfloat16))
    grads = torch.autograd.grad((rows, state), list(both.values()), (d_rows, d_state.to(state)))
    names = ["rows", "state", *(f"d_{name}" for name in both)]
    for name, x in zip(names, (rows, state, *grads), strict=True):
        torch.testing.assert_close(x[:1].detach().cpu(), expected[name], rtol=0.0, atol=0.0)


@pytest.mark.gpu
def test_hopper_kernels_do_what_the_triton_kernels_do(monkeypatch):
    """Over several segments of several chunks, in every layout of the values."""
    from meta_attention.ops.linear_attention import hopper, hopper_backward

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    case = Case(5000, B=4, H=16, K=8, P=128, listed="groups", initial=True)
    inputs = case.inputs(torch.bfloat16)
    assert hopper_backward.segment_length(inputs["key"]) > 256
    value = inputs["value"].transpose(1, 2).contiguous().transpose(1, 2)
    actual = run(case, inputs, "triton", "cuda")
    other = run(case, inputs | {"value": value}, "triton", "cuda")
    monkeypatch.setattr(hopper, "can_run", lambda *_: False)
    expected = run(case, inputs, "triton", "cuda")
    for name in expected:
        torch.testing.assert_close(other[name], actual[name], rtol=0, atol=0)
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(actual[name], expected[name], rtol=0.02, atol=0.01 * scale)


def test_segments_cover_the_tokens_and_fill_the_multiprocessors():
    from meta_attention.ops.linear_attention.hopper import PROGRAMS, cut_segments

    assert cut_segments(16384, 16, 128) == (8, 32)
    for T in (1, 64, 65, 1000, 4096, 65536):
        for heads in (1, 3, 16, 100, 300, 5000):
            for P in (64, 128):
                segments, chunks = cut_segments(T, heads, P)
                assert (segments - 1) * chunks * 64 < T <= segments * chunks * 64
                assert segments == 1 or segments * heads * (P // 64) <= 4 * PROGRAMS


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_kernel_never_waits_for_the_device():
    case = Case(300, H=4, K=2, documents=True, decay=True, initial=True, listed="groups")
    inputs = {n: x.cuda().requires_grad_() for n, x in case.inputs(torch.bfloat16).items()}
    mask, queries = case.mask().cuda(), case.queries()
    queries = QueryList(*(x.cuda() for x in (queries.positions, queries.count, queries.ranks)))
    for mode in ("default", "error"):  # the first run compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            rows, state = linear_attention(**inputs, causal=True, mask=mask, queries=queries)
            torch.autograd.backward((rows, state), (rows.detach(), state.detach()))
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("columns", [16, 32])
def test_heads_in_parts_give_the_same(columns, device, monkeypatch):
    """Wide heads are worked on some columns at a time."""
    from meta_attention.ops.linear_attention import kernel

    case = Case(70, B=1, P=40, decay=True, initial=True, listed="some")
    tiles = {64: kernel.TILES[torch.float32][64]._replace(columns=columns, rows=32, keys=32)}
    inputs = case.inputs(torch.float32)
    oracle = expect(case, {name: x.double() for name, x in inputs.items()})
    plain = expect(case, inputs)
    monkeypatch.setitem(kernel.TILES, torch.float32, tiles)
    actual = run(case, inputs, "triton", device)
    for name in oracle:
        found = (actual[name], oracle[name], plain[name])
        assert_within_error_budget(name, *found, roundings=roundings(case))


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_experts_share_one_buffer(impl, device):
    """Rows of the first survive the second, and so do its gradients."""
    case = Case(100, H=4, K=2)
    inputs = {n: x.to(device).requires_grad_() for n, x in case.inputs(torch.float32).items()}
    expert = torch.arange(case.T, device=device).remainder(3).lt(2).long().expand(case.B, case.T)
    plan = plan_routes(torch.nn.functional.one_hot(expert, 2), is_exclusive=True)
    buffer = torch.full_like(inputs["query"], NAN).detach()
    call = {"causal": True, "impl": impl}
    first, _ = linear_attention(**inputs, queries=plan.list_of(0), rows=buffer, **call)
    both, _ = linear_attention(**inputs, queries=plan.list_of(1), rows=first, **call)
    whole, _ = linear_attention(**inputs, causal=True)
    if impl == "triton":
        assert both.data_ptr() == buffer.data_ptr()
    torch.testing.assert_close(both, whole)
    up = torch.linspace(-1, 1, whole.numel(), device=device).view_as(whole)
    actual = torch.autograd.grad(both, list(inputs.values()), up)
    expected = torch.autograd.grad(whole, list(inputs.values()), up)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_chunks_of_a_sequence_give_the_whole(impl, device):
    """Rows, states and the gradients that flow back through the states."""
    case = Case(200, B=1, H=2, documents=True, decay=True)
    inputs = {n: x.to(device).requires_grad_() for n, x in case.inputs(torch.float32).items()}
    mask = case.mask().to(device)
    whole, last = linear_attention(**inputs, causal=True, mask=mask, impl="reference")
    parts, state = [], None
    for part in (slice(0, 30), slice(30, 170), slice(170, 200)):
        rows, state = linear_attention(
            **{name: x[:, part] for name, x in inputs.items()},
            causal=True,
            mask=mask[:, part],
            initial_state=state,
            impl=impl,
        )
        parts.append(rows)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    torch.testing.assert_close(state, last)
    up = torch.linspace(-1, 1, whole.numel(), device=device).view_as(whole)
    actual = torch.autograd.grad(
        (torch.cat(parts, dim=1), state), list(inputs.values()), (up, last)
    )
    expected = torch.autograd.grad((whole, last), list(inputs.values()), (up, last))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_kernel_takes_views(device):
    """Of one projection, and of heads before tokens."""
    B, T, H, K, P = 2, 70, 2, 1, 8
    projected = torch.randn(B, T, (H + 2 * K) * P, device=device)
    query, key, value = projected.unflatten(2, (-1, P)).split((H, K, K), dim=2)
    value = value.transpose(1, 2).contiguous().transpose(1, 2)
    rows, state = linear_attention(query, key, value, causal=True, impl="triton")
    expected = linear_attention(query, key, value, causal=True, impl="reference")
    torch.testing.assert_close((rows, state), expected)
    query = query.transpose(2, 3).contiguous().transpose(2, 3)
    again, _ = linear_attention(query, key, value, causal=True, impl="triton")
    torch.testing.assert_close(again, rows)


@pytest.mark.parametrize("shift", [30.0, 60.0, 200.0])
def test_kernel_survives_features_that_underflow(shift, device):
    case = Case(70, B=1, P=4)
    query, key, value = (x.to(device).requires_grad_() for x in case.inputs(torch.float32).values())
    rows, _ = linear_attention(query - shift, key - shift, value, causal=True, impl="triton")
    assert rows.isfinite().all()
    grads = torch.autograd.grad(rows.sum(), (query, key, value))
    assert all(g.isfinite().all() for g in grads)


def test_reference_works_out_listed_rows_only():
    """Its largest tensor shrinks with the list."""
    case = Case(4096, B=1, H=8, K=1, P=8)
    inputs = case.inputs(torch.float32)
    sizes = []
    for stride in (1, 16):
        weights = (torch.arange(case.T) % stride == 0).float().view(1, -1, 1)
        queries = plan_routes(weights, is_exclusive=True).list_of(0)
        largest = LargestProduct()
        with largest:
            linear_attention(**inputs, causal=True, queries=queries, impl="reference")
        sizes.append(largest.numel)
    assert sizes[1] * 8 < sizes[0]


class LargestProduct(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the size of the largest result of a batched matrix product."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.bmm.default:
            self.numel = max(self.numel, out.numel())
        return out


def test_bidirectional_lists_equal_all_rows():
    case = Case(130, listed="some", padding="left", H=4, K=2)
    inputs = {name: x.double() for name, x in case.inputs(torch.float32).items()}
    rows, state = linear_attention(**inputs, causal=False, mask=case.mask())
    buffer = torch.full_like(rows, NAN)
    listed, same = linear_attention(
        **inputs, causal=False, mask=case.mask(), queries=case.queries(), rows=buffer
    )
    torch.testing.assert_close(same, state)
    assert listed.masked_select(~case.is_row()).isnan().all()
    is_row = case.is_row().expand_as(rows)
    torch.testing.assert_close(listed[is_row], rows[is_row])


def test_what_the_kernel_does_not_do_is_refused():
    heads = list(Case(4).inputs(torch.float32).values())
    with pytest.raises(BackendUnavailableError, match="is causal"):
        linear_attention(*heads, causal=False, impl="triton")
    wide = [x.repeat(1, 1, 1, 64) for x in heads]
    with pytest.raises(BackendUnavailableError, match=r"widths up to 256, .* width 512"):
        linear_attention(*wide, causal=True, impl="triton")
    with pytest.raises(BackendUnavailableError, match=r"computes in float32.* got torch.float64"):
        linear_attention(*(x.double() for x in heads), causal=True, impl="triton")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"decay": torch.zeros(2, 4, 1), "causal": False}, ConfigError, "decay only when causal"),
        ({"skip": torch.zeros(2)}, ConfigError, "skip only when causal, with normalise=False"),
        (
            {"skip": torch.zeros(1), "normalise": False},
            ShapeError,
            r"skip must be \[2\], got \[1\]",
        ),
        ({"decay": torch.zeros(2, 4)}, ShapeError, r"decay must be \[2, 4, 1\], got \[2, 4\]"),
        ({"initial_state": torch.zeros(2, 1, 8, 8)}, ShapeError, r"initial_state .* 8, 9\], got"),
        ({"rows": torch.zeros(2, 4, 1, 8)}, ShapeError, r"rows must be \[2, 4, 2, 8\]"),
        ({"rows": torch.zeros(2, 4, 2, 8).half()}, ShapeError, "float32 like query"),
        ({"rows": torch.zeros(2, 4, 8, 2).mT}, ShapeError, "last axis contiguous"),
        ({"queries": Case(5, listed="all").queries()}, ShapeError, r"T = 4 tokens, .* \[2, 1, 5\]"),
    ],
)
def test_wrong_arguments_are_named(change, error, message):
    heads = Case(4).inputs(torch.float32)
    with pytest.raises(error, match=message):
        linear_attention(**heads, **({"causal": True} | change))
