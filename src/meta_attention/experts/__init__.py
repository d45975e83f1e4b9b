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
from meta_attention.experts.linear import LinearAttention, LinearStateExpert, StateInputs
from meta_attention.experts.local import LocalAttention
from meta_attention.experts.ssm import SelectiveStateSpace, StateSpaceRates

# whose state the decoding kernel knows; one derived from these may do something else with it
LINEAR_STATES = (LinearAttention, SelectiveStateSpace)

__all__ = [
    "LINEAR_STATES",
    "Expert",
    "FullAttention",
    "GatedFullAttention",
    "Heads",
    "LinearAttention",
    "LinearStateExpert",
    "LocalAttention",
    "RecurrentExpert",
    "SelectiveStateSpace",
    "SoftmaxExpert",
    "StateInputs",
    "StateSpaceRates",
    "build_experts",
    "expert_costs",
    "keep_listed",
    "known_experts",
    "register_expert",
]
