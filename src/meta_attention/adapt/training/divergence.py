"""How far a routed model's predictions are from its base's, without the logits of all tokens.

8,192 tokens of a vocabulary of 50,000 are 1.6 GB in float32, and several times that with what a
gradient keeps. So hidden states are kept, and logits are made of a few tokens at a time, in the
backward pass once more.

Shapes: B batch, T sequence, N tokens, D width, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from meta_attention.adapt.router import routed_as
from meta_attention.errors import ConfigError
from meta_attention.training.packing import IGNORED

# logits that are there at a time, in float32: 128 MB
LOGITS_AT_ONCE = 2**25


class Predictor:
    """Runs a causal language model as far as it must, and makes logits of what came out.

    Up to its last hidden states, where its head is known to be a matrix with or without a soft-cap.
    The head of another model may do more than its modules say; it is then run whole, and only what
    is made of its logits is made a few tokens at a time.

    Args:
        model: An adapted model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        head = model.get_output_embeddings()
        if head is None:
            raise ConfigError(
                f"a router is trained on predictions of tokens, but {type(model).__name__} makes "
                "none; load a causal language model"
            )
        self.head: Callable[[Tensor], Tensor] = head
        self.vocab_size = int(model.config.vocab_size)
        self.softcap: float | None = getattr(model.config, "final_logit_softcapping", None)
        self.is_whole = False
        self.is_whole = not self._is_known(model)

    def run(self, model: PreTrainedModel, input_ids: Tensor) -> Tensor:
        """Hidden states ``[B, T, D]``, or logits ``[B, T, V]`` where the head is not known."""
        if self.is_whole:
            out: Any = model(input_ids=input_ids, use_cache=False)
            whole: Tensor = out.logits
            return whole
        out = model.base_model(input_ids=input_ids, use_cache=False)
        hidden: Tensor = out.last_hidden_state
        return hidden

    def logits(self, states: Tensor) -> Tensor:
        """Logits ``[N, V]`` in float32 of what :meth:`run` gave of some tokens."""
        if self.is_whole:
            return states.float()
        logits = self.head(states).float()
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()

    @torch.no_grad()
    def _is_known(self, model: PreTrainedModel) -> bool:
        """Whether the head's modules give the logits of the model itself."""
        ids = torch.arange(min(8, self.vocab_size), device=model.device).unsqueeze(0)
        was_training = model.training
        model.eval()
        with routed_as(model, "full"):
            expected = model(input_ids=ids, use_cache=False).logits.float()
            found = self.logits(self.run(model, ids))
        model.train(was_training)
        # rounded once more or once less, also where float32 is multiplied in less
        error = max(1e-3, 8 * torch.finfo(model.dtype).eps) * expected.abs().max()
        return bool(((found - expected).abs() <= error).all())


def compare_predictions(
    predictor: Predictor,
    routed: Tensor,
    base: Tensor,
    labels: Tensor,
    *,
    tokens_at_once: int | None = None,
) -> Tensor:
    """Three figures of every token, in nats: ``[B, T, 3]``.

    The divergence KL(base || routed) of the predictions made at it, and the loss of the routed and
    of the base model on the token that follows; these are 0 where no label follows.

    Args:
        predictor: Makes logits.
        routed: From :meth:`Predictor.run`, ``[B, T, ...]``.
        base: Likewise, of the base; without a gradient.
        labels: Tokens ``[B, T]``, not shifted.
        tokens_at_once: Whose logits are there at a time; default: what fits ``LOGITS_AT_ONCE``.
    """
    size = tokens_at_once or max(1, LOGITS_AT_ONCE // predictor.vocab_size)
    following = F.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
    parts = zip(
        routed.flatten(0, 1).split(size),
        base.detach().flatten(0, 1).split(size),
        following.split(size),
        strict=True,
    )
    figures = []
    for part in parts:
        if routed.requires_grad:
            found: Tensor = checkpoint(
                _compare, predictor, *part, use_reentrant=False, preserve_rng_state=False
            )
        else:
            found = _compare(predictor, *part)
        figures.append(found)
    return torch.cat(figures).unflatten(0, labels.shape)


def _compare(predictor: Predictor, routed: Tensor, base: Tensor, following: Tensor) -> Tensor:
    """[N, 3] of N tokens."""
    with torch.no_grad():
        expected = predictor.logits(base).log_softmax(dim=-1)
    found = predictor.logits(routed).log_softmax(dim=-1)
    divergence = (expected.exp() * (expected - found)).sum(dim=-1)
    is_known = following != IGNORED
    index = following.masked_fill(~is_known, 0).unsqueeze(-1)
    loss, base_loss = (
        torch.where(is_known, -x.gather(-1, index).squeeze(-1), 0.0) for x in (found, expected)
    )
    return torch.stack([divergence, loss, base_loss], dim=-1)
