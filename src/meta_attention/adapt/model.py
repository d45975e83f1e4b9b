"""``adapt``: a pretrained model, routed, with all of its weights as they were."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel

from meta_attention.adapt.adaptation import Adaptation
from meta_attention.adapt.attention import IMPLEMENTATIONS, hand_inputs
from meta_attention.adapt.config import AdaptConfig
from meta_attention.adapt.families import Family, family_of
from meta_attention.adapt.router import Router
from meta_attention.errors import ConfigError

ModelType = TypeVar("ModelType", bound=PreTrainedModel)


def adapt(model: ModelType, config: AdaptConfig | None = None, **settings: Any) -> ModelType:
    """Route the tokens of a pretrained model, its weights kept.

    Every adapted layer gets a router: a controller, and what its experts have of their own. The
    model's projections, norms, positions and caches stay, and all experts share them. Routers are
    new, and believe in full attention: until they are trained, the model says what it said.

    Args:
        model: A Transformers model of a known family; see :func:`known_families`.
        config: Settings, where they are at hand as one.
        settings: Fields of :class:`AdaptConfig`: ``experts``, ``window_size``, ``layers`` and so
            on.

    Returns:
        The same model.
    """
    if config is not None and settings:
        raise ConfigError("adapt takes a config or settings, not both")
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(f"adapt takes a Transformers model, got a {type(model).__name__}")
    routers = new_routers(model, AdaptConfig.of(settings) if config is None else config)
    install_routers(model, routers)
    return model


def new_routers(model: PreTrainedModel, config: AdaptConfig) -> dict[int, Router]:
    """Routers for the layers of a model, which is left as it is."""
    family = family_of(model.config)
    modules = family.attention_modules(model)
    _check(model, family, modules)
    layers = _layers_to_adapt(model, family, config.layers, len(modules))
    adaptation = Adaptation(
        family,
        config,
        config.for_base(family.shape(model.config), causal=family.causal, use_rope=family.use_rope),
        layers,
    )
    return {index: Router(adaptation, index) for index in layers}


def install_routers(model: PreTrainedModel, routers: Mapping[int, Router]) -> None:
    """Let the layers of a model attend as its :func:`new_routers` say."""
    modules = family_of(model.config).attention_modules(model)
    model.set_attn_implementation(IMPLEMENTATIONS[_below(model)])
    generation = getattr(model, "generation_config", None)
    if generation is not None and not all(r.can_be_captured for r in routers.values()):
        # static caches would have it compiled, which lengths on the host break up
        generation.disable_compile = True
    for index, router in routers.items():
        module = modules[index]
        # its controller stays in float32
        device = next(module.parameters()).device
        module.add_module("router", router.to(device, model.dtype))
        router.train(module.training)
        module.register_forward_pre_hook(hand_inputs, with_kwargs=True)


def freeze_base(model: nn.Module) -> None:
    """Let nothing but the routers of an adapted model learn."""
    mine = {id(p) for m in model.modules() if isinstance(m, Router) for p in m.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in mine)


def _check(model: PreTrainedModel, family: Family, modules: Sequence[nn.Module]) -> None:
    if any(isinstance(module, Router) for module in model.modules()):
        raise ConfigError("the model is adapted already; load it anew to adapt it otherwise")
    if getattr(model.config, "add_cross_attention", False):
        raise ConfigError("a model with cross-attention cannot be adapted")
    for module in modules:
        if next(module.parameters()).is_meta:
            raise ConfigError(
                "weights must be in memory to be adapted; load the model without offloading"
            )
        if bool(getattr(module, "is_causal", family.causal)) != family.causal:
            kind = "causal" if family.causal else "bidirectional"
            raise ConfigError(
                f"family {family.model_type!r} is {kind}, but this model is not; such a use of it "
                "cannot be adapted"
            )


def _layers_to_adapt(
    model: PreTrainedModel, family: Family, asked: Sequence[int] | None, num_layers: int
) -> tuple[int, ...]:
    full = [i for i in range(num_layers) if not family.has_window(model.config, i)]
    if not full:
        raise ConfigError(
            "all layers of this model have a window of their own, but only layers of full "
            f"attention can be adapted; {_remedy(model.config)}"
        )
    if asked is None:
        return tuple(full)
    if isinstance(asked, str) or not isinstance(asked, Sequence) or not asked:
        raise ConfigError(f"layers must be a list of layer indices, got {asked!r}")
    for index in asked:
        if index not in full:
            raise ConfigError(
                f"layers must be of full attention, among {full}, got {index!r}: others have a "
                "window of their own, or are not there"
            )
    return tuple(sorted(set(asked)))


def _remedy(config: Any) -> str:
    """What to do about a model that has a window in every layer."""
    size = getattr(config, "sliding_window", None)
    if size is None or getattr(config, "layer_types", None) is not None:
        return "take a model that has some"
    return (
        f"take a model that has some, or, if no text is longer than the window of {size} tokens, "
        "which then hides nothing, load this one with sliding_window=None (null in its config.json)"
    )


def _below(model: PreTrainedModel) -> str:
    """What runs where nothing is routed: fused attention, unless it would miss something."""
    has_softcap = getattr(model.config, "attn_logit_softcapping", None) is not None
    is_eager = model.config._attn_implementation == "eager"
    # older Transformers run sdpa and leave the soft-cap out
    return "eager" if has_softcap or is_eager else "sdpa"
