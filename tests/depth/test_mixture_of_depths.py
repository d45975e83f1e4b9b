"""Blocks that tokens may pass by: who enters, what runs, and what the others leave behind."""

import pytest
import torch
import torch.nn.functional as F

from meta_attention import (
    MetaAttentionCache,
    MetaAttentionConfig,
    MetaAttentionForCausalLM,
    MetaAttentionStaticCache,
    MetaTransformerBlock,
)
from meta_attention.depth import DepthRouter, MixtureOfDepthsBlock
from meta_attention.errors import CacheError, ConfigError
from meta_attention.layers import execution
from meta_attention.layers.projections import positions_of

B, T, D = 3, 20, 32
EVEN = {"expert_costs": (0.5, 0.5, 0.5)}
CLOSE = {"rtol": 1e-5, "atol": 3e-5}
ROUTINGS = ["top_k", "threshold"]


def make_config(**options):
    fields = {
        "vocab_size": 61,
        "hidden_size": D,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "window_size": 3,
        "max_position_embeddings": 64,
        "controller_hidden_size": 8,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "depth_capacity": 0.4,
        "depth_layers": (0, 1, 2),
    }
    return MetaAttentionConfig(**(fields | options))


def make_model(**options):
    torch.manual_seed(0)
    model = MetaAttentionForCausalLM(make_config(**options)).eval()
    for name, weight in model.named_parameters():
        if "short_conv" in name:
            torch.nn.init.normal_(weight)
    return model


def make_block(**options):
    """A block with weights as large as those of a model, in float64."""
    model = make_model(depth_layers=(1,), **options)
    return model.model.layers[1].double()


def draw_states(seed=0):
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed)).double()


def draw_tokens(T=T, B=B, seed=0):
    return torch.randint(2, 61, (B, T), generator=torch.Generator().manual_seed(seed))


def scores_of(router, x, head="score"):
    x = x * (x.square().mean(dim=-1, keepdim=True) + router.eps).rsqrt()
    linear = getattr(router, head)
    return x @ linear.weight[0] + linear.bias


def expected_output(block, x, enters, mask):
    """Row by row: a plain block on the tokens that enter, at their positions in the text."""
    plain = MetaTransformerBlock(block.attention.config, 1).double().train(block.training)
    names = plain.state_dict().keys()
    plain.load_state_dict({name: block.state_dict()[name] for name in names})
    positions = positions_of(None if mask is None else mask.bool(), B, T, 0, x.device)
    out = x.clone()
    for b in range(B):
        at = enters[b].nonzero().squeeze(1)
        if len(at):
            rows = x[b, at].unsqueeze(0)
            update = plain(rows, position_ids=positions[b, at].unsqueeze(0)).output - rows
            gate = torch.sigmoid(scores_of(block.depth_router, rows))
            out[b, at] = (rows + gate.unsqueeze(-1) * update).squeeze(0)
    return out


BLOCKS = {
    "soft": {},
    "hard": {"routing": "hard", **EVEN},
    "by head, sinks": {"route_granularity": "kv_head", "num_sinks": 2},
    "own projections": {"shared_projections": False},
    "ssm, convolved": {
        "experts": ("ssm", "local"),
        "expert_costs": (0.2, 0.3),
        "short_conv": 3,
        "routing": "hard",
    },
    "static": {"experts": ("local",)},
}


