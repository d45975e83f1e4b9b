"""Which blocks a token goes through, and what these read of those before them."""

from meta_attention.depth.attention_residuals import (
    AttentionResiduals,
    HalvedBlock,
    HalvedMixtureOfDepthsBlock,
    ResidualStream,
    check_one_device,
    count_reads,
)
from meta_attention.depth.mixture_of_depths import (
    DepthOutput,
    DepthRouter,
    MixtureOfDepthsBlock,
    TokenScore,
)
from meta_attention.depth.packing import Entered

__all__ = [
    "AttentionResiduals",
    "DepthOutput",
    "DepthRouter",
    "Entered",
    "HalvedBlock",
    "HalvedMixtureOfDepthsBlock",
    "MixtureOfDepthsBlock",
    "ResidualStream",
    "TokenScore",
    "check_one_device",
    "count_reads",
]
