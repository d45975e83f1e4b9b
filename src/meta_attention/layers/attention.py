"""The routed attention layer. ``forward`` is the pipeline.

Shapes: B batch, T sequence, D width, H heads, P head width, E experts.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from meta_attention.config import MetaAttentionConfig
from meta_attention.controller import Posterior, build_controller
from meta_attention.errors import ShapeError
from meta_attention.experts import build_experts, expert_costs
from meta_attention.layers.projections import Projections, RotaryPositions, positions_of
from meta_attention.ops.heads import check_mask
from meta_attention.ops.route_merge import route_merge
from meta_attention.routing import Routes, choose_routes


@dataclass(frozen=True, slots=True)
class LayerOutput:
    """Attention output with the routing it was produced by."""

    output: Tensor  # [B, T, D], zero for padding
    kl: Tensor  # [B, T] nats, zero for padding
    projected_cost: Tensor  # [B, T], sum over experts of weight * cost, zero for padding
    posterior: Posterior
    routes: Routes


class BayesianMetaAttentionLayer(nn.Module):
    """Attention whose algorithm is chosen per token; stands where self-attention stands.

    Args:
        config: Model configuration.
        layer_idx: Index of the layer in its model; picks its experts where layers differ.
    """

    def __init__(self, config: MetaAttentionConfig, layer_idx: int = 0) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        experts = build_experts(config, layer_idx)
        self.expert_names = tuple(experts)
        self.controller = build_controller(config, expert_costs(config, experts))
        self.experts = nn.ModuleList(experts.values())
        # one set for all experts, or one each
        num_projections = 1 if config.shared_projections else len(experts)
        self.projections = nn.ModuleList(Projections(config) for _ in range(num_projections))
        self.rotary = RotaryPositions(config) if config.use_rope else None

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> LayerOutput:
        """Route and attend.

        Args:
            x: Hidden states ``[B, T, D]``, already normalised by the block.
            attention_mask: ``[B, T]``, 1 for tokens and 0 for padding on either side.
            position_ids: Absolute positions ``[B, T]``; default: counted from each row's first
                token.
        """
        mask, position_ids = self._check_inputs(x, attention_mask, position_ids)
        if mask is not None:
            # padding may hold anything, also what 0 * x would not remove
            x = x.masked_fill(~mask.unsqueeze(-1), 0.0)

        # tokens -> posterior -> routes
        posterior = self.controller(x, position_ids)
        sample = self.training and self.config.training_weights == "sample"
        routes = choose_routes(posterior, sample=sample)

        # routes -> experts -> merge
        output = self._attend(x, mask, position_ids, routes)

        # what the objective needs
        kl = posterior.kl_to(self.controller.prior_concentration)
        cost = (routes.weights * self.controller.costs).sum(dim=-1)
        if mask is not None:
            output = output.masked_fill(~mask.unsqueeze(-1), 0.0)
            kl, cost = kl.masked_fill(~mask, 0.0), cost.masked_fill(~mask, 0.0)
        return LayerOutput(output, kl, cost, posterior, routes)

    def _attend(
        self, x: Tensor, mask: Tensor | None, position_ids: Tensor, routes: Routes
    ) -> Tensor:
        projections: list[Projections] = list(self.projections)  # type: ignore[arg-type]
        plain = [p.heads(x) for p in projections]
        rotated = plain
        if self.rotary is not None:
            cos, sin = self.rotary(x, position_ids)  # [B, T, P]
            rotated = [self.rotary.rotate(heads, cos, sin) for heads in plain]

        rows = []
        for index, expert in enumerate(self.experts):
            own = 0 if self.config.shared_projections else index
            heads = rotated[own] if expert.uses_rope else plain[own]
            rows.append(expert(heads, x, mask).flatten(2))  # [B, T, H * P]

        impl = self.config.impl
        if self.config.shared_projections:
            return projections[0].output(route_merge(routes.weights, rows, impl=impl))
        outputs = [p.output(row) for p, row in zip(projections, rows, strict=True)]
        return route_merge(routes.weights, outputs, impl=impl)

    def _check_inputs(
        self, x: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        width, longest = self.config.hidden_size, self.config.max_position_embeddings
        if x.dim() != 3 or x.shape[-1] != width or 0 in x.shape:
            raise ShapeError(
                f"x must be [B, T, D] with B and T above 0 and D = {width}, got {list(x.shape)}"
            )
        B, T, _ = x.shape
        if x.shape[1] > longest:
            raise ShapeError(
                f"the sequence must fit max_position_embeddings = {longest}, got {T} tokens; "
                "shorten it or build the model with a larger value"
            )
        check_mask(attention_mask, B, T)
        mask = None if attention_mask is None else attention_mask.bool()
        if position_ids is None:
            return mask, positions_of(x, mask)
        if position_ids.shape not in ((B, T), (1, T)):
            raise ShapeError(
                f"position_ids must be [B, T] = [{B}, {T}] to match x {list(x.shape)}, "
                f"got {list(position_ids.shape)}"
            )
        return mask, position_ids.expand(B, T)

    def extra_repr(self) -> str:
        return f"experts={', '.join(self.expert_names)}"
