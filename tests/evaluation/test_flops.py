"""Counted operations are those of the matrix products that a forward needs.

PyTorch's own counter is the judge. It counts a matrix product as 2 m n k, whatever of it a mask
then hides, and does not see fused attention on the CPU. So where every product is needed in full
(projections, controller, feed-forward, head, attention that is not causal) the layers themselves
run under it, with attention in plain products. Causal rows and windows, which the layers compute in
blocks with a mask, are written out below one row and one matrix product at a time.
"""

from dataclasses import asdict

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from meta_attention import MetaAttentionConfig, MetaAttentionForCausalLM, register_expert
from meta_attention.errors import ConfigError, ShapeError
from meta_attention.evaluation.flops import (
    LENGTHS,
    Flops,
    controller_flops,
    cost_table,
    count_full,
    count_layer,
    count_mix,
    count_model,
)
from meta_attention.experts import FullAttention, LinearAttention, build_experts
from meta_attention.ops.route_plan import RoutePlan, plan_routes
from meta_attention.ops.routed_attention import routed_attention

EXPERTS = ("full", "gated_full", "linear", "local")
WITH_SSM = (*EXPERTS, "ssm")
MASKS = {
    "whole": None,
    "padding": [[0] * 5 + [1] * 15, [1] * 17 + [0] * 3],
    "gaps": [[1, 0] * 10, [0] * 20],
    "documents": [[1] * 7 + [2] * 9 + [0] * 4, [0, 0, 1, 1, 0, 1] + [2] * 4 + [3] * 10],
}


def make_config(**kwargs) -> MetaAttentionConfig:
    defaults = {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "window_size": 5,
        "max_position_embeddings": 256,
        "controller_hidden_size": 8,
    }
    return MetaAttentionConfig(**(defaults | kwargs))


def make_mask(name: str) -> Tensor | None:
    if MASKS[name] is None:
        return None
    mask = torch.tensor(MASKS[name])
    return mask if name == "documents" else mask.bool()


def make_routes(*shape: int) -> Tensor:
    """Some tokens take one expert, some several."""
    weights = torch.rand(shape) * (torch.rand(shape) < 0.4)
    weights[..., 0] += (weights.sum(dim=-1) == 0).float()
    return weights / weights.sum(dim=-1, keepdim=True)


def visible(config: MetaAttentionConfig, mask: Tensor | None, B: int, T: int, window: int):
    """[B, T, T], from the definition of each condition."""
    distance = torch.arange(T)[:, None] - torch.arange(T)[None, :]
    own = torch.ones(B, T, T, dtype=torch.bool)
    if mask is not None:
        own &= (mask != 0)[:, None, :]
        if mask.dtype != torch.bool:
            own &= mask[:, :, None] == mask[:, None, :]
    is_sink = own.cumsum(dim=2) <= config.num_sinks
    near = (distance.abs() <= window) | is_sink
    return own & near & ((distance >= 0) | (not config.causal))


def attend_row_by_row(config: MetaAttentionConfig, weights: Tensor, mask: Tensor | None) -> int:
    """Operations of one layer's attention with a matrix product for each row, by the counter.

    Args:
        weights: ``[B, T, G, E]`` of ``config.experts``.
        mask: As the layer takes it.
    """
    B, T, G, _ = weights.shape
    H, K, P = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    h = H // G  # heads of a group
    with FlopCounterMode(display=False) as counter:
        for e, name in enumerate(config.experts):
            window = config.window_size if name == "local" else T
            seen = visible(config, mask, B, T, window)
            for b in range(B):
                for t in range(T):
                    if mask is not None and mask[b, t] == 0:
                        continue
                    if name == "linear":
                        # feature x (value and a one), added to the state of each key-value head
                        torch.zeros(K, P, 1) @ torch.zeros(K, 1, P + 1)
                    elif name == "ssm":
                        torch.zeros(1, config.hidden_size) @ torch.zeros(config.hidden_size, K)
                        torch.zeros(K, P, 1) @ torch.zeros(K, 1, P)
                    for g in range(G):
                        if weights[b, t, g, e] == 0:
                            continue
                        query = torch.zeros(h, 1, P)
                        if name == "linear":
                            query @ torch.zeros(h, P, P + 1)
                            continue
                        if name == "ssm":
                            query @ torch.zeros(h, P, P)
                            continue
                        n = int(seen[b, t].sum())
                        scores = query @ torch.zeros(h, P, n)
                        scores @ torch.zeros(h, n, P)
                        if name == "gated_full":
                            torch.zeros(1, config.hidden_size) @ torch.zeros(
                                config.hidden_size, h * P
                            )
    return counter.get_total_flops()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("groups", "num_sinks"), [(1, 0), (2, 0), (1, 3), (2, 9)])
