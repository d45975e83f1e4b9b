"""Routed attention: listed queries only, exact, in every implementation, gradients included."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from meta_attention.config import Impl
from meta_attention.errors import ConfigError, ShapeError
from meta_attention.ops.route_plan import RoutePlan, plan_routes
from meta_attention.ops.routed_attention import attend_all, routed_attention
from meta_attention.testing import assert_within_error_budget, naive_local_attention

NAMES = ("rows", "d_query", "d_key", "d_value")


@dataclass(frozen=True)
class Case:
    """Shapes and routes; experts are full, another one that does not run here, local."""

    T: int = 130
    B: int = 2
    H: int = 4
    K: int = 2
    P: int = 32
    G: int = 1
    past: int = 0
    window: int = 20
    causal: bool = True
    is_exclusive: bool = True
    routes: str = "mixed"
    marks: str = "none"
    num_sinks: int = 0
    scale: float | None = None
    softcap: float | None = None

    @property
    def windows(self) -> dict[int, int | None]:
        return {0: None, 2: self.window}

    @property
    def scores(self) -> dict[str, Any]:
        return {"num_sinks": self.num_sinks, "scale": self.scale, "softcap": self.softcap}

    def __str__(self) -> str:
        changed = {k: v for k, v in vars(self).items() if v != getattr(Case(), k)}
        return "-".join(f"{k}{v}" for k, v in changed.items()) or "default"


def make_weights(case: Case) -> Tensor:
    generator = torch.Generator().manual_seed(case.T)
    shape = (case.B, case.T, case.G, 3)
    if case.routes == "mixed" and not case.is_exclusive:
        weights = torch.rand(shape, generator=generator)
        return weights * (torch.rand(shape, generator=generator) > 0.4)
    experts = {"full": [0], "local": [2], "other": [1], "mixed": [0, 1, 2]}[case.routes]
    choice = torch.tensor(experts)[torch.randint(len(experts), shape[:3], generator=generator)]
    return torch.nn.functional.one_hot(choice, 3).float()


def make_mask(case: Case) -> Tensor | None:
    S = case.T + case.past
    position = torch.arange(S).expand(case.B, S)
    row = torch.arange(case.B)[:, None]
    if case.marks == "left":
        return position >= 7 * row + 3
    if case.marks == "first row only":
        return (position >= 0) & (row == 0)
    if case.marks == "right":
        return position < S - 5 * row - 2
    if case.marks == "gap":
        return (position < S // 3) | (position > S // 2)
    if case.marks == "two documents":
        return 1 + (position >= 90).int()
    if case.marks == "documents":
        return (1 + position // (17 + 20 * row)) * (position < S - 4)
    return None


def make_inputs(case: Case, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(case.T + 1)
    S = case.T + case.past
    shapes = ((case.T, case.H), (S, case.K), (S, case.K))
    return [torch.randn(case.B, n, h, case.P, generator=generator).to(dtype) for n, h in shapes]


def make_plan(case: Case, device: str = "cpu", impl: Impl = "reference") -> RoutePlan:
    mask = make_mask(case)
    new_mask = None if mask is None else mask[:, case.past :].to(device)
    weights = make_weights(case).to(device)
    return plan_routes(weights, mask=new_mask, is_exclusive=case.is_exclusive, impl=impl)


def run(case: Case, inputs: list[Tensor], impl: Impl) -> dict[str, Tensor]:
    """Rows and the gradients of a fixed weighted sum of the listed ones, on the CPU."""
    device = inputs[0].device.type
    query, key, value = inputs = [x.clone().requires_grad_() for x in inputs]
    mask = make_mask(case)
    plan = make_plan(case, device, impl)
    rows = routed_attention(
        query,
        key,
        value,
        plan,
        case.windows,
        causal=case.causal,
        mask=None if mask is None else mask.to(device),
        **case.scores,
        impl=impl,
    )
    upstream = torch.linspace(-1, 1, rows.numel(), device=device).view_as(rows).to(rows.dtype)
    # a graph even where nothing is listed
    total = (rows * upstream).sum() + 0 * sum(x.sum() for x in inputs)
    gradients = torch.autograd.grad(total, inputs)
    return {n: x.detach().cpu() for n, x in zip(NAMES, (rows, *gradients), strict=True)}


def define(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same by the definition: dense attention, then only the rows of the lists."""
    query, key, value = (x.requires_grad_() for x in make_inputs(case, dtype))
    mask = make_mask(case)
    plan = make_plan(case)
    # queries of the past, which nobody asks for
    padded = torch.cat([query.new_zeros(case.B, case.past, case.H, case.P), query], dim=1)
    buffers = []
    for index, window in case.windows.items():
        dense = naive_local_attention(
            padded,
            key,
            value,
            window=window or 10**6,
            causal=case.causal,
            mask=mask,
            **case.scores,
        )[:, case.past :]
        listed = plan.list_of(index).is_listed(case.T)
        listed = listed.repeat_interleave(case.H // listed.shape[2], dim=2).unsqueeze(-1)
        buffers.append(torch.where(listed, dense, 0.0))
    rows = torch.stack(buffers)
    rows = rows.sum(dim=0) if case.is_exclusive else rows
    upstream = torch.linspace(-1, 1, rows.numel()).view_as(rows).to(dtype)
    gradients = torch.autograd.grad(rows, (query, key, value), upstream)
    return {n: x.detach() for n, x in zip(NAMES, (rows, *gradients), strict=True)}


def check(ours: dict[str, Tensor], exact: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    for name in NAMES:
        if exact[name].count_nonzero() == 0:
            # a softmax over one key has no gradient: what is left is rounding of terms of order one
            assert ours[name].abs().max() <= 16 * torch.finfo(ours[name].dtype).eps, name
        else:
            assert_within_error_budget(name, ours[name], exact[name], plain[name])


CASES = [
    Case(),
    Case(T=1),
    Case(T=63, P=16, H=2, K=1),
    Case(T=65, P=24, window=1),
    Case(T=100, window=1000),
    Case(T=200, B=1, window=64),
    Case(routes="full"),
    Case(routes="local"),
    Case(routes="other"),
    Case(G=2),
    Case(past=37),
    Case(T=1, past=70),
    Case(causal=False),
    Case(is_exclusive=False),
    Case(is_exclusive=False, G=2, marks="left"),
    Case(marks="left"),
    Case(marks="right", past=10),
    Case(marks="gap"),
    Case(marks="first row only", T=1),
    Case(marks="first row only", T=1, num_sinks=3),
    Case(marks="documents"),
    Case(marks="documents", causal=False, is_exclusive=False, T=90),
    Case(num_sinks=4),
    Case(num_sinks=4, T=63, P=24, H=2, K=1, window=1),
    Case(num_sinks=4, T=100, window=1000),
    Case(num_sinks=40, T=90, window=3),  # more than the window, and than a tile
    Case(num_sinks=200, T=70),  # more than there are
    # longer than what the ranks of a plan tell apart: queries far from the sinks, on either side
    Case(num_sinks=4, T=280, B=1, H=2, K=1, P=16, window=5, routes="local"),
    Case(num_sinks=4, T=250, B=1, H=1, K=1, P=16, window=5, marks="two documents"),
    Case(num_sinks=200, T=200, B=1, H=1, K=1, P=16, window=3, routes="local", causal=False),
    Case(num_sinks=3, T=1, past=70),
    Case(num_sinks=3, T=66, past=37, G=2),
    Case(num_sinks=5, T=70, is_exclusive=False, G=2, marks="left"),
    Case(num_sinks=30, T=70, window=9, marks="gap"),
    Case(num_sinks=3, T=91, window=5, marks="documents"),
    Case(num_sinks=30, T=70, window=4, causal=False),
    Case(num_sinks=7, T=70, window=3, marks="documents", causal=False),
    Case(scale=0.3, T=40),
    Case(softcap=1.5, T=70),
    Case(softcap=50.0, scale=0.5, num_sinks=4, T=66, marks="left", is_exclusive=False),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_is_the_definition_gradients_included(case):
    exact = define(case, torch.float64)
    ours = run(case, make_inputs(case, torch.float64), "reference")
    for name in NAMES:
        torch.testing.assert_close(ours[name], exact[name], rtol=1e-9, atol=1e-9)


def test_long_lists_go_in_longer_blocks(monkeypatch):
    module = "meta_attention.ops.routed_attention.reference"
    sizes = {"FULL_BLOCK": 7, "LONG_FULL_BLOCK": 20, "LOCAL_BLOCK": 5, "LONG_LIST": 30}
    for name, size in sizes.items():
        monkeypatch.setattr(f"{module}.{name}", size)
    for case in (Case(T=50), Case(T=110), Case(T=64, routes="full")):
        test_reference_is_the_definition_gradients_included(case)


@pytest.mark.parametrize("sizes", [(20, 7), (7, 7), (5, 1)], ids=str)
def test_rows_in_parts_are_the_definition(sizes, monkeypatch):
    """Without a gradient, full attention is put together from parts of the keys."""
    module = "meta_attention.ops.routed_attention.reference"
    monkeypatch.setattr(f"{module}.COMMON_BLOCK", sizes[0])
    monkeypatch.setattr(f"{module}.OWN_BLOCK", sizes[1])
    for case in CASES:
        mask, inputs = make_mask(case), make_inputs(case, torch.float64)
        rows = routed_attention(
            *inputs,
            make_plan(case),
            case.windows,
            causal=case.causal,
            mask=mask,
            **case.scores,
            impl="reference",
        )
        expected = define(case, torch.float64)["rows"]
        torch.testing.assert_close(rows, expected, rtol=1e-9, atol=1e-9, msg=str(case))


def test_rows_in_parts_need_no_kernel_without_a_name(monkeypatch):
    case = Case()
    expected = define(case, torch.float64)["rows"]
    monkeypatch.setattr("meta_attention.ops.routed_attention.reference.FLASH", None)
    rows = routed_attention(
        *make_inputs(case, torch.float64), make_plan(case), case.windows, causal=True
    )
    torch.testing.assert_close(rows, expected, rtol=1e-9, atol=1e-9)


def test_rows_in_parts_round_once_in_half_precision():
    case = Case(T=800, P=64, routes="full")
    inputs = make_inputs(case, torch.bfloat16)
    rows = routed_attention(*inputs, make_plan(case), case.windows, causal=True, impl="reference")
    exact = define_from([x.double() for x in inputs], case)
    plain = define_from(inputs, case)
    assert_within_error_budget("rows", rows, exact, plain)


def define_from(inputs: list[Tensor], case: Case) -> Tensor:
    """Full causal attention by its definition, in the precision of the inputs."""
    query, key, value = (x.transpose(1, 2) for x in inputs)
    key, value = (x.repeat_interleave(case.H // case.K, dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * case.P**-0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return (weights @ value).transpose(1, 2)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_are_the_definition_gradients_included(case, kernel_device):
    exact, plain = define(case, torch.float64), define(case, torch.float32)
    ours = run(case, [x.to(kernel_device) for x in make_inputs(case)], "triton")
    check(ours, exact, plain)


@pytest.mark.parametrize(
    "case",
    [
        Case(num_sinks=4, T=100, past=20, G=2),
        Case(num_sinks=4, T=70, is_exclusive=False, G=2),
    ],
    ids=str,
)
def test_lists_without_a_window_may_run_apart_from_those_with_sinks(
    case, kernel_device, monkeypatch
):
    module = "meta_attention.ops.routed_attention.kernel"

    def is_split(query, key, windows, *rest):
        return len(windows) > 1

    monkeypatch.setattr(f"{module}._is_split", is_split)
    test_kernels_are_the_definition_gradients_included(case, kernel_device)


HALF_CASES = [
    *(Case(T=T, B=1, P=P, window=100) for T in (1, 127, 1000) for P in (64, 128)),
    Case(T=700, P=128, H=4, K=1, G=1, window=256),
    Case(T=700, P=128, H=4, K=2, G=2, window=256),
    Case(T=500, P=64, past=333, window=50),
    Case(T=333, P=128, past=500, window=300),
    Case(T=1, P=128, past=700, window=100),
    Case(T=1500, B=1, H=2, P=64, window=1000),
    Case(T=600, P=128, is_exclusive=False, window=64),
    Case(T=500, P=64, is_exclusive=False, G=2, past=100, window=90),
    Case(T=600, P=128, routes="full"),
    Case(T=600, P=128, routes="local", window=33),
    Case(T=600, P=128, routes="other"),
    Case(T=400, P=96),
    Case(T=400, P=256, window=77),
    Case(T=400, P=32),
    Case(T=600, P=128, marks="left"),
    Case(T=600, P=128, marks="documents"),
    Case(T=600, P=64, causal=False),
    Case(T=700, P=64, H=6, K=2, num_sinks=4, window=256),
    Case(T=600, P=128, num_sinks=4, window=100, G=2),
    Case(T=500, P=64, num_sinks=4, window=50, past=333, is_exclusive=False),
    Case(T=600, P=128, num_sinks=4, window=64, marks="left"),
    Case(T=600, P=64, num_sinks=3, window=10, marks="documents"),
    Case(T=400, P=96, num_sinks=200, window=50),
    Case(T=400, P=64, num_sinks=1000, window=50),
    Case(T=400, P=64, num_sinks=100, window=1000),
    Case(T=400, P=64, num_sinks=100, window=20, causal=False),
    Case(T=1, P=128, past=700, num_sinks=4, window=100),
    Case(T=600, P=128, scale=0.2),
    Case(T=600, P=256, softcap=50.0, scale=0.0625, num_sinks=4, window=100),
    Case(T=600, P=64, softcap=2.0, marks="left"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", HALF_CASES, ids=str)
def test_half_precision_kernels_are_the_definition_gradients_included(case, dtype):
    # the same rounded inputs for both, so that only the arithmetic differs
    plain = define(case, dtype)
    rounded = [x.float() for x in make_inputs(case, dtype)]
    exact = run(case, [x.double() for x in rounded], "reference")
    ours = run(case, [x.to("cuda", dtype) for x in rounded], "triton")
    check(ours, exact, plain)


@pytest.mark.parametrize(
    ("impl", "case", "dtype"),
    [
        ("reference", Case(T=100), torch.float32),
        ("triton", Case(T=100), torch.float32),
        pytest.param("triton", Case(T=300, P=64), torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param("triton", Case(T=300, P=128), torch.bfloat16, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_rows_of_other_lists_are_neither_read_nor_written(impl, case, dtype, kernel_device):
    """What is poisoned stays poisoned, what is listed does not, gradients included."""
    inputs = [x.to(kernel_device).requires_grad_() for x in make_inputs(case, dtype)]
    plan = make_plan(case, kernel_device, impl)
    poison = torch.full_like(inputs[0], float("nan")).detach()
    rows = routed_attention(*inputs, plan, case.windows, causal=True, rows=poison, impl=impl)
    listed = plan.list_of(0).is_listed(case.T) | plan.list_of(2).is_listed(case.T)  # [B, T, 1]
    assert rows[listed.squeeze(-1)].isfinite().all()
    assert rows[~listed.squeeze(-1)].isnan().all()
    upstream = torch.where(listed.unsqueeze(-1), 1.0, float("nan")).to(dtype).expand_as(rows)
    d_query, d_key, d_value = torch.autograd.grad(rows, inputs, upstream)
    assert d_key.isfinite().all()
    assert d_value.isfinite().all()
    assert d_query.isfinite().all()
    assert (d_query[~listed.squeeze(-1)] == 0).all()


def test_heads_may_lie_in_memory_as_a_cache_keeps_them(kernel_device):
    case = Case(T=70, past=20)
    query, key, value = (x.to(kernel_device) for x in make_inputs(case))
    plan = make_plan(case, kernel_device, "triton")
    cached = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (key, value)]
    strided = [torch.cat([x, x], dim=-1)[..., : case.P] for x in (query, key, value)]
    expected = routed_attention(query, key, value, plan, case.windows, causal=True, impl="triton")
    for heads in ([query, *cached], strided):
        rows = routed_attention(*heads, plan, case.windows, causal=True, impl="triton")
        assert torch.equal(rows, expected)


def test_a_window_may_be_longer_than_32_bits_count(kernel_device):
    case = Case(T=70)
    inputs = [x.to(kernel_device).requires_grad_() for x in make_inputs(case)]
    query, key, value = inputs
    plan = make_plan(case, kernel_device, "triton")

    def gradients(window: int) -> tuple[Tensor, ...]:
        rows = routed_attention(query, key, value, plan, {2: window}, causal=True, impl="triton")
        return torch.autograd.grad(rows, inputs, torch.ones_like(rows))

    for ours, expected in zip(gradients(2**31 - 1), gradients(1000), strict=True):
        assert torch.equal(ours, expected)


def test_a_cache_may_have_room_for_more(kernel_device):
    """Keys in the first places of a longer buffer, as a static cache keeps them."""
    case = Case(T=70, past=20)
    query, key, value = (x.to(kernel_device) for x in make_inputs(case))
    plan = make_plan(case, kernel_device, "triton")
    roomy = []
    for x in (key, value):
        buffer = torch.full((2, 2, 150, case.P), 7.0, device=kernel_device)
        buffer[:, :, :90] = x.transpose(1, 2)
        roomy.append(buffer[:, :, :90].transpose(1, 2))
    expected = routed_attention(query, key, value, plan, case.windows, causal=True, impl="triton")
    rows = routed_attention(query, *roomy, plan, case.windows, causal=True, impl="triton")
    assert torch.equal(rows, expected)


def test_a_list_of_everyone_is_plain_attention(kernel_device):
    case = Case(T=70)
    query, key, value = make_inputs(case)
    expected = naive_local_attention(query, key, value, window=10**6, causal=True)
    on_device = (x.to(kernel_device) for x in (query, key, value))
    rows = attend_all(*on_device, None, causal=True, impl="triton")
    torch.testing.assert_close(rows.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_kernels_for_hopper_get_cases_without_soft_caps_and_with_few_sinks_only(
    monkeypatch, kernel_device
):
    """They know of neither soft-caps nor many sinks; a scale they are given."""
    asked = []

    def can_run(query, is_plain, num_sinks, layout):
        asked.append((is_plain, num_sinks))
        return False

    monkeypatch.setattr("meta_attention.ops.routed_attention.hopper.can_run", can_run)
    case = Case(T=5)
    inputs = [x.to(kernel_device) for x in make_inputs(case)]
    plan = make_plan(case, kernel_device, "triton")
    full, both = {0: None}, case.windows
    for windows, scores, expected in (
        (both, {}, (True, 0)),
        (both, {"scale": 0.3}, (True, 0)),
        (both, {"softcap": 5.0}, (False, 0)),
        (both, {"num_sinks": 1}, (True, 1)),
        (full, {"num_sinks": 1}, (True, 0)),  # nothing to an expert without a window
    ):
        with torch.no_grad():
            routed_attention(*inputs, plan, windows, causal=True, impl="triton", **scores)
        assert asked.pop() == expected, scores


# up to 16 sinks are a tile of their own there
SINK_CASES = [
    Case(T=600, P=64, num_sinks=4, window=100),
    Case(T=600, P=128, num_sinks=16, window=20, routes="local"),
    Case(T=600, P=64, num_sinks=17, window=20),
    Case(T=600, P=64, num_sinks=1, window=200, routes="full"),
    Case(T=300, P=64, num_sinks=4, window=1000),
    Case(T=1000, P=64, num_sinks=4, window=3, H=6, K=2, G=2),
    Case(T=9, P=64, num_sinks=16, window=2),
    Case(T=5, P=64, num_sinks=4, window=2, B=3),
    Case(T=130, P=128, past=700, num_sinks=4, window=100),
    Case(T=400, P=64, num_sinks=4, window=50, is_exclusive=False),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", SINK_CASES, ids=str)
def test_sinks_are_seen_with_and_without_gradients(case):
    """Without gradients all lists are one launch, with them full attention has its own."""
    rounded = [x.float() for x in make_inputs(case, torch.bfloat16)]
    exact = run(case, [x.double() for x in rounded], "reference")
    plain = define(case, torch.bfloat16)
    inputs = [x.to("cuda", torch.bfloat16) for x in rounded]
    check(run(case, inputs, "triton"), exact, plain)
    with torch.no_grad():
        plan = make_plan(case, "cuda", "triton")
        rows = routed_attention(
            *inputs, plan, case.windows, causal=True, impl="triton", **case.scores
        )
    assert_within_error_budget("rows", rows.cpu(), exact["rows"], plain["rows"])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("num_sinks", [0, 4])
def test_nothing_waits_for_the_device(num_sinks):
    """The plan and everything after it, backward included, leave the host free."""
    case = Case(T=1000, P=128, window=100, num_sinks=num_sinks)
    inputs = [x.to("cuda", torch.bfloat16).requires_grad_() for x in make_inputs(case)]
    query, key, value = inputs
    weights = make_weights(case).cuda()

    def step() -> None:
        plan = plan_routes(weights, is_exclusive=True)
        rows = routed_attention(
            query, key, value, plan, case.windows, causal=True, num_sinks=case.num_sinks
        )
        torch.autograd.grad(rows, inputs, torch.ones_like(rows))

    step()  # compiles
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"windows": {3: None}}, ConfigError, "lists of the plan, 0 to 2, got 3"),
        ({"windows": {0: 0}}, ConfigError, "window must be >= 1, got 0"),
        ({"windows": {}}, ConfigError, "at least one list"),
        ({"rows": torch.zeros(1)}, ShapeError, "rows must be like query"),
        ({"plan": make_plan(Case(T=5))}, ShapeError, "T = 130"),
        ({"plan": make_plan(Case(G=3))}, ShapeError, "1 or 2 groups"),
    ],
)
def test_what_does_not_fit_is_named(change, error, message):
    case = Case()
    arguments = {"plan": make_plan(case), "windows": case.windows} | change
    with pytest.raises(error, match=message):
        routed_attention(*make_inputs(case), **arguments, causal=True)


def test_kernels_take_heads_of_one_precision(kernel_device):
    query, key, value = torch.randn(3, 1, 4, 2, 16, device=kernel_device)
    plan = plan_routes(torch.ones(1, 4, 1, device=kernel_device), is_exclusive=True)
    with pytest.raises(ShapeError, match=r"key and value must be torch.float32 like query, got"):
        routed_attention(query, key, value.bfloat16(), plan, {0: None}, causal=True, impl="triton")
