"""What the controller sees of a token: its hidden state, norm and position."""

from meta_attention.ops.controller_logits import NUM_EXTRA_FEATURES, token_features

__all__ = ["NUM_EXTRA_FEATURES", "token_features"]
