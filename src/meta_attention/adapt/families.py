"""Pretrained models that can be adapted, and how another kind is made known.

A family says where a model keeps its attention modules. All of them must run attention through
Transformers' ``AttentionInterface``, with queries and keys already normalised and rotated: what is
around attention then stays as it is, and need not be known here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from meta_attention.adapt.config import Shape
from meta_attention.errors import ConfigError


def shape_of(config: Any) -> Shape:
    """Widths under the names that most configurations use."""
    heads = config.num_attention_heads
    return Shape(
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        max_position_embeddings=config.max_position_embeddings,
    )


def has_window(config: Any, layer_idx: int) -> bool:
    """Whether a layer sees a window only, by ``layer_types`` or one window for all layers."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        return bool(layer_types[layer_idx] != "full_attention")
    return is_window(getattr(config, "sliding_window", None), config)


def is_window(size: int | None, config: Any) -> bool:
    """Whether a window hides anything: some models have one as long as the longest text."""
    return size is not None and size < config.max_position_embeddings


@dataclass(frozen=True, slots=True)
class Family:
    """Where a kind of model keeps what a router needs.

    Args:
        model_type: ``config.model_type`` of its models.
        layers: The list of layers in the base model (``model.base_model``).
        attention: The attention module in a layer.
        causal: Whether tokens see only those before them.
        use_rope: Whether queries and keys are rotated; the module is then called with
            ``position_embeddings``.
        shape: Reads widths from a configuration.
        has_window: Says of a configuration and a layer whether it sees a window only.
    """

    model_type: str
    layers: str = "layers"
    attention: str = "self_attn"
    causal: bool = True
    use_rope: bool = True
    shape: Callable[[Any], Shape] = shape_of
    has_window: Callable[[Any, int], bool] = has_window

    def attention_modules(self, model: PreTrainedModel) -> list[nn.Module]:
        """The attention modules of a model, one per layer."""
        layers = model.base_model.get_submodule(self.layers)
        return [layer.get_submodule(self.attention) for layer in layers.children()]


_FAMILIES: dict[str, Family] = {}


def register_family(family: Family) -> Family:
    """Make a kind of model known to ``adapt``; a name that is taken is replaced."""
    _FAMILIES[family.model_type] = family
    return family


def known_families() -> tuple[str, ...]:
    """Model types that can be adapted."""
    return tuple(sorted(_FAMILIES))


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a configuration; raise where there is none."""
    model_type = getattr(config, "model_type", None)
    text_type = getattr(getattr(config, "text_config", None), "model_type", None)
    if model_type not in _FAMILIES and text_type in _FAMILIES:
        raise ConfigError(
            f"model_type {model_type!r} is of more than text and cannot be adapted; adapt the text "
            f"model in it, which is of {text_type!r}: docs/adapt.md says how to take it out"
        )
    if model_type not in _FAMILIES:
        raise ConfigError(
            f"model_type {model_type!r} cannot be adapted; supported are "
            f"{', '.join(known_families())}; register_family(Family({model_type!r}, layers=..., "
            "attention=...)) adds one, see docs/adapt.md"
        )
    return _FAMILIES[model_type]


for _name in ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3"):
    register_family(Family(_name))
register_family(Family("gpt2", layers="h", attention="attn", use_rope=False))
register_family(
    Family("bert", layers="encoder.layer", attention="attention.self", causal=False, use_rope=False)
)
