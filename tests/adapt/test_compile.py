"""A step of an adapted model compiles as a whole, as ``generate`` has it with a static cache."""

from functools import partial

import pytest
import torch
from transformers import CompileConfig, StaticCache

from meta_attention import adapt
from meta_attention.adapt.attention import make_mask
from meta_attention.errors import CacheError
from meta_attention.testing.pretrained import (
    build_base,
    draw_tokens,
    pad_rows,
    randomise_controllers,
)

EXPERTS = ("full", "local:6", "local")


def make_model(name="llama", **settings):
    wide = {"hidden_size": 64, "head_dim": 16} if name == "llama" else {}
    given = {"experts": EXPERTS, "window_size": 3, "num_sinks": 2, "route_granularity": "kv_head"}
    model = adapt(build_base(name, **wide), **given | settings)
    randomise_controllers(model)
    return model


class Kept:
    """A backend that keeps what it is given to compile."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph.forward

    def __deepcopy__(self, memo):
        return self  # as of any function


@pytest.fixture(autouse=True)
def _forget_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("impl", ["reference", "triton"])
@torch.no_grad()
def test_a_step_is_one_graph_for_all_positions(impl, is_masked):
    model, ids, kept = make_model(impl=impl), draw_tokens(2, 6), Kept()
    expected = make_model(impl="reference")(ids).logits
    cache = StaticCache(config=model.config, max_cache_len=16)
    model(ids[:, :3], past_key_values=cache)
    given = {"attention_mask": torch.ones(2, 16, dtype=torch.bool)} if is_masked else {}
    step = torch.compile(model.__call__, backend=kept, fullgraph=True, dynamic=False)
    for at in range(3, 6):
        actual = step(ids[:, at : at + 1].clone(), past_key_values=cache, **given).logits
        torch.testing.assert_close(actual, expected[:, at : at + 1], rtol=0.0, atol=5e-5)
    (graph,) = kept.graphs
    assert "meta_attention.routed_decode" in graph.code
    assert ("meta_attention.route_tokens" in graph.code) == (impl == "triton")


@torch.no_grad()
def test_a_step_can_be_functionalised():
    """As backends need it that make code: caches are written in place."""
    model, ids = make_model(experts=("full", "gated_full", "local")), draw_tokens(2, 5)
    expected = model(ids).logits
    cache = StaticCache(config=model.config, max_cache_len=16)
    model(ids[:, :3], past_key_values=cache)
    step = torch.compile(model.__call__, backend="aot_eager", fullgraph=True, dynamic=False)
    for at in (3, 4):
        actual = step(ids[:, at : at + 1].clone(), past_key_values=cache).logits
        torch.testing.assert_close(actual, expected[:, at : at + 1], rtol=0.0, atol=5e-5)


def compiled(kept, fullgraph=True):
    """What ``generate`` takes to compile, also without a GPU."""
    config = CompileConfig(fullgraph=fullgraph, backend=kept, mode=None)
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_generate_compiles_its_steps_and_writes_the_same(name):
    model, kept = make_model(name), Kept()
    ids, mask = pad_rows(draw_tokens(3, 7), [7, 3, 5], "left")
    given = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(ids, **given)
    for _ in range(2):
        assert torch.equal(model.generate(ids, **given, **compiled(kept)), expected)
    assert len(kept.graphs) == 1


def test_a_prompt_that_follows_another_breaks_up_what_is_compiled_and_goes_on():
    """As ``generate`` has it with a static cache and ``prefill_chunk_size``."""
    make = torch.compile(partial(make_mask, below="sdpa"), backend=Kept())
    mask = make(batch_size=2, q_length=3, kv_length=16, q_offset=torch.tensor(4))
    assert mask.shape == (2, 7)
    assert mask.all()


def test_a_prompt_that_ends_in_padding_is_refused_as_it_is_without_compiling():
    model = make_model()
    ids, mask = pad_rows(draw_tokens(2, 7), [7, 3], "right")
    given = compiled(Kept(), fullgraph=False)  # as generate has it
    with pytest.raises(CacheError, match="pad prompts on the left"):
        model.generate(ids, attention_mask=mask, max_new_tokens=4, **given)


def test_what_a_step_reads_on_the_host_is_not_compiled():
    assert make_model().generation_config.disable_compile is not True
    assert make_model(experts=("full", "linear")).generation_config.disable_compile is True


# the compiler advises float32 of fewer bits, which is another result
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
# and begins with a graph of nothing, of which torch 2.11 then warns
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.gpu
def test_generate_compiles_by_itself_on_a_gpu():
    model = make_model().to("cuda")
    ids, mask = (x.cuda() for x in pad_rows(draw_tokens(3, 9), [9, 5, 7], "left"))
    given = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, **given)
    for _ in range(2):
        assert torch.equal(model.generate(ids, **given, cache_implementation="static"), expected)
