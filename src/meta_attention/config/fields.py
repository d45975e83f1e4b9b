"""One configuration for layer, block and model. Plain data: no tensors, no I/O of its own."""

import difflib
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from transformers import PreTrainedConfig

from meta_attention.config.checks import (
    check_depth,
    check_experts,
    check_residual,
    check_routing,
    check_sizes,
)
from meta_attention.config.choices import (
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

# these change their frequencies with the sequence length, so a prefix would not be stable
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")

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
            ``controller="value"`` learns: some routes try any expert.
        explored_share: How many do; ``learn_values`` sets it.
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
    explored_share: float = 0.5
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
        check_sizes(self)
        check_experts(self)
        check_routing(self)
        check_residual(self)
        check_depth(self)
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
