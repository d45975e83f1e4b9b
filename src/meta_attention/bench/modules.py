"""Layers and models with random weights and fixed routes, and whether they compute what they say.

A hard-routed module is right when it agrees with its twin of the same weights in which every expert
runs on every token and the chosen row is taken.
"""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from meta_attention.bench.data import Mix, fixed_routes
from meta_attention.bench.gates import gate_norm
from meta_attention.bench.rows import Gate
from meta_attention.config import MetaAttentionConfig
from meta_attention.layers import BayesianMetaAttentionLayer
from meta_attention.models import MetaAttentionForCausalLM

Run = Callable[[nn.Module], dict[str, Tensor]]  # named outputs, to be compared


def build_layer(
    config: MetaAttentionConfig, *, dtype: torch.dtype, device: torch.device, seed: int
) -> BayesianMetaAttentionLayer:
    """A layer with random weights, in evaluation mode."""
    torch.manual_seed(seed)
    with device:
        layer = BayesianMetaAttentionLayer(config)
    return layer.to(device, dtype).eval()


def build_model(
    config: MetaAttentionConfig, *, dtype: torch.dtype, device: torch.device, seed: int
) -> MetaAttentionForCausalLM:
    """A language model with random weights, in evaluation mode."""
    torch.manual_seed(seed)
    with device:
        model = MetaAttentionForCausalLM(config)
    return model.to(device, dtype).eval()  # type: ignore[arg-type]


def draw_layers(
    mix: Mix, layers: int, B: int, T: int, *, seed: int, device: torch.device
) -> list[Tensor]:
    """Routes [B, T] of every layer, each drawn for itself."""
    return [mix.draw(B, T, seed=seed + index, device=device) for index in range(layers)]


def millions_of(model: nn.Module) -> str:
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters"


def twin_gates(
    module: nn.Module,
    routes: Sequence[Tensor],
    run: Run,
    *,
    oracle_device: torch.device,
    label: str,
) -> list[Gate]:
    """Outputs of a hard-routed module against its dense twin.

    Args:
        module: The module, with ``config.routing`` hard; left as it is.
        routes: Where its tokens are sent, for each layer that has a choice.
        run: Runs a module and returns what is compared.
        oracle_device: Where the twin that counts as exact runs: in float64 on the CPU, and on a GPU
            in the next higher precision.
        label: Added to the names of the gates.
    """
    # no gradient of the belief: the twin has none
    with fixed_routes(module, routes, as_point=True):
        actual = run(module)
    twin = copy.deepcopy(module)
    # layers share the config of their model, and so do those of a copy
    twin.config.routing = "soft"  # type: ignore[union-attr]
    with fixed_routes(twin, routes, as_point=True):
        plain = run(twin)
    output = next(iter(actual.values()))
    is_exact = oracle_device.type == "cpu" or output.dtype == torch.float32
    twin.to(oracle_device, torch.float64 if is_exact else torch.float32)
    with fixed_routes(twin, [r.to(oracle_device) for r in routes], as_point=True):
        oracle = run(twin)
    return [
        gate_norm(f"{name}, {label}", actual[name], oracle[name], plain[name]) for name in oracle
    ]
