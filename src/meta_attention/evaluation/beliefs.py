"""What every layer's controller believes while a model runs.

A model's output has the weights that were executed, and of a hard route these say nothing of how
sure the controller was. Here its posterior is kept, of any controller.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

from torch import Tensor, nn

from meta_attention.config import Signal
from meta_attention.controller import Posterior
from meta_attention.depth import MixtureOfDepthsBlock
from meta_attention.evaluation.forcing import attention_layers
from meta_attention.layers import LayerOutput
from meta_attention.routing.gate import uncertainty_of

SIGNALS: tuple[str, ...] = get_args(Signal)


@contextmanager
def watch_beliefs(model: nn.Module) -> Iterator[dict[int, Posterior]]:
    """Posterior of every layer that has a choice, by index, of the last pass; filled as it runs.

    Layers are counted as by ``forcing.attention_layers``, static ones included. Of tokens that
    passed a block by, it is the prior. Not for compiled models.
    """
    beliefs: dict[int, Posterior] = {}

    def keep(index: int) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, LayerOutput):
                beliefs[index] = output.posterior
            elif not isinstance(output, Tensor):  # that of the other half of a block
                beliefs[index] = output

        return hook

    # their controllers see tokens that enter only, packed
    blocks: dict[nn.Module, nn.Module] = {
        m.attention: m for m in model.modules() if isinstance(m, MixtureOfDepthsBlock)
    }
    handles = [
        blocks.get(layer, layer.controller).register_forward_hook(keep(index))
        for index, layer in enumerate(attention_layers(model))
        if len(layer.expert_names) > 1
    ]
    try:
        yield beliefs
    finally:
        for handle in handles:
            handle.remove()


def signals_of(posterior: Posterior) -> dict[str, Tensor]:
    """Every uncertainty signal the posterior has ``[B, T]``: higher is less sure.

    The mean over key-value heads where these have routes of their own.
    """
    signals = {}
    for name in SIGNALS:
        # a controller without a prior has no evidence to count
        if hasattr(posterior, name):
            value = uncertainty_of(posterior, name)
            signals[name] = value.mean(dim=2) if value.dim() == 3 else value
    return signals
