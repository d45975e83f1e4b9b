"""What an adapted model does to a prompt and in a step can be captured: it asks the device nothing.

A CUDA graph holds launches alone. Whatever the host reads in between would be read once, while the
graph is captured, or refused.
"""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache
from triton.runtime.interpreter import GridExecutor

from meta_attention import adapt
from meta_attention.adapt import adaptation, attention, routed_as, routers_of
from meta_attention.errors import CacheError
from meta_attention.testing.pretrained import (
    build_base,
    draw_tokens,
    pad_rows,
    randomise_controllers,
)

CACHES = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=16),
}
# methods and operations that wait for the device
READS = {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"}
OPERATIONS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal"}


class Asked(Exception):
    """The host asked for what only the device knows."""


class Methods(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in READS:
            raise Asked(name)
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        # an index of booleans is counted first
        given = args[1] if name in ("index", "index_put", "index_put_") else ()
        has_booleans = any(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in given)
        if name in OPERATIONS or has_booleans:
            raise Asked(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def asking_nothing(monkeypatch):
    """Refuse what waits for the device. An interpreter of kernels reads: these are left out."""
    launched = []
    with monkeypatch.context() as patch, Methods(), Operations():
        patch.setattr(GridExecutor, "__call__", lambda self, *args, **_: launched.append(self.fn))
        yield launched


@pytest.fixture
def capturing(monkeypatch):
    """As while a graph is captured, for what asks whether it is."""
    for module in (adaptation, attention):
        monkeypatch.setattr(module, "may_wait", lambda x: False)


def make_model(device="cpu", **settings):
    # heads as wide as kernels are made for
    base = build_base("llama", hidden_size=64, head_dim=16)
    given = {"experts": ("full", "local:6", "local"), "window_size": 3, "num_sinks": 2}
    given |= {"impl": "triton", "route_granularity": "kv_head"} | settings
    model = adapt(base, **given)
    randomise_controllers(model)
    return model.to(device)


def test_whatever_reads_is_noticed(monkeypatch):
    x = torch.ones(2, dtype=torch.bool)
    reads = (x.tolist, x.any().item, x.nonzero, x.cpu, lambda: bool(x.any()), lambda: x[x])
    for read in reads:
        with pytest.raises(Asked), asking_nothing(monkeypatch):
            read()


# without a cache, Transformers itself looks for documents packed into a row
@pytest.mark.parametrize("kind", CACHES)
@torch.no_grad()
def test_a_prompt_asks_the_device_nothing(monkeypatch, kernel_device, kind):
    model, ids = make_model(kernel_device), draw_tokens(2, 12).to(kernel_device)
    with asking_nothing(monkeypatch) as launched:
        model(ids, past_key_values=CACHES[kind](model))
    assert kernel_device == "cuda" or len(launched) == 3 * 2


@pytest.mark.parametrize("layers", [None, [1]], ids=["all layers", "one layer"])
@pytest.mark.parametrize("kind", CACHES)
@torch.no_grad()
def test_a_step_asks_the_device_nothing(monkeypatch, kernel_device, kind, layers):
    """Also of the layers that are not adapted, and in no more than two launches."""
    model = make_model(kernel_device, layers=layers)
    ids, cache = draw_tokens(2, 12).to(kernel_device), CACHES[kind](model)
    model(ids[:, :3], past_key_values=cache)
    with asking_nothing(monkeypatch) as launched:
        model(ids[:, 3:4], past_key_values=cache)
    assert kernel_device == "cuda" or len(launched) == 2 * (1 if layers else 2)


@pytest.mark.parametrize("experts", [("full", "local"), ("full", "gated_full", "local")])
@torch.no_grad()
def test_a_captured_step_asks_nothing_about_padding(monkeypatch, capturing, experts):
    """A mask as long as the cache, as ``generate`` makes one, is enough to know."""
    for impl in ("triton", "reference"):
        model = make_model(experts=experts, impl=impl)
        ids, mask = pad_rows(draw_tokens(3, 8), [8, 6, 4], "left")
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        cache = StaticCache(config=model.config, max_cache_len=16)
        given = {"attention_mask": mask[:, :6], "position_ids": positions[:, :6]}
        with routed_as(model, "full") if impl == "triton" else nullcontext():
            model(ids[:, :6], past_key_values=cache, **given)
        room = torch.ones(3, 16, dtype=torch.long)
        room[:, :8] = mask
        for at in (6, 7):
            new = {"position_ids": positions[:, at : at + 1], "past_key_values": cache}
            with asking_nothing(monkeypatch) if impl == "triton" else nullcontext():
                actual = model(ids[:, at : at + 1], attention_mask=room, **new).logits
    # of the reference, which is run
    expected = model(ids, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(actual, expected[:, 7:], rtol=0.0, atol=5e-5)


@torch.no_grad()
def test_a_captured_step_refuses_what_it_would_have_to_ask(capturing):
    ids, mask = pad_rows(draw_tokens(2, 9), [9, 5], "right")
    room = torch.ones(2, 16, dtype=torch.long)

    def decode(model, *prompts, **given):
        cache = StaticCache(config=model.config, max_cache_len=16)
        for prompt in prompts:
            model(prompt, past_key_values=cache, **given)
        return model(ids[:, :1], past_key_values=cache, attention_mask=room)

    with pytest.raises(CacheError, match="pad prompts on the left"):
        decode(make_model(impl="reference"), ids, attention_mask=mask)
    with pytest.raises(CacheError, match="read on the host by prompts that follow others"):
        decode(make_model(impl="reference"), ids[:, :4], ids[:, 4:])
    with pytest.raises(CacheError, match="by recurrent experts"):
        decode(make_model(experts=("full", "linear"), impl="reference"), ids)


@torch.no_grad()
def test_what_an_earlier_prompt_ended_in_does_not_hold_for_one_token(monkeypatch):
    model, room = make_model(impl="reference"), torch.ones(2, 16, dtype=torch.long)
    cache = StaticCache(config=model.config, max_cache_len=16)
    ids, mask = pad_rows(draw_tokens(2, 9), [9, 5], "right")
    expected = model(ids[:, :2]).logits[:, 1:]
    model(ids, attention_mask=mask, past_key_values=cache)
    cache.reset()
    model(ids[:, :1], attention_mask=room, past_key_values=cache)
    for module in (adaptation, attention):
        monkeypatch.setattr(module, "may_wait", lambda x: False)
    actual = model(ids[:, 1:2], attention_mask=room, past_key_values=cache).logits
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=5e-5)


@torch.no_grad()
def test_a_mask_that_is_one_row_for_all_may_have_padding():
    """Strides say that ours have none; those of others say nothing."""
    model, ids = make_model(impl="reference"), draw_tokens(2, 8)
    row = torch.ones(1, 8, dtype=torch.bool)
    row[:, :3] = False
    expected = model(ids, attention_mask=row.repeat(2, 1)).logits
    torch.testing.assert_close(model(ids, attention_mask=row.expand(2, -1)).logits, expected)


@torch.no_grad()
def test_nothing_of_a_call_is_kept_after_it():
    model, ids = make_model(impl="reference"), draw_tokens(2, 8)
    model(ids, attention_mask=torch.ones_like(ids))
    shared = routers_of(model)[0].adaptation
    assert shared._layout is None
    # also where the last layer is not routed
    with routed_as(model, {1: "full"}):
        model(ids, attention_mask=torch.ones_like(ids))
    assert shared._layout is None


@torch.no_grad()
def test_a_call_that_failed_leaves_nothing_to_the_next():
    """What was not captured to its end, say, was never computed."""
    model, ids = make_model(impl="reference"), draw_tokens(2, 8)
    expected = model(ids).logits
    shared = routers_of(model)[0].adaptation

    def fail(*args):
        shared._layout[-1].position_ids.fill_(60)
        raise Asked

    with model.model.layers[0].mlp.register_forward_hook(fail), pytest.raises(Asked):
        model(ids)
    assert shared._layout is not None
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("is_padded", [False, True])
@torch.no_grad()
def test_a_captured_step_decodes_as_calls_do(is_padded):
    model = make_model("cuda", impl="auto")
    ids, mask = pad_rows(draw_tokens(3, 24), [24, 20, 17] if is_padded else [24] * 3, "left")
    ids, mask = ids.cuda(), mask.cuda()
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    expected = model(ids, attention_mask=mask, position_ids=positions).logits
    cache = StaticCache(config=model.config, max_cache_len=32)
    given = {"attention_mask": mask[:, :9], "position_ids": positions[:, :9]}
    model(ids[:, :9], past_key_values=cache, **given)
    token, position = ids[:, 9:10].clone(), positions[:, 9:10].clone()
    room = torch.ones(3, 32, dtype=torch.bool, device="cuda")
    room[:, :24] = mask

    def step():
        masked = {"attention_mask": room} if is_padded else {}
        return model(token, position_ids=position, past_key_values=cache, **masked).logits

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for at in (9, 10):
            token.copy_(ids[:, at : at + 1])
            position.copy_(positions[:, at : at + 1])
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()
    for at in range(11, 24):
        token.copy_(ids[:, at : at + 1])
        position.copy_(positions[:, at : at + 1])
        graph.replay()
        torch.testing.assert_close(logits, expected[:, at : at + 1], rtol=0.0, atol=1e-3)
