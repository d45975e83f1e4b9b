"""Routing among experts, Mixture of Depths and Attention Residuals: any two, and all three.

A table of compositions and, below it, what holds of each of them.
"""

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from meta_attention import (
    MetaAttentionCache,
    MetaAttentionConfig,
    MetaAttentionForCausalLM,
    MetaAttentionStaticCache,
)
from meta_attention.depth import AttentionResiduals, HalvedMixtureOfDepthsBlock
from meta_attention.depth.attention_residuals import group_ends
from meta_attention.layers import execution
from meta_attention.layers.projections import positions_of
from meta_attention.testing import naive_attention_residuals

B, T, D = 3, 20, 32
CLOSE = {"rtol": 1e-6, "atol": 1e-8}  # of models in float64

STATIC = {"experts": ("full",)}
ROUTED = {"experts": ("full", "ssm", "local"), "expert_costs": (0.5, 0.5, 0.5)}
HARD = {"routing": "hard", **ROUTED}
DEPTH = {"depth_capacity": 0.5}
THRESHOLD = {"depth_capacity": 0.4, "depth_routing": "threshold", "depth_layers": (0, 1, 2)}
FULL = {"residual": "attention"}
BLOCKS = {"residual": "block_attention", "residual_blocks": 2}
COMPOSITIONS: dict[str, dict[str, Any]] = {
    "experts and depth": ROUTED | DEPTH,
    "experts and residuals": ROUTED | BLOCKS,
    "depth and residuals": STATIC | DEPTH | BLOCKS,
    "depth and residuals, full": STATIC | THRESHOLD | FULL,
    "all": ROUTED | DEPTH | BLOCKS,
    "all, full, threshold": ROUTED | THRESHOLD | FULL,
    "all, hard": HARD | THRESHOLD | BLOCKS,
    "all, hard, full, convolved": HARD | DEPTH | FULL | {"short_conv": 3, "depth_layers": (0, 2)},
    "all, gated by head": {
        "experts": ("gated_full", "linear", "ssm", "local"),
        "expert_costs": (0.5, 0.5, 0.5, 0.5),
        "route_granularity": "kv_head",
        "routing": "gated",
        "uncertainty_threshold": 0.5,
        "num_sinks": 1,
    }
    | DEPTH
    | BLOCKS,
    "all, values": HARD | {"controller": "value", "price": 0.01} | THRESHOLD | BLOCKS,
    "all, prior-free, own projections": ROUTED
    | {"controller": "prior_free", "shared_projections": False, "cost_weight": 0.1}
    | THRESHOLD
    | FULL,
}
EACH = pytest.mark.parametrize("composition", COMPOSITIONS)
HALVED = [name for name in COMPOSITIONS if "depth" in name and "residuals" in name]
HALVED += [name for name in COMPOSITIONS if name.startswith("all")]


