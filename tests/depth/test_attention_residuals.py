"""Attention Residuals: the paper's formula, a start as the plain sum, a model like any other."""

import math
from itertools import pairwise

import pytest
import torch
from accelerate import dispatch_model  # type: ignore[import-untyped]
from torch import nn
from transformers import AutoModelForCausalLM

from meta_attention import (
    MetaAttentionCache,
    MetaAttentionConfig,
    MetaAttentionForCausalLM,
    MetaAttentionStaticCache,
)
from meta_attention.depth import AttentionResiduals, count_reads
from meta_attention.depth.attention_residuals import group_ends
from meta_attention.errors import ConfigError
from meta_attention.testing import naive_attention_residuals

FULL = {"residual": "attention"}
BLOCKS = {"residual": "block_attention", "residual_blocks": 3}
VARIANTS = pytest.mark.parametrize("variant", [FULL, BLOCKS], ids=["full", "block"])


def make_config(**kwargs) -> MetaAttentionConfig:
    defaults = {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "window_size": 5,
        "max_position_embeddings": 128,
        "controller_hidden_size": 8,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    return MetaAttentionConfig(**(defaults | kwargs))


def make_model(*, trained: bool = True, **kwargs) -> MetaAttentionForCausalLM:
    """A model whose queries choose, unless it shall be new."""
    torch.manual_seed(0)
    model = MetaAttentionForCausalLM(make_config(**kwargs)).eval()
    if trained and model.model.residuals is not None:
        nn.init.normal_(model.model.residuals.queries, std=0.5)
    return model


def draw(B: int = 2, T: int = 24, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 61, (B, T), generator=generator)


def sizes_of(config: MetaAttentionConfig) -> list[int]:
    return [end - start for start, end in pairwise([0, *group_ends(config)])]


@pytest.mark.parametrize("blocks", [1, 3, 5, 8, None])
def test_inputs_are_those_of_the_papers_formula_gradients_included(blocks):
    """Times the number of sources, which the norms that follow take out again."""
    variant = FULL if blocks is None else {**BLOCKS, "residual_blocks": blocks}
    config = make_config(**variant)
    residuals = AttentionResiduals(config).double()
    nn.init.normal_(residuals.queries)
    embedding, *outputs = torch.randn(9, 2, 5, 32, dtype=torch.float64).requires_grad_().unbind()

    stream = residuals.start(embedding)
    inputs = []
    for output in outputs:
        inputs.append(stream.read())
        stream.write(output)
    inputs.append(stream.read())

    sizes = sizes_of(config)
    expected = naive_attention_residuals(
        embedding, outputs, residuals.queries, groups=sizes, eps=config.rms_norm_eps
    )
    # sources of each input, counted by hand: the embedding, groups begun
    counts = [1 + sum(at > start for start in [0, *group_ends(config)[:-1]]) for at in range(9)]
    assert sum(counts[1:]) == count_reads(config)
    for ours, count, definition in zip(inputs, counts, expected, strict=True):
        torch.testing.assert_close(ours, count * definition)
    upstream = torch.randn(9, 2, 5, 32, dtype=torch.float64)
    wanted = (residuals.queries, embedding, *outputs)
    ours = torch.autograd.grad(
        sum((x * u).sum() for x, u in zip(inputs, upstream, strict=True)), wanted
    )
    theirs = torch.autograd.grad(
        sum((c * x * u).sum() for c, x, u in zip(counts, expected, upstream, strict=True)), wanted
    )
    for gradient, definition in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, definition)


@pytest.mark.parametrize(("layers", "blocks"), [(24, 8), (12, 8), (5, 4), (3, 1), (3, 6)])
def test_groups_are_of_equal_size_or_one_more_or_less(layers, blocks):
    sizes = sizes_of(make_config(num_hidden_layers=layers, **BLOCKS | {"residual_blocks": blocks}))
    assert len(sizes) == blocks
    assert sum(sizes) == 2 * layers
    assert max(sizes) - min(sizes) <= 1


def test_a_group_for_every_sublayer_is_the_full_variant():
    full = make_model(**FULL)
    blocks = make_model(**BLOCKS | {"residual_blocks": 8})
    assert torch.equal(full(draw()).logits, blocks(draw()).logits)


@VARIANTS
@pytest.mark.parametrize("initializer_range", [0.02, 0.3])
def test_a_new_model_is_the_plain_one_and_parts_from_it_in_training(variant, initializer_range):
    """Also where weights are so small that eps shows next to a mean of sources."""
    options = {"initializer_range": initializer_range}
    plain, model = make_model(**options), make_model(trained=False, **options, **variant)
    missing, unexpected = model.load_state_dict(plain.state_dict(), strict=False)
    assert (missing, unexpected) == (["model.residuals.queries"], [])
    ids = draw()
    ours, theirs = (m(ids, output_hidden_states=True) for m in (model, plain))
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-5)
    for state, expected in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-5)
    losses = []
    for m in (model, plain):
        optimiser = torch.optim.AdamW(m.parameters(), lr=0.01)
        m.train()(ids, labels=ids).loss.backward()
        optimiser.step()
        losses.append(m.eval()(ids, labels=ids).loss)
    assert abs(losses[0] - losses[1]) > 1e-4