@pytest.mark.parametrize("kind", ["none", "left", "right"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("options", BLOCKS)
def test_a_block_is_a_plain_one_on_the_tokens_that_enter(
    options, routing, training, kind, make_mask, who_enters
):
    block = make_block(depth_routing=routing, **BLOCKS[options]).train(training)
    x, mask = draw_states(), make_mask(kind)
    out = block(x, mask)
    enters = who_enters(block, x, mask)[0]
    is_token = torch.ones(B, T, dtype=torch.bool) if mask is None else mask.bool()
    assert 0 < enters.sum() < is_token.sum()
    assert torch.equal(~out.is_padding, enters)
    expected = expected_output(block, x, enters, mask)
    torch.testing.assert_close(out.output[is_token], expected[is_token])
    # those that pass by are not touched, and have no routes
    assert torch.equal(out.output[~enters], x[~enters])
    assert (out.routes.weights[~enters] == 0).all()
    assert ((out.routes.weights > 0).flatten(2).any(dim=-1) == enters).all()
    for figure in (out.kl, out.projected_cost, out.evaluated_cost):
        assert (figure[~enters] == 0).all()
    assert (out.projected_cost[enters] > 0).all()


def test_training_lets_the_share_of_the_capacity_enter_of_every_row(make_mask):
    block, x = make_block(depth_capacity=0.3).train(), draw_states()
    assert (~block(x).is_padding).sum(dim=1).tolist() == [6] * B
    # of tokens, not of padding; and one of a row at least
    entered = ~block(x, make_mask("left")).is_padding
    assert entered.sum(dim=1).tolist() == [4, 1, 6]


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_what_follows_matters_to_the_highest_scores_of_training_alone(routing, training):
    block, x, t = make_block(depth_routing=routing).train(training), draw_states(), T // 2
    other = torch.cat([x[:, :t], draw_states(seed=1)[:, t:]], dim=1)
    ours, others = (block(states).output[:, :t] for states in (x, other))
    is_same = torch.allclose(ours, others)
    assert is_same is not (routing == "top_k" and training)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_at_a_capacity_of_one_everyone_enters(routing, training, make_mask):
    block = make_block(depth_capacity=1.0, depth_routing=routing).train(training)
    x, mask = draw_states(), make_mask("left")
    out = block(x, mask)
    assert torch.equal(~out.is_padding, mask.bool())
    expected = expected_output(block, x, mask.bool(), mask)
    torch.testing.assert_close(out.output[mask.bool()], expected[mask.bool()])
    assert (out.depth_loss == 0.0) if training else out.depth_loss is None
    assert block.depth_router.predictor is None


def test_without_a_capacity_there_is_nothing_of_it():
    model = make_model(depth_capacity=None, depth_layers=None)
    assert {type(layer) for layer in model.model.layers} == {MetaTransformerBlock}
    assert not [name for name in model.state_dict() if "depth" in name]
    out = model.train()(draw_tokens(), labels=draw_tokens())
    assert out.depth_loss is None
    parts = out.task_loss + model.config.kl_weight * out.kl
    torch.testing.assert_close(out.loss, parts)


# --- those that pass by cost nothing and leave nothing ---


@pytest.fixture
def executed(monkeypatch):
    """Rows of attention that were run, over all experts."""
    total, routed_attention = [0], execution.routed_attention

    def spy(query, key, value, plan, windows, **kwargs):
        total[0] += plan.counts.sum().item()
        assert query.shape[1] == key.shape[1]
        return routed_attention(query, key, value, plan, windows, **kwargs)

    monkeypatch.setattr(execution, "routed_attention", spy)
    return total


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_block_runs_on_the_tokens_that_enter_only(routing, training, rows, executed, spy_on):
    block = make_block(
        depth_routing=routing, routing="hard", route_gradient="chosen", **EVEN
    ).train(training)
    spy = spy_on(block)
    out = block(draw_states()[:rows])
    counts = (~out.is_padding).sum(dim=1)
    assert 0 < counts.sum() < rows * T
    if training and routing == "top_k":
        assert counts.tolist() == [8] * rows
    # rows of a batch are packed to the longest
    assert set(spy.seen.values()) == {rows * counts.max().item()}
    assert len(spy.seen) == 4
    assert executed == [counts.sum().item()]


def test_a_text_that_nobody_enters_runs_nothing(spy_on):
    block = make_block(depth_routing="threshold")
    with torch.no_grad():
        block.depth_router.score.bias.fill_(-1e3)
    spy, x = spy_on(block), draw_states()
    out = block(x)
    assert torch.equal(out.output, x)
    assert spy.seen == {}
    assert (out.kl == 0).all()
    assert out.routes.weights.shape == (B, T, 3)


def test_training_that_nobody_enters_still_has_a_gradient_for_everything():
    """Processes that train together wait for the gradients of all parameters."""
    model, ids = make_model(depth_routing="threshold").train(), draw_tokens()
    expected = model.model.embed_tokens(ids)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.depth_router.score.bias.fill_(-1e3)
    out = model(ids, labels=ids, output_hidden_states=True)
    assert torch.equal(out.hidden_states[2], expected)
    out.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert model.model.layers[0].mlp.up_proj.weight.grad.abs().max() == 0


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_token_that_passes_by_costs_a_decoding_step_nothing(routing, spy_on):
    """Of one row; several rows run together unless all of them pass by."""
    model = make_model(depth_layers=(1,), depth_routing=routing)
    ids, cache = draw_tokens(B=1), MetaAttentionCache(model.config)
    spy, entered = spy_on(model.model.layers[1]), []
    with torch.no_grad():
        for t in range(T):
            out = model(ids[:, t, None], past_key_values=cache, output_routing=True)
            entered.append((out.routing_weights[1] > 0).any().item())
            assert spy.seen.get("query", 0) == sum(entered)
            assert spy.seen.get("feed-forward", 0) == sum(entered)
    assert 0 < sum(entered) < T
    # and it leaves no key
    assert cache.layers[0].keys.shape[2] == T
    assert cache.layers[1].keys.shape[2] == sum(entered)


@pytest.mark.parametrize("options", BLOCKS)
def test_what_passes_by_reaches_nobody(options, force_entry):
    """Poison in its place: no key, no value, no state and no gradient of it is read."""
    block, x = make_block(**BLOCKS[options]), draw_states()
    enters = torch.rand(B, T) < 0.5
    with force_entry(block, enters):
        expected = block(x).output
        poisoned = x.masked_fill(~enters.unsqueeze(-1), torch.nan).requires_grad_()
        out = block(poisoned)
        out.output[enters].sum().backward()
    torch.testing.assert_close(out.output[enters], expected[enters])
    assert (poisoned.grad[~enters] == 0).all()
    assert poisoned.grad[enters].isfinite().all()
    assert all(p.grad.isfinite().all() for p in block.parameters() if p.grad is not None)


def test_documents_of_a_row_do_not_see_each_other():
    model = make_model(depth_routing="threshold").double()
    ids = draw_tokens(B=1)
    with torch.no_grad():
        packed = model(ids, document_ids=torch.tensor([[1] * 7 + [2] * 9 + [3] * 4])).logits
        parts = [model(part, use_cache=False).logits for part in ids.split([7, 9, 4], dim=1)]
    torch.testing.assert_close(packed, torch.cat(parts, dim=1))


def test_a_document_that_nobody_enters_still_parts_those_around_it():
    block, x = make_block(depth_routing="threshold", experts=("full",)), draw_states()
    numbers = torch.tensor([[1] * 8 + [2] * 4 + [1] * 8]).expand(B, T)
    with torch.no_grad():
        lowest = scores_of(block.depth_router, x[0]).argmin()
        x[:, 8:12] = x[0, lowest].clone()
        packed = block(x, document_ids=numbers)
        alone = block(x[:, 12:])
    entered = ~packed.is_padding
    assert not entered[:, 8:12].any()
    assert entered[:, :8].any()
    torch.testing.assert_close(packed.output[:, 12:], alone.output)


# --- the cache; decode equals prefill in tests/models ---


@pytest.mark.parametrize("make", ["growing", "static"])
def test_rows_go_on_after_padding_where_windows_count_tokens_that_entered(make):
    model, ids = make_model(short_conv=3).double(), draw_tokens()
    lengths, T_all = [4, 11, 7], 16
    mask = torch.arange(11) < torch.tensor(lengths).unsqueeze(1)
    cache = MetaAttentionCache(model.config)
    if make == "static":
        cache = MetaAttentionStaticCache(model.config, max_cache_len=T_all)
    later = draw_tokens(T=5, seed=1)
    with torch.no_grad():
        model(ids[:, :11], attention_mask=mask, past_key_values=cache)
        ours = [model(later[:, :3], past_key_values=cache).logits]
        ours += [model(later[:, t, None], past_key_values=cache).logits for t in (3, 4)]
        for b, length in enumerate(lengths):
            alone = torch.cat([ids[b, :length], later[b]]).unsqueeze(0)
            expected = model(alone, use_cache=False).logits[:, length:]
            torch.testing.assert_close(torch.cat(ours, dim=1)[b, None], expected)


def test_a_window_keeps_no_more_than_it_sees_of_what_entered():
    model, ids = make_model(experts=("local",)), draw_tokens(T=40)
    cache = MetaAttentionCache(model.config)
    with torch.no_grad():
        for part in ids.split([25, 1, 1, 13], dim=1):
            model(part, past_key_values=cache)
    for layer in cache.layers:
        assert layer.keys.shape[2] == model.config.window_size
        assert layer.counts.max() == model.config.window_size
    assert cache.get_seq_length() == 40


def test_beams_follow_their_rows():
    model, ids = make_model(), draw_tokens()
    options = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False}
    expected = model.generate(ids, use_cache=False, **options)
    assert torch.equal(model.generate(ids, **options), expected)
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), expected)


