"""One decoding step of a routed layer: the newest token of every row, by that row's route.

    out[b] = sum_e weights[b, e] * expert_e(query[b])

A full expert reads the cache from the row's first token on, a local one its last positions (and, as
attention sinks, the first ones), the linear one its state. Only experts of weight above zero are
read; the state is updated whatever the route, so that a later token may take any expert.

Inference only: no gradient flows. No shape depends on routes or lengths and nothing waits for the
device, so a step can be captured in a CUDA graph and replayed as the cache fills.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from meta_attention.config import Impl
from meta_attention.errors import ConfigError, ShapeError
from meta_attention.ops.backend import choose_impl
from meta_attention.ops.heads import check_scores
from meta_attention.ops.routed_decode.reference import LinearStep, routed_decode_reference

__all__ = ["LinearStep", "routed_decode"]


def routed_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Tensor,
    windows: Mapping[int, int | None],
    *,
    length: Tensor,
    start: Tensor | None = None,
    is_token: Tensor | None = None,
    linear: LinearStep | None = None,
    num_sinks: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Attend from the newest token of every row, by its route.

    Args:
        query: ``[B, H, P]``.
        key: The cache ``[B, K, S, P]``, the newest token's key in it; each of the K key-value heads
            serves H / K query heads. S is its capacity: what lies past ``length`` is not read.
        value: ``[B, K, S, P]``.
        weights: Routing weights ``[B, E]``, or ``[B, G, E]`` where every key-value head has its own
            route (G = K, or 1).
        windows: Softmax experts by their index in ``weights``, and how many positions before its
            own each sees; None: all. Experts in neither ``windows`` nor ``linear`` add nothing.
        length: How many positions are filled, the newest included: whole number on the device,
            ``[]`` or ``[1]`` for all rows or ``[B]``, at most S.
        start: First position that is not padding ``[B]``. A row with none is padding throughout.
        is_token: ``[B]``, 0 where the newest token is padding.
        linear: The linear expert; its state is updated in place.
        num_sinks: How many first tokens of its row an expert with a window sees beside those in it.
        scale: Factor of the softmax experts' scores; default 1 / sqrt(P).
        softcap: Their scores become ``softcap * tanh(score / softcap)``; default: as they are.
        impl: ``"auto"``, ``"reference"`` or ``"triton"``.

    Returns:
        Rows ``[B, H, P]``, zero for padding, whose state stays as it was.
    """
    _check_cache(query, key, value)
    B, K, _, _ = key.shape
    if weights.dim() == 2:
        weights = weights.unsqueeze(1)
    if weights.dim() != 3 or weights.shape[0] != B or weights.shape[1] not in (1, K):
        raise ShapeError(
            f"weights must be [B, E] or [B, G, E] with B = {B} and G = 1 or {K} to match key "
            f"{list(key.shape)}, got {list(weights.shape)}"
        )
    _check_experts(windows, linear, weights.shape[2])
    check_scores(scale, softcap, num_sinks)
    if length.shape not in ((), (1,), (B,)):
        raise ShapeError(f"length must be [], [1] or [B] = [{B}], got {list(length.shape)}")
    for name, rows in (("start", start), ("is_token", is_token)):
        if rows is not None and rows.shape != (B,):
            raise ShapeError(f"{name} must be [B] = [{B}], got {list(rows.shape)}")
    if linear is not None:
        _check_linear(linear, query, key)
    tensors = {"weights": weights, "length": length, "start": start, "is_token": is_token}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.device != query.device:
            raise ShapeError(
                f"{name} must be on the device of query, {query.device}, got {tensor.device}"
            )
        if name != "weights" and tensor.is_floating_point():
            raise ShapeError(f"{name} must be of whole numbers, got {tensor.dtype}")

    if linear is None and torch.compiler.is_compiling():
        # one node of the graph, whatever runs: the graph stays whole
        reach = [-1 if window is None else window for window in windows.values()]
        experts = (list(windows), reach)
        where = (length, start, is_token)
        return _compiled(
            query, key, value, weights, *experts, *where, num_sinks, scale, softcap, impl
        )
    state = (length, start, is_token, linear)
    arguments = (query, key, value, weights, windows, *state, num_sinks, scale, softcap)
    if choose_impl("routed_decode", impl, query) == "triton":
        from meta_attention.ops.routed_decode.kernel import routed_decode_triton

        return routed_decode_triton(*arguments)
    return routed_decode_reference(*arguments)


