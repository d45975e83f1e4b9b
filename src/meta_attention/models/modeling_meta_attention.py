"""Decoder-only language model of routed blocks, as Transformers expects one."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, StaticCache
from transformers.utils.generic import ModelOutput

from meta_attention.config import MetaAttentionConfig
from meta_attention.controller import RecurrenceEmbedding, RoutingPosterior, last_seen
from meta_attention.controller.controllers import Controller
from meta_attention.depth import (
    AttentionResiduals,
    DepthOutput,
    HalvedBlock,
    HalvedMixtureOfDepthsBlock,
    MixtureOfDepthsBlock,
    TokenScore,
    check_one_device,
)
from meta_attention.errors import ConfigError, ShapeError
from meta_attention.experts import StateSpaceRates
from meta_attention.layers import (
    LayerOutput,
    MetaAttentionCache,
    MetaAttentionStaticCache,
    MetaTransformerBlock,
)
from meta_attention.layers.decode_step import DecodeStep
from meta_attention.layers.projections import (
    MetaAttentionRotaryEmbedding,
    ShortConvolution,
    number_documents,
    positions_of,
)
from meta_attention.objective import mean_over_tokens, routing_loss
from meta_attention.ops.heads import check_mask


@dataclass
class RoutedModelOutput(ModelOutput):
    """Hidden states with the routing they were produced by."""

    last_hidden_state: Tensor | None = None  # [B, T, D]
    past_key_values: Cache | None = None
    kl: Tensor | None = None  # [] nats, mean over routed layers and tokens
    projected_cost: Tensor | None = None  # [], mean over all layers and tokens
    routed_cost: Tensor | None = None  # [], of evaluation's routes, mean over routed layers
    routed_projected_cost: Tensor | None = None  # [], as projected_cost, over routed layers only
    depth_loss: Tensor | None = None  # [], of who enters blocks, mean over them; in training only
    routing_entropy: Tensor | None = None  # [], of beliefs, share of ln E, mean over routed layers
    routing_weights: tuple[Tensor, ...] | None = None  # [B, T, E] or [B, T, G, E] per layer
    concentrations: tuple[Tensor | None, ...] | None = None  # likewise; None without a prior
    hidden_states: tuple[Tensor, ...] | None = None


@dataclass
class RoutedCausalLMOutput(ModelOutput):
    """Logits with the routing they were produced by, and the loss with its parts."""

    # [], task_loss + kl_weight * kl + cost_weight * projected_cost + depth_weight * depth_loss
    loss: Tensor | None = None
    task_loss: Tensor | None = None  # [], nats per token
    kl: Tensor | None = None  # [] nats, mean over routed layers and tokens
    projected_cost: Tensor | None = None  # [], mean over all layers and tokens
    routed_cost: Tensor | None = None  # [], of evaluation's routes, mean over routed layers
    routed_projected_cost: Tensor | None = None  # [], as projected_cost, over routed layers only
    depth_loss: Tensor | None = None  # [], of who enters blocks, mean over them; in training only
    routing_entropy: Tensor | None = None  # [], of beliefs, share of ln E, mean over routed layers
    logits: Tensor | None = None  # [B, T, V]
    past_key_values: Cache | None = None
    routing_weights: tuple[Tensor, ...] | None = None  # [B, T, E] or [B, T, G, E] per layer
    concentrations: tuple[Tensor | None, ...] | None = None  # likewise; None without a prior
    hidden_states: tuple[Tensor, ...] | None = None


class MetaAttentionPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation."""

    config_class = MetaAttentionConfig
    config: MetaAttentionConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    # evidence below a bfloat16's precision would vanish
    _keep_in_fp32_modules_strict = [
        "controller",
        "recurrence",
        "rates",
        "depth_router",
        "residuals",
    ]

    def __init__(self, config: MetaAttentionConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        # those there are: FSDP refuses the name of one that is not
        blocks = (_block_type(config, index) for index in range(config.num_hidden_layers))
        self._no_split_modules = sorted({block.__name__ for block in blocks})

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Controller):
            # buffers are not saved; a model loaded from disk starts without them
            module.reset_buffers()
            module.reset_start()
        elif isinstance(module, TokenScore):
            super()._init_weights(module)
            module.reset_start()
        elif isinstance(
            module, ShortConvolution | StateSpaceRates | AttentionResiduals | RecurrenceEmbedding
        ):
            module.reset_parameters()
        else:
            super()._init_weights(module)

    def gradient_checkpointing_enable(  # type: ignore[override]  # versions differ in the rest
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """As in Transformers, but never reentrant: that sees no gradient in a block's output."""
        options = gradient_checkpointing_kwargs or {}
        if options.get("use_reentrant"):
            raise ConfigError(
                "gradient checkpointing must have use_reentrant=False: blocks return more than "
                "tensors, and most parameters would get no gradient"
            )
        super().gradient_checkpointing_enable({"use_reentrant": False} | options, **kwargs)

    def set_uncertainty_threshold(self, threshold: float) -> None:
        """Gate all layers at ``threshold`` from now on, as a schedule does in training."""
        if self.config.routing != "gated":
            raise ConfigError(
                f"a threshold is for routing='gated', got routing={self.config.routing!r}"
            )
        self._set_in_controllers("uncertainty_threshold", threshold)

    def set_price(self, price: float) -> None:
        """Let full attention cost so many nats in all layers from now on; saved with the config."""
        if self.config.controller != "value":
            raise ConfigError(
                f"a price is for controller='value', got controller={self.config.controller!r}"
            )
        self._set_in_controllers("price", price)

    def _set_in_controllers(self, name: str, value: float) -> None:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise ConfigError(f"{name} must be a finite number, got {value!r}")
        setattr(self.config, name, float(value))
        for module in self.modules():
            if isinstance(module, Controller):
                module.reset_buffers()


class MetaAttentionModel(MetaAttentionPreTrainedModel):
    """Embedding, routed blocks, final norm."""

    def __init__(self, config: MetaAttentionConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(
            config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id
        )
        self.residuals = None if config.residual == "sum" else AttentionResiduals(config)
        self.layers = nn.ModuleList(
            _block_type(config, i)(config, i) for i in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = MetaAttentionRotaryEmbedding(config) if config.use_rope else None
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        document_ids: Tensor | None = None,
        use_cache: bool | None = None,
        output_routing: bool = False,
        output_hidden_states: bool | None = None,
        output_losses: bool = True,
        output_routed_cost: bool = False,
        output_routing_entropy: bool = False,
        **kwargs: object,
    ) -> RoutedModelOutput:
        """Run the blocks.

        Args:
            input_ids: Tokens ``[B, T]``.
            attention_mask: 1 for tokens and 0 for padding, ``[B, T]``, or ``[B, S]`` with the
                cached tokens included.
            position_ids: Absolute positions ``[B, T]``; default: counted from each row's first
                token.
            past_key_values: What earlier calls left: a :class:`MetaAttentionCache` or a
                :class:`MetaAttentionStaticCache`.
            inputs_embeds: Embeddings ``[B, T, D]`` in place of ``input_ids``.
            document_ids: Documents packed into a row ``[B, T]``; see the layer.
            use_cache: Return a cache. Default: the config's, but never while training or with
                packed documents.
            output_routing: Return routing weights and concentrations of every layer.
            output_hidden_states: Return the hidden states before every block and at the end. With
                Attention Residuals: what the attention of every block reads.
            output_losses: Return ``kl`` and ``projected_cost``.
            output_routed_cost: Return ``routed_cost``: the cost of the experts most believed in,
                which are those that hard routing executes in evaluation; mean over tokens and
                routed layers. And ``routed_projected_cost``: ``projected_cost`` of these layers.
            output_routing_entropy: Return ``routing_entropy``: that of the expected weights, also
                where one expert was drawn from them, as a share of ln E; mean over tokens and
                routed layers, 0 if there are none.
            kwargs: Ignored; Transformers passes flags of its own.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ShapeError("exactly one of input_ids and inputs_embeds must be given")
        if input_ids is not None and (input_ids.dim() != 2 or input_ids.is_floating_point()):
            raise ShapeError(
                f"input_ids must be whole numbers [B, T], got {input_ids.dtype} "
                f"{list(input_ids.shape)}"
            )
        if self.residuals is not None:
            check_one_device([self.embed_tokens, self.residuals, *self.layers])
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if x.dim() != 3:
            raise ShapeError(f"inputs_embeds must be [B, T, D], got {list(x.shape)}")
        if 0 in x.shape:
            raise ShapeError(f"tokens must be [B, T] with B and T above 0, got {list(x.shape[:2])}")
        B, T, _ = x.shape

        if use_cache is None:
            use_cache = self.config.use_cache and self.config.causal and not self.training
            use_cache = use_cache and document_ids is None
        if self.gradient_checkpointing and self.training:
            use_cache = False
            if past_key_values is not None:
                raise ConfigError("gradient checkpointing would write the cache twice; use one")
        cache = self._cache_of(past_key_values, use_cache)
        past = 0 if cache is None else cache.get_seq_length()
        mask, step = attention_mask, None
        if cache is not None:
            mask, step = cache.prepare(attention_mask, B, T, x.device)
        check_mask(mask, B, past + T)
        marks = None if mask is None else mask.bool()
        if document_ids is not None:
            check_mask(document_ids, B, T)
            document_ids = marks = number_documents(document_ids, mask)
        if position_ids is None and step is not None:
            position_ids = step.position_ids
        elif position_ids is None:
            position_ids = positions_of(marks, B, T, past, x.device)
        rotation = None if self.rotary is None else self.rotary(x, position_ids)
        new_mask = None if marks is None else marks[:, -T:] != 0
        if step is not None and step.is_token is not None:
            new_mask = step.is_token.unsqueeze(1)
        recurrence = self._recurrence_of(input_ids, new_mask, document_ids, cache, step)

        outputs: list[LayerOutput] = []
        hidden_states = [x]
        stream = None if self.residuals is None else self.residuals.start(x)
        # positional, as checkpointing passes them on
        arguments = (mask, position_ids, document_ids, cache, rotation, step, recurrence)
        for block in self.layers:
            out = block(x, *arguments) if stream is None else stream.through(block, x, *arguments)
            x = out.output
            # of the states of all layers, long prompts have room for few
            outputs.append(replace(out, output=x.new_empty(0)))
            if output_hidden_states:
                hidden_states.append(x)
        if cache is not None:
            cache.finish(T)
        x = self.norm(x)
        hidden_states[-1] = x

        routed = [o for o in outputs if o.routes.weights.shape[-1] > 1]
        depth_losses = [
            o.depth_loss for o in outputs if isinstance(o, DepthOutput) and o.depth_loss is not None
        ]
        return RoutedModelOutput(
            last_hidden_state=x,
            past_key_values=cache if use_cache else None,
            kl=_mean_of([o.kl for o in routed], new_mask, x) if output_losses else None,
            projected_cost=(
                _mean_of([o.projected_cost for o in outputs], new_mask, x)
                if output_losses
                else None
            ),
            routed_cost=(
                _mean_of([o.evaluated_cost for o in routed], new_mask, x)
                if output_routed_cost
                else None
            ),
            routed_projected_cost=(
                _mean_of([o.projected_cost for o in routed], new_mask, x)
                if output_routed_cost
                else None
            ),
            depth_loss=torch.stack(depth_losses).mean() if depth_losses else None,
            routing_entropy=(
                _mean_of([o.routing_entropy for o in routed], new_mask, x)
                if output_routing_entropy
                else None
            ),
            routing_weights=tuple(o.routes.weights for o in outputs) if output_routing else None,
            concentrations=tuple(map(_concentration, outputs)) if output_routing else None,
            hidden_states=tuple(hidden_states) if output_hidden_states else None,
        )

    def _recurrence_of(
        self,
        input_ids: Tensor | None,
        is_token: Tensor | None,
        document_ids: Tensor | None,
        cache: MetaAttentionCache | None,
        step: DecodeStep | None,
    ) -> Tensor | None:
        """When each new token was last seen [B, T, N], if the config asks for it."""
        if self.config.recurrence is None:
            return None
        if input_ids is None:
            raise ShapeError(
                "a model with recurrence needs input_ids, to find tokens that come again, and got "
                "inputs_embeds"
            )
        if cache is None:
            return last_seen(input_ids, self.config.recurrence, is_token, document_ids)
        assert cache.history is not None  # _cache_of has refused those without
        return cache.history.add(input_ids, is_token, step, cache.get_seq_length())

    def _cache_of(self, given: Cache | None, use_cache: bool) -> MetaAttentionCache | None:
        if isinstance(given, MetaAttentionCache):
            if len(given.layers) != len(self.layers):
                raise ConfigError(
                    f"past_key_values must have {len(self.layers)} layers, got "
                    f"{len(given.layers)}: it is of another model"
                )
            kept = None if given.history is None else given.history.num_lengths
            if kept != self.config.recurrence:
                raise ConfigError(
                    f"past_key_values must keep tokens for recurrence={self.config.recurrence}, "
                    f"got one for {kept}: it is of another model"
                )
            return given
        if given is not None:
            ours = (
                MetaAttentionStaticCache if isinstance(given, StaticCache) else MetaAttentionCache
            )
            raise ConfigError(
                f"past_key_values must be a {ours.__name__}, got a {type(given).__name__}: it "
                "has no states for the recurrent experts"
            )
        return MetaAttentionCache(self.config) if use_cache else None


class MetaAttentionForCausalLM(MetaAttentionPreTrainedModel, GenerationMixin):
    """Language model; loads, saves and generates like any Transformers model."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    # its losses are means: Transformers' Trainer divides them among accumulated parts itself
    accepts_loss_kwargs = False

    def __init__(self, config: MetaAttentionConfig) -> None:
        super().__init__(config)
        self.model = MetaAttentionModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        document_ids: Tensor | None = None,
        use_cache: bool | None = None,
        output_routing: bool = False,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_routed_cost: bool = False,
        output_routing_entropy: bool = False,
        **kwargs: object,
    ) -> RoutedCausalLMOutput:
        """Logits, and the loss when there are labels.

        ``kl`` and ``projected_cost`` are there with labels, with ``output_routing`` or where
        gradients are recorded.

        Args:
            labels: Tokens ``[B, T]`` to predict, -100 where there is nothing to; shifted inside.
            logits_to_keep: Compute logits of the last tokens only (0: of all), or of these
                positions.
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, document_ids,
                use_cache, output_routing, output_hidden_states, output_routed_cost,
                output_routing_entropy, kwargs: See :class:`MetaAttentionModel`.
        """
        hidden = self.model(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            document_ids,
            use_cache,
            output_routing,
            output_hidden_states,
            # generating asks for none of it, at every token
            labels is not None or output_routing or torch.is_grad_enabled(),
            output_routed_cost,
            output_routing_entropy,
            **kwargs,
        )
        if labels is not None and (
            logits_to_keep != 0 or labels.shape != hidden.last_hidden_state.shape[:2]
        ):
            raise ShapeError(
                f"labels must be [B, T] = {list(hidden.last_hidden_state.shape[:2])} and need all "
                f"logits, got {list(labels.shape)} and logits_to_keep={logits_to_keep}"
            )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden.last_hidden_state[:, keep])  # [B, T, V]

        loss = task_loss = None
        if labels is not None:
            # labels move, not logits: a slice of these would be copied, however many they are
            next_tokens = F.pad(labels[:, 1:], (0, 1), value=-100)
            task_loss = F.cross_entropy(
                logits.flatten(0, 1).float(), next_tokens.flatten(), ignore_index=-100
            )
            loss = routing_loss(
                task_loss,
                hidden.kl,
                kl_weight=self.config.kl_weight,
                cost=hidden.projected_cost,
                cost_weight=self.config.cost_weight,
            )
            if hidden.depth_loss is not None:
                loss = loss + self.config.depth_weight * hidden.depth_loss
        return RoutedCausalLMOutput(
            loss=loss,
            task_loss=task_loss,
            kl=hidden.kl,
            projected_cost=hidden.projected_cost,
            routed_cost=hidden.routed_cost,
            routed_projected_cost=hidden.routed_projected_cost,
            depth_loss=hidden.depth_loss,
            routing_entropy=hidden.routing_entropy,
            logits=logits,
            past_key_values=hidden.past_key_values,
            routing_weights=hidden.routing_weights,
            concentrations=hidden.concentrations,
            hidden_states=hidden.hidden_states,
        )

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        # Transformers' own caches have no states for recurrent experts
        return False

    def _prepare_cache_for_generation(  # type: ignore[override]  # the rest goes through as it is
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic", "static"):
            raise ConfigError(
                f"cache_implementation must be 'static' or left out, got {kind!r}: the model keeps "
                "a MetaAttentionCache"
            )
        needs_cache = generation_config.use_cache and model_kwargs.get("past_key_values") is None
        if needs_cache and kind == "static":
            room = max(max_cache_length, generation_config.max_cache_len or 0, 1)
            model_kwargs["past_key_values"] = MetaAttentionStaticCache(self.config, room)
        elif needs_cache:
            model_kwargs["past_key_values"] = MetaAttentionCache(self.config)
        else:
            super()._prepare_cache_for_generation(  # type: ignore[misc]
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )

    def prepare_inputs_for_generation(  # type: ignore[override]  # the rest goes through as it is
        self,
        input_ids: torch.LongTensor,
        next_sequence_length: int | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        inputs = super().prepare_inputs_for_generation(  # type: ignore[misc]
            input_ids, next_sequence_length, past_key_values, **kwargs
        )
        is_step = next_sequence_length == 1 and not kwargs.get("is_first_iteration")
        if is_step and isinstance(past_key_values, MetaAttentionCache):
            # the prompt's padding is known, and what follows is none: a mask would have to be read
            inputs.pop("attention_mask", None)
        return inputs


def _block_type(config: MetaAttentionConfig, layer_idx: int) -> type[MetaTransformerBlock]:
    may_skip = config.may_skip(layer_idx)
    if config.residual != "sum":
        return HalvedMixtureOfDepthsBlock if may_skip else HalvedBlock
    return MixtureOfDepthsBlock if may_skip else MetaTransformerBlock


def _mean_of(values: list[Tensor], mask: Tensor | None, like: Tensor) -> Tensor:
    """Mean over layers and tokens, float32; 0 if there are no layers."""
    if not values:
        return like.new_zeros((), dtype=torch.float32)
    return mean_over_tokens(torch.stack(values).mean(dim=0), mask)


def _concentration(out: LayerOutput) -> Tensor | None:
    posterior = out.posterior
    return posterior.concentration if isinstance(posterior, RoutingPosterior) else None
