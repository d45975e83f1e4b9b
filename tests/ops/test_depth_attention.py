"""depth_attention: kernels agree with the definition, and hand gradients on."""

import gc
import weakref

import pytest
import torch

from meta_attention.errors import BackendUnavailableError, ShapeError
from meta_attention.ops.depth_attention import kernel, open_sources
from meta_attention.testing import assert_within_error_budget

SIZES = (2, 3, 1, 1)


def run(data, queries, impl, sizes=SIZES):
    """Inputs of all sublayers, where outputs depend on what was read, and their gradients."""
    data, queries = data.clone().requires_grad_(), queries.clone().requires_grad_()
    embedding, *drawn = data.unbind()
    sources = open_sources(embedding, len(sizes) + 1, eps=1e-6, impl=impl)
    inputs, at = [], 0
    for size in sizes:
        parts = []
        for row in sources.attend(queries[at : at + size]):
            mixed, partial = sources.join(row, *parts)
            inputs.append(mixed)
            output = drawn[at] * torch.tanh(mixed.mean(dim=-1, keepdim=True))
            parts = [output] if partial is None else [partial, output]
            at += 1
        sources.add(*parts)
    (row,) = sources.attend(queries[at : at + 1])
    inputs.append(sources.join(row)[0])
    mixed = torch.stack(inputs)
    upstream = torch.linspace(-1, 1, mixed.numel(), device=mixed.device).view_as(mixed)
    gradients = torch.autograd.grad(mixed, (data, queries), upstream.to(mixed.dtype))
    return dict(zip(("mixed", "d_data", "d_queries"), (mixed.detach(), *gradients), strict=True))


@pytest.mark.parametrize("D", [1, 24, 130])
def test_kernel_agrees_with_the_reference(D, kernel_device):
    data, queries = torch.randn(8, 2, 5, D), 3.0 * torch.randn(8, D) / D**0.5
    # nothing at all, as of padding, and logits that the exponential of float32 has no number for
    data[:, 0, 0] = 0.0
    data[0, 1, 1], queries[3] = 3.0, 200.0 / D
    exact = run(data.double(), queries.double(), "reference")
    plain = run(data, queries, "reference")
    actual = run(data.to(kernel_device), queries.to(kernel_device), "triton")
    for name, tensor in actual.items():
        assert tensor.isfinite().all(), name
        assert_within_error_budget(name, tensor.cpu(), exact[name], plain[name], roundings=4.0)