@torch.library.custom_op("meta_attention::routed_decode", mutates_args=())
def _compiled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Tensor,
    experts: list[int],
    reach: list[int],
    length: Tensor,
    start: Tensor | None,
    is_token: Tensor | None,
    num_sinks: int,
    scale: float | None,
    softcap: float | None,
    impl: str,
) -> Tensor:
    """The step without a state, as ``torch.compile`` sees it; a reach of -1: all."""
    windows = {
        index: None if window < 0 else window for index, window in zip(experts, reach, strict=True)
    }
    state = (length, start, is_token, None)
    arguments = (query, key, value, weights, windows, *state, num_sinks, scale, softcap)
    if choose_impl("routed_decode", impl, query) == "triton":  # type: ignore[arg-type]
        from meta_attention.ops.routed_decode.kernel import routed_decode_triton

        # memory of a graph that is about to be captured must not be kept
        return routed_decode_triton(*arguments, keep_counters=False)
    return routed_decode_reference(*arguments)


@_compiled.register_fake
def _(query: Tensor, *args: object) -> Tensor:
    return query.new_empty(query.shape)


def _check_cache(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise unless query ``[B, H, P]`` fits the cache ``[B, K, S, P]``."""
    if query.dim() != 3 or 0 in query.shape:
        raise ShapeError(f"query must be [B, H, P] with no empty axis, got {list(query.shape)}")
    B, H, P = query.shape
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dim() != 4 or (tensor.shape[0], tensor.shape[3]) != (B, P) or 0 in tensor.shape:
            raise ShapeError(
                f"{name} must be [B, K, S, P] = [{B}, K, S, {P}] to match query "
                f"{list(query.shape)}, got {list(tensor.shape)}"
            )
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise ShapeError(
                f"{name} must be like query, {query.dtype} on {query.device}, "
                f"got {tensor.dtype} on {tensor.device}"
            )
        if tensor.stride(3) != 1:
            raise ShapeError(
                f"{name} must be contiguous along its last axis, got strides {tensor.stride()}; "
                "copying a cache at every step would cost more than reading it"
            )
    if key.shape != value.shape:
        raise ShapeError(
            f"key and value must have one shape, got {list(key.shape)} and {list(value.shape)}"
        )
    if H % key.shape[1]:
        raise ShapeError(
            f"query heads must be a multiple of key-value heads, got query {list(query.shape)} "
            f"and key {list(key.shape)}"
        )


def _check_experts(
    windows: Mapping[int, int | None], linear: LinearStep | None, num_experts: int
) -> None:
    """Raise unless windows and linear name experts that have weights, none of them twice."""
    named = [*windows] if linear is None else [*windows, linear.index]
    if not named:
        raise ConfigError("windows or linear must name at least one expert")
    for index in named:
        if not 0 <= index < num_experts:
            raise ConfigError(
                f"experts must have weights, 0 to {num_experts - 1}, got index {index}"
            )
    if linear is not None and linear.index in windows:
        raise ConfigError(f"expert {linear.index} must be in windows or linear, not in both")
    for window in windows.values():
        if window is not None and window < 1:
            raise ConfigError(f"window must be >= 1, got {window}")


def _check_linear(linear: LinearStep, query: Tensor, key: Tensor) -> None:
    B, H, P = query.shape
    K = key.shape[1]
    shapes = {
        "query": (B, H, P),
        "key": (B, K, P),
        "value": (B, K, P),
        "state": (B, K, P, P + 1),
        "decay": (B, K),
        "skip": (H,),
    }
    for name, shape in shapes.items():
        tensor: Tensor | None = getattr(linear, name)
        if tensor is None:
            continue
        if tensor.shape != shape or tensor.device != query.device:
            raise ShapeError(
                f"linear.{name} must be {list(shape)} on {query.device} to match query "
                f"{list(query.shape)} and key {list(key.shape)}, "
                f"got {list(tensor.shape)} on {tensor.device}"
            )
    if linear.skip is not None and linear.normalise:
        raise ConfigError("linear must have normalise=False where it has a skip")
    expected = torch.promote_types(query.dtype, torch.float32)
    if linear.state.dtype != expected or linear.state.stride(3) != 1:
        raise ShapeError(
            f"linear.state must be {expected} and contiguous along its last axis, as it is updated "
            f"in place, got {linear.state.dtype} with strides {linear.state.stride()}"
        )