def test_attention_is_counted_as_one_product_for_each_row(groups, num_sinks, mask, causal):
    # the state-space expert is causal
    experts = WITH_SSM if causal else EXPERTS
    config = make_config(experts=experts, causal=causal, num_sinks=num_sinks)
    marks = make_mask(mask)
    weights = make_routes(2, 20, groups, len(experts))
    counted = count_layer(config, weights, mask=marks)
    assert counted.attention == attend_row_by_row(config, weights, marks)


@pytest.mark.parametrize("is_exclusive", [True, False])
def test_a_plan_counts_as_the_weights_it_was_made_from(is_exclusive):
    config = make_config(experts=EXPERTS)
    expert = torch.randint(4, (2, 20))
    weights = torch.nn.functional.one_hot(expert, 4).float()
    mask = make_mask("padding")
    plan = plan_routes(weights, mask=mask, is_exclusive=is_exclusive)
    assert count_layer(config, plan, mask=mask) == count_layer(config, weights, mask=mask)
    # beyond its count a list holds anything
    slot = torch.arange(20)
    garbage = torch.where(slot < plan.counts[..., None], plan.positions, 2**31 - 1)
    torn = RoutePlan(garbage, plan.counts, plan.ranks, is_exclusive)
    assert count_layer(config, torn, mask=mask) == count_layer(config, plan, mask=mask)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("length", [1, 2, 5, 6, 40])
@pytest.mark.parametrize("name", EXPERTS)
def test_a_full_list_costs_what_the_expert_says(name, length, causal):
    config = make_config(experts=(name,), causal=causal)
    counted = count_layer(config, torch.ones(3, length, 1))
    expected = build_experts(config, 0)[name].flops(length)
    assert counted.attention / (3 * length) == pytest.approx(expected, rel=1e-12)


def test_no_row_costs_nothing_but_a_state_is_always_updated():
    config = make_config(experts=EXPERTS)
    weights = torch.zeros(2, 20, 4)
    update = 2 * 8 * 9 * 2  # P x (P + 1) numbers for each of 2 key-value heads
    assert count_layer(config, weights).attention == 2 * 20 * update


@pytest.mark.parametrize("layout", ["shared", "own", "kv_head"])
@pytest.mark.parametrize("bias", [True, False])
def test_everything_around_attention_is_counted_as_pytorch_does(layout, bias):
    config = make_config(
        layer_experts=[["full", "linear", "local"], ["local"]],
        shared_projections=layout != "own",
        route_granularity="kv_head" if layout == "kv_head" else "token",
        attention_bias=bias,
        head_dim=6,
        intermediate_size=88,
    )
    model = MetaAttentionForCausalLM(config).eval()
    x, positions = torch.randn(2, 20, 32), torch.arange(20).expand(2, 20)
    routed = (2, 20, 2, 3) if layout == "kv_head" else (2, 20, 3)
    weights = [make_routes(*routed), torch.ones(2, 20, 1)]
    # padding is projected too
    counted = count_model(config, weights, mask=make_mask("padding"))

    def count(run) -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            run()
        return counter.get_total_flops()

    blocks = list(model.model.layers)
    sets = [p for block in blocks for p in block.attention.projections]
    assert len(sets) == (4 if layout == "own" else 2)
    rows = torch.randn(2, 20, 4 * 6)
    parts = {
        "projections": lambda: [(p.heads(x), p.output(rows)) for p in sets],
        "controller": lambda: [b.attention.controller(x, positions) for b in blocks],
        "feed_forward": lambda: [b.mlp(x) for b in blocks],
        "head": lambda: model.lm_head(x),
    }
    for name, run in parts.items():
        assert getattr(counted, name) == count(run) > 0, name


@pytest.mark.parametrize("granularity", ["token", "kv_head"])
def test_a_whole_model_is_counted_as_pytorch_does(granularity):
    """Not causal, without windows: the layers then compute nothing that they mask away."""
    config = make_config(
        experts=("full", "linear"), causal=False, use_rope=False, route_granularity=granularity
    )
    model = MetaAttentionForCausalLM(config).eval()
    tokens = torch.randint(61, (3, 64))
    with (
        FlopCounterMode(display=False) as counter,
        sdpa_kernel(SDPBackend.MATH),
        torch.no_grad(),
    ):
        out = model(tokens, output_routing=True)
    assert count_model(config, out.routing_weights).model == counter.get_total_flops()