def test_the_cache_of_a_model_without_depth_is_refused():
    model = make_model(depth_layers=(1,))
    cache = MetaAttentionCache(make_config(depth_capacity=None, depth_layers=None))
    with pytest.raises(ConfigError, match=r"the tokens that enter layer 1, .* of another model"):
        model(draw_tokens(), past_key_values=cache)


def test_a_cache_starts_over_and_does_not_forget():
    model, ids = make_model(experts=("full",)), draw_tokens()
    cache = MetaAttentionCache(model.config)
    with torch.no_grad():
        first = model(ids, past_key_values=cache).logits
        with pytest.raises(CacheError, match="some have passed it by"):
            cache.crop(-2)
        cache.reset()
        torch.testing.assert_close(model(ids, past_key_values=cache).logits, first)


# --- learning ---


@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_gradient_reaches_the_router_through_the_gate(routing):
    model = make_model(depth_routing=routing, depth_weight=0.0).train()
    ids = draw_tokens()
    out = model(ids, labels=ids)
    out.loss.backward()
    for layer in model.model.layers:
        router = layer.depth_router
        assert router.score.weight.grad.abs().max() > 0
        if router.predictor is not None:
            # which only its own loss teaches
            assert router.predictor.weight.grad.abs().max() == 0


def test_the_loss_of_the_predictor_teaches_the_predictor_alone():
    model, ids = make_model().train(), draw_tokens()
    model(ids).depth_loss.backward()
    taught = {name for name, p in model.named_parameters() if p.grad is not None}
    assert taught == {
        f"model.layers.{i}.depth_router.predictor.{part}"
        for i in range(3)
        for part in ("weight", "bias")
    }


