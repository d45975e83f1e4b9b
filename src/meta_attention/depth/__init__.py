"""What happens along the depth of a model."""

from meta_attention.depth.attention_residuals import AttentionResiduals, HalvedBlock, ResidualStream

__all__ = ["AttentionResiduals", "HalvedBlock", "ResidualStream"]