@pytest.mark.parametrize(
    "residual",
    [{"residual": "attention"}, {"residual": "block_attention", "residual_blocks": 3}],
    ids=str,
)
def test_reading_sources_is_counted_as_pytorch_counts_its_logits(residual):
    """To PyTorch sums are no products; they have as many terms as there are logits."""
    tokens = torch.randint(61, (3, 64))

    def products(**options):
        torch.manual_seed(0)
        model = MetaAttentionForCausalLM(make_config(num_hidden_layers=4, **options)).eval()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(tokens)
        return counter.get_total_flops()

    config = make_config(num_hidden_layers=4, experts=("full",), **residual)
    counted = count_model(config, [torch.ones(3, 64, 1)] * 4)
    assert counted.residuals == 2 * (products(**residual) - products()) > 0
    assert count_mix(config, {"full": 1.0}, 64).residuals == counted.residuals / 3
    plain = count_model(make_config(experts=("full",)), [torch.ones(3, 64, 1)] * 2)
    assert plain.residuals == 0.0


@pytest.mark.parametrize("routing", ["soft", "hard"])
@pytest.mark.parametrize("residual", ["sum", "attention"])
def test_blocks_that_tokens_pass_by_are_counted_as_pytorch_does(residual, routing):
    """One row, which is packed without gaps; as above, nothing is masked away.

    Depth times mechanism, and what is read of earlier outputs by every token on top.
    """
    config = make_config(
        experts=("full", "linear"),
        causal=False,
        use_rope=False,
        routing=routing,
        expert_costs=(0.5, 0.5),
        initializer_range=0.3,
        depth_capacity=0.5,
        depth_routing="threshold",
        depth_layers=(0, 1),
        residual=residual,
    )
    torch.manual_seed(0)
    model = MetaAttentionForCausalLM(config).eval()
    tokens = torch.randint(61, (1, 64))
    with (
        FlopCounterMode(display=False) as counter,
        sdpa_kernel(SDPBackend.MATH),
        torch.no_grad(),
    ):
        out = model(tokens, output_routing=True)
    entered = [(weights > 0).any(dim=-1).sum().item() for weights in out.routing_weights]
    assert all(0 < number < 64 for number in entered)
    counted = count_model(config, out.routing_weights)
    # sums of sources are no products to PyTorch, as above
    assert counted.model - counted.residuals / 2 == counter.get_total_flops()
    # the last reads five sources: the embedding and two halves of two blocks
    reads = 2 + 3 + 4 + 5
    assert counted.residuals == (0 if residual == "sum" else 64 * 4 * 32 * reads)


@pytest.mark.parametrize("mask", MASKS)
def test_a_block_costs_what_a_plain_one_costs_on_the_tokens_that_enter(mask):
    options = {"experts": EXPERTS, "expert_costs": "flops", "num_sinks": 2}
    config = make_config(depth_capacity=0.5, depth_layers=(0,), **options)
    marks = make_mask(mask)
    enters = torch.rand(2, 20) < 0.6
    weights = make_routes(2, 20, 4) * enters.unsqueeze(-1)
    counted = count_layer(config, weights, mask=marks)
    expected, number = Flops(), 0
    for b in range(2):
        at = (enters[b] if marks is None else enters[b] & (marks[b] != 0)).nonzero().squeeze(1)
        if len(at):
            own = None if marks is None else marks[b, at].unsqueeze(0)
            expected += count_layer(make_config(**options), weights[b, at].unsqueeze(0), mask=own)
        number += len(at)
    assert 0 < number < 40
    # score and predictor, of all tokens
    expected += Flops(controller=2 * 20 * 2 * 2 * 32)
    assert asdict(counted) == pytest.approx(asdict(expected))
    model = count_model(config, [weights, make_routes(2, 20, 4)], mask=marks)
    assert model.feed_forward == (number + 2 * 20) * 6 * 32 * config.intermediate_size


def test_a_block_that_nobody_enters_costs_its_scores():
    config = make_config(depth_capacity=0.5, depth_layers=(0,), depth_routing="threshold")
    assert count_layer(config, torch.zeros(2, 20, 3)) == Flops(controller=2 * 20 * 2 * 32)
    with pytest.raises(ConfigError, match="not known which did; count a whole text at once"):
        count_layer(config, torch.zeros(2, 1, 3), past=19)


