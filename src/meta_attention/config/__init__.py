"""One configuration for layer, block and model. Plain data: no tensors, no I/O of its own."""

from meta_attention.config.checks import check_costs, check_prior
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
from meta_attention.config.fields import MetaAttentionConfig

__all__ = [
    "ControllerName",
    "DepthRouting",
    "Impl",
    "MetaAttentionConfig",
    "ResidualName",
    "RouteGradient",
    "RouteGranularity",
    "RoutingName",
    "Signal",
    "TrainingWeights",
    "check_costs",
    "check_prior",
]