def test_the_plain_sum_is_what_it_was():
    """Without the option a model has neither the module nor the halved blocks."""
    model = make_model()
    assert model.model.residuals is None
    assert {type(block).__name__ for block in model.model.layers} == {"MetaTransformerBlock"}
    embedding = model.get_input_embeddings()(draw())
    x = embedding
    for block in model.model.layers:
        position_ids = torch.arange(24).expand(2, -1)
        rotation = model.model.rotary(x, position_ids)
        attended = block.attention(block.attention_norm(x), None, position_ids, rotation=rotation)
        x = x + attended.output
        x = x + block.mlp(block.mlp_norm(x))
    assert torch.equal(model(draw()).logits, model.lm_head(model.model.norm(x)))


@pytest.mark.parametrize("variant", [{}, FULL, BLOCKS], ids=["sum", "full", "block"])
def test_what_shards_a_model_finds_its_blocks(variant):
    """FSDP wraps these by name, and refuses names that the model does not have."""
    model = make_model(**variant)
    names = {type(block).__name__ for block in model.model.layers}
    assert set(model._no_split_modules) == set(model.model._no_split_modules) == names


@VARIANTS
@pytest.mark.parametrize("T", [1, 24])
def test_a_model_over_several_devices_is_refused_before_a_block_runs(variant, T):
    """The second is one that holds no numbers: what counts is where blocks are to run."""
    model = make_model(**variant)
    expected = model(draw(T=T)).logits
    places = {name: "cpu" for name, _ in model.model.named_children() if name != "layers"}
    places = {f"model.{name}": place for name, place in places.items()} | {"lm_head": "cpu"}
    blocks = {f"model.layers.{i}": "cpu" for i in range(4)}
    dispatch_model(model, places | blocks, force_hooks=True)
    assert torch.equal(model(draw(T=T)).logits, expected)
    dispatch_model(model, places | blocks | {"model.layers.3": "meta"}, force_hooks=True)
    with pytest.raises(ConfigError, match="one device, got cpu and meta"):
        model(draw(T=T))


@VARIANTS
def test_every_query_that_can_choose_learns(variant):
    model = make_model(trained=False, **variant).train()
    model(draw(), labels=draw()).loss.backward()
    gradient = model.model.residuals.queries.grad.abs().sum(dim=1)
    assert gradient[0] == 0.0
    assert (gradient[1:] > 0.0).all()


@VARIANTS
def test_hidden_states_are_what_blocks_read(variant):
    model, ids = make_model(**variant), draw()
    seen = []
    for block in model.model.layers:
        block.attention_norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    out = model.model(ids, output_hidden_states=True)
    assert len(out.hidden_states) == 5
    for state, given in zip(out.hidden_states[:-1], seen, strict=True):
        assert torch.equal(state, given)
    assert torch.equal(out.hidden_states[-1], out.last_hidden_state)


@VARIANTS
@pytest.mark.parametrize("routing", ["soft", "hard"])
@pytest.mark.parametrize(
    "make_cache", [MetaAttentionCache, lambda config: MetaAttentionStaticCache(config, 24)]
)
def test_decode_equals_prefill_and_the_cache_holds_nothing_more(variant, routing, make_cache):
    options = {"routing": routing, "initializer_range": 0.3}
    model, ids = make_model(**variant, **options), draw()
    plain = make_model(**options)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    caches = []
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, use_cache=False).logits
        for m in (model, plain):
            cache, parts = make_cache(m.config), []
            for start, stop in pairwise([0, 11, 17, *range(18, 25)]):
                given = {"attention_mask": mask[:, :stop], "past_key_values": cache}
                parts.append(m(ids[:, start:stop], use_cache=True, **given).logits)
            caches.append(cache)
            if m is model:
                decoded = torch.cat(parts, dim=1)
    torch.testing.assert_close(decoded[mask.bool()], whole[mask.bool()], rtol=1e-4, atol=1e-4)
    ours, theirs = (tensors_in(cache) for cache in caches)
    assert ours == theirs


def tensors_in(cache: MetaAttentionCache) -> list[tuple[int, ...]]:
    """Shapes of all that the layers of a cache hold."""
    shapes = []
    for layer in cache.layers:
        for value in vars(layer).values():
            held = value.values() if isinstance(value, dict) else [value]
            for tensor in held:
                parts = tensor if isinstance(tensor, tuple | list) else [tensor]
                shapes += [tuple(x.shape) for x in parts if isinstance(x, torch.Tensor)]
    assert shapes
    return shapes


@VARIANTS
def test_a_model_survives_saving_and_generates_with_a_cache_as_without(variant, tmp_path):
    model, ids = make_model(**variant, initializer_range=0.3), draw()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.config.residual == variant["residual"]
    cached = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(
        cached, model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False)
    )
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.model.residuals.queries.dtype == torch.float32
    assert half.lm_head.weight.dtype == torch.bfloat16


