"""Experts: what they cost, and how a config asks for them."""

import pytest
import torch

from meta_attention import (
    BayesianMetaAttentionLayer,
    Expert,
    Heads,
    MetaAttentionCache,
    MetaAttentionConfig,
    known_experts,
    register_expert,
)
from meta_attention.errors import ConfigError
from meta_attention.experts import (
    FullAttention,
    GatedFullAttention,
    LinearStateExpert,
    RecurrentExpert,
    SoftmaxExpert,
    StateInputs,
    build_experts,
    expert_costs,
)
from meta_attention.experts.base import visible_keys
from meta_attention.testing import naive_linear_attention, naive_local_attention


def make_config(**kwargs) -> MetaAttentionConfig:
    defaults = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 1024}
    return MetaAttentionConfig(**(defaults | kwargs))


def costs_of(**kwargs) -> dict[str, float]:
    config = make_config(**kwargs)
    experts = build_experts(config, 0)
    return dict(zip(experts, expert_costs(config, experts), strict=True))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("name", ["full", "gated_full", "linear", "local"])
def test_every_expert_is_its_definition_gradients_included(name, adapted, causal):
    """Also as a pretrained model may have it: with sinks, a scale and a soft-cap."""
    config = make_config(
        hidden_size=32,
        num_key_value_heads=2,
        window_size=7,
        num_sinks=3 if adapted else 0,
        causal=causal,
        experts=(name,),
    )
    scores = {"scale": 0.5, "softcap": 1.5} if adapted else {}
    expert = build_experts(config, 0)[name].double()
    if isinstance(expert, SoftmaxExpert) and adapted:
        expert.scale, expert.softcap = 0.5, 1.5
    shapes = ((2, 70, 4, 8), (2, 70, 2, 8), (2, 70, 2, 8), (2, 70, 32))
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    *heads, x = inputs
    mask = torch.ones(2, 70, dtype=torch.bool)
    mask[0, :9] = False

    if isinstance(expert, RecurrentExpert):
        rows, _ = expert(Heads(*heads), x, mask, None)
        expected = naive_linear_attention(*heads, causal=causal, mask=mask)
    else:
        rows = expert(Heads(*heads), x, mask)
        window = 7 if name == "local" else 70
        expected = naive_local_attention(
            *heads,
            window=window,
            causal=causal,
            mask=mask,
            num_sinks=config.num_sinks,
            **scores,
        )
    if isinstance(expert, GatedFullAttention):
        expected = expected * torch.sigmoid(x @ expert.gate.weight.T).view_as(expected)

    upstream = torch.randn_like(rows)
    used = inputs if name == "gated_full" else heads
    ours = (rows, *torch.autograd.grad(rows, used, upstream))
    theirs = (expected, *torch.autograd.grad(expected, used, upstream))
    for actual, exact in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, exact, rtol=1e-9, atol=1e-9)


def test_the_four_experts_are_known():
    assert {"full", "gated_full", "linear", "local"} <= set(known_experts())


def test_paper_costs_are_the_papers():
    assert costs_of() == {"full": 1.0, "linear": 0.15, "local": 0.30}


def test_given_costs_follow_their_names_into_every_layer():
    config = make_config(
        expert_costs=(1.0, 0.2, 0.1),
        num_hidden_layers=2,
        layer_experts=[["local", "full"], ["linear"]],
    )
    assert list(expert_costs(config, build_experts(config, 0))) == [0.1, 1.0]
    assert list(expert_costs(config, build_experts(config, 1))) == [0.2]


def test_counted_costs_at_1024_tokens_reverse_the_papers_order():
    costs = costs_of(expert_costs="flops", window_size=32)
    assert costs["full"] == 1.0
    assert costs["linear"] == pytest.approx(0.125, abs=0.003)
    assert costs["local"] == pytest.approx(0.062, abs=0.003)


def test_costs_fall_with_the_length():
    short = costs_of(expert_costs="flops", cost_length=1024)
    long = costs_of(expert_costs="flops", cost_length=65536)
    assert long["linear"] < short["linear"] / 60
    assert long["local"] < short["local"] / 30


def test_no_cost_passes_that_of_full_attention():
    # at 16 tokens a state of 64 x 65 is more work than 16 keys
    costs = costs_of(expert_costs="flops", cost_length=16)
    assert costs == {"full": 1.0, "linear": 1.0, "local": 1.0}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("num_sinks", [0, 1, 4, 40, 1000])
@pytest.mark.parametrize("window", [1, 5, 31, 1000])
@pytest.mark.parametrize("length", [1, 2, 32, 100])
def test_visible_keys_are_counted_exactly(length, window, num_sinks, causal):
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    seen = (distance.abs() <= window) | (torch.arange(length) < num_sinks)
    seen &= (distance >= 0) | (not causal)
    counted = seen.sum(dim=1).double().mean().item()
    keys = visible_keys(length, window, causal=causal, num_sinks=num_sinks)
    assert keys == pytest.approx(counted)


