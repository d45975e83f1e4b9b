"""Names that a configuration chooses from."""

from typing import Literal

Impl = Literal["auto", "reference", "triton"]
ControllerName = Literal["bayesian", "prior_free", "value"]
TrainingWeights = Literal["mean", "sample", "one_hot", "explore"]
RouteGradient = Literal["all", "chosen"]
RouteGranularity = Literal["token", "kv_head"]
DepthRouting = Literal["top_k", "threshold"]
RoutingName = Literal["soft", "hard", "gated"]
Signal = Literal["entropy", "mean_entropy", "margin", "mutual_information", "vacuity"]
ResidualName = Literal["sum", "attention", "block_attention"]

# what a controller without a prior can tell
SIGNALS_OF_WEIGHTS = ("mean_entropy", "margin")
