"""Sliding-window attention."""

from torch import Tensor

from meta_attention.config import MetaAttentionConfig
from meta_attention.experts.base import Heads, SoftmaxExpert, register_expert
from meta_attention.ops.local_attention import local_attention


@register_expert("local")
class LocalAttention(SoftmaxExpert):
    """Every token sees its neighbours within the window. The paper's E3.

    With ``num_sinks``, also the first tokens of its row.

    Args:
        config: Model configuration.
        window_size: Default: the config's. A layer may have several, as ``"local:64"`` and
            ``"local:512"``.
    """

    paper_cost = 0.30
    takes_window = True
    keeps_documents_apart = True

    def __init__(self, config: MetaAttentionConfig, window_size: int | None = None) -> None:
        super().__init__(config)
        self.window_size = config.window_size if window_size is None else window_size
        self.num_sinks = config.num_sinks

    @property
    def window(self) -> int:
        return self.window_size

    def forward(self, heads: Heads, x: Tensor, mask: Tensor | None) -> Tensor:
        return local_attention(
            heads.query,
            heads.key,
            heads.value,
            window=self.window,
            causal=self.causal,
            mask=mask,
            num_sinks=self.num_sinks,
            scale=self.scale,
            softcap=self.softcap,
            impl=self.impl,
        )
