"""Attention that picks its algorithm per token.

Importing this makes the model known to Transformers' Auto classes. The command line, whose help
should not wait for torch, does so only when a command runs.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meta_attention.adapt import adapt
    from meta_attention.config import MetaAttentionConfig
    from meta_attention.controller import (
        BayesianMetaController,
        PriorFreeController,
        RoutingPosterior,
        compute_aware_prior,
    )
    from meta_attention.experts import Expert, Heads, known_experts, register_expert
    from meta_attention.layers import (
        BayesianMetaAttentionLayer,
        MetaAttentionCache,
        MetaAttentionStaticCache,
        MetaTransformerBlock,
    )
    from meta_attention.models import CapturedStep, MetaAttentionForCausalLM, MetaAttentionModel
    from meta_attention.objective import mean_over_tokens, routing_loss

__version__ = "0.1.0"

_HOME = {
    "MetaAttentionConfig": "config",
    "BayesianMetaController": "controller",
    "PriorFreeController": "controller",
    "RoutingPosterior": "controller",
    "compute_aware_prior": "controller",
    "Expert": "experts",
    "Heads": "experts",
    "known_experts": "experts",
    "register_expert": "experts",
    "BayesianMetaAttentionLayer": "layers",
    "MetaAttentionCache": "layers",
    "MetaAttentionStaticCache": "layers",
    "MetaTransformerBlock": "layers",
    "CapturedStep": "models",
    "MetaAttentionForCausalLM": "models",
    "MetaAttentionModel": "models",
    "mean_over_tokens": "objective",
    "routing_loss": "objective",
    "adapt": "adapt",
}

__all__ = [
    "BayesianMetaAttentionLayer",
    "BayesianMetaController",
    "CapturedStep",
    "Expert",
    "Heads",
    "MetaAttentionCache",
    "MetaAttentionConfig",
    "MetaAttentionForCausalLM",
    "MetaAttentionModel",
    "MetaAttentionStaticCache",
    "MetaTransformerBlock",
    "PriorFreeController",
    "RoutingPosterior",
    "adapt",
    "compute_aware_prior",
    "known_experts",
    "mean_over_tokens",
    "register_expert",
    "routing_loss",
]


if Path((sys.argv or [""])[0]).stem != "meta-attention":
    import_module(f"{__name__}.models")


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