@pytest.fixture
def poisoned():
    """What was allocated and not written is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("programs", [1, 2, 3])
def test_each_program_leaves_its_share_of_the_gradient_of_queries(
    programs, kernel_device, monkeypatch
):
    """Programs of several tokens, the last of fewer and of half a tile."""
    monkeypatch.setattr(kernel, "MAX_PROGRAMS", programs)
    assert kernel._split(11)[0] == programs
    data, queries = torch.randn(8, 1, 11, 24), torch.randn(8, 24) / 24**0.5
    exact = run(data.double(), queries.double(), "reference")
    plain = run(data, queries, "reference")
    actual = run(data.to(kernel_device), queries.to(kernel_device), "triton")
    for name, tensor in actual.items():
        assert_within_error_budget(name, tensor.cpu(), exact[name], plain[name], roundings=4.0)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("used", [0, 1])
def test_a_query_learns_from_the_row_that_was_used(used, kernel_device):
    """Joined, or read as it is."""
    data = torch.randn(2, 1, 5, 8, device=kernel_device)
    queries = torch.randn(3, 8, device=kernel_device, requires_grad=True)
    sources = open_sources(data[0], 2, eps=1e-6, impl="triton")
    sources.add(data[1])
    rows = sources.attend(queries)
    found = sources.join(rows[0], data[0])[0] if used == 0 else rows[1].numerator
    (gradient,) = torch.autograd.grad(found.square().sum(), queries)
    assert gradient[used].abs().min() > 0.0
    assert gradient[torch.arange(3) != used].eq(0.0).all()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("num_parts", [0, 1, 2])
def test_a_sum_that_nothing_reads_later_has_its_gradient(num_parts, kernel_device):
    drawn = (torch.randn(4, 1, 5, 24), torch.randn(1, 24) / 24**0.5)

    def gradients(impl, device="cpu", dtype=torch.float32):
        data, queries = (x.to(device, dtype).requires_grad_() for x in drawn)
        sources = open_sources(data[0], 2, eps=1e-6, impl=impl)
        sources.add(data[1])
        (row,) = sources.attend(queries)
        mixed, _ = sources.join(row, *data[2 : 2 + num_parts])
        return torch.autograd.grad(mixed.pow(3).sum(), (data, queries))

    exact, plain = gradients("reference", dtype=torch.float64), gradients("reference")
    for i, found in enumerate(gradients("triton", kernel_device)):
        name = ("d_data", "d_queries")[i]
        assert_within_error_budget(name, found.cpu(), exact[i], plain[i], roundings=4.0)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_parts_of_two_precisions_make_a_sum_of_the_finer(impl, kernel_device):
    fine = torch.randn(1, 4, 8, device=kernel_device, requires_grad=True)
    coarse = torch.randn(1, 4, 8, device=kernel_device).bfloat16().requires_grad_()
    sources = open_sources(fine, 2, eps=1e-6, impl=impl)
    (row,) = sources.attend(torch.randn(1, 8, device=kernel_device))
    mixed, partial = sources.join(row, fine, coarse)
    assert partial.dtype == torch.float32
    torch.testing.assert_close(partial, fine + coarse)
    gradients = torch.autograd.grad(mixed.sum() + partial.sum(), (fine, coarse))
    assert [gradient.dtype for gradient in gradients] == [torch.float32, torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 1024, 1536])
def test_half_precision_is_within_its_budget(D):
    data = torch.randn(8, 2, 100, D, device="cuda", dtype=torch.bfloat16)
    queries = 3.0 * torch.randn(8, D, device="cuda") / D**0.5
    exact = run(data.double(), queries.double(), "reference")
    plain = run(data, queries, "reference")
    # numerators and gradients on their way are kept in bfloat16 here, in float32 there
    for name, tensor in run(data, queries, "triton").items():
        assert_within_error_budget(name, tensor, exact[name], plain[name], roundings=8.0)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_gradient_of_some_inputs_is_a_gradient(impl, kernel_device):
    """What was read later has none then, and neither has what was added later."""
    data = torch.randn(3, 1, 4, 8, device=kernel_device, requires_grad=True)
    queries = torch.randn(3, 8, device=kernel_device, requires_grad=True)
    sources = open_sources(data[0], 3, eps=1e-6, impl=impl)
    sources.add(data[1])
    first, second = sources.attend(queries[:2])
    mixed, _ = sources.join(first)
    sources.join(second, data[2])
    sources.add(data[2])
    sources.attend(queries[2:])
    d_data, d_queries = torch.autograd.grad(mixed.square().sum(), (data, queries))
    assert d_data[:2].abs().amin(dim=(0, 1, 2)).min() > 0.0
    assert d_data[2].eq(0.0).all()
    assert d_queries[0].abs().min() > 0.0
    assert d_queries[1:].eq(0.0).all()


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_second_backward_finds_what_the_first_found(impl, kernel_device):
    data = torch.randn(2, 1, 4, 8, device=kernel_device, requires_grad=True)
    queries = torch.randn(2, 8, device=kernel_device, requires_grad=True)
    sources = open_sources(data[0], 2, eps=1e-6, impl=impl)
    (row,) = sources.attend(queries[:1])
    mixed, partial = sources.join(row, data[1])
    sources.add(partial)
    (row,) = sources.attend(queries[1:])
    loss = (mixed + sources.join(row)[0]).square().sum()
    first = torch.autograd.grad(loss, (data, queries), retain_graph=True)
    for ours, expected in zip(torch.autograd.grad(loss, (data, queries)), first, strict=True):
        assert torch.equal(ours, expected)


def test_numerators_are_not_kept_for_the_backward(kernel_device):
    data = torch.randn(2, 1, 4, 8, device=kernel_device, requires_grad=True)
    queries = torch.randn(1, 8, device=kernel_device)
    sources = open_sources(data[0], 2, eps=1e-6, impl="triton")
    (row,) = sources.attend(queries)
    numerator = weakref.ref(row.numerator.untyped_storage())
    mixed, _ = sources.join(row, data[1])
    assert numerator() is not None
    del row
    gc.collect()
    assert numerator() is None
    mixed.sum().backward()
    assert data.grad.isfinite().all()


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_zero_queries_give_the_sum(impl, kernel_device):
    data = torch.randn(3, 1, 4, 8, device=kernel_device)
    queries = torch.zeros(1, 8, device=kernel_device)
    sources = open_sources(data[0], 3, eps=1e-6, impl=impl)
    sources.add(data[1])
    (row,) = sources.attend(queries)
    mixed, _ = sources.join(row, data[2])
    torch.testing.assert_close(mixed, data.sum(dim=0))


def test_bad_sources_get_one_clear_sentence():
    with pytest.raises(ShapeError, match=r"\[B, T, D\] and at least one, got \[4, 8\] and 2"):
        open_sources(torch.zeros(4, 8), 2, eps=1e-6)
    with pytest.raises(BackendUnavailableError, match=r"depth_attention .* got torch.float64"):
        open_sources(torch.zeros(1, 1, 1, dtype=torch.float64), 2, eps=1e-6, impl="triton")
