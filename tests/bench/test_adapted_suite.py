"""Times of adapted models: both sides run, on the same text, to the end of it."""

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import import_utils

from meta_attention import adapt
from meta_attention.adapt import collect_routing
from meta_attention.bench.adapted_suite import time_adapted
from meta_attention.bench.timing import GRAPH_WARM_UP, Clock
from meta_attention.errors import ConfigError
from meta_attention.testing.pretrained import build_base, draw_tokens, randomise_controllers


def make_model(name="llama", **options):
    model = adapt(build_base(name, **options), window_size=4)
    randomise_controllers(model)
    return model


def clock():
    return Clock(torch.device("cpu"), budget_ms=1.0, min_runs=2, max_runs=2)


# gpt2 has no positions beyond its longest length
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_prefill_and_decoding_are_timed_at_every_length(name):
    model, text = make_model(name), draw_tokens(2, 64)
    rows = time_adapted(
        model, text, [32, 64], prefill_batches=[1, 2], decode_batch=3, clock=clock()
    )
    assert [(row["length"], row["phase"], row["cache"], row["batch"]) for row in rows] == [
        (length, *kind)
        for length in (32, 64)
        for kind in (
            ("prefill", "dynamic", 1),
            ("prefill", "dynamic", 2),
            ("decode", "dynamic", 3),
            ("decode", "static", 3),
        )
    ]
    for row in rows:
        assert row["speedup"] == pytest.approx(row["base_ms"] / row["adapted_ms"])
        assert row["timings"]["adapted"]["runs"] == 4


class Graphless(Clock):
    """Stands in for a clock that captures: it calls as often, and as it is."""

    can_capture = True

    def time_graph(self, call):
        for _ in range(GRAPH_WARM_UP):
            call()
        return self.time(call)


@torch.no_grad()
def test_a_captured_prefill_of_the_base_has_no_mask_either(monkeypatch):
    """With one PyTorch would run another kernel than it does in a call."""
    model, seen = make_model(), []
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)
    attention = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def note(module, query, key, value, attention_mask, **kwargs):
        seen.append(attention_mask)
        return attention(module, query, key, value, attention_mask, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", note)
    given = {"prefill_batches": [2], "decode_batch": 0, "caches": ["captured"]}
    graphless = Graphless(torch.device("cpu"), budget_ms=1.0, min_runs=2, max_runs=2)
    rows = time_adapted(model, draw_tokens(2, 32), [32], **given, clock=graphless)
    assert rows[-1]["cache"] == "captured"
    assert seen
    assert all(mask is None for mask in seen)


def test_captured_steps_go_on_to_the_end_of_the_text():
    model, text = make_model(), draw_tokens(1, 32)
    seen = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True
    )
    watch = Graphless(torch.device("cpu"), budget_ms=1.0, min_runs=2, max_runs=2)
    rows = time_adapted(model, text, [32], decode_batch=2, clock=watch, caches=["captured"])
    assert [(row["phase"], row["cache"]) for row in rows] == [
        ("prefill", "dynamic"),
        ("prefill", "captured"),
        ("decode", "captured"),
    ]
    assert all(row["speedup"] > 0.0 for row in rows)
    # of the base, then ours: a prompt of 21 tokens, and one token after the other
    prompts = [at for at, ids in enumerate(seen) if ids.shape == (2, 21)]
    for at in prompts:
        steps = seen[at + 1 : at + 12]
        assert torch.equal(torch.cat(steps, dim=1), text[:, 21:].repeat(2, 1))
    assert len(prompts) == 2
    assert len(seen) == prompts[1] + 12


def test_steps_that_cannot_be_captured_are_left_out_or_refused_by_name():
    text = draw_tokens(1, 32)
    with pytest.raises(ConfigError, match="must have a CUDA device, got cpu; leave them out"):
        time_adapted(make_model(), text, [32], caches=["captured"], clock=clock())
    recurrent = adapt(build_base("llama"), experts=("full", "linear"))
    watch = Graphless(torch.device("cpu"), budget_ms=1.0, min_runs=2, max_runs=2)
    given = {"prefill_batches": (), "decode_batch": 1, "clock": watch}
    rows = time_adapted(recurrent, text, [32], **given)
    assert [row["cache"] for row in rows] == ["dynamic", "static"]
    with pytest.raises(ConfigError, match="must have softmax experts"):
        time_adapted(recurrent, text, [32], caches=["captured"], **given)


def test_only_one_of_both_is_routed(monkeypatch):
    """The base must not be timed with our attention, nor the adapted model without."""
    model, text = make_model(), draw_tokens(1, 64)
    layers = []

    class Watch(Clock):
        def time(self, call):
            with collect_routing(model) as record:
                timing = super().time(call)
            layers.append(len(record.layers))
            return timing

    watch = Watch(torch.device("cpu"), budget_ms=1.0, min_runs=2, max_runs=2)
    time_adapted(model, text, [64], clock=watch, decode_batch=1)
    # prefill, then both caches: base, adapted
    assert layers == [0, 2] * 3


def test_phases_may_be_left_out_and_mistakes_are_one_sentence():
    model, text = make_model(), draw_tokens(1, 64)
    (row,) = time_adapted(model, text, [64], decode_batch=0, clock=clock())
    assert row["phase"] == "prefill"
    (row,) = time_adapted(model, text, [64], prefill_batches=(), caches=["static"], clock=clock())
    assert (row["phase"], row["cache"]) == ("decode", "static")
    with pytest.raises(ConfigError, match="caches must be of dynamic, static, captured"):
        time_adapted(model, text, [64], caches=["paged"], clock=clock())
    with pytest.raises(ConfigError, match="lengths must be above 8"):
        time_adapted(model, text, [8], clock=clock())


@pytest.mark.gpu
def test_both_run_in_half_precision_on_a_gpu():
    # heads as wide as kernels are made for
    model = make_model(hidden_size=256).to("cuda", torch.bfloat16)
    rows = time_adapted(model, draw_tokens(2, 64), [64], decode_batch=4)
    assert [(row["phase"], row["cache"]) for row in rows] == [
        ("prefill", "dynamic"),
        ("prefill", "captured"),
        ("decode", "dynamic"),
        ("decode", "static"),
        ("decode", "captured"),
    ]
    assert all(row["base_ms"] > 0.0 < row["adapted_ms"] for row in rows)