def test_depth_multiplies_what_mechanisms_save():
    """Everything of the second block is of the share that enters, attention within it as well."""
    mix = {"full": 0.5, "local": 0.5}
    options = {"experts": ("full", "local"), "window_size": 64, "max_position_embeddings": 8192}
    config = make_config(depth_capacity=0.25, **options)
    plain = make_config(num_hidden_layers=1, **options)
    (row,) = cost_table(config, mix, lengths=[4096])
    first, second = count_mix(plain, mix, 4096), count_mix(plain, mix, 1024)
    for name in ("attention", "projections", "feed_forward"):
        total = getattr(first, name) + getattr(second, name)
        assert getattr(row.routed, name) == pytest.approx(total), name
    # and is compared with a model that all tokens go through
    assert row.full == count_mix(make_config(experts=("full",)), {"full": 1.0}, 4096)


def test_attention_over_query_lists_is_counted_as_pytorch_does():
    config = make_config(experts=("full", "linear"), causal=False)
    weights = torch.nn.functional.one_hot(torch.randint(2, (2, 40)), 2).float()
    plan = plan_routes(weights, is_exclusive=True)
    query, key, value = torch.randn(2, 40, 4, 8), torch.randn(2, 40, 2, 8), torch.randn(2, 40, 2, 8)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        routed_attention(query, key, value, plan, {0: None}, causal=False, impl="reference")
    # the list of the other expert is empty, but its state is updated
    only_full = weights * torch.tensor([1.0, 0.0])
    updates = 2 * 40 * 2 * 8 * 9 * 2
    counted = count_layer(config, only_full)
    assert counted.attention - updates == counter.get_total_flops() > 0


@pytest.mark.parametrize("mask", ["whole", "padding"])
def test_a_text_in_parts_costs_what_it_costs_in_one(mask):
    config = make_config(experts=EXPERTS)
    marks, weights = make_mask(mask), make_routes(2, 20, 4)
    whole = count_model(config, [weights] * 2, mask=marks)
    parts = Flops()
    for start, stop in ((0, 7), (7, 8), (8, 20)):
        parts += count_model(
            config,
            [weights[:, start:stop]] * 2,
            mask=None if marks is None else marks[:, :stop],
            past=start,
        )
    assert parts == whole


def test_logits_may_be_of_the_last_tokens_only():
    config = make_config(experts=("full",))
    weights = [torch.ones(2, 20, 1)] * 2
    whole = count_model(config, weights)
    last = count_model(config, weights, logits_to_keep=1)
    assert last.head == whole.head / 20
    assert last.layer == whole.layer


def test_totals_are_the_sums_of_the_parts():
    flops = count_model(make_config(residual="attention"), [make_routes(2, 20, 3)] * 2)
    parts = asdict(flops)
    assert all(isinstance(value, float) and value > 0 for value in parts.values())
    assert flops.model == sum(parts.values())
    assert flops.layer == flops.model - flops.feed_forward - flops.head - flops.residuals


def test_an_expert_of_ones_own_counts_by_its_mean():
    @register_expert("test_flops_rows")
    class Rows(FullAttention):
        def flops(self, length: int) -> float:
            return 10.0 * length

    @register_expert("test_flops_states")
    class States(LinearAttention):
        def flops(self, length: int) -> float:
            return 7.0

    config = make_config(experts=("test_flops_rows", "test_flops_states"))
    weights = torch.zeros(1, 20, 2)
    weights[:, :5, 0] = weights[:, 5:, 1] = 1.0
    # rows of the first; of the other every token, since its state is always updated
    assert count_layer(config, weights).attention == 5 * 10.0 * 20 + 20 * 7.0
    mix = {"test_flops_rows": 0.25, "test_flops_states": 0.75}
    assert count_mix(config, mix, 20).attention == 2 * (5 * 10.0 * 20 + 20 * 7.0)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_a_mix_is_the_mean_over_routes_spread_evenly(causal):
    """A pattern of period 4, moved by one token at a time, takes every position equally often."""
    config = make_config(experts=("full", "local", "linear"), causal=causal)
    pattern = torch.tensor([0, 1, 2, 2]).repeat(10)
    shifted = torch.stack([pattern.roll(n) for n in range(4)])
    weights = torch.nn.functional.one_hot(shifted, 3).float()  # [4, 40, 3]
    executed = asdict(count_model(config, [weights] * 2))
    mixed = asdict(count_mix(config, {"full": 0.25, "local": 0.25, "linear": 0.5}, 40))
    assert mixed == pytest.approx({name: value / 4 for name, value in executed.items()})


