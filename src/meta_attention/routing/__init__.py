"""Posterior -> routes: which experts a token takes, and with what weight."""

from meta_attention.routing.direct import can_route_directly, route_directly
from meta_attention.routing.gate import uncertainty_of
from meta_attention.routing.policy import Routes, choose_routes

__all__ = [
    "Routes",
    "can_route_directly",
    "choose_routes",
    "route_directly",
    "uncertainty_of",
]
