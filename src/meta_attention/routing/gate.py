"""How unsure the controller is of a token, by any of several signals, all pointing one way."""

from torch import Tensor

from meta_attention.controller import Posterior


def uncertainty_of(posterior: Posterior, signal: str) -> Tensor:
    """Uncertainty ``[B, T]`` or ``[B, T, G]`` by ``uncertainty_signal``: higher is less sure.

    The margin, which is high where the controller is sure, counts as 1 - margin.
    """
    value: Tensor = getattr(posterior, signal)
    return 1.0 - value if signal == "margin" else value
