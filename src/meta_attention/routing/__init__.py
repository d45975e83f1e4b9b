"""Posterior -> routes: which experts a token takes, and with what weight."""

from meta_attention.routing.gate import uncertainty_of
from meta_attention.routing.policy import Routes, choose_routes

__all__ = ["Routes", "choose_routes", "uncertainty_of"]