def test_sinks_are_part_of_the_cost():
    without, with_sinks = (
        costs_of(expert_costs="flops", window_size=32, num_sinks=n)["local"] for n in (0, 64)
    )
    # of 1024 tokens, which see 512.5 on average: 64 more, but fewer at the start
    more = sum(min(64, max(t - 32, 0)) for t in range(1024)) / 1024
    assert with_sinks - without == pytest.approx(more / 512.5)


def test_counted_flops_are_those_of_the_matrix_products():
    """Full attention in plain matrix products, counted by PyTorch, against our formula."""
    from torch.utils.flop_counter import FlopCounterMode

    expert = FullAttention(make_config(causal=False))
    T = 96
    q = k = v = torch.randn(4, T, 64)
    with FlopCounterMode(display=False) as counter:
        (q @ k.transpose(1, 2)).softmax(dim=-1) @ v
    assert expert.flops(T) * T == counter.get_total_flops()


def test_an_expert_without_a_paper_cost_asks_for_one():
    @register_expert("test_uncosted")
    class Uncosted(FullAttention):
        paper_cost = None

    config = make_config(experts=("full", "test_uncosted"))
    with pytest.raises(ConfigError, match="the paper gives no cost for expert 'test_uncosted'"):
        expert_costs(config, build_experts(config, 0))


def test_a_layer_expert_outside_the_given_costs_asks_for_one():
    config = make_config(
        experts=("full", "linear"),
        expert_costs=(1.0, 0.2),
        num_hidden_layers=1,
        layer_experts=[["local"]],
    )
    with pytest.raises(ConfigError, match="expert_costs gives no cost for expert 'local'"):
        expert_costs(config, build_experts(config, 0))


def test_a_linear_state_of_ones_own_needs_no_more_than_its_inputs():
    """Lists, documents and decoding come with it."""

    @register_expert("test_retention")
    class Retention(LinearStateExpert):
        def inputs(self, heads, x):
            decay = torch.full_like(heads.key[..., 0], -0.2)
            return StateInputs(heads.query, heads.key, heads.value, decay, normalise=False)

        def flops(self, length):
            return 1.0

    config = make_config(
        hidden_size=32,
        experts=("full", "test_retention"),
        expert_costs=(0.5, 0.5),
        routing="hard",
        num_key_value_heads=2,
    )
    layer = BayesianMetaAttentionLayer(config).double().eval()
    torch.nn.init.normal_(layer.controller.mlp[-1].weight)
    x = torch.randn(2, 70, 32, dtype=torch.float64)
    with torch.no_grad():
        out = layer(x)
        assert 0.1 < out.routes.weights[..., 1].mean() < 0.9
        cache = MetaAttentionCache(config)
        parts = []
        for part in x.split([60, *[1] * 10], dim=1):
            _, step = cache.prepare(None, 2, part.shape[1], x.device)
            parts.append(layer(part, past_key_values=cache, step=step).output)
        torch.testing.assert_close(torch.cat(parts, dim=1), out.output)
        documents = torch.ones(2, 70, dtype=torch.long)
        documents[:, 30:] = 2
        alone = layer(x[:, 30:]).output
        apart = layer(x, document_ids=documents).output[:, 30:]
        torch.testing.assert_close(apart, alone)


def test_a_name_is_not_taken_twice():
    class FullAttention(Expert):
        """Of the same name as ours, in another module."""

    with pytest.raises(ConfigError, match=r"'full' is taken by meta_attention.experts.full.Full"):
        register_expert("full")(FullAttention)
    assert build_experts(make_config(), 0)["full"].paper_cost == 1.0


def test_a_class_defined_anew_replaces_itself():
    def define():
        @register_expert("test_notebook")
        class Notebook(FullAttention):
            pass

        return Notebook

    define()
    latest = define()
    assert type(build_experts(make_config(experts=["test_notebook"]), 0)["test_notebook"]) is latest


def test_a_name_may_give_local_attention_a_window_of_its_own():
    config = make_config(experts=("local", "local:64", "full"), window_size=16)
    experts = build_experts(config, 0)
    assert [expert.window for expert in experts.values()] == [16, 64, None]
    costs = expert_costs(make_config(experts=("local", "local:64"), expert_costs="flops"), experts)
    assert costs[0] < costs[1] < costs[2] == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("full:64", "expert 'full' has no window"),
        ("local:", "window of an expert must be a number >= 1, got 'local:'"),
        ("local:0", "window of an expert must be a number >= 1"),
        ("local:-3", "window of an expert must be a number >= 1"),
        ("lokal:64", "unknown expert 'lokal:64'"),
    ],
)
def test_a_window_that_is_none_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        build_experts(make_config(experts=(name,)), 0)
