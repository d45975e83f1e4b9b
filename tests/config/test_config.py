"""The configuration: every bad value gets one clear sentence, every good one a round trip."""

import json
import math

import pytest

from meta_attention import MetaAttentionConfig
from meta_attention.errors import ConfigError

GATED = {"routing": "gated", "uncertainty_threshold": 0.1}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"hidden_size": 100, "num_attention_heads": 3}, "hidden_size must be a multiple .* 100"),
        ({"num_attention_heads": 12, "num_key_value_heads": 5}, "got 12 and 5"),
        ({"window_size": 0}, "window_size must be a whole number >= 1, got 0"),
        ({"window_size": 2.5}, "window_size must be a whole number >= 1, got 2.5"),
        ({"num_sinks": -1}, "num_sinks must be a whole number >= 0, got -1"),
        ({"num_sinks": True}, "num_sinks must be a whole number >= 0, got True"),
        ({"hidden_size": -1}, "hidden_size must be a whole number"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": 7}, "head_dim must be even for rotary positions, got 7"),
        ({"experts": ()}, "experts must name at least one expert, got none"),
        ({"experts": "full"}, "experts must be a list of expert names, got 'full'"),
        ({"experts": ("full", "full")}, "name each expert once"),
        ({"num_hidden_layers": 2, "layer_experts": [["full"]]}, "all 2 layers, got 1 entries"),
        ({"num_hidden_layers": 1, "layer_experts": [[]]}, r"layer_experts\[0\] must name at"),
        ({"expert_costs": (1.0, 0.5)}, "got 2 costs for 3 experts"),
        ({"expert_costs": (1.0, 0.5, 0.0)}, r"expert_costs\[2\] must be in \(0, 1\], got 0.0"),
        ({"expert_costs": (1.0, 1.5, 0.1)}, r"expert_costs\[1\] must be in \(0, 1\], got 1.5"),
        ({"expert_costs": ("a", "b", "c")}, r"expert_costs\[0\] must be a number, got 'a'"),
        ({"expert_costs": 5}, "'paper', 'flops' or one number per expert, got 5"),
        ({"experts": [["full"]]}, "experts must be a list of expert names"),
        ({"layer_experts": 5}, "layer_experts must be a list of expert names for each layer"),
        ({"start_expert": "fulll"}, "an expert of a layer, one of full, .* got 'fulll'"),
        ({"kl_weight": None}, "kl_weight must be a number, got None"),
        ({"prior_strength": "x"}, "prior_strength must be a number, got 'x'"),
        ({"short_conv": 0}, "short_conv must be a whole number >= 1, got 0"),
        ({"short_conv": 3, "causal": False}, "short_conv reads backwards only"),
        ({"causal": "no"}, "causal must be True or False, got 'no'"),
        (
            {"routing": "gated", "uncertainty_threshold": "a"},
            "uncertainty_threshold must be a number, got 'a'",
        ),
        ({"expert_costs": "guess"}, "'paper', 'flops' or one number per expert, got 'guess'"),
        ({"prior_floor": 0.0}, "prior_floor must be finite and > 0, got 0.0"),
        ({"prior_strength": -0.1}, "prior_strength must be finite and >= 0, got -0.1"),
        ({"kl_weight": -1.0}, "kl_weight must be finite and >= 0, got -1.0"),
        ({"kl_weight": float("nan")}, "kl_weight must be finite and >= 0, got nan"),
        ({"cost_weight": float("inf")}, "cost_weight must be finite and >= 0, got inf"),
        ({"window": 4}, "unknown config field 'window'"),
        ({"expert_cost": "flops"}, "unknown .* 'expert_cost'; did you mean 'expert_costs'"),
        ({"controller": "softmax"}, "one of bayesian, prior_free, value, got 'softmax'"),
        ({"routing": "topk"}, "routing must be one of soft, hard, gated, got 'topk'"),
        ({"uncertainty_signal": "doubt"}, "uncertainty_signal must be one of entropy"),
        ({"routing": "gated"}, "must have a finite uncertainty_threshold, got None"),
        ({"uncertainty_threshold": 0.1}, "is for routing='gated', got 0.1 with routing='soft'"),
        (
            {"routing": "gated", "uncertainty_threshold": 0.1, "controller": "prior_free"},
            "must be gated by one of mean_entropy, margin, got 'mutual_information'",
        ),
        ({"price": 0.1}, "price is for controller='value'"),
        ({"controller": "value"}, "must have routing='hard' and route_gradient='all'"),
        (
            {"controller": "value", "routing": "hard", "route_gradient": "chosen"},
            "must have routing='hard' and route_gradient='all'",
        ),
        (
            {"controller": "value", "routing": "hard", "training_weights": "one_hot"},
            "must have training_weights='explore', or 'mean'",
        ),
        (
            {"controller": "value", "routing": "hard", "price": math.inf},
            "price must be finite",
        ),
        (
            {
                "controller": "value",
                "routing": "hard",
                "training_weights": "explore",
                "kl_weight": 0.3,
            },
            "must have kl_weight=1 and cost_weight=0",
        ),
        ({"routing": "hard", "training_weights": "explore"}, "'explore' is for controller='value'"),
        ({"training_weights": "max"}, "one of mean, sample, one_hot, explore, got 'max'"),
        (
            {"training_weights": "one_hot", "routing": "soft"},
            "'one_hot' draws a single expert, but routing='soft' mixes them; use 'mean' or",
        ),
        ({"route_gradient": "none"}, "route_gradient must be one of all, chosen, got 'none'"),
        ({"route_granularity": "head"}, "must be one of token, kv_head, got 'head'"),
        (
            {"route_granularity": "kv_head", "shared_projections": False},
            "'kv_head' needs shared_projections=True: .* share them or use 'token'",
        ),
        ({"depth_capacity": 0.0}, r"depth_capacity must be in \(0, 1\], got 0.0"),
        ({"depth_capacity": 1.5}, r"depth_capacity must be in \(0, 1\], got 1.5"),
        ({"depth_capacity": float("nan")}, r"depth_capacity must be in \(0, 1\], got nan"),
        ({"depth_capacity": "half"}, "depth_capacity must be a number, got 'half'"),
        ({"depth_capacity": 0.5, "depth_layers": (12,)}, "of the 12 blocks, 0 to 11, got 12"),
        ({"depth_capacity": 0.5, "depth_layers": (True,)}, "0 to 11, got True"),
        ({"depth_capacity": 0.5, "depth_layers": ([1],)}, r"0 to 11, got \[1\]"),
        ({"depth_capacity": 0.5, "depth_layers": ()}, "a list of one or more indices"),
        ({"depth_capacity": 0.5, "depth_layers": (1, 1)}, "each of them once"),
        ({"depth_capacity": 0.5, "depth_layers": "all"}, "a list of one or more indices"),
        ({"depth_layers": (1,)}, "need a depth_capacity"),
        ({"depth_capacity": 0.5, "num_hidden_layers": 1}, r"name it by depth_layers=\[0\]"),
        ({"depth_capacity": 0.5, "causal": False}, "'top_k' .* needs causal=True; use 'threshold'"),
        ({"depth_routing": "random"}, "depth_routing must be one of top_k, threshold"),
        ({"depth_weight": -1.0}, "depth_weight must be finite and >= 0, got -1.0"),
        ({"impl": "cuda"}, "one of auto, reference, triton, got 'cuda'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    ],
)
def test_a_bad_value_gets_one_clear_sentence(kwargs, message):
    with pytest.raises(ConfigError, match=message) as error:
        MetaAttentionConfig(**kwargs)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("routing", [{"routing": "hard"}, GATED], ids=["hard", "gated"])
@pytest.mark.parametrize("gradient", ["all", "chosen"])
def test_hard_and_gated_routes_may_be_drawn(routing, gradient):
    config = MetaAttentionConfig(training_weights="one_hot", route_gradient=gradient, **routing)
    assert (config.training_weights, config.route_gradient) == ("one_hot", gradient)


def test_layer_beyond_the_list_is_refused():
    config = MetaAttentionConfig(num_hidden_layers=1, layer_experts=[["full"]])
    with pytest.raises(ConfigError, match="below the 1 entries of layer_experts, got 1"):
        config.experts_of(1)


def test_config_survives_saving_and_loading(tmp_path):
    config = MetaAttentionConfig(
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        experts=("full", "local"),
        layer_experts=[["local"], ["full", "local"]],
        expert_costs=(1.0, 0.2),
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4},
        routing="hard",
        training_weights="one_hot",
        route_gradient="chosen",
        route_granularity="kv_head",
        depth_capacity=0.25,
        depth_layers=[0],
        depth_routing="threshold",
    )
    config.save_pretrained(tmp_path)
    loaded = MetaAttentionConfig.from_pretrained(tmp_path)
    for name in ("experts", "layer_experts", "expert_costs", "rope_parameters", "head_dim"):
        assert getattr(loaded, name) == getattr(config, name), name
    assert (loaded.training_weights, loaded.route_gradient) == ("one_hot", "chosen")
    assert loaded.route_granularity == "kv_head"
    assert loaded.experts_of(0) == ("local",)
    assert (loaded.depth_capacity, loaded.depth_routing) == (0.25, "threshold")
    assert [loaded.may_skip(layer) for layer in range(2)] == [True, False]