@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_loss_is_the_sum_of_its_parts(routing):
    model = make_model(depth_routing=routing, depth_weight=0.7).train()
    ids = draw_tokens()
    out = model(ids, labels=ids)
    parts = out.task_loss + model.config.kl_weight * out.kl + 0.7 * out.depth_loss
    torch.testing.assert_close(out.loss, parts)
    assert out.depth_loss > 0
    # evaluation has nothing to teach
    assert model.eval()(ids, labels=ids).depth_loss is None


def test_the_losses_are_what_they_say(make_mask, who_enters):
    x, mask = draw_states(), make_mask("left")
    block = make_block().train()
    router, enters = block.depth_router, who_enters(block, x, mask)[0]
    logits = scores_of(router, x, "predictor")[mask.bool()]
    expected = F.binary_cross_entropy_with_logits(logits, enters[mask.bool()].double())
    torch.testing.assert_close(router(x, mask.bool()).loss, expected)

    block = make_block(depth_routing="threshold").train()
    share = who_enters(block, x, mask)[0].sum() / mask.sum()
    torch.testing.assert_close(
        block.depth_router(x, mask.bool()).loss, (share.double() - 0.4).square()
    )


def learn(router, x, steps=400):
    optimizer = torch.optim.Adam(router.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        router.train()(x, None).loss.backward()
        optimizer.step()
    return router.eval()


def test_a_predictor_learns_who_enters():
    torch.manual_seed(0)
    router, x = DepthRouter(make_config(depth_capacity=0.25)), torch.randn(8, 64, D)
    chosen = router.train()(x, None).enters
    before = (router.eval()(x, None).enters == chosen).float().mean()
    after = (learn(router, x)(x, None).enters == chosen).float().mean()
    assert before < 0.75
    assert after > 0.9


@pytest.mark.parametrize("capacity", [0.1, 0.6])
def test_the_share_above_a_threshold_is_drawn_to_the_capacity(capacity):
    torch.manual_seed(0)
    config = make_config(depth_capacity=capacity, depth_routing="threshold")
    router, x = DepthRouter(config), torch.randn(8, 64, D)
    with torch.no_grad():
        router.score.bias.fill_(1.0 if capacity < 0.5 else -1.5)
    before = router(x, None).enters.float().mean().item()
    assert abs(before - capacity) > 0.2
    assert learn(router, x)(x, None).enters.float().mean().item() == pytest.approx(
        capacity, abs=0.02
    )


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("capacity", [0.125, 0.5])
def test_a_new_model_lets_about_the_capacity_enter(capacity, routing):
    model = make_model(
        hidden_size=256,
        initializer_range=0.02,
        depth_capacity=capacity,
        depth_routing=routing,
    )
    with torch.no_grad():
        weights = model(draw_tokens(T=60, B=8), output_routing=True).routing_weights
    share = torch.stack([(w > 0).any(dim=-1) for w in weights]).float().mean().item()
    assert share == pytest.approx(capacity, abs=0.12)


# --- as a Transformers model ---


@pytest.mark.parametrize("routing", ROUTINGS)
def test_gradient_checkpointing_changes_no_gradient(routing):
    model = make_model(depth_routing=routing, routing="hard", training_weights="one_hot").train()
    ids = draw_tokens()

    def gradients():
        model.zero_grad()
        torch.manual_seed(1)
        model(ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    model.gradient_checkpointing_enable()
    for ours, expected in zip(gradients(), plain, strict=True):
        torch.testing.assert_close(ours, expected)


# compiling takes seconds
SMALL = {"num_hidden_layers": 1, "depth_layers": (0,), "experts": ("full", "local")}


def test_training_on_the_highest_scores_compiles_into_one_graph():
    model, ids = make_model(**SMALL).train(), draw_tokens()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ours = compiled(ids, labels=ids, use_cache=False)
    torch.testing.assert_close(ours.loss, model(ids, labels=ids, use_cache=False).loss)
    ours.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    torch._dynamo.reset()


# that is how Dynamo looks at hidden states between two graphs
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(("routing", "training"), [("top_k", False), ("threshold", True)])
def test_what_counts_tokens_compiles_in_parts(routing, training):
    model, ids = make_model(depth_routing=routing, **SMALL).train(training), draw_tokens()
    compiled = torch.compile(model, backend="aot_eager")
    ours = compiled(ids, labels=ids, use_cache=False).loss
    torch.testing.assert_close(ours, model(ids, labels=ids, use_cache=False).loss)
    if training:
        ours.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
    torch._dynamo.reset()


def test_saved_and_loaded_models_agree_and_routers_stay_precise(tmp_path):
    model, ids = make_model(), draw_tokens()
    model.save_pretrained(tmp_path)
    loaded = MetaAttentionForCausalLM.from_pretrained(tmp_path).eval()
    assert isinstance(loaded.model.layers[0], MixtureOfDepthsBlock)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    half = MetaAttentionForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    for moved in (half, make_model().bfloat16()):
        router = moved.model.layers[0].depth_router
        assert {p.dtype for p in router.parameters()} == {torch.float32}
        assert torch.equal(router.score.weight, model.model.layers[0].depth_router.score.weight)
        with torch.no_grad():
            assert moved(ids).logits.isfinite().all()


def test_blocks_that_are_not_split_are_those_there_are():
    """FSDP refuses the name of a block that a model does not have."""
    both = {"MetaTransformerBlock", "MixtureOfDepthsBlock"}
    assert set(make_model(depth_layers=(1,))._no_split_modules) == both
    assert set(make_model()._no_split_modules) == {"MixtureOfDepthsBlock"}
    plain = make_model(depth_capacity=None, depth_layers=None)
    assert set(plain._no_split_modules) == {"MetaTransformerBlock"}


def test_autocast_leaves_scores_in_float32():
    model, ids = make_model().train(), draw_tokens()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(ids, labels=ids)
        entry = model.model.layers[0].depth_router(model.model.embed_tokens(ids), None)
    assert entry.gate.dtype == torch.float32
    out.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_encoders_may_have_a_threshold(make_mask):
    model = make_model(causal=False, depth_routing="threshold").double()
    ids, mask = draw_tokens(), make_mask("left")
    with torch.no_grad():
        padded = model(ids, attention_mask=mask).logits[0, 7:]
        torch.testing.assert_close(padded, model(ids[:1, 7:]).logits[0])