def make_config(composition: str, **options) -> MetaAttentionConfig:
    fields = {
        "vocab_size": 61,
        "hidden_size": D,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "window_size": 3,
        "max_position_embeddings": 64,
        "controller_hidden_size": 8,
        # large enough that tokens differ in their routes
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    return MetaAttentionConfig(**(fields | COMPOSITIONS[composition] | options))


def make_model(composition: str, **options) -> MetaAttentionForCausalLM:
    """A model whose pseudo-queries choose, whose convolutions mix and whose states forget."""
    torch.manual_seed(0)
    model = MetaAttentionForCausalLM(make_config(composition, **options)).eval()
    for name, weight in model.named_parameters():
        if "short_conv" in name or "rates" in name or "residuals" in name:
            nn.init.normal_(weight, mean=-2.0 if name.endswith("step_bias") else 0.0, std=0.5)
    return model


def draw_tokens(seed: int = 0) -> torch.Tensor:
    """No token twice in a row: in the first block their scores would tie."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([2 + torch.randperm(59, generator=generator)[:T] for _ in range(B)])


def entered(out, is_token: torch.Tensor | bool = True) -> torch.Tensor:
    """Who had a route [L, B, T], padding aside."""
    routed = [(weights > 0).flatten(2).any(dim=-1) for weights in out.routing_weights]
    return torch.stack(routed) & torch.as_tensor(is_token)


def find_tokens(mask: torch.Tensor | None) -> torch.Tensor:
    return torch.ones(B, T, dtype=torch.bool) if mask is None else mask.bool()


def layers_with_depth(model) -> list[int]:
    return [layer for layer in range(3) if model.config.may_skip(layer)]


# --- what a composition is ---


def by_definition(model, ids, mask, who_enters):
    """Logits [B, T, V] and who enters [L, B, T]: halves of plain blocks, on rows that enter."""
    config, net = model.config, model.model
    is_token = find_tokens(mask)
    positions = positions_of(None if mask is None else is_token, B, T, 0, ids.device)
    embedding, outputs, chosen = net.embed_tokens(ids), [], []
    ends = [0, *group_ends(config)]
    sizes = [end - start for start, end in pairwise(ends)]

    def read():
        inputs = naive_attention_residuals(
            embedding, outputs, net.residuals.queries, groups=sizes, eps=config.rms_norm_eps
        )
        return inputs[-1] * (1 + sum(len(outputs) > start for start in ends[:-1]))

    def write(x, enters, gate, half):
        output = torch.zeros_like(x)
        for b in range(B):
            at = enters[b].nonzero().squeeze(1)
            if len(at):
                update = half(x[b, at].unsqueeze(0), positions[b, at].unsqueeze(0))
                output[b, at] = gate[b, at].unsqueeze(-1) * update.squeeze(0)
        outputs.append(output)

    for block in net.layers:
        x = read()
        enters, gate = who_enters(block, x, mask)
        chosen.append(enters)

        def attend(rows, at, block=block):
            return block.attention(block.attention_norm(rows), position_ids=at).output

        write(x, enters, gate, attend)
        write(read(), enters, gate, lambda rows, _, block=block: block.mlp(block.mlp_norm(rows)))
    return model.lm_head(net.norm(read())), torch.stack(chosen)


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("composition", HALVED)
def test_halves_run_on_the_tokens_that_enter_and_are_read_by_pseudo_queries(
    composition, training, padding, make_mask, who_enters
):
    model, ids = make_model(composition).double().train(training), draw_tokens()
    mask = make_mask(padding)
    with torch.no_grad():
        out = model(ids, attention_mask=mask, use_cache=False, output_routing=True)
        logits, enters = by_definition(model, ids, mask, who_enters)
    is_token = find_tokens(mask)
    assert torch.equal(entered(out, is_token), enters)
    shares = enters[layers_with_depth(model)].sum(dim=(1, 2)) / is_token.sum()
    assert shares.min() > 0.0
    assert shares.max() < 1.0
    torch.testing.assert_close(out.logits[is_token], logits[is_token], **CLOSE)


def test_an_output_of_zeros_changes_how_long_a_row_is_and_not_where_it_points():
    """Tokens that pass by leave such outputs; the norm that follows takes the length out."""
    config = make_config("all, full, threshold")
    residuals = AttentionResiduals(config).double()
    nn.init.normal_(residuals.queries)
    embedding, *outputs = torch.randn(3, B, T, D, dtype=torch.float64)
    row = read_after(residuals, embedding, *outputs)
    # with the query of the third reader, over the sources without the zeros
    queries = residuals.queries[[0, 1, 3]]
    expected = naive_attention_residuals(
        embedding, outputs, queries, groups=[1, 1], eps=config.rms_norm_eps
    )[-1]
    torch.testing.assert_close(*(nn.functional.normalize(x, dim=-1) for x in (row, expected)))
    # at the start, when all weights are equal, not even that
    nn.init.zeros_(residuals.queries)
    row = read_after(residuals, embedding, *outputs)
    torch.testing.assert_close(row, embedding + sum(outputs))


def read_after(residuals, embedding, first, last):
    """What is read after two outputs with one of zeros between them."""
    stream = residuals.start(embedding)
    for output in (first, torch.zeros_like(embedding), last):
        stream.read()
        stream.write(output)
    return stream.read()


# --- those that pass by cost nothing and leave nothing ---


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("composition", ["all, hard", "all, hard, full, convolved"])
def test_both_halves_run_on_the_tokens_that_enter_only(
    composition, training, rows, monkeypatch, spy_on
):
    executed, routed_attention = [], execution.routed_attention

    def spy_attention(query, key, value, plan, windows, **kwargs):
        # the state-space expert is run by another function
        executed.append(plan.counts[:, :, [0, 2]].sum().item())
        assert query.shape[1] == key.shape[1]
        return routed_attention(query, key, value, plan, windows, **kwargs)

    monkeypatch.setattr(execution, "routed_attention", spy_attention)
    model = make_model(composition, route_gradient="chosen").train(training)
    spies = [spy_on(block) for block in model.model.layers]
    out = model(draw_tokens()[:rows], use_cache=False, output_routing=True)
    enters = entered(out)
    for layer, spy in enumerate(spies):
        counts = enters[layer].sum(dim=1)
        if model.config.may_skip(layer):
            assert 0 < counts.sum() < rows * T
        # rows of a batch are packed to the longest
        assert spy.seen == dict.fromkeys(spy.seen, rows * counts.max().item())
        assert len(spy.seen) == 4
        taken = out.routing_weights[layer] > 0
        assert executed[layer] == taken[..., [0, 2]].sum().item()


@pytest.mark.parametrize("composition", ["all", "all, hard", "all, gated by head"])
def test_what_passes_by_reaches_neither_half(composition, force_entry):
    """Poison in its place: nothing of it is read, and no gradient comes from there."""
    block = make_model(composition).double().model.layers[1]
    x, later = torch.randn(2, B, T, D, dtype=torch.float64)
    enters = torch.rand(B, T) < 0.5

    def halves(x, later):
        with force_entry(block, enters):
            attended = block(x)
        return attended.output, block(later, half="feed_forward", entered=attended.entered)

    expected = halves(x, later)
    poisoned = [y.masked_fill(~enters.unsqueeze(-1), torch.nan) for y in (x, later)]
    for ours, theirs, given in zip(
        halves(*(y.requires_grad_() for y in poisoned)), expected, poisoned, strict=True
    ):
        torch.testing.assert_close(ours, theirs)
        assert (ours[~enters] == 0).all()
        assert (ours[enters] != 0).any(dim=-1).all()
        (gradient,) = torch.autograd.grad(ours.square().sum(), given, retain_graph=True)
        assert (gradient[~enters] == 0).all()
        assert gradient[enters].isfinite().all()
        ours.sum().backward(retain_graph=True)
    assert all(p.grad.isfinite().all() for p in block.parameters() if p.grad is not None)


@pytest.mark.parametrize("composition", ["all", "all, full, threshold"])
def test_a_token_that_passes_by_costs_a_decoding_step_nothing(composition, spy_on):
    model, ids = make_model(composition), draw_tokens()[:1]
    cache, spies = MetaAttentionCache(model.config), [spy_on(block) for block in model.model.layers]
    passed = 0
    with torch.no_grad():
        for t in range(T):
            out = model(ids[:, t, None], past_key_values=cache, output_routing=True)
            passed = passed + entered(out).sum(dim=(1, 2))
            for name in ("query", "feed-forward"):
                assert [spy.seen.get(name, 0) for spy in spies] == passed.tolist()
    assert 0 < passed[1] < T
    # and it leaves no key
    assert [layer.keys.shape[2] for layer in cache.layers] == passed.tolist()


def test_a_text_that_nobody_enters_reads_the_embedding(spy_on):
    model, ids = make_model("all, full, threshold"), draw_tokens()
    spies = [spy_on(block) for block in model.model.layers]
    with torch.no_grad():
        # where zeros had all of the weight, what is left would be small next to the norm's eps
        model.model.residuals.queries.mul_(0.1)
        for block in model.model.layers:
            block.depth_router.score.bias.fill_(-1e3)
        out = model(ids, output_hidden_states=True, labels=ids)
        expected = model.model.norm(model.model.embed_tokens(ids))
    assert all(spy.seen == {} for spy in spies)
    assert out.kl == 0.0
    # of seven sources all are zeros but one
    torch.testing.assert_close(out.hidden_states[-1], expected, rtol=1e-3, atol=1e-4)


# --- learning ---


def learns(name: str, gradient: torch.Tensor) -> bool:
    """Whether every part of a parameter that can has a gradient."""
    if name.endswith("residuals.queries"):
        # the first has one source to choose from
        return bool((gradient[1:].abs().sum(dim=1) > 0.0).all() and (gradient[0] == 0.0).all())
    return bool(gradient.abs().max() > 0.0)


@EACH
def test_a_step_of_training_reaches_everything_and_lowers_the_loss(composition):
    model, ids = make_model(composition).train(), draw_tokens()
    if model.config.controller == "value":
        model.config.training_weights = "explore"  # or nothing is learnt of values
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(4):
        torch.manual_seed(1)
        out = model(ids, labels=ids)
        optimizer.zero_grad()
        out.loss.backward()
        if step == 0:
            assert [n for n, p in model.named_parameters() if not p.grad.isfinite().all()] == []
            assert [n for n, p in model.named_parameters() if not learns(n, p.grad)] == []
        optimizer.step()
        losses.append(out.loss.item())
        parts = out.task_loss + model.config.kl_weight * out.kl
        parts = parts + model.config.cost_weight * out.projected_cost
        if out.depth_loss is not None:
            parts = parts + model.config.depth_weight * out.depth_loss
        torch.testing.assert_close(out.loss, parts)
    assert (out.depth_loss is not None) == (model.config.depth_capacity is not None)
    assert losses[-1] < losses[0]


KINDS = {
    "Mixture of Depths": "depth_router.score",
    "Attention Residuals": "residuals.queries",
    "controller": "attention.controller",
    "step size of ssm": ".rates",
}


@pytest.mark.parametrize("composition", ["all", "all, full, threshold"])
def test_all_three_are_differentiable_together(composition):
    """Under soft routing: autograd tells what the loss does when any of them moves."""
    model, ids = make_model(composition, depth_weight=0.0).double().train(), draw_tokens()
    parameters = dict(model.named_parameters())

    def objective():
        out = model(ids, output_routing=True)
        # that of the model is float32
        task = nn.functional.cross_entropy(out.logits[:, :-1].mT, ids[:, 1:])
        return task + out.kl

    objective().backward()
    for kind, part in KINDS.items():
        names = [name for name in parameters if part in name]
        assert names, kind
        ways = {name: 1e-6 * torch.randn_like(parameters[name]) for name in names}
        slope = sum((parameters[name].grad * way).sum().item() for name, way in ways.items())
        ends = []
        for sign in (1.0, -1.0):
            with torch.no_grad():
                for name, way in ways.items():
                    parameters[name].add_(sign * way)
                ends.append(objective().item())
                for name, way in ways.items():
                    parameters[name].sub_(sign * way)
        assert abs(slope) > 1e-9, kind
        assert (ends[0] - ends[1]) / 2 == pytest.approx(slope, rel=1e-4), kind


@pytest.mark.parametrize("composition", ["all", "all, hard", "all, full, threshold"])
def test_gradient_checkpointing_changes_no_gradient(
    composition, assert_checkpointing_changes_nothing
):
    assert_checkpointing_changes_nothing(make_model(composition).train(), draw_tokens())


def test_training_that_nobody_enters_still_has_a_gradient_for_everything():
    """Processes that train together wait for the gradients of all parameters."""
    model, ids = make_model("all, full, threshold").train(), draw_tokens()
    with torch.no_grad():
        for block in model.model.layers:
            block.depth_router.score.bias.fill_(-1e3)
    model(ids, labels=ids).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert model.model.layers[0].mlp.up_proj.weight.grad.abs().max() == 0


# compiling takes seconds
SMALL = {
    "num_hidden_layers": 1,
    "depth_layers": (0,),
    "experts": ("full", "local"),
    "expert_costs": "paper",
}


def test_training_of_all_three_compiles_into_one_graph():
    model, ids = make_model("all", **SMALL).train(), draw_tokens()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ours = compiled(ids, labels=ids, use_cache=False)
    torch.testing.assert_close(ours.loss, model(ids, labels=ids, use_cache=False).loss)
    ours.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_blocks_compile_one_by_one():
    """As ``meta-attention train --compile`` does it: two graphs for each kind of block."""
    model, ids = make_model("depth and residuals").train(), draw_tokens()
    expected = model(ids, labels=ids).loss
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    for block in model.model.layers:
        block.compile(backend=count, fullgraph=True)
    loss = model(ids, labels=ids).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert len(graphs) == 4
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_what_counts_tokens_compiles_in_parts():
    model, ids = make_model("depth and residuals, full", **SMALL | STATIC), draw_tokens()
    compiled = torch.compile(model, backend="aot_eager")
    ours = compiled(ids, use_cache=False).logits
    torch.testing.assert_close(ours, model(ids, use_cache=False).logits)
    torch._dynamo.reset()


# --- decoding ---


CACHES = {
    "growing": MetaAttentionCache,
    "static": lambda config: MetaAttentionStaticCache(config, max_cache_len=T),
}
CHUNKS = {
    "token by token": [1] * T,
    "prompt, then tokens": [12] + [1] * 8,
    "chunks": [7, 1, 9, 3],
}


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("cache", CACHES)
@EACH
def test_decode_equals_prefill(composition, cache, padding, make_mask):
    model, ids = make_model(composition).double(), draw_tokens()
    mask = make_mask(padding)
    is_token = find_tokens(mask)
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, use_cache=False, output_routing=True)
        for sizes in CHUNKS.values():
            memory, outs, at = CACHES[cache](model.config), [], 0
            for part in ids.split(sizes, dim=1):
                at += part.shape[1]
                given = None if mask is None else mask[:, :at]
                outs.append(
                    model(part, attention_mask=given, past_key_values=memory, output_routing=True)
                )
            logits = torch.cat([out.logits for out in outs], dim=1)
            torch.testing.assert_close(logits[is_token], whole.logits[is_token], **CLOSE)
            enters = torch.cat([entered(out) for out in outs], dim=2)
            assert torch.equal(enters & is_token, entered(whole, is_token))
    if layers_with_depth(model):
        # rows go different ways, and not all of them through
        counts = entered(whole, is_token)[layers_with_depth(model)].sum(dim=2)  # [L, B]
        assert (counts.amax(dim=1) > counts.amin(dim=1)).any()
        assert counts.max() < T


@pytest.mark.parametrize("composition", ["all", "all, hard"])
def test_generation_is_the_same_with_any_cache_and_beams_follow_their_rows(composition, make_mask):
    model, ids, mask = make_model(composition), draw_tokens(), make_mask("left")
    for options in ({}, {"num_beams": 2}, {"prefill_chunk_size": 6}):
        given = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, **options}
        cached = model.generate(ids * mask, **given)
        static = model.generate(ids * mask, cache_implementation="static", **given)
        assert torch.equal(cached, static)
        given.pop("prefill_chunk_size", None)
        assert torch.equal(cached, model.generate(ids * mask, use_cache=False, **given))


# --- as a Transformers model ---


@EACH
def test_saved_and_loaded_models_agree_and_what_is_precise_stays_so(composition, tmp_path):
    model, ids = make_model(composition), draw_tokens()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0.0, atol=0.0)
    # weights that lie elsewhere in memory may be added up in another order
    with torch.no_grad():
        logits = [one.double()(ids).logits for one in (loaded, model)]
    torch.testing.assert_close(*logits, **CLOSE)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    precise = ("depth_router", "residuals", "controller")
    for moved in (half, make_model(composition).bfloat16()):
        kept = {n for n, p in moved.named_parameters() if p.dtype == torch.float32}
        expected = {n for n in dict(model.named_parameters()) if any(x in n for x in precise)}
        assert expected <= kept
        assert all("controller" in n or any(x in n for x in (*precise, "rates")) for n in kept)
        with torch.no_grad():
            assert moved(ids).logits.isfinite().all()


def test_blocks_that_are_not_split_are_those_there_are():
    """FSDP refuses the name of a block that a model does not have."""
    model = make_model("all")
    assert set(model._no_split_modules) == {"HalvedBlock", "HalvedMixtureOfDepthsBlock"}
    assert isinstance(model.model.layers[1], HalvedMixtureOfDepthsBlock)
    everywhere = make_model("all, full, threshold")
    assert set(everywhere._no_split_modules) == {"HalvedMixtureOfDepthsBlock"}


@pytest.mark.parametrize("composition", ["all", "all, full, threshold"])
def test_autocast_trains(composition):
    model, ids = make_model(composition).train(), draw_tokens()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(ids, labels=ids, output_hidden_states=True)
    out.loss.backward()
    assert {state.dtype for state in out.hidden_states[:-1]} == {torch.float32}
    assert all(p.grad.isfinite().all() for p in model.parameters())
    exact = model(ids, labels=ids).loss
    assert abs(out.loss.item() - exact.item()) < 0.1 * exact.item()


@pytest.mark.parametrize("composition", ["all", "all, hard", "all, prior-free, own projections"])
def test_documents_of_a_row_do_not_see_each_other(composition):
    model, ids = make_model(composition).double(), draw_tokens()[:1]
    documents = torch.tensor([[1] * 7 + [2] * 9 + [3] * 4])
    with torch.no_grad():
        packed = model(ids, document_ids=documents).logits
        parts = [model(part, use_cache=False).logits for part in ids.split([7, 9, 4], dim=1)]
    torch.testing.assert_close(packed, torch.cat(parts, dim=1), **CLOSE)


def test_encoders_may_have_all_three(make_mask):
    options = {"causal": False, "experts": ("full", "linear", "local")}
    model, ids = make_model("all, full, threshold", **options).double(), draw_tokens()
    with torch.no_grad():
        padded = model(ids, attention_mask=make_mask("left")).logits[0, 7:]
        torch.testing.assert_close(padded, model(ids[:1, 7:]).logits[0], **CLOSE)


def test_kernels_read_outputs_of_zeros_as_the_reference_does(kernel_device):
    model = make_model("depth and residuals, full", num_hidden_layers=2, depth_layers=(0, 1))
    model, ids = model.to(kernel_device).train(), draw_tokens()[:1, :6].to(kernel_device)
    found = []
    for impl in ("reference", "triton"):
        model.model.residuals.impl = impl
        model.zero_grad()
        out = model(ids, labels=ids, output_routing=True)
        assert 0 < entered(out).sum() < 12
        out.loss.backward()
        found.append((out.logits, [p.grad for p in model.parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


# --- what kernels allocate ---


@pytest.fixture
def poison(monkeypatch):
    """From here on, what is allocated and not written is NaN."""

    def fill(make):
        def filled(*args, **kwargs):
            made = make(*args, **kwargs)
            return made.fill_(float("nan")) if made.is_floating_point() else made

        return filled

    def begin():
        for name in ("empty", "empty_like"):
            monkeypatch.setattr(torch, name, fill(getattr(torch, name)))
        monkeypatch.setattr(torch.Tensor, "new_empty", fill(torch.Tensor.new_empty))

    return begin


def gradients(model, ids):
    out = model(ids, labels=ids, use_cache=False)
    (out.loss if out.depth_loss is None else out.loss + out.depth_loss).backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


def prefer(model, expert):
    """All tokens take one expert: nobody takes the others."""
    for block in model.model.layers:
        controller = block.attention.controller
        bias = controller.mlp[-1].bias
        nn.init.zeros_(controller.mlp[-1].weight)
        nn.init.constant_(bias, -20.0)
        with torch.no_grad():
            bias.view(-1, len(controller.costs))[:, expert] = 20.0


WITH_ALL = ("full", "linear", "ssm", "local")
ROWS = {"all": "all", "chosen": "chosen", "chosen by head": "chosen"}
# which rows a step computes, and whom all tokens take
STEPS = [("all", None), ("all", 0), ("chosen", 1), ("chosen", 3), ("chosen by head", 2)]


def options_of(rows):
    by_head = {"route_granularity": "kv_head"} if rows == "chosen by head" else {}
    hard = {"experts": WITH_ALL, "expert_costs": (0.5,) * 4, "routing": "hard"}
    return hard | by_head | {"route_gradient": ROWS[rows]}


@pytest.mark.parametrize(("rows", "taken"), STEPS)
def test_a_training_step_uses_nothing_that_was_not_written(rows, taken, kernel_device, poison):
    ids = draw_tokens()[:1, :9]
    found = {}
    for impl in ("reference", "triton"):
        model = make_model("all", impl=impl, **options_of(rows)).train()
        if taken is not None:
            prefer(model, taken)
        if impl == "triton":
            model.to(kernel_device)
            poison()
        found[impl] = gradients(model, ids.to(model.device))
    for name, expected in found["reference"].items():
        actual = found["triton"][name]
        assert (actual is None) == (expected is None), name
        if expected is not None:
            told = partial("{}: {}".format, name)
            torch.testing.assert_close(actual.cpu(), expected, rtol=1e-3, atol=1e-5, msg=told)


@pytest.mark.gpu
@pytest.mark.parametrize("composition", ["experts and depth", "all"])
@pytest.mark.parametrize(("rows", "taken"), [*STEPS, ("all", 1), ("all", 2), ("all", 3)])
def test_nor_does_one_of_the_size_that_hopper_has_kernels_for(rows, taken, composition, poison):
    wide = {"hidden_size": 256, "max_position_embeddings": 2048, "initializer_range": 0.05}
    model = make_model(composition, **wide | options_of(rows)).cuda().train()
    if taken is not None:
        prefer(model, taken)
    ids = torch.randint(2, 61, (2, 700), generator=torch.Generator().manual_seed(0)).cuda()
    poison()
    with torch.autocast("cuda", torch.bfloat16):
        found = gradients(model, ids)
    wrong = [n for n, g in found.items() if g is not None and not g.isfinite().all()]
    assert not wrong
