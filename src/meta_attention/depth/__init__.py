"""Which blocks a token goes through, and how their outputs add up."""

from meta_attention.depth.mixture_of_depths import (
    DepthOutput,
    DepthRouter,
    MixtureOfDepthsBlock,
    TokenScore,
)

__all__ = ["DepthOutput", "DepthRouter", "MixtureOfDepthsBlock", "TokenScore"]
