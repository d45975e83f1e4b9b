"""The attention function and the mask that adapted models run in Transformers.

Transformers lets a model's attention be exchanged by name. Ours has two names, for what is below
it: layers that are not routed run as before, by PyTorch's fused attention or in the open
("eager"), which soft-caps need.

    meta_attention         below it sdpa
    meta_attention_eager   below it eager

The mask is padding only, ``[B, S]`` as it was given, for the layers that see everything; layers
with a window of their own get the mask they always had. For a step with a static cache it has a
place for all there is room for.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    bidirectional_mask_function,
    causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from meta_attention.adapt.adaptation import is_same_in_all_rows, may_wait, read_length
from meta_attention.adapt.families import is_window
from meta_attention.adapt.memory import self_attention_cache
from meta_attention.adapt.router import Inputs, Router
from meta_attention.errors import ConfigError, ShapeError

# by what runs below them
IMPLEMENTATIONS = {"sdpa": "meta_attention", "eager": "meta_attention_eager"}


def hand_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before an attention module runs: what its router needs and its attention is not told.

    Attention modules hand on what they do not know themselves. Nothing is kept in between, where
    calls of several threads would find what is another's.
    """
    router: Router = module.router  # type: ignore[assignment]
    router.adaptation.begin(router.layer_idx)
    x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    rotation = kwargs.get("position_embeddings")
    cache = self_attention_cache(kwargs.get("past_key_values"))
    if cache is None:
        # under another name, if there is one
        caches = (self_attention_cache(given) for given in (*kwargs.values(), *args))
        cache = next((c for c in caches if c is not None), None)
    return args, kwargs | {"router_inputs": Inputs(x, cache, rotation)}


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    below: str,
    scaling: float | None = None,
    softcap: float | None = None,
    router_inputs: Inputs | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention ``[B, T, H, P]`` of a module: by its router, or as it was.

    Attention dropout is the base's own: routed layers have none.
    """
    router = getattr(module, "router", None)
    if isinstance(router, Router) and router.is_bypassed:
        router.adaptation.finish(router.layer_idx)
    elif isinstance(router, Router):
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ConfigError(
                "an adapted model takes an attention_mask [B, S] of 1 for tokens and 0 for "
                f"padding, got one of {attention_mask.dim()} axes"
            )
        if router_inputs is None:
            raise ConfigError(
                "an adapted attention module must be called itself, and hand on what it is called "
                "with: its router sees the hidden states"
            )
        heads = (query, key, value)
        rows = router(router_inputs, *heads, attention_mask, scale=scaling, softcap=softcap)
        return rows, None
    if attention_mask is None or attention_mask.dim() == 2:
        attention_mask = _mask_below(module, query, key, attention_mask, below)
    if softcap is not None:
        kwargs["softcap"] = softcap
    function = ALL_ATTENTION_FUNCTIONS.get_interface(below, _eager_of(module))
    return function(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


def _eager_of(module: nn.Module) -> Callable[..., Any]:
    """Attention in the open, as the model's own file has it."""
    function: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
    return function


def _mask_below(
    module: nn.Module, query: Tensor, key: Tensor, padding: Tensor | None, below: str
) -> Tensor | None:
    """The mask of a layer that sees everything, as its own attention takes it."""
    T, S = query.shape[2], key.shape[2]
    if below == "sdpa" and (T == 1 or (padding is None and S == T)):
        # a token sees all there is before it; of a whole text sdpa needs no mask
        if padding is None:
            return None
        # of a first token, a static cache has more room than the mask is of
        return F.pad(padding, (0, S - padding.shape[1]))[:, None, None, :]
    # what a static cache has room for goes on after the tokens that the mask is of
    filled = S if padding is None else padding.shape[1]
    if padding is not None and T > 1 and is_same_in_all_rows(padding):
        padding = None
    causal = bool(getattr(module, "is_causal", True))
    mask: Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS[below](
        batch_size=query.shape[0],
        q_length=T,
        kv_length=S,
        q_offset=filled - T,
        kv_offset=0,
        mask_function=causal_mask_function if causal else bidirectional_mask_function,
        attention_mask=padding,
        allow_is_causal_skip=causal,
        allow_is_bidirectional_skip=not causal,
        dtype=query.dtype,
        config=module.config,
        use_vmap=False,
        device=query.device,
    )
    return mask


def make_mask(
    *,
    below: str,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    config: Any = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """Padding ``[B, S]`` or None; for layers with a window, the mask they always had."""
    if is_window(local_size, config):
        mask: Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS[below](
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            config=config,
            use_vmap=use_vmap,
            device=device,
            **kwargs,
        )
        return mask
    is_plain = mask_function in (causal_mask_function, bidirectional_mask_function)
    if use_vmap or not (is_plain or local_size is not None):
        raise ConfigError(
            "adapted layers know causality and padding, but the model asks for another mask: of "
            "documents packed into a row (position_ids that start anew) or its own; give each "
            "text a row, and under torch.compile an attention_mask"
        )
    if attention_mask is not None and is_same_in_all_rows(attention_mask):
        # only ours say by it that there is no padding
        attention_mask = attention_mask.clone(memory_format=torch.contiguous_format)
    if isinstance(q_offset, Tensor) and q_length == 1:
        return _mask_of_step(attention_mask, batch_size, kv_length, q_offset)
    filled = read_length(q_offset) + q_length
    if attention_mask is None and kv_length > filled:
        # a static cache has room for more: the mask says how far it is filled
        return _one_row(torch.ones(filled, dtype=torch.bool, device=device), batch_size)
    _check_length(attention_mask, filled)
    # a new object for every call, so that layers can tell one call from another
    return None if attention_mask is None else attention_mask[:, :filled]


def _mask_of_step(mask: Tensor | None, B: int, S: int, position: Tensor) -> Tensor:
    """Mask ``[B, S]`` of all that a static cache has room for, whose length is on the device.

    So no shape changes from step to step, and nobody waits for the device.
    """
    is_filled = torch.arange(S, device=position.device) <= position
    if mask is None:
        return _one_row(is_filled, B)
    if mask.shape[1] < S:
        if may_wait(position):
            _check_length(mask, read_length(position) + 1)
        mask = F.pad(mask.bool(), (0, S - mask.shape[1]))
    return mask[:, :S] & is_filled


def _one_row(row: Tensor, B: int) -> Tensor:
    """A mask without padding, the same for all rows; its strides say that it is."""
    return row.as_strided((B, row.shape[0]), (0, 1))


def _check_length(mask: Tensor | None, filled: int) -> None:
    if mask is not None and mask.shape[1] < filled:
        raise ShapeError(
            f"attention_mask must be of all {filled} tokens, the cached ones included, got "
            f"{list(mask.shape)}"
        )


for _below, _name in IMPLEMENTATIONS.items():
    ALL_ATTENTION_FUNCTIONS.register(_name, partial(attend, below=_below))
    ALL_MASK_ATTENTION_FUNCTIONS.register(_name, partial(make_mask, below=_below))
