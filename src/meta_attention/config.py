"""One configuration for layer, block and model. Plain data: no tensors, no I/O of its own."""

import difflib
import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Literal, get_args

from transformers import PreTrainedConfig

from meta_attention.errors import ConfigError

Impl = Literal["auto", "reference", "triton"]
ControllerName = Literal["bayesian", "prior_free", "value"]
TrainingWeights = Literal["mean", "sample", "one_hot", "explore"]
RouteGradient = Literal["all", "chosen"]
RouteGranularity = Literal["token", "kv_head"]
DepthRouting = Literal["top_k", "threshold"]
RoutingName = Literal["soft", "hard", "gated"]
Signal = Literal["entropy", "mean_entropy", "margin", "mutual_information", "vacuity"]
ResidualName = Literal["sum", "attention", "block_attention"]

# what a controller without a prior can tell
_SIGNALS_OF_WEIGHTS = ("mean_entropy", "margin")

# these change their frequencies with the sequence length, so a prefix would not be stable
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")

_MAX_RECURRENCE = 8

# what Transformers itself accepts beside the fields of a config
_TRANSFORMERS_ARGUMENTS = {
    "attn_implementation",
    "experts_implementation",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "partial_rotary_factor",
    "rope_scaling",
    "rope_theta",
    "torch_dtype",
}


