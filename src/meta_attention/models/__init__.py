"""The language model, known to Transformers' Auto classes once this is imported."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from meta_attention.config import MetaAttentionConfig
from meta_attention.models.captured_step import CapturedStep
from meta_attention.models.modeling_meta_attention import (
    MetaAttentionForCausalLM,
    MetaAttentionModel,
    MetaAttentionPreTrainedModel,
    RoutedCausalLMOutput,
    RoutedModelOutput,
)

AutoConfig.register(MetaAttentionConfig.model_type, MetaAttentionConfig)
AutoModel.register(MetaAttentionConfig, MetaAttentionModel)
AutoModelForCausalLM.register(MetaAttentionConfig, MetaAttentionForCausalLM)

__all__ = [
    "CapturedStep",
    "MetaAttentionForCausalLM",
    "MetaAttentionModel",
    "MetaAttentionPreTrainedModel",
    "RoutedCausalLMOutput",
    "RoutedModelOutput",
]