def test_a_saved_config_may_hold_fields_of_another_version(tmp_path):
    config = MetaAttentionConfig()
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(saved | {"from_the_future": 1}))
    assert MetaAttentionConfig.from_pretrained(tmp_path).hidden_size == config.hidden_size


def test_sizes_left_out_follow_from_the_width():
    config = MetaAttentionConfig(hidden_size=768, num_attention_heads=12)
    assert config.head_dim == 64
    assert config.num_key_value_heads == 12
    assert config.intermediate_size == 2048


def test_tokens_may_pass_by_every_other_block_unless_told_which():
    config = MetaAttentionConfig(num_hidden_layers=5, depth_capacity=0.5)
    assert [layer for layer in range(5) if config.may_skip(layer)] == [1, 3]
    config = MetaAttentionConfig(num_hidden_layers=3, depth_capacity=0.5, depth_layers=[2, 0])
    assert [layer for layer in range(3) if config.may_skip(layer)] == [0, 2]
    assert not any(MetaAttentionConfig().may_skip(layer) for layer in range(12))


def test_head_dim_frees_the_width_from_the_heads():
    config = MetaAttentionConfig(hidden_size=100, num_attention_heads=3, head_dim=32)
    assert config.head_dim == 32


def test_layers_may_differ_in_the_strength_of_their_prior():
    config = MetaAttentionConfig(num_hidden_layers=2, prior_strength=[0.5, 2])
    assert [config.prior_strength_of(layer) for layer in range(2)] == [0.5, 2.0]
    assert MetaAttentionConfig(num_hidden_layers=2, prior_strength=3.0).prior_strength_of(1) == 3.0
    with pytest.raises(ConfigError, match="one for each of 2 layers, got 3"):
        MetaAttentionConfig(num_hidden_layers=2, prior_strength=[1.0, 1.0, 1.0])
    with pytest.raises(ConfigError, match="finite and >= 0, got -1"):
        MetaAttentionConfig(num_hidden_layers=2, prior_strength=[1.0, -1.0])
    with pytest.raises(ConfigError, match=r"prior_strength\[1\] must be a number"):
        MetaAttentionConfig(num_hidden_layers=2, prior_strength=[1.0, "2"])