def test_full_attention_alone_is_the_measure_of_a_table():
    config = make_config(experts=("full",))
    for row in cost_table(config, {"full": 1.0}):
        assert row.routed == row.full
        assert row.full.controller == 0.0


def test_the_measure_is_a_plain_model_whatever_is_added():
    added = {"depth_capacity": 0.5, "residual": "attention"}
    plain = count_model(make_config(experts=("full",)), [torch.ones(1, 20, 1)] * 2)
    assert count_full(make_config(experts=("full", "local"), **added), 20) == plain
    (row,) = cost_table(make_config(experts=("full",), **added), {"full": 1.0}, lengths=[20])
    assert asdict(row.full) == pytest.approx(asdict(plain))


@pytest.mark.parametrize("layers", [None, [["local", "full"], ["full", "local"]]])
def test_a_table_runs_from_1k_to_128k_and_saves_more_the_longer(layers):
    config = make_config(experts=("full", "local"), layer_experts=layers)
    rows = [row.to_dict() for row in cost_table(config, {"full": 0.25, "local": 0.75})]
    assert [row["length"] for row in rows] == list(LENGTHS) == [1024 << n for n in range(8)]
    for name in ("attention", "layer", "model"):
        ratios = [row[name]["relative_to_full"] for row in rows]
        assert ratios == sorted(ratios, reverse=True)
        for row in rows:
            per_token, per_sequence = row[name]["gflop_per_token"], row[name]["tflop_per_sequence"]
            assert per_sequence == pytest.approx(per_token * row["length"] / 1000)
    # a quarter of full attention, and the windows
    assert rows[-1]["attention"]["relative_to_full"] == pytest.approx(0.25, abs=1e-3)
    assert config.experts == ("full", "local")


def test_a_table_by_hand():
    """D = 1024, 8 heads of 128, 24 layers, 4k tokens, half full, half window 256."""
    config = MetaAttentionConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=8,
        experts=("full", "local"),
        intermediate_size=2816,
    )
    (row,) = cost_table(config, {"full": 0.5, "local": 0.5}, lengths=[4096])
    full_keys, local_keys = 4097 / 2, 257 - 256 * 257 / 2 / 4096
    attention = 24 * 4 * 1024 * (full_keys + local_keys) / 2
    layer = attention + 24 * (4 * 2 * 1024 * 1024 + 2 * 64 * (1026 + 2))
    model = layer + 24 * 3 * 2 * 1024 * 2816 + 2 * 1024 * 32000
    ours = [row.routed.attention, row.routed.layer, row.routed.model]
    assert [value / 4096 for value in ours] == pytest.approx([attention, layer, model], rel=1e-12)
    assert row.full.attention / 4096 == pytest.approx(24 * 4 * 1024 * full_keys)


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ({"full": 0.5, "local": 0.4}, "the shares of a mix must sum to 1, got 0.9"),
        ({"full": 1.5, "local": -0.5}, "share of 'local' in a mix must be >= 0, got -0.5"),
        ({"full": float("nan")}, "share of 'full' in a mix must be >= 0, got nan"),
        ({}, "must sum to 1, got 0"),
        ({"full": 0.5, "linear": 0.5}, "experts of layer 0, full, local, got 'linear'"),
    ],
)
def test_a_bad_mix_gets_one_clear_sentence(mix, message):
    with pytest.raises(ConfigError, match=message) as error:
        cost_table(make_config(experts=("full", "local")), mix)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (lambda c: count_layer(c, torch.ones(1, 4, 2)), "lists for its 3 experts, got 2"),
        (lambda c: count_model(c, [torch.ones(1, 4, 3)]), "each of 2 layers, got 1"),
        (
            lambda c: count_layer(c, torch.ones(1, 4, 3), mask=torch.ones(1, 5, dtype=torch.bool)),
            r"\[1, 4\].* got \[1, 5\]",
        ),
    ],
)
def test_lists_of_another_shape_are_refused(count, message):
    with pytest.raises(ShapeError, match=message):
        count(make_config())


def test_what_was_seen_before_adds_a_vector_for_each_length_where_there_is_a_choice():
    layers = [["full", "local"], ["local"]]
    plain, seen = (
        MetaAttentionConfig(
            hidden_size=32,
            num_attention_heads=2,
            num_hidden_layers=2,
            layer_experts=layers,
            recurrence=recurrence,
        )
        for recurrence in (None, 3)
    )
    assert controller_flops(seen, 0) - controller_flops(plain, 0) == 3 * 32
    assert controller_flops(seen, 1) == 0.0
