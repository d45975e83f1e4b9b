"""What happens along the depth of a model."""

from meta_attention.depth.attention_residuals import (
    AttentionResiduals,
    HalvedBlock,
    ResidualStream,
    count_reads,
)

__all__ = ["AttentionResiduals", "HalvedBlock", "ResidualStream", "count_reads"]
