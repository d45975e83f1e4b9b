"""A cache of fixed size: the tokens of a growing one, by a step that can be captured."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meta_attention import CapturedStep, MetaAttentionCache, MetaAttentionStaticCache
from meta_attention.errors import BackendUnavailableError, CacheError, ConfigError, ShapeError
from meta_attention.layers import execution

# of equal cost, so that hard routes take all of them
EVEN = {"expert_costs": (0.5, 0.5, 0.5)}
MODELS = {
    "soft": {},
    "hard": {"routing": "hard", **EVEN},
    "gated": {"routing": "gated", "uncertainty_threshold": 0.22},
    "prior-free": {"controller": "prior_free"},
    "values by head": {
        "controller": "value",
        "price": 0.01,
        "routing": "hard",
        "route_granularity": "kv_head",
        "recurrence": 2,
    },
    "gated_full": {"routing": "hard", "experts": ("gated_full", "linear", "local"), **EVEN},
    "linear only": {"experts": ("linear",)},
    "mixed": {"layer_experts": [["local"], ["full", "linear"], ["linear", "local"]]},
    "without rotation": {"use_rope": False, "routing": "hard"},
    "by head": {"routing": "hard", "route_granularity": "kv_head", **EVEN},
    "gated_full by head": {
        "routing": "hard",
        "route_granularity": "kv_head",
        "experts": ("gated_full", "linear", "local"),
        **EVEN,
    },
    "convolved": {"routing": "hard", "short_conv": 3, **EVEN},
    "sinks": {"routing": "hard", "num_sinks": 2, **EVEN},
    "ssm": {"routing": "hard", "experts": ("full", "ssm", "local"), **EVEN},
    "two states by head": {
        "routing": "hard",
        "route_granularity": "kv_head",
        "experts": ("ssm", "linear", "gated_full"),
        **EVEN,
    },
    "recurrence": {"routing": "hard", "recurrence": 3, **EVEN},
    "depth": {"routing": "hard", "depth_capacity": 0.5, "depth_layers": (0, 2), **EVEN},
    "depth, convolved states": {
        "experts": ("ssm", "local"),
        "expert_costs": "flops",
        "depth_capacity": 0.5,
        "depth_routing": "threshold",
        "short_conv": 3,
    },
    "residuals": {"routing": "hard", "residual": "block_attention", "residual_blocks": 2, **EVEN},
    "depth, residuals": {
        "routing": "hard",
        "experts": ("full", "ssm", "local"),
        "depth_capacity": 0.5,
        "depth_layers": (0, 2),
        "residual": "attention",
        **EVEN,
    },
}
# their step reads the length on the host, and cannot be captured
ON_THE_HOST = {"own projections": {"shared_projections": False, "routing": "hard"}}
CLOSE = {"rtol": 1e-5, "atol": 3e-5}
ROOM = 40


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def static_cache(model, room=ROOM):
    return MetaAttentionStaticCache(model.config, max_cache_len=room)


def left_padded(ids):
    """Some rows begin later; one not at all before the last token."""
    mask = torch.ones_like(ids)
    mask[0, :9], mask[1, :-1] = 0, 0
    return mask


# --- generate ---


HOW = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "chunked prompt": {"do_sample": False, "prefill_chunk_size": 5},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", ["soft", "hard", "gated", "recurrence"])
def test_static_generation_is_that_of_a_growing_cache(make_model, tokens, kind, how):
    model, ids = make_model(**MODELS[kind]), tokens(B=3)
    mask = left_padded(ids)
    ids = ids * mask
    outputs = []
    for cache in ("static", None):
        torch.manual_seed(0)
        outputs.append(
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=10,
                cache_implementation=cache,
                **HOW[how],
            )
        )
    assert torch.equal(*outputs)


@pytest.mark.parametrize("kind", [*MODELS, *ON_THE_HOST])
def test_static_generation_works_with_all_experts(make_model, tokens, kind):
    model, ids = make_model(**(MODELS | ON_THE_HOST)[kind]), tokens()
    arguments = {"max_new_tokens": 10, "do_sample": False}
    static = model.generate(ids, cache_implementation="static", **arguments)
    assert torch.equal(static, model.generate(ids, **arguments))


def test_a_static_cache_is_as_large_as_generation_needs(make_model, tokens):
    out = make_model().generate(
        tokens(T=24),
        max_new_tokens=6,
        do_sample=False,
        eos_token_id=None,
        cache_implementation="static",
        return_dict_in_generate=True,
    )
    cache = out.past_key_values
    assert isinstance(cache, MetaAttentionStaticCache)
    # the last token is never fed
    assert cache.get_max_length() == cache.get_seq_length() == 29
    assert cache.layers[0].keys.shape[2] == 29


def test_a_conversation_goes_on_from_a_static_cache(make_model, tokens):
    model, prompt = make_model(), tokens(B=1, T=10)
    cache = static_cache(model)
    first = model.generate(prompt, past_key_values=cache, max_new_tokens=6, do_sample=False)
    more = torch.cat([first, tokens(B=1, T=5, seed=1)], dim=1)
    second = model.generate(more, past_key_values=cache, max_new_tokens=6, do_sample=False)
    assert torch.equal(second, model.generate(more, max_new_tokens=6, do_sample=False))


@pytest.mark.parametrize(
    "kind", ["hard", "gated_full", "by head", "gated_full by head", "ssm", "two states by head"]
)
def test_the_hard_models_of_these_tests_take_every_expert(make_model, tokens, kind):
    weights = make_model(**MODELS[kind])(tokens(B=3), output_routing=True).routing_weights
    assert torch.stack(weights).sum(dim=(0, 1, 2)).min() >= 5


# --- one launch per layer, which reads what routes ask for ---


@pytest.mark.parametrize("static", [True, False], ids=["static", "growing"])
@pytest.mark.parametrize(
    "kind", ["soft", "hard", "gated", "linear only", "mixed", "by head", "sinks", "ssm"]
)
def test_a_step_is_one_launch_per_layer(make_model, tokens, kind, static):
    model, ids = make_model(**MODELS[kind]), tokens(B=3)
    cache = static_cache(model) if static else MetaAttentionCache(model.config)
    model(ids, attention_mask=left_padded(ids), past_key_values=cache)
    with (
        mock.patch.object(execution, "routed_decode", wraps=execution.routed_decode) as launch,
        mock.patch.object(execution, "routed_attention") as other,
    ):
        model(ids[:, :1], past_key_values=cache)
    assert launch.call_count == 3
    other.assert_not_called()


@pytest.mark.parametrize("static", [True, False], ids=["static", "growing"])
def test_a_row_reads_only_the_keys_of_its_route(make_model, tokens, static):
    """Keys before the window are poison, which reaches rows of full attention and no others."""
    model, ids = make_model(num_hidden_layers=1, **MODELS["hard"]), tokens(B=32)
    cache = static_cache(model) if static else MetaAttentionCache(model.config)
    model(ids, past_key_values=cache)
    layer, window = cache.layers[0], model.config.window_size
    for kept in (layer.keys, layer.values):
        kept[:, :, : 24 - window] = torch.nan
        kept[:, :, 25:] = torch.nan
    out = model(tokens(B=32, T=1, seed=3), past_key_values=cache, output_routing=True)
    expert = out.routing_weights[0][:, 0].argmax(dim=-1)
    full = model.config.experts.index("full")
    assert 0 < (expert == full).sum() < 32
    assert torch.equal(out.logits[:, 0].isnan().any(dim=-1), expert == full)


@pytest.mark.parametrize(
    ("kind", "num_layers"),
    [
        *((kind, 1) for kind in ("soft", "hard", "gated_full by head", "sinks", "ssm")),
        *(("two states by head", 1), ("residuals", 2)),
        *(("depth", 3), ("depth, convolved states", 3), ("depth, residuals", 3)),
    ],
)
@pytest.mark.parametrize("static", [True, False], ids=["static", "growing"])
def test_the_kernel_decodes_as_the_reference(
    make_model, tokens, kernel_device, kind, num_layers, static
):
    options = MODELS[kind] | {"num_hidden_layers": num_layers, "impl": "reference"}
    model = make_model(**options).to(kernel_device)
    ids = tokens(B=3, T=12).to(kernel_device)
    steps = {}
    for impl in ("reference", "triton"):
        cache = static_cache(model) if static else MetaAttentionCache(model.config)
        model.config.impl = "reference"
        model(ids[:, :9], attention_mask=left_padded(ids[:, :9]), past_key_values=cache)
        model.config.impl = impl
        if model.config.residual != "sum":
            model.model.residuals.impl = impl
        steps[impl] = [
            model(ids[:, t, None], past_key_values=cache, output_routing=True) for t in range(9, 12)
        ]
    logits = [torch.cat([out.logits for out in steps[impl]]) for impl in ("triton", "reference")]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    # in blocks that tokens may pass by some do, and some do not
    for layer in filter(model.config.may_skip, range(num_layers)):
        weights = torch.stack([out.routing_weights[layer] for out in steps["triton"]])
        assert 0.0 < (weights.sum(dim=-1) > 0).float().mean() < 1.0


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_a_step_with_a_gradient_is_the_same_step(make_model, tokens, kind):
    model, ids = make_model(**MODELS[kind]), tokens()
    caches = [MetaAttentionCache(model.config) for _ in range(2)]
    for cache in caches:
        model(ids, past_key_values=cache)
    expected = model(ids[:, :1], past_key_values=caches[0]).logits
    with torch.enable_grad():
        logits = model(ids[:, :1], past_key_values=caches[1], use_cache=True).logits
        logits.sum().backward()
    torch.testing.assert_close(logits, expected, **CLOSE)
    assert model.lm_head.weight.grad is not None


def test_a_step_leaves_what_others_hold_of_the_cache(make_model, tokens):
    """A state that belongs to a graph, or to inference mode, is not written in place."""
    model, ids = make_model(), tokens()
    expected = model(ids, use_cache=False).logits[:, -1:]
    for mode in (torch.enable_grad, torch.inference_mode):
        cache = MetaAttentionCache(model.config)
        with mode():
            out = model(ids[:, :-1], past_key_values=cache, use_cache=True)
        step = model(ids[:, -1:], past_key_values=cache)
        torch.testing.assert_close(step.logits, expected, **CLOSE)
        if mode is torch.enable_grad:
            with mode():
                out.logits.sum().backward()


@pytest.mark.parametrize("kind", ["soft", "ssm"])
@pytest.mark.parametrize("static", [True, False], ids=["static", "growing"])
def test_steps_run_under_autocast(make_model, tokens, static, kind):
    # soft: a hard route may turn over
    model, ids = make_model(**(MODELS[kind] | {"routing": "soft"})), tokens()
    cache = static_cache(model) if static else MetaAttentionCache(model.config)
    expected = model(ids, use_cache=False).logits
    with torch.autocast("cpu", torch.bfloat16):
        model(ids[:, :20], past_key_values=cache)
        steps = [model(ids[:, t, None], past_key_values=cache).logits for t in range(20, 24)]
    error = (torch.cat(steps, dim=1) - expected[:, 20:]).abs().max()
    assert error <= 0.05 * expected.abs().max()


# --- a step can be captured ---


class Recording(TorchDispatchMode):
    """A CUDA graph in small: the tensor operations of a step, run again on the same memory.

    What Python works out is worked out once, and reading a tensor on the host is an error, as it
    is while CUDA captures. The kernel of the step, which on a CPU reads routes on the host, counts
    as one operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.inside_kernel = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not self.inside_kernel:
            assert "_local_scalar_dense" not in str(func), "the host has read a tensor"
            self.calls.append((func, args, kwargs or {}, out))
        return out

    def record(self, step):
        kernel, one_hot, tolist = execution.routed_decode, F.one_hot, Tensor.tolist

        def run_kernel(*args, **kwargs):
            self.inside_kernel = True
            out = kernel(*args, **kwargs)
            self.inside_kernel = False
            self.calls.append((kernel, args, kwargs, out))
            return out

        def run_one_hot(*args):
            # it checks its range on the host, though not on a GPU
            self.inside_kernel = True
            out = one_hot(*args)
            self.inside_kernel = False
            self.calls.append((one_hot, args, {}, out))
            return out

        def read(tensor):
            assert self.inside_kernel, "the host has read a tensor"
            return tolist(tensor)

        with (
            mock.patch.object(execution, "routed_decode", run_kernel),
            mock.patch.object(F, "one_hot", run_one_hot),
            mock.patch.object(Tensor, "tolist", read),
            self,
        ):
            return step()

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for new, old in zip(tree_leaves(again), tree_leaves(out), strict=True):
                if isinstance(old, Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)


