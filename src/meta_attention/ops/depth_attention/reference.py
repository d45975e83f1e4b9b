"""Readable PyTorch definition of attention over depth."""

import torch
import torch.nn.functional as F
from torch import Tensor

from meta_attention.ops.depth_attention import DepthRow


class ListedSources:
    """Sources in a list, each a tensor of its own."""

    max_rows = 1 << 30

    def __init__(self, first: Tensor, eps: float) -> None:
        self.sources = [first]
        self.eps = eps
        self.dtype = first.dtype
        # at least float32; stays float64 when the tests use it as an oracle
        self.compute = torch.promote_types(first.dtype, torch.float32)

    def add(self, *parts: Tensor) -> None:
        self.sources.append(_sum(parts))

    def attend(self, queries: Tensor) -> list[DepthRow]:
        logits = [self._logits(source, queries) for source in self.sources]  # [B, T, S] each
        maximum = torch.stack(logits).detach().amax(dim=0)
        weights = [torch.exp(logit - maximum).unbind(dim=-1) for logit in logits]
        rows = []
        for j, highest in enumerate(maximum.unbind(dim=-1)):
            numerator = torch.zeros_like(self.sources[0], dtype=self.compute)
            denominator = torch.zeros_like(highest)
            for weight, source in zip(weights, self.sources, strict=True):
                numerator = numerator + weight[j].unsqueeze(-1) * source.to(self.compute)
                denominator = denominator + weight[j]
            rows.append(DepthRow(numerator, denominator, highest, queries[j], len(self.sources)))
        return rows

    def join(self, row: DepthRow, *parts: Tensor) -> tuple[Tensor, Tensor | None]:
        numerator, denominator, count = row.numerator, row.denominator, row.count
        partial = _sum(parts) if parts else None
        if partial is not None:
            logit = self._logits(partial, row.query.unsqueeze(0)).squeeze(-1)  # [B, T]
            # the larger of the two, so that neither exponential overflows
            maximum = torch.maximum(row.maximum, logit.detach())
            weight, rest = torch.exp(logit - maximum), torch.exp(row.maximum - maximum)
            numerator = rest.unsqueeze(-1) * numerator
            numerator = numerator + weight.unsqueeze(-1) * partial.to(self.compute)
            denominator = rest * denominator + weight
            count += 1
        mixed = numerator * (count / denominator).unsqueeze(-1)
        return mixed.to(self.dtype), partial

    def _logits(self, source: Tensor, queries: Tensor) -> Tensor:
        """Of one source for some queries [S, D]: [B, T, S]."""
        with torch.autocast(source.device.type, enabled=False):
            source = source.to(self.compute)
            scale = torch.rsqrt(source.square().mean(dim=-1, keepdim=True) + self.eps)
            return F.linear(source, queries.to(self.compute)) * scale


def _sum(parts: tuple[Tensor, ...]) -> Tensor:
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]
