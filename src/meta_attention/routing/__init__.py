"""Posterior -> routes: which experts a token takes, and with what weight."""

from meta_attention.routing.direct import can_route_directly, route_directly
from meta_attention.routing.gate import uncertainty_of
from meta_attention.routing.policy import Routes, choose_routes
from meta_attention.routing.prices import BEYOND, check_cost, search_price

__all__ = [
    "BEYOND",
    "Routes",
    "can_route_directly",
    "check_cost",
    "choose_routes",
    "route_directly",
    "search_price",
    "uncertainty_of",
]
