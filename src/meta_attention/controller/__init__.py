"""Tokens -> posterior: what is believed about each token before attention runs."""

from meta_attention.controller.controllers import (
    BayesianMetaController,
    PriorFreeController,
    StaticController,
    ValueController,
    build_controller,
)
from meta_attention.controller.posterior import (
    PointPosterior,
    Posterior,
    RoutingPosterior,
    ValuePosterior,
)
from meta_attention.controller.prior import compute_aware_prior
from meta_attention.controller.recurrence import RecurrenceEmbedding, last_seen

__all__ = [
    "BayesianMetaController",
    "PointPosterior",
    "Posterior",
    "PriorFreeController",
    "RecurrenceEmbedding",
    "RoutingPosterior",
    "StaticController",
    "ValueController",
    "ValuePosterior",
    "build_controller",
    "compute_aware_prior",
    "last_seen",
]