@pytest.mark.parametrize("kind", MODELS)
def test_a_recorded_step_is_right_as_the_cache_fills(make_model, tokens, kind):
    model, ids = make_model(**MODELS[kind]), tokens(B=3)
    mask = left_padded(ids[:, :14])
    cache = static_cache(model)
    # recorded on an empty cache, without padding, as CapturedStep does
    newest = torch.zeros(3, 1, dtype=torch.long)
    model(newest, past_key_values=cache)
    cache.reset()
    recording = Recording()
    logits = recording.record(lambda: model(newest, past_key_values=cache).logits)
    cache.reset()

    model(ids[:, :14], attention_mask=mask, past_key_values=cache)
    steps = []
    for t in range(14, 24):
        cache.advance(1)
        newest.copy_(ids[:, t, None])
        recording.replay()
        steps.append(logits.clone())
    assert cache.get_seq_length() == cache.length.item() == 24
    whole_mask = torch.cat([mask, torch.ones(3, 10, dtype=torch.long)], dim=1)
    expected = model(ids, attention_mask=whole_mask, use_cache=False).logits[:, 14:]
    torch.testing.assert_close(torch.cat(steps, dim=1), expected, **CLOSE)

    # and by hand again, from where the replays left it
    out = model(ids[:, :3], past_key_values=cache)
    longer = torch.cat([ids, ids[:, :3]], dim=1)
    whole_mask = torch.cat([whole_mask, torch.ones(3, 3, dtype=torch.long)], dim=1)
    expected = model(longer, attention_mask=whole_mask, use_cache=False).logits[:, 24:]
    torch.testing.assert_close(out.logits, expected, **CLOSE)