@VARIANTS
def test_under_autocast_the_softmax_is_float32(variant, monkeypatch):
    """Logits as large as these differ by whole numbers in bfloat16."""
    from meta_attention.ops.depth_attention.reference import ListedSources

    model, ids = make_model(**variant).train(), draw()
    with torch.no_grad():
        model.model.residuals.queries.mul_(20.0)
    seen = []
    attend = ListedSources.attend

    def watched(self, queries):
        rows = attend(self, queries)
        for row in rows:
            seen.append((row.maximum, row.denominator, queries, list(self.sources)))
        return rows

    monkeypatch.setattr(ListedSources, "attend", watched)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert math.isfinite(loss.item())
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert any(s.dtype == torch.bfloat16 for s in seen[-1][3]), "autocast did nothing"
    maximum, denominator, queries, sources = seen[-1]
    assert maximum.dtype == denominator.dtype == torch.float32
    keys = [s.double() / (s.double().square().mean(-1, True) + 1e-6).sqrt() for s in sources]
    exact = torch.stack([key @ queries[-1].double() for key in keys])
    assert exact.abs().max() > 30
    torch.testing.assert_close(maximum.double(), exact.amax(0), rtol=1e-5, atol=1e-4)


@VARIANTS
def test_gradient_checkpointing_changes_no_gradient(variant, assert_checkpointing_changes_nothing):
    assert_checkpointing_changes_nothing(make_model(**variant).train(), draw())


def test_compiles_without_graph_breaks():
    model, ids = make_model(num_hidden_layers=2, experts=("full",), **BLOCKS).train(), draw()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ours = compiled(ids, labels=ids, use_cache=False)
    torch.testing.assert_close(ours.loss, model(ids, labels=ids, use_cache=False).loss)
    ours.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    torch._dynamo.reset()


def test_blocks_compile_one_by_one():
    """As ``meta-attention train --compile`` does it; both halves of all blocks are two graphs."""
    model, ids = make_model(experts=("full",), **BLOCKS), draw()
    expected = model(ids).logits
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    for block in model.model.layers:
        block.compile(backend=count, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected)
    assert len(graphs) == 2
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("variant", "checkpointing"), [(FULL, False), (BLOCKS, False), (BLOCKS, True)]
)
def test_a_model_on_kernels_is_the_model_on_the_reference(variant, checkpointing, kernel_device):
    options = {"num_hidden_layers": 2, "experts": ("full",), "impl": "reference"}
    model = make_model(**options, **variant).to(kernel_device).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    ids = draw(B=1, T=4).to(kernel_device)
    found = []
    for impl in ("reference", "triton"):
        model.model.residuals.impl = impl
        model.zero_grad()
        out = model(ids, labels=ids)
        out.loss.backward()
        with torch.no_grad():
            evaluated = model(ids, use_cache=False).logits
        torch.testing.assert_close(evaluated, out.logits)
        found.append((out.logits, [p.grad for p in model.parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_kernels_run_under_autocast(kernel_device):
    """Sources are then rounded, and what is read is not; the interpreter rounds them otherwise."""
    options = {"num_hidden_layers": 2, "experts": ("full",), "impl": "reference"}
    model = make_model(**options, **BLOCKS).to(kernel_device).train()
    ids = draw(B=1, T=4).to(kernel_device)
    found = []
    for impl in ("reference", "triton"):
        model.model.residuals.impl = impl
        model.zero_grad()
        with torch.autocast(kernel_device, dtype=torch.bfloat16):
            out = model(ids, labels=ids, output_hidden_states=True)
        out.loss.backward()
        assert {state.dtype for state in out.hidden_states[:-1]} == {torch.float32}
        found.append((out.loss, [p.grad for p in model.parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=0.1, atol=0.02)
    assert model.model.residuals.queries.grad[1:].abs().sum(dim=1).min() > 0.0


@VARIANTS
def test_padding_and_other_rows_change_nothing(variant):
    model, ids = make_model(**variant, initializer_range=0.3), draw()
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    alone = model(ids[:1, 9:]).logits
    together = model(ids, attention_mask=mask).logits[:1, 9:]
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"residual": "atention"}, "residual must be one of sum, attention, block_attention"),
        ({"residual_blocks": 0}, "residual_blocks must be a whole number >= 1, got 0"),
        ({"residual_blocks": 2.5}, "residual_blocks must be a whole number"),
        (BLOCKS | {"residual_blocks": 9}, r"at most 8, two for each of 4 layers, got 9; lower it"),
    ],
)
def test_bad_options_get_one_clear_sentence(options, message):
    with pytest.raises(ConfigError, match=message) as error:
        make_config(**options)
    assert "\n" not in str(error.value)


def test_the_default_number_of_groups_does_not_bother_small_plain_models():
    assert make_config(num_hidden_layers=1).residual_blocks == 8
