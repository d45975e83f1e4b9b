"""What a configuration must be: each refusal is one sentence that says what to do."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

from meta_attention.config.choices import (
    SIGNALS_OF_WEIGHTS,
    ControllerName,
    DepthRouting,
    Impl,
    ResidualName,
    RouteGradient,
    RouteGranularity,
    RoutingName,
    Signal,
    TrainingWeights,
)
from meta_attention.errors import ConfigError

if TYPE_CHECKING:
    from meta_attention.config.fields import MetaAttentionConfig

MAX_RECURRENCE = 8


def check_sizes(config: "MetaAttentionConfig") -> None:
    for name in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "window_size",
        "controller_hidden_size",
    ):
        _require_count(name, getattr(config, name))
    for name in (
        "intermediate_size",
        "num_key_value_heads",
        "head_dim",
        "cost_length",
        "short_conv",
        "recurrence",
    ):
        if getattr(config, name) is not None:
            _require_count(name, getattr(config, name))
    _require_count("num_sinks", config.num_sinks, least=0)
    if (config.recurrence or 0) > MAX_RECURRENCE:
        raise ConfigError(
            f"recurrence must be at most {MAX_RECURRENCE}, got {config.recurrence}: it is the "
            "number of tokens of the longest run that is looked for"
        )
    heads = config.num_attention_heads
    if config.head_dim is None and config.hidden_size % heads:
        raise ConfigError(
            f"hidden_size must be a multiple of num_attention_heads, got {config.hidden_size} "
            f"and {heads}; change one or set head_dim"
        )
    if config.num_key_value_heads is not None and heads % config.num_key_value_heads:
        raise ConfigError(
            f"num_attention_heads must be a multiple of num_key_value_heads, got {heads} and "
            f"{config.num_key_value_heads}: each key-value head serves a whole group of heads"
        )
    head_dim = config.head_dim or config.hidden_size // heads
    if config.use_rope and head_dim % 2:
        raise ConfigError(
            f"head_dim must be even for rotary positions, got {head_dim}; set use_rope=False "
            "or change head_dim"
        )


def check_experts(config: "MetaAttentionConfig") -> None:
    config.experts = _names("experts", config.experts)
    if config.layer_experts is not None:
        if isinstance(config.layer_experts, str) or not isinstance(config.layer_experts, Sequence):
            raise ConfigError(
                "layer_experts must be a list of expert names for each layer, "
                f"got {config.layer_experts!r}"
            )
        config.layer_experts = tuple(
            _names(f"layer_experts[{i}]", names) for i, names in enumerate(config.layer_experts)
        )
        if len(config.layer_experts) != config.num_hidden_layers:
            raise ConfigError(
                f"layer_experts must name the experts of all {config.num_hidden_layers} layers, "
                f"got {len(config.layer_experts)} entries"
            )
    known = sorted({name for names in config.layer_experts or [config.experts] for name in names})
    if config.start_expert is not None and config.start_expert not in known:
        raise ConfigError(
            f"start_expert must be an expert of a layer, one of {', '.join(known)}, got "
            f"{config.start_expert!r}"
        )
    if isinstance(config.expert_costs, str):
        if config.expert_costs not in ("paper", "flops"):
            raise ConfigError(
                "expert_costs must be 'paper', 'flops' or one number per expert, "
                f"got {config.expert_costs!r}"
            )
        return
    if not isinstance(config.expert_costs, Sequence):
        raise ConfigError(
            "expert_costs must be 'paper', 'flops' or one number per expert, "
            f"got {config.expert_costs!r}"
        )
    for index, cost in enumerate(config.expert_costs):
        _require_number(f"expert_costs[{index}]", cost)
    config.expert_costs = tuple(float(cost) for cost in config.expert_costs)
    check_costs(config.expert_costs)
    if len(config.expert_costs) != len(config.experts):
        raise ConfigError(
            f"expert_costs must have one number per expert, got {len(config.expert_costs)} "
            f"costs for {len(config.experts)} experts {list(config.experts)}"
        )


def check_routing(config: "MetaAttentionConfig") -> None:
    _require_choice("controller", config.controller, ControllerName)
    _require_choice("training_weights", config.training_weights, TrainingWeights)
    _require_choice("route_gradient", config.route_gradient, RouteGradient)
    _require_choice("route_granularity", config.route_granularity, RouteGranularity)
    _require_choice("routing", config.routing, RoutingName)
    _require_choice("uncertainty_signal", config.uncertainty_signal, Signal)
    _require_choice("impl", config.impl, Impl)
    if config.routing == "soft" and config.training_weights == "one_hot":
        raise ConfigError(
            "training_weights='one_hot' draws a single expert, but routing='soft' mixes them; "
            "use 'mean' or 'sample', or routing='hard' or 'gated'"
        )
    _check_gate(config)
    _check_values(config)
    for name in ("prior_floor", "kl_weight", "cost_weight"):
        _require_number(name, getattr(config, name))
    for name in ("initializer_range", "rms_norm_eps"):
        _require_number(name, getattr(config, name))
    for name in ("causal", "use_rope", "shared_projections"):
        if not isinstance(getattr(config, name), bool):
            raise ConfigError(f"{name} must be True or False, got {getattr(config, name)!r}")
    if config.short_conv is not None and not config.causal:
        raise ConfigError(
            "short_conv reads backwards only and needs causal=True; leave it out of encoders"
        )
    if config.route_granularity == "kv_head" and not config.shared_projections:
        raise ConfigError(
            "route_granularity='kv_head' needs shared_projections=True: experts are merged "
            "head by head, before one output projection; share them or use 'token'"
        )
    _check_prior_strengths(config)
    for name in ("kl_weight", "cost_weight", "initializer_range", "rms_norm_eps"):
        if not 0.0 <= getattr(config, name) < math.inf:
            raise ConfigError(f"{name} must be finite and >= 0, got {getattr(config, name)}")


def check_residual(config: "MetaAttentionConfig") -> None:
    _require_choice("residual", config.residual, ResidualName)
    _require_count("residual_blocks", config.residual_blocks)
    halves = 2 * config.num_hidden_layers
    if config.residual == "block_attention" and config.residual_blocks > halves:
        raise ConfigError(
            f"residual_blocks must be at most {halves}, two for each of "
            f"{config.num_hidden_layers} layers, got {config.residual_blocks}; lower it or use "
            "residual='attention', which reads them all"
        )


def check_depth(config: "MetaAttentionConfig") -> None:
    _require_choice("depth_routing", config.depth_routing, DepthRouting)
    _require_number("depth_weight", config.depth_weight)
    if not 0.0 <= config.depth_weight < math.inf:
        raise ConfigError(f"depth_weight must be finite and >= 0, got {config.depth_weight}")
    if config.depth_capacity is None:
        if config.depth_layers is not None:
            raise ConfigError(
                "depth_layers are blocks that tokens may pass by and need a depth_capacity, "
                "the share of tokens that enter; set it or leave them out"
            )
        return
    _require_number("depth_capacity", config.depth_capacity)
    if not 0.0 < config.depth_capacity <= 1.0:
        raise ConfigError(
            f"depth_capacity must be in (0, 1], got {config.depth_capacity}: it is the share of "
            "tokens that enter a block"
        )
    if not config.causal and config.depth_routing == "top_k":
        raise ConfigError(
            "depth_routing='top_k' predicts a choice among later tokens and needs causal=True; "
            "use 'threshold' in encoders"
        )
    _check_depth_layers(config)


def _check_depth_layers(config: "MetaAttentionConfig") -> None:
    number = config.num_hidden_layers
    if config.depth_layers is None:
        if number < 2:
            raise ConfigError(
                "depth_capacity is for every other block, and a model of one has no second; "
                "name it by depth_layers=[0] or add blocks"
            )
        return
    layers = config.depth_layers
    is_list = isinstance(layers, Sequence) and not isinstance(layers, str)
    for index in layers if is_list else ():
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < number:
            raise ConfigError(
                f"depth_layers must be indices of the {number} blocks, 0 to {number - 1}, got "
                f"{index!r}"
            )
    if not is_list or not layers or len(set(layers)) != len(layers):
        raise ConfigError(
            f"depth_layers must be a list of one or more indices of blocks, each of them once, "
            f"got {layers!r}"
        )
    config.depth_layers = tuple(sorted(layers))


def _check_prior_strengths(config: "MetaAttentionConfig") -> None:
    strengths = config.prior_strength
    if isinstance(strengths, Sequence) and not isinstance(strengths, str):
        if len(strengths) != config.num_hidden_layers:
            raise ConfigError(
                f"prior_strength must be one number, or one for each of "
                f"{config.num_hidden_layers} layers, got {len(strengths)}"
            )
        for index, strength in enumerate(strengths):
            _require_number(f"prior_strength[{index}]", strength)
        config.prior_strength = tuple(float(strength) for strength in strengths)
    else:
        _require_number("prior_strength", strengths)
    for layer_idx in range(config.num_hidden_layers):
        check_prior(config.prior_strength_of(layer_idx), config.prior_floor)


def _check_values(config: "MetaAttentionConfig") -> None:
    if config.value_scale is not None:
        _require_number("value_scale", config.value_scale)
        if not 0.0 < config.value_scale < math.inf:
            raise ConfigError(
                f"value_scale must be > 0 and finite, or None, got {config.value_scale}"
            )
        if config.controller != "value":
            raise ConfigError(
                f"value_scale is for controller='value', got {config.value_scale} with "
                f"controller={config.controller!r}; leave it out"
            )
    _require_number("price", config.price)
    if not math.isfinite(config.price):
        raise ConfigError(f"price must be finite, got {config.price}")
    _require_number("explored_share", config.explored_share)
    if not 0.0 < config.explored_share <= 1.0:
        raise ConfigError(
            f"explored_share must be above 0 and at most 1, got {config.explored_share}"
        )
    draw = config.training_weights
    if config.controller != "value":
        if config.price:
            raise ConfigError(
                f"price is for controller='value', got {config.price} with "
                f"controller={config.controller!r}; leave it out"
            )
        if draw == "explore":
            raise ConfigError(
                "training_weights='explore' is for controller='value', got "
                f"controller={config.controller!r}"
            )
        return
    if config.routing != "hard" or config.route_gradient != "all":
        raise ConfigError(
            "controller='value' must have routing='hard' and route_gradient='all', which tells "
            f"what other experts would have done, got {config.routing!r} and "
            f"{config.route_gradient!r}"
        )
    if draw not in ("mean", "explore"):
        raise ConfigError(
            "controller='value' must have training_weights='explore', or 'mean', which teaches "
            f"it nothing, got {draw!r}"
        )
    if draw == "explore" and (config.kl_weight != 1.0 or config.cost_weight != 0.0):
        raise ConfigError(
            "training_weights='explore' must have kl_weight=1 and cost_weight=0, or values "
            f"would not be nats, got {config.kl_weight} and {config.cost_weight}"
        )


def _check_gate(config: "MetaAttentionConfig") -> None:
    threshold = config.uncertainty_threshold
    if config.routing != "gated":
        if threshold is not None:
            raise ConfigError(
                f"uncertainty_threshold is for routing='gated', got {threshold} with "
                f"routing={config.routing!r}; leave it out"
            )
        return
    if threshold is not None:
        _require_number("uncertainty_threshold", threshold)
    if threshold is None or not math.isfinite(threshold):
        raise ConfigError(
            f"routing='gated' must have a finite uncertainty_threshold, got {threshold}"
        )
    signal = config.uncertainty_signal
    if config.controller == "prior_free" and signal not in SIGNALS_OF_WEIGHTS:
        raise ConfigError(
            f"a prior_free controller must be gated by one of {', '.join(SIGNALS_OF_WEIGHTS)}"
            f", got {signal!r}: without a posterior there is no other uncertainty"
        )


def check_costs(costs: Sequence[float]) -> None:
    """Raise unless every cost is in (0, 1]."""
    for index, cost in enumerate(costs):
        if not 0.0 < cost <= 1.0:
            raise ConfigError(
                f"expert_costs[{index}] must be in (0, 1], got {cost}: costs are relative to full "
                "attention"
            )


def check_prior(strength: float, floor: float) -> None:
    """Raise unless strength and floor give a proper Dirichlet prior."""
    if not 0.0 <= strength < math.inf:
        raise ConfigError(f"prior_strength must be finite and >= 0, got {strength}")
    if not 0.0 < floor < math.inf:
        raise ConfigError(
            f"prior_floor must be finite and > 0, got {floor}: an expert of cost 1.0 would get "
            "prior concentration 0, and the KL term would be infinite"
        )


def _require_count(name: str, value: object, *, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be a whole number >= {least}, got {value!r}")


def _require_number(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigError(f"{name} must be a number, got {value!r}")


def _require_choice(name: str, value: object, choices: object) -> None:
    known = get_args(choices)
    if value not in known:
        raise ConfigError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def _names(field: str, names: object) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ConfigError(f"{field} must be a list of expert names, got {names!r}")
    if not names:
        raise ConfigError(f"{field} must name at least one expert, got none")
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{field} must be a list of expert names, got {names!r}")
    if len(set(names)) != len(names):
        raise ConfigError(f"{field} must name each expert once, got {list(names)}")
    return tuple(str(name) for name in names)