def test_the_recording_of_these_tests_sees_the_host_read(make_model, tokens):
    model, ids = make_model(), tokens()
    cache = static_cache(model)
    model(ids, past_key_values=cache)
    mask = torch.ones(2, 1, dtype=torch.long)
    with pytest.raises(AssertionError, match="the host has read"):
        Recording().record(
            lambda: model(ids[:, :1], attention_mask=mask, past_key_values=cache).logits
        )


def test_nothing_of_a_static_cache_moves(make_model, tokens):
    model, ids = make_model(), tokens()
    cache = static_cache(model)
    model(ids, past_key_values=cache)

    def addresses():
        tensors = [cache.length, cache.start]
        for layer in cache.layers:
            tensors += [layer.keys, layer.values, *layer.states.values()]
        return [x.data_ptr() for x in tensors]

    before = addresses()
    model(ids[:, :1], past_key_values=cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    model(ids[:, :4], past_key_values=cache)
    cache.reset()
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    model(ids, attention_mask=mask, past_key_values=cache)
    assert addresses() == before


# --- what it cannot do, it says ---


@pytest.mark.parametrize("T", [1, 7])
def test_a_full_cache_says_what_to_do_and_stays_whole(make_model, tokens, T):
    model, ids = make_model(), tokens()
    cache = static_cache(model, room=24)
    model(ids[:, :20], past_key_values=cache)
    for t in range(20, 24):
        out = model(ids[:, t, None], past_key_values=cache)
    expected = model(ids, use_cache=False).logits[:, -1:]
    torch.testing.assert_close(out.logits, expected, **CLOSE)
    message = f"room for max_cache_len = 24 positions, got {24 + T} tokens; build a larger one"
    with pytest.raises(CacheError, match=message):
        model(tokens(T=T), past_key_values=cache)
    with pytest.raises(CacheError, match=message):
        cache.advance(T)
    assert cache.get_seq_length() == cache.length.item() == 24


def test_rows_are_those_of_the_first_call(make_model, tokens):
    model = make_model()
    cache = static_cache(model)
    model(tokens(B=2), past_key_values=cache)
    with pytest.raises(ShapeError, match="keeps its number of rows, B = 2, got 1"):
        model(tokens(B=1, T=1), past_key_values=cache)
    for change in (cache.batch_select_indices, cache.batch_repeat_interleave):
        with pytest.raises(CacheError, match="keeps its number of rows; use a MetaAttentionCache"):
            change(torch.tensor([0]))


def test_beams_reorder_in_place(make_model, tokens):
    model, ids = make_model(), tokens(B=3)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    cache, order = static_cache(model), torch.tensor([2, 1, 1])
    model(ids[:, :15], attention_mask=mask[:, :15], past_key_values=cache)
    cache.reorder_cache(order)
    steps = [model(ids[order, t, None], past_key_values=cache).logits for t in range(15, 24)]
    expected = model(ids, attention_mask=mask, use_cache=False).logits[order, 15:]
    torch.testing.assert_close(torch.cat(steps, dim=1), expected, **CLOSE)


def test_states_that_cannot_forget_say_so(make_model, tokens):
    model = make_model()
    cache = static_cache(model)
    model(tokens(), past_key_values=cache)
    with pytest.raises(CacheError, match="cannot forget tokens"):
        cache.crop(-3)


@pytest.mark.parametrize("kind", ["soft", "linear only"])
def test_gradients_are_refused(make_model, tokens, kind):
    model = make_model(**MODELS[kind])
    with torch.enable_grad(), pytest.raises(CacheError, match=r"run .* under torch.no_grad\(\)"):
        model(tokens(), past_key_values=static_cache(model), use_cache=True)


def test_a_cache_without_room_is_refused(make_model):
    with pytest.raises(ConfigError, match="max_cache_len must be >= 1, got 0"):
        static_cache(make_model(), room=0)


def test_a_plain_static_cache_is_refused(make_model, tokens):
    from transformers import StaticCache

    model = make_model()
    cache = StaticCache(model.config, max_cache_len=ROOM)
    with pytest.raises(ConfigError, match="be a MetaAttentionStaticCache, got a StaticCache"):
        model(tokens(), past_key_values=cache)


def test_a_step_is_captured_on_a_gpu_only(make_model):
    model = make_model()
    with pytest.raises(BackendUnavailableError, match="on a CUDA device, the model is on cpu"):
        CapturedStep(model, static_cache(model), batch_size=2)


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("kind", MODELS)
def test_a_captured_step_is_right_as_the_cache_fills(make_model, tokens, kind):
    model, ids = make_model(**MODELS[kind]).cuda(), tokens(B=3).cuda()
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    cache = static_cache(model)
    step = CapturedStep(model, cache, batch_size=3)
    for _ in range(2):
        model(ids[:, :14], attention_mask=mask[:, :14], past_key_values=cache)
        steps = [step(ids[:, t, None]).clone() for t in range(14, 24)]
        expected = model(ids, attention_mask=mask, use_cache=False).logits[:, 14:]
        torch.testing.assert_close(torch.cat(steps, dim=1), expected, rtol=1e-3, atol=1e-3)
        cache.reset()
    cache.advance(ROOM)
    with pytest.raises(CacheError, match="build a larger one"):
        step(ids[:, :1])


@pytest.mark.gpu
def test_what_cannot_be_captured_says_so(make_model):
    model = make_model(**ON_THE_HOST["own projections"]).cuda()
    with pytest.raises(CacheError, match="cannot be captured"):
        CapturedStep(model, static_cache(model), batch_size=2)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", MODELS)
def test_static_generation_on_the_gpu_is_that_of_a_growing_cache(make_model, tokens, kind):
    model, ids = make_model(**MODELS[kind]).cuda(), tokens(B=3).cuda()
    arguments = {"max_new_tokens": 10, "do_sample": False}
    static = model.generate(ids, cache_implementation="static", **arguments)
    assert torch.equal(static, model.generate(ids, **arguments))


def test_a_captured_step_does_not_go_on_after_padding_on_the_right(make_model, tokens):
    """A replay would take it for tokens: only what lies before a row's tokens is on the device."""
    model, ids = make_model().eval(), tokens(2, 7)
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    cache = MetaAttentionStaticCache(model.config, max_cache_len=20)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
    with pytest.raises(CacheError, match="pad prompts on the left"):
        cache.advance(1)