class MetaAttentionConfig(PreTrainedConfig):
    """How a routed model is built and how its tokens choose among attention experts.

    The fields with the usual Transformers names mean what they mean there. The rest:

    Args:
        experts: Names of the experts of every layer, in the order of the routing weights.
            ``"local:512"`` is local attention with a window of its own.
        layer_experts: Experts of each layer where layers differ; overrides ``experts``. A layer
            with one expert is static and has no controller, so a local/global hybrid is
            ``layer_experts=[["local"], ["local"], ["full"]]``.
        expert_costs: Cost of each expert relative to full attention, in (0, 1]: ``"paper"`` (full
            1, linear 0.15, local 0.30), ``"flops"`` (counted at ``cost_length``), or one number
            per name in ``experts``.
        cost_length: Sequence length at which ``"flops"`` counts; default
            ``max_position_embeddings``.
        window_size: Local attention sees this many positions before a token, and as many after
            it when ``causal`` is off.
        num_sinks: Local attention also sees this many first tokens of a row, or of a document
            packed into it (attention sinks), padding not counted. A pretrained model needs a few:
            its heads look there when there is nothing to look at. A cache then keeps all keys.
        shared_projections: One query, key, value and output projection for all experts of a
            layer. ``False`` is the paper's layout: each expert has its own.
        causal: Language models read backwards only; ``False`` is for encoders.
        use_rope: Rotate queries and keys by position in the softmax experts.
        short_conv: Taps of a causal convolution over queries, keys and values, each channel on its
            own: with 3, a token's heads also hold something of the two tokens before it, so that
            one layer can find what followed a token. None: without. Shared by all experts that
            share projections; for ``"ssm"`` it is the convolution of Mamba-2.
        depth_capacity: Mixture of Depths: the share of tokens that enter a block, in (0, 1]; the
            others pass it by at no cost. None: every token enters every block. With any experts
            and any ``residual``.
        depth_layers: Indices of the blocks that tokens may pass by; default: every other one,
            beginning with the second.
        depth_routing: Who enters. ``"top_k"``: in training the share of a row with the highest
            scores, which a predictor learns to tell from the token alone; evaluation asks the
            predictor. ``"threshold"``: tokens of a score above 0, in training and evaluation; the
            share is drawn to the capacity by the loss.
        depth_weight: Weight in the loss of what teaches the predictor or draws the share.
        controller: ``"bayesian"``, ``"prior_free"``, or ``"value"``: it learns what each expert is
            worth to a token, in nats, and takes the one that is worth most at the going ``price``.
            Needs hard routes; see ``meta_attention.training.values``.
        controller_hidden_size: Width of the controller's hidden layer.
        recurrence: Controllers also see when a token was last seen, alone and with the tokens
            before it: in runs of up to this many, 1 to 8. From a hidden state they cannot tell
            whether there is anything to find far back. None: without. Needs ``input_ids``.
        start_expert: Expert that a new model believes in for every token, in the layers that have
            it; None: whatever prior and random weights make of it. ``"full"`` lets a model learn
            what attention can do before it learns to do without. Initialisation only: nothing
            changes in a model that is loaded.
        prior_strength: Scale of the Dirichlet prior, the paper's beta_0: one number, or one for
            each layer.
        price: Nats that full attention has to be worth to a token, of ``controller="value"``; a
            cheaper expert costs its share of it. May be another in use than in training: a lower
            one buys more attention.
        value_scale: Nats of a token, of ``controller="value"``, each of its routes having its part:
            values well above that are told apart in relation to their size, others by their
            difference. None: all by their difference.
        prior_floor: Smallest prior concentration; the paper's epsilon.
        kl_weight: Weight of the KL term in the loss; the paper's beta_elbo.
        cost_weight: Weight of the projected cost in the loss; how a prior-free controller is told
            to be cheap.
        training_weights: Routing weights while training: the posterior ``"mean"``, a
            reparameterised ``"sample"`` of it (a hard route then takes the largest of a sample:
            Thompson sampling), or ``"one_hot"``: a hard route takes one expert drawn with the
            probabilities of the mean. Evaluation always uses the mean. ``"explore"`` is how
            ``controller="value"`` learns: half of the routes try any expert.
        route_gradient: How hard routes teach the controller: ``"all"``: every expert runs in
            training, and the gradient is that of the belief in all of them (straight-through).
            ``"chosen"``: only the chosen expert runs, so that training saves time too, and its
            weight carries the gradient of the belief in it. See ``choose_routes``.
        route_granularity: What has a route of its own: a ``"token"``, or every key-value head of a
            token, with the query heads it serves (``"kv_head"``). Posterior and routes then have
            an axis for these, ``[B, T, G, E]``; the KL and the projected cost of a token are means
            over them, so that their weights mean the same either way. Needs
            ``shared_projections``.
        routing: ``"soft"``: every token takes every expert, by weight. ``"hard"``: one expert, that
            of largest weight. ``"gated"``: hard where the uncertainty is below the threshold, soft
            elsewhere.
        uncertainty_signal: What gates: ``"mutual_information"``, ``"mean_entropy"``, ``"margin"``
            (as 1 - margin), ``"vacuity"`` or ``"entropy"`` (the paper's U).
        uncertainty_threshold: The paper's eta; needed by ``"gated"`` and by nothing else. Raising
            it makes tokens hard.
        impl: Implementation of the tensor functions. ``"auto"`` takes the fastest there is; one
            asked for by name runs or raises.
        residual: What the halves of the blocks read. ``"sum"``: the sum of the embedding and of
            all outputs before, as in any transformer. ``"attention"``: a softmax over them, by a
            learned query for each half (Attention Residuals). ``"block_attention"``: a softmax
            over the sums of groups of outputs, which costs less. Both start as the sum. A token
            that passes a block by (``depth_capacity``) adds nothing there.
        residual_blocks: Groups of ``"block_attention"``: the halves of all blocks in order, in so
            many groups of equal size, or one more or less.
    """

    model_type = "meta_attention"
    keys_to_ignore_at_inference = ["past_key_values"]

    vocab_size: int = 32000
    hidden_size: int = 768
    # None until __post_init__ fills these in from the others
    intermediate_size: int = None  # type: ignore[assignment]
    num_key_value_heads: int = None  # type: ignore[assignment]
    head_dim: int = None  # type: ignore[assignment]
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    hidden_act: str = "silu"
    max_position_embeddings: int = 8192
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    rope_parameters: dict[str, Any] | None = None
    use_rope: bool = True
    short_conv: int | None = None
    depth_capacity: float | None = None
    depth_layers: Sequence[int] | None = None
    depth_routing: DepthRouting = "top_k"
    depth_weight: float = 1.0

    experts: Sequence[str] = ("full", "linear", "local")
    layer_experts: Sequence[Sequence[str]] | None = None
    expert_costs: str | Sequence[float] = "paper"
    cost_length: int | None = None
    window_size: int = 256
    num_sinks: int = 0
    shared_projections: bool = True
    causal: bool = True
    controller: ControllerName = "bayesian"
    controller_hidden_size: int = 64
    recurrence: int | None = None
    start_expert: str | None = None
    prior_strength: float | Sequence[float] = 1.0
    prior_floor: float = 0.01
    price: float = 0.0
    value_scale: float | None = None
    kl_weight: float = 1.0
    cost_weight: float = 0.0
    training_weights: TrainingWeights = "mean"
    route_gradient: RouteGradient = "all"
    route_granularity: RouteGranularity = "token"
    routing: RoutingName = "soft"
    uncertainty_signal: Signal = "mutual_information"
    uncertainty_threshold: float | None = None
    impl: Impl = "auto"
    residual: ResidualName = "sum"
    residual_blocks: int = 8

    def __post_init__(self, **kwargs: Any) -> None:
        self._check_names(kwargs)
        self._check_sizes()
        self._check_experts()
        self._check_routing()
        self._check_residual()
        self._check_depth()
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.intermediate_size is None:
            # SwiGLU has three matrices: 8/3 D gives it the parameters of a 4 D feed-forward
            self.intermediate_size = -(-8 * self.hidden_size // (3 * 64)) * 64
        super().__post_init__(**kwargs)
        rope_type = (self.rope_parameters or {}).get("rope_type", "default")
        if rope_type in _LENGTH_DEPENDENT_ROPE:
            raise ConfigError(
                f"rope_type must not depend on the sequence length, got {rope_type!r}: a prefix "
                "would change when text is appended; use 'default', 'linear', 'llama3' or 'yarn'"
            )

    def experts_of(self, layer_idx: int) -> tuple[str, ...]:
        """Names of the experts of one layer."""
        if self.layer_experts is None:
            return tuple(self.experts)
        if not 0 <= layer_idx < len(self.layer_experts):
            raise ConfigError(
                f"layer_idx must be below the {len(self.layer_experts)} entries of layer_experts, "
                f"got {layer_idx}"
            )
        return tuple(self.layer_experts[layer_idx])

    def prior_strength_of(self, layer_idx: int) -> float:
        """Scale of the prior of one layer."""
        strengths = self.prior_strength
        return strengths[layer_idx] if isinstance(strengths, Sequence) else strengths

    def may_skip(self, layer_idx: int) -> bool:
        """Whether tokens may pass by this block: Mixture of Depths."""
        if self.depth_capacity is None:
            return False
        return layer_idx % 2 == 1 if self.depth_layers is None else layer_idx in self.depth_layers

    def _check_names(self, unknown: dict[str, Any]) -> None:
        """Refuse misspelt fields, which Transformers would store and never read."""
        # a saved config may come from another version of Transformers, with fields of its own
        if self.transformers_version is not None:
            return
        for name in unknown:
            if name not in _TRANSFORMERS_ARGUMENTS and not name.startswith("_"):
                known = [field.name for field in fields(self)]
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ConfigError(f"unknown config field {name!r}{hint}")

    def _check_sizes(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
            "window_size",
            "controller_hidden_size",
        ):
            _require_count(name, getattr(self, name))
        for name in (
            "intermediate_size",
            "num_key_value_heads",
            "head_dim",
            "cost_length",
            "short_conv",
            "recurrence",
        ):
            if getattr(self, name) is not None:
                _require_count(name, getattr(self, name))
        _require_count("num_sinks", self.num_sinks, least=0)
        if (self.recurrence or 0) > _MAX_RECURRENCE:
            raise ConfigError(
                f"recurrence must be at most {_MAX_RECURRENCE}, got {self.recurrence}: it is the "
                "number of tokens of the longest run that is looked for"
            )
        heads = self.num_attention_heads
        if self.head_dim is None and self.hidden_size % heads:
            raise ConfigError(
                f"hidden_size must be a multiple of num_attention_heads, got {self.hidden_size} "
                f"and {heads}; change one or set head_dim"
            )
        if self.num_key_value_heads is not None and heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads must be a multiple of num_key_value_heads, got {heads} and "
                f"{self.num_key_value_heads}: each key-value head serves a whole group of heads"
            )
        head_dim = self.head_dim or self.hidden_size // heads
        if self.use_rope and head_dim % 2:
            raise ConfigError(
                f"head_dim must be even for rotary positions, got {head_dim}; set use_rope=False "
                "or change head_dim"
            )

    def _check_experts(self) -> None:
        self.experts = _names("experts", self.experts)
        if self.layer_experts is not None:
            if isinstance(self.layer_experts, str) or not isinstance(self.layer_experts, Sequence):
                raise ConfigError(
                    "layer_experts must be a list of expert names for each layer, "
                    f"got {self.layer_experts!r}"
                )
            self.layer_experts = tuple(
                _names(f"layer_experts[{i}]", names) for i, names in enumerate(self.layer_experts)
            )
            if len(self.layer_experts) != self.num_hidden_layers:
                raise ConfigError(
                    f"layer_experts must name the experts of all {self.num_hidden_layers} layers, "
                    f"got {len(self.layer_experts)} entries"
                )
        known = sorted({name for names in self.layer_experts or [self.experts] for name in names})
        if self.start_expert is not None and self.start_expert not in known:
            raise ConfigError(
                f"start_expert must be an expert of a layer, one of {', '.join(known)}, got "
                f"{self.start_expert!r}"
            )
        if isinstance(self.expert_costs, str):
            if self.expert_costs not in ("paper", "flops"):
                raise ConfigError(
                    "expert_costs must be 'paper', 'flops' or one number per expert, "
                    f"got {self.expert_costs!r}"
                )
            return
        if not isinstance(self.expert_costs, Sequence):
            raise ConfigError(
                "expert_costs must be 'paper', 'flops' or one number per expert, "
                f"got {self.expert_costs!r}"
            )
        for index, cost in enumerate(self.expert_costs):
            _require_number(f"expert_costs[{index}]", cost)
        self.expert_costs = tuple(float(cost) for cost in self.expert_costs)
        check_costs(self.expert_costs)
        if len(self.expert_costs) != len(self.experts):
            raise ConfigError(
                f"expert_costs must have one number per expert, got {len(self.expert_costs)} "
                f"costs for {len(self.experts)} experts {list(self.experts)}"
            )

    def _check_routing(self) -> None:
        _require_choice("controller", self.controller, ControllerName)
        _require_choice("training_weights", self.training_weights, TrainingWeights)
        _require_choice("route_gradient", self.route_gradient, RouteGradient)
        _require_choice("route_granularity", self.route_granularity, RouteGranularity)
        _require_choice("routing", self.routing, RoutingName)
        _require_choice("uncertainty_signal", self.uncertainty_signal, Signal)
        _require_choice("impl", self.impl, Impl)
        if self.routing == "soft" and self.training_weights == "one_hot":
            raise ConfigError(
                "training_weights='one_hot' draws a single expert, but routing='soft' mixes them; "
                "use 'mean' or 'sample', or routing='hard' or 'gated'"
            )
        self._check_gate()
        self._check_values()
        for name in ("prior_floor", "kl_weight", "cost_weight"):
            _require_number(name, getattr(self, name))
        for name in ("initializer_range", "rms_norm_eps"):
            _require_number(name, getattr(self, name))
        for name in ("causal", "use_rope", "shared_projections"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.short_conv is not None and not self.causal:
            raise ConfigError(
                "short_conv reads backwards only and needs causal=True; leave it out of encoders"
            )
        if self.route_granularity == "kv_head" and not self.shared_projections:
            raise ConfigError(
                "route_granularity='kv_head' needs shared_projections=True: experts are merged "
                "head by head, before one output projection; share them or use 'token'"
            )
        self._check_prior()
        for name in ("kl_weight", "cost_weight", "initializer_range", "rms_norm_eps"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be finite and >= 0, got {getattr(self, name)}")

    def _check_residual(self) -> None:
        _require_choice("residual", self.residual, ResidualName)
        _require_count("residual_blocks", self.residual_blocks)
        halves = 2 * self.num_hidden_layers
        if self.residual == "block_attention" and self.residual_blocks > halves:
            raise ConfigError(
                f"residual_blocks must be at most {halves}, two for each of "
                f"{self.num_hidden_layers} layers, got {self.residual_blocks}; lower it or use "
                "residual='attention', which reads them all"
            )

    def _check_depth(self) -> None:
        _require_choice("depth_routing", self.depth_routing, DepthRouting)
        _require_number("depth_weight", self.depth_weight)
        if not 0.0 <= self.depth_weight < math.inf:
            raise ConfigError(f"depth_weight must be finite and >= 0, got {self.depth_weight}")
        if self.depth_capacity is None:
            if self.depth_layers is not None:
                raise ConfigError(
                    "depth_layers are blocks that tokens may pass by and need a depth_capacity, "
                    "the share of tokens that enter; set it or leave them out"
                )
            return
        _require_number("depth_capacity", self.depth_capacity)
        if not 0.0 < self.depth_capacity <= 1.0:
            raise ConfigError(
                f"depth_capacity must be in (0, 1], got {self.depth_capacity}: it is the share of "
                "tokens that enter a block"
            )
        if not self.causal and self.depth_routing == "top_k":
            raise ConfigError(
                "depth_routing='top_k' predicts a choice among later tokens and needs causal=True; "
                "use 'threshold' in encoders"
            )
        self._check_depth_layers()

    def _check_depth_layers(self) -> None:
        number = self.num_hidden_layers
        if self.depth_layers is None:
            if number < 2:
                raise ConfigError(
                    "depth_capacity is for every other block, and a model of one has no second; "
                    "name it by depth_layers=[0] or add blocks"
                )
            return
        layers = self.depth_layers
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
        self.depth_layers = tuple(sorted(layers))

    def _check_prior(self) -> None:
        strengths = self.prior_strength
        if isinstance(strengths, Sequence) and not isinstance(strengths, str):
            if len(strengths) != self.num_hidden_layers:
                raise ConfigError(
                    f"prior_strength must be one number, or one for each of "
                    f"{self.num_hidden_layers} layers, got {len(strengths)}"
                )
            for index, strength in enumerate(strengths):
                _require_number(f"prior_strength[{index}]", strength)
            self.prior_strength = tuple(float(strength) for strength in strengths)
        else:
            _require_number("prior_strength", strengths)
        for layer_idx in range(self.num_hidden_layers):
            check_prior(self.prior_strength_of(layer_idx), self.prior_floor)

    def _check_values(self) -> None:
        if self.value_scale is not None:
            _require_number("value_scale", self.value_scale)
            if not 0.0 < self.value_scale < math.inf:
                raise ConfigError(
                    f"value_scale must be > 0 and finite, or None, got {self.value_scale}"
                )
            if self.controller != "value":
                raise ConfigError(
                    f"value_scale is for controller='value', got {self.value_scale} with "
                    f"controller={self.controller!r}; leave it out"
                )
        _require_number("price", self.price)
        if not math.isfinite(self.price):
            raise ConfigError(f"price must be finite, got {self.price}")
        draw = self.training_weights
        if self.controller != "value":
            if self.price:
                raise ConfigError(
                    f"price is for controller='value', got {self.price} with "
                    f"controller={self.controller!r}; leave it out"
                )
            if draw == "explore":
                raise ConfigError(
                    "training_weights='explore' is for controller='value', got "
                    f"controller={self.controller!r}"
                )
            return
        if self.routing != "hard" or self.route_gradient != "all":
            raise ConfigError(
                "controller='value' must have routing='hard' and route_gradient='all', which tells "
                f"what other experts would have done, got {self.routing!r} and "
                f"{self.route_gradient!r}"
            )
        if draw not in ("mean", "explore"):
            raise ConfigError(
                "controller='value' must have training_weights='explore', or 'mean', which teaches "
                f"it nothing, got {draw!r}"
            )
        if draw == "explore" and (self.kl_weight != 1.0 or self.cost_weight != 0.0):
            raise ConfigError(
                "training_weights='explore' must have kl_weight=1 and cost_weight=0, or values "
                f"would not be nats, got {self.kl_weight} and {self.cost_weight}"
            )

    def _check_gate(self) -> None:
        threshold = self.uncertainty_threshold
        if self.routing != "gated":
            if threshold is not None:
                raise ConfigError(
                    f"uncertainty_threshold is for routing='gated', got {threshold} with "
                    f"routing={self.routing!r}; leave it out"
                )
            return
        if threshold is not None:
            _require_number("uncertainty_threshold", threshold)
        if threshold is None or not math.isfinite(threshold):
            raise ConfigError(
                f"routing='gated' must have a finite uncertainty_threshold, got {threshold}"
            )
        signal = self.uncertainty_signal
        if self.controller == "prior_free" and signal not in _SIGNALS_OF_WEIGHTS:
            raise ConfigError(
                f"a prior_free controller must be gated by one of {', '.join(_SIGNALS_OF_WEIGHTS)}"
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
