"""The pipeline put together: a routed attention layer, and a block around it."""

from meta_attention.layers.attention import BayesianMetaAttentionLayer, LayerOutput
from meta_attention.layers.block import MetaTransformerBlock
from meta_attention.layers.cache import MetaAttentionCache
from meta_attention.layers.static_cache import MetaAttentionStaticCache

__all__ = [
    "BayesianMetaAttentionLayer",
    "LayerOutput",
    "MetaAttentionCache",
    "MetaAttentionStaticCache",
    "MetaTransformerBlock",
]
