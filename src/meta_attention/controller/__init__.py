"""Tokens -> posterior: what is believed about each token before attention runs."""

from meta_attention.controller.controllers import (
    BayesianMetaController,
    PriorFreeController,
    StaticController,
    build_controller,
)
from meta_attention.controller.posterior import PointPosterior, Posterior, RoutingPosterior
from meta_attention.controller.prior import compute_aware_prior

__all__ = [
    "BayesianMetaController",
    "PointPosterior",
    "Posterior",
    "PriorFreeController",
    "RoutingPosterior",
    "StaticController",
    "build_controller",
    "compute_aware_prior",
]
