"""What is measured on: random heads, random routes, and models whose routes are fixed.

Shapes: B batch, T sequence, S keys of a cache, H heads, P head width, E experts.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from meta_attention.config import MetaAttentionConfig
from meta_attention.controller import PointPosterior, Posterior, RoutingPosterior
from meta_attention.errors import ShapeError
from meta_attention.evaluation.flops import count_layer
from meta_attention.evaluation.forcing import attention_layers

FULL, LOCAL, LINEAR = range(3)
EXPERTS = ("full", "local", "linear")

# evidence for the expert a token is forced to; the others have 1
CERTAIN = 50.0


@dataclass(frozen=True, slots=True)
class Mix:
    """Percent of the tokens each expert takes."""

    full: int
    local: int
    linear: int

    def __str__(self) -> str:
        return f"{self.full}/{self.local}/{self.linear}"

    @property
    def experts(self) -> tuple[str, ...]:
        """Names of those there are to choose from: linear ones only where they get tokens."""
        return EXPERTS if self.linear else EXPERTS[:LINEAR]

    def draw(self, B: int, T: int, *, seed: int, device: torch.device) -> Tensor:
        """The expert of every token [B, T], drawn independently."""
        generator = torch.Generator().manual_seed(seed)
        shares = torch.tensor([self.full, self.local, self.linear], dtype=torch.float32)
        routes = torch.multinomial(shares, B * T, replacement=True, generator=generator)
        return routes.view(B, T).to(device)

    def share_out(self, rows: int, *, seed: int, device: torch.device) -> Tensor:
        """The expert of every row [B], in numbers as near the mix as they can be."""
        bounds = [round(rows * s / 100) for s in (self.full, self.full + self.local)]
        routes = torch.full((rows,), LINEAR)
        routes[: bounds[1]] = LOCAL
        routes[: bounds[0]] = FULL
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
        return routes[order].to(device)

    def weights(self, routes: Tensor) -> Tensor:
        """One-hot routing weights [..., E] of routes [...]."""
        return F.one_hot(routes, len(self.experts)).float()


@dataclass(frozen=True, slots=True)
class OpShape:
    """Sizes of one attention call."""

    B: int
    T: int
    H: int = 8
    P: int = 128
    window: int = 256

    def to_dict(self) -> dict[str, int]:
        return {"B": self.B, "T": self.T, "H": self.H, "P": self.P, "window": self.window}


@dataclass(frozen=True, slots=True)
class OpData:
    """Heads [B, T, H, P] that want a gradient, and the gradient of what comes of them."""

    query: Tensor
    key: Tensor
    value: Tensor
    upstream: Tensor

    @property
    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


def make_heads(shape: OpShape, *, dtype: torch.dtype, device: torch.device, seed: int) -> OpData:
    """Normal random heads, the same for every implementation."""
    generator = torch.Generator(device).manual_seed(seed)
    size = (shape.B, shape.T, shape.H, shape.P)
    heads = [torch.randn(size, generator=generator, device=device).to(dtype) for _ in range(4)]
    query, key, value = (x.requires_grad_() for x in heads[:3])
    return OpData(query, key, value, heads[3])


def attention_flops(shape: OpShape, routes: Tensor, experts: Sequence[str]) -> float:
    """Operations of these experts' forward, as executed for routes [B, T]."""
    config = MetaAttentionConfig(
        hidden_size=shape.H * shape.P,
        num_attention_heads=shape.H,
        head_dim=shape.P,
        num_hidden_layers=1,
        window_size=shape.window,
        max_position_embeddings=shape.T,
        experts=tuple(experts),
    )
    weights = F.one_hot(routes.cpu(), len(EXPERTS)).float()
    return count_layer(config, weights[..., : len(experts)]).attention


def causal_flops(shape: OpShape) -> float:
    """Operations of full attention's forward: two products over the causal half."""
    return 4.0 * shape.B * shape.H * shape.P * shape.T * (shape.T + 1) / 2


Hook = Callable[[nn.Module, tuple[object, ...], Posterior], Posterior]


def fix_routes(
    model: nn.Module, routes: Sequence[Tensor], *, as_point: bool = False
) -> list[RemovableHandle]:
    """Send every token where it is told. Controllers still run, and are then overruled.

    Args:
        model: A routed model or layer.
        routes: Expert of every token ``[B, T]``, for each layer that has a choice.
        as_point: Believe in nothing else: weights of exactly one and zero also where routing is
            soft. Otherwise a Dirichlet, whose gradient is the controller's own.

    Returns:
        Handles by which to undo it.
    """
    layers = [layer for layer in attention_layers(model) if len(layer.expert_names) > 1]
    if len(layers) != len(routes):
        raise ShapeError(
            f"routes must be given for each of {len(layers)} layers, got {len(routes)}"
        )
    handles = []
    for layer, route in zip(layers, routes, strict=True):
        chosen = F.one_hot(route, len(layer.expert_names)).float()
        hook = _point_hook(chosen) if as_point else _dirichlet_hook(chosen)
        handles.append(layer.controller.register_forward_hook(hook))
    return handles


@contextmanager
def fixed_routes(
    model: nn.Module, routes: Sequence[Tensor], *, as_point: bool = False
) -> Iterator[None]:
    """:func:`fix_routes`, for a while."""
    handles = fix_routes(model, routes, as_point=as_point)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _point_hook(chosen: Tensor) -> Hook:
    def overrule(module: nn.Module, args: tuple[object, ...], answer: Posterior) -> Posterior:
        return PointPosterior(chosen)

    return overrule


def _dirichlet_hook(chosen: Tensor) -> Hook:
    concentration = 1.0 + CERTAIN * chosen  # [B, T, E]

    def overrule(module: nn.Module, args: tuple[object, ...], answer: Posterior) -> Posterior:
        if isinstance(answer, RoutingPosterior) and answer.concentration.requires_grad:
            own = answer.concentration
            return RoutingPosterior(own + (concentration - own).detach())
        return RoutingPosterior(concentration)

    return overrule
