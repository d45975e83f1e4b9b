"""Heads -> rows: the attention algorithms a token may take."""

from meta_attention.experts.base import (
    Expert,
    Heads,
    RecurrentExpert,
    SoftmaxExpert,
    build_experts,
    expert_costs,
    keep_listed,
    known_experts,
    register_expert,
)
from meta_attention.experts.full import FullAttention
from meta_attention.experts.gated import GatedFullAttention
from meta_attention.experts.linear import LinearAttention
from meta_attention.experts.local import LocalAttention

__all__ = [
    "Expert",
    "FullAttention",
    "GatedFullAttention",
    "Heads",
    "LinearAttention",
    "LocalAttention",
    "RecurrentExpert",
    "SoftmaxExpert",
    "build_experts",
    "expert_costs",
    "keep_listed",
    "known_experts",
    "register_expert",
]
