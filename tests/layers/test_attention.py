"""The routed layer: causal, prefix-stable, safe, and the sum of its experts."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meta_attention import (
    BayesianMetaAttentionLayer,
    MetaAttentionCache,
    MetaAttentionConfig,
    known_experts,
)
from meta_attention.errors import BackendUnavailableError, ConfigError, ShapeError

LENGTHS = [1, 63, 64, 65, 500]
LAYOUTS: dict[str, dict[str, Any]] = {
    "shared": {},
    "own": {"shared_projections": False},
    "kv_head": {"route_granularity": "kv_head"},
}
EXPERT_SETS = [
    ("full", "linear", "local"),
    ("gated_full", "local"),
    ("linear",),
    ("local",),
    ("ssm", "full", "linear"),
]


def make_layer(dtype=torch.float64, **kwargs) -> BayesianMetaAttentionLayer:
    defaults = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "window_size": 5,
        "max_position_embeddings": 512,
        "controller_hidden_size": 8,
    }
    options = defaults | LAYOUTS[kwargs.pop("layout", "shared")] | kwargs
    if not options.get("causal", True):
        options["short_conv"] = None
        options["experts"] = tuple(n for n in options.get("experts", ("full",)) if n != "ssm")
    if "ssm" in options.get("experts", ()):
        options["expert_costs"] = "flops"
    torch.manual_seed(0)
    layer = BayesianMetaAttentionLayer(MetaAttentionConfig(**options)).to(dtype).eval()
    for name, weight in layer.named_parameters():
        # new ones are the same in all channels, or forget next to nothing
        if "short_conv" in name or "rates" in name:
            torch.nn.init.normal_(weight)
    return layer


def assert_same_tokens(a, b, rows_a=slice(None), rows_b=slice(None)):
    """Outputs, posteriors, routes and KL of the chosen (row, position) slices agree."""
    for x, y in (
        (a.output, b.output),
        (a.posterior.mean, b.posterior.mean),
        (a.routes.weights, b.routes.weights),
        (a.kl, b.kl),
        (a.projected_cost, b.projected_cost),
    ):
        torch.testing.assert_close(x[rows_a], y[rows_b], rtol=1e-9, atol=1e-9)
    assert torch.equal(a.routes.expert[rows_a], b.routes.expert[rows_b])


layer_options = st.fixed_dictionaries(
    {
        "experts": st.sampled_from(EXPERT_SETS),
        "num_key_value_heads": st.sampled_from([1, 2, 4]),
        "window_size": st.sampled_from([1, 5, 64, 1000]),
        "num_sinks": st.sampled_from([0, 0, 3, 100]),
        "layout": st.sampled_from(["shared", "own", "kv_head"]),
        "use_rope": st.booleans(),
        "short_conv": st.sampled_from([None, 1, 4]),
        "controller": st.sampled_from(["bayesian", "prior_free"]),
    }
).flatmap(
    lambda options: st.sampled_from(
        [
            options,
            options | {"routing": "hard"},
            options
            | {
                "routing": "gated",
                "uncertainty_signal": "margin",
                "uncertainty_threshold": 0.9,
            },
        ]
    )
)


@given(options=layer_options, T=st.sampled_from(LENGTHS), data=st.data())
def test_the_future_changes_nothing_before_it(options, T, data):
    layer = make_layer(**options)
    t = data.draw(st.integers(0, T), label="first changed position")
    x = torch.randn(2, T, 32, dtype=torch.float64)
    changed = x.clone()
    changed[:, t:] = 10.0 * torch.randn(2, T - t, 32, dtype=torch.float64)
    past = (slice(None), slice(0, t))
    assert_same_tokens(layer(x), layer(changed), past, past)


@given(options=layer_options, T=st.sampled_from(LENGTHS), data=st.data())
def test_a_prefix_does_not_depend_on_the_length(options, T, data):
    layer = make_layer(**options)
    t = data.draw(st.integers(1, T), label="prefix")
    x = torch.randn(2, T, 32, dtype=torch.float64)
    prefix = (slice(None), slice(0, t))
    assert_same_tokens(layer(x), layer(x[:, :t]), prefix)


@given(
    options=layer_options,
    T=st.sampled_from(LENGTHS),
    left=st.sampled_from([0, 1, 70]),
    right=st.sampled_from([0, 1, 70]),
    causal=st.booleans(),
)
def test_padding_and_neighbours_in_the_batch_change_nothing(options, T, left, right, causal):
    T = min(T, 300)
    layer = make_layer(causal=causal, **options)
    x = torch.randn(1, T, 32, dtype=torch.float64)
    alone = layer(x)

    batch = torch.randn(3, left + T + right, 32, dtype=torch.float64)
    batch[1] = float("nan")
    mask = torch.ones(3, left + T + right, dtype=torch.long)
    inside = (slice(1, 2), slice(left, left + T))
    batch[inside] = x
    mask[1, :left] = 0
    mask[1, left + T :] = 0
    padded = layer(batch, mask)
    assert_same_tokens(padded, alone, inside)
    is_padding = mask == 0
    assert (padded.output[is_padding] == 0).all()
    assert (padded.kl[is_padding] == 0).all()
    assert (padded.projected_cost[is_padding] == 0).all()


@given(options=layer_options, T=st.sampled_from(LENGTHS), causal=st.booleans())
def test_legal_input_gives_no_nan(options, T, causal):
    layer = make_layer(torch.float32, causal=causal, training_weights="sample", **options).train()
    x = torch.randn(2, T, 32, requires_grad=True)
    mask = torch.ones(2, T, dtype=torch.bool)
    mask[0] = False  # nothing but padding
    out = layer(x, mask)
    (out.output.sum() + out.kl.sum() + out.projected_cost.sum()).backward()
    for tensor in (out.output, out.kl, out.posterior.mean, out.routes.weights, x.grad):
        assert tensor.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("how", ["autocast", "cast"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_half_precision_is_finite_and_close(dtype, how, scale):
    x = scale * torch.randn(2, 65, 32)
    exact = make_layer(torch.float32, experts=("full", "linear", "local", "gated_full"))(x)
    layer = make_layer(torch.float32, experts=("full", "linear", "local", "gated_full"))
    mask = torch.ones(2, 65, dtype=torch.long)
    mask[0, :3] = 0
    with torch.autocast("cpu", dtype=dtype, enabled=how == "autocast"):
        if how == "cast":
            layer, x = layer.to(dtype), x.to(dtype)
        out = layer(x)
        padded = layer(x, mask)
    assert out.output.dtype == dtype
    assert out.routes.weights.dtype == torch.float32
    assert padded.output.isfinite().all()
    tolerance = 64 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        out.output.float(), exact.output, rtol=tolerance, atol=tolerance * scale
    )
    torch.testing.assert_close(out.routes.weights, exact.routes.weights, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("how", ["autocast", "cast"])
def test_a_state_space_in_half_precision_is_close(dtype, how):
    """On inputs as a block gives them: it is not normalised, and grows with their cube."""
    x = torch.randn(2, 200, 32)
    layer = make_layer(torch.float32, experts=("ssm",))
    exact = layer(x).output
    with torch.autocast("cpu", dtype=dtype, enabled=how == "autocast"):
        if how == "cast":
            layer, x = layer.to(dtype), x.to(dtype)
        out = layer(x).output
    assert out.dtype == dtype
    error = (out.float() - exact).abs().max()
    assert error <= 8 * torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
def test_output_is_the_weighted_sum_of_single_experts(shared):
    names = ("full", "linear", "local")
    layer = make_layer(experts=names, shared_projections=shared)
    x = torch.randn(2, 40, 32, dtype=torch.float64)
    out = layer(x)
    expected = torch.zeros_like(x)
    for index, name in enumerate(names):
        single = make_layer(experts=(name,), shared_projections=shared)
        own = layer.projections[0 if shared else index]
        single.projections[0].load_state_dict(own.state_dict())
        expected += out.routes.weights[..., index, None] * single(x).output
    torch.testing.assert_close(out.output, expected, rtol=1e-6, atol=1e-6)


def test_own_projections_are_one_set_per_expert():
    assert len(make_layer(shared_projections=True).projections) == 1
    assert len(make_layer(shared_projections=False).projections) == 3


def test_evaluation_uses_the_mean_and_training_what_the_config_says():
    x = torch.randn(2, 10, 32, dtype=torch.float64)
    for training_weights, is_mean in (("mean", True), ("sample", False)):
        layer = make_layer(training_weights=training_weights)
        torch.testing.assert_close(layer(x).routes.weights, layer(x).posterior.mean)
        out = layer.train()(x)
        assert torch.equal(out.routes.weights, out.posterior.mean) == is_mean
        torch.testing.assert_close(
            out.routes.weights.sum(dim=-1), torch.ones(2, 10, dtype=torch.float64)
        )


def test_soft_routes_are_not_hard():
    out = make_layer()(torch.randn(2, 10, 32, dtype=torch.float64))
    assert not out.routes.hard.any()
    assert torch.equal(out.routes.expert, out.routes.weights.argmax(dim=-1))


def test_a_static_layer_has_no_controller_to_train():
    layer = make_layer(
        num_hidden_layers=2, layer_experts=[["local"], ["full", "local"]], experts=("full",)
    )
    assert layer.expert_names == ("local",)
    assert list(layer.controller.parameters()) == []
    out = layer(torch.randn(1, 9, 32, dtype=torch.float64))
    assert (out.routes.weights == 1).all()
    assert (out.kl.abs() < 1e-12).all()


def test_projected_cost_is_the_paper_sum():
    out = make_layer()(torch.randn(2, 10, 32, dtype=torch.float64))
    expected = out.routes.weights @ torch.tensor([1.0, 0.15, 0.30], dtype=torch.float64)
    torch.testing.assert_close(out.projected_cost, expected, rtol=1e-6, atol=1e-6)


def test_gradient_reaches_every_parameter():
    layer = make_layer(experts=known_builtin_experts(), shared_projections=False, short_conv=3)
    out = layer(torch.randn(2, 20, 32, dtype=torch.float64))
    (out.output.square().sum() + out.kl.sum()).backward()
    for name, p in layer.named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().sum() > 0, name


def known_builtin_experts() -> tuple[str, ...]:
    return ("full", "gated_full", "linear", "local", "ssm")


def test_builtin_experts_are_known():
    assert set(known_builtin_experts()) <= set(known_experts())


def test_explicit_positions_shift_routes_but_not_attention():
    """Rotary attention sees differences of positions only; the controller sees the position."""
    layer = make_layer()
    x = torch.randn(1, 12, 32, dtype=torch.float64)
    here = layer(x)
    there = layer(x, position_ids=torch.arange(100, 112)[None])
    assert not torch.allclose(here.routes.weights, there.routes.weights)
    static = make_layer(experts=("full",))
    moved = static(x, position_ids=torch.arange(100, 112)[None])
    torch.testing.assert_close(static(x).output, moved.output, rtol=1e-4, atol=1e-4)


def test_gated_expert_can_say_nothing():
    layer = make_layer(experts=("gated_full",))
    x = torch.randn(1, 6, 32, dtype=torch.float64)
    with torch.no_grad():
        layer.experts[0].gate.weight.zero_()
    plain = make_layer(experts=("full",))
    plain.load_state_dict(layer.state_dict(), strict=False)
    # sigmoid(0) = 1/2
    torch.testing.assert_close(layer(x).output, plain(x).output / 2, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("x", "kwargs", "message"),
    [
        ((2, 5), {}, r"x must be \[B, T, D\] .* D = 32, got \[2, 5\]"),
        ((2, 5, 16), {}, r"D = 32, got \[2, 5, 16\]"),
        ((2, 0, 32), {}, r"B and T above 0 .* got \[2, 0, 32\]"),
        ((1, 513, 32), {}, r"max_position_embeddings = 512, got 513 tokens"),
        ((2, 5, 32), {"attention_mask": (2, 4)}, r"\[B, T\] = \[2, 5\].* got \[2, 4\]"),
        ((2, 5, 32), {"attention_mask": (2, 1, 5)}, r"\[2, 5\].* got \[2, 1, 5\]"),
        ((2, 5, 32), {"position_ids": (2, 4)}, r"\[2, 5\] to match x \[2, 5, 32\], got \[2, 4\]"),
    ],
)
def test_wrong_shapes_get_one_clear_sentence(x, kwargs, message):
    layer = make_layer(torch.float32)
    tensors = {name: torch.ones(shape, dtype=torch.long) for name, shape in kwargs.items()}
    with pytest.raises(ShapeError, match=message) as error:
        layer(torch.zeros(x), **tensors)
    assert "\n" not in str(error.value)


def test_additive_float_mask_is_refused():
    layer = make_layer(torch.float32)
    with pytest.raises(ShapeError, match="boolean or whole numbers"):
        layer(torch.zeros(2, 5, 32), torch.zeros(2, 5))


def test_triton_asked_for_by_name_is_not_replaced():
    layer = make_layer(torch.float64, impl="triton")
    with pytest.raises(BackendUnavailableError, match="impl='triton' computes in"):
        layer(torch.zeros(1, 4, 32, dtype=torch.float64))


def test_auto_and_reference_agree():
    x = torch.randn(1, 20, 32, dtype=torch.float64)
    auto, reference = make_layer(impl="auto")(x), make_layer(impl="reference")(x)
    assert torch.equal(auto.output, reference.output)


def test_unknown_expert_lists_the_known():
    with pytest.raises(ConfigError, match=r"unknown expert 'fulll'; known are .*full.*linear"):
        make_layer(experts=("fulll",), expert_costs=(1.0,))


def test_state_dict_holds_weights_only():
    """Costs and prior follow from the config: changing them must not need a new checkpoint."""
    layer = make_layer()
    other = make_layer(expert_costs=(1.0, 0.5, 0.5), prior_strength=2.0)
    other.load_state_dict(layer.state_dict())
    assert other.controller.prior_concentration.tolist() == pytest.approx([0.01, 1.01, 1.01])


@pytest.mark.parametrize("routing", ["soft", "hard"])
def test_a_step_stands_for_the_mask_and_the_positions(routing):
    layer = make_layer(routing=routing, num_hidden_layers=1)
    x = torch.randn(2, 12, 32, dtype=torch.float64)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, :4] = False
    expected = layer(x, mask)
    cache = MetaAttentionCache(layer.config)
    with torch.no_grad():
        prompt, _ = cache.prepare(mask[:, :9], 2, 9, x.device)
        layer(x[:, :9], prompt, past_key_values=cache)
        for t in range(9, 12):
            nothing, step = cache.prepare(None, 2, 1, x.device)
            assert nothing is None
            out = layer(x[:, t, None], past_key_values=cache, step=step)
            torch.testing.assert_close(out.output, expected.output[:, t, None])
            torch.testing.assert_close(out.routes.weights, expected.routes.weights[:, t, None])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_layer_on_the_gpu_agrees_with_the_cpu(dtype, causal):
    layer = make_layer(torch.float32, experts=known_builtin_experts(), causal=causal)
    x = torch.randn(2, 500, 32)
    mask = torch.ones(2, 500, dtype=torch.bool)
    mask[0, :9] = False
    expected = layer(x, mask)
    out = layer.to("cuda", dtype)(x.to("cuda", dtype), mask.cuda())
    tolerance = 64 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        out.output.float().cpu(), expected.output, rtol=tolerance, atol=tolerance
    )
    out.output.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())
