"""Time of an adapted model against its base: a prefill, and a step of batched decoding.

Both run the same text, as routes depend on it, in the same process, the base by the attention it
was loaded with. A cache of Transformers grows by copying itself at every step ("dynamic", what
``generate`` takes), or has room from the start ("static").

Small batches wait for Python to launch their kernels, the base's as well as ours. So both are also
replayed from a CUDA graph ("captured"): a prefill, and a step with a static cache, which is about
what ``generate`` does with one by ``torch.compile``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache, masking_utils

from meta_attention.adapt import routers_of
from meta_attention.bench.timing import GRAPH_WARM_UP, WARM_UP, Clock
from meta_attention.errors import ConfigError
from meta_attention.evaluation.compare import as_base, check_lengths
from meta_attention.evaluation.perplexity import Advance, evaluating

CACHES = ("dynamic", "static", "captured")


def time_adapted(
    model: PreTrainedModel,
    sequences: Tensor,
    lengths: Sequence[int],
    *,
    prefill_batches: Sequence[int] = (1,),
    decode_batch: int = 8,
    caches: Sequence[str] | None = None,
    clock: Clock | None = None,
    advance: Advance = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Milliseconds of the base and the adapted model, and their ratio, a row per measurement.

    Args:
        model: The adapted model, on the device and in the dtype to measure.
        sequences: Text ``[N, T]``; rows are repeated to fill a batch.
        lengths: At most T each. A step of decoding is timed at the end of such a length.
        prefill_batches: Rows of a prefill: few wait for launches, many for the device; none
            leaves it out.
        decode_batch: Rows of a step; 0 leaves it out.
        caches: Kinds of cache to decode with; "captured" also replays prefills. Default: all that
            the device and the experts can do.
        clock: What measures.
        advance: Called with the measurements made so far and in all.
    """
    check_lengths(model, lengths, sequences.shape[1])
    clock = clock or Clock(model.device, budget_ms=1000.0, min_runs=4, max_runs=16)
    caches = _caches(model, clock, caches)
    kinds = [("prefill", "dynamic", batch) for batch in prefill_batches]
    if "captured" in caches:
        kinds += [("prefill", "captured", batch) for batch in prefill_batches]
    kinds += [("decode", cache, decode_batch) for cache in caches] if decode_batch else []
    # measured at the longest length first: what does not fit is known at once
    plan = [(length, *kind) for length in sorted(lengths, reverse=True) for kind in kinds]
    rows = []
    with evaluating(model):
        for length, phase, cache, batch in plan:
            ids = take_rows(sequences, batch)[:, :length].to(model.device)
            times = {}
            for name in ("base", "adapted"):
                way: AbstractContextManager[None] = (
                    as_base(model) if name == "base" else nullcontext()
                )
                with way:
                    is_captured = cache == "captured"
                    if phase == "prefill":
                        call = make_prefill(model, ids)
                    else:
                        calls = WARM_UP + 2 * clock.max_runs
                        call = make_step(model, ids, cache, calls + is_captured * GRAPH_WARM_UP)
                    times[name] = (clock.time_graph if is_captured else clock.time)(call)
                    # its cache goes before the next one comes
                    del call
            rows.append(
                {
                    "phase": phase,
                    "cache": cache,
                    "length": length,
                    "batch": batch,
                    **{f"{name}_ms": timing.median_ms for name, timing in times.items()},
                    "speedup": times["base"].median_ms / times["adapted"].median_ms,
                    "timings": {name: asdict(timing) for name, timing in times.items()},
                }
            )
            advance(len(rows), len(plan))
    return sorted(rows, key=lambda row: row["length"])


def take_rows(sequences: Tensor, batch: int) -> Tensor:
    """So many of ``sequences`` [N, T], the same again where they do not suffice."""
    return sequences[torch.arange(batch) % len(sequences)]


def make_prefill(model: PreTrainedModel, ids: Tensor) -> Callable[[], object]:
    """A call that reads ``ids`` [B, T] and makes a cache of them."""

    def prefill() -> object:
        with _without_masks():
            return model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values

    return prefill


@contextmanager
def _without_masks() -> Iterator[None]:
    """Let a captured prefill have no mask where a call has none, as of a whole text.

    Older Transformers give it one whenever a graph is captured, with which PyTorch has no flash
    attention: the base would be timed at something slower than what it does.
    """
    own: Any = masking_utils
    asked, own.is_tracing = own.is_tracing, lambda tensor=None: False
    try:
        yield
    finally:
        own.is_tracing = asked


def make_step(model: PreTrainedModel, ids: Tensor, kind: str, steps: int) -> Callable[[], object]:
    """Decode the next token of every row; so many steps fit, the last at the end of the text.

    Which token is the next is counted on the device: a step that is replayed goes on, too.
    """
    T = ids.shape[1]
    if steps >= T:
        raise ConfigError(f"lengths must be above {steps}, the steps that are timed, got {T}")
    config = model.config.get_text_config()
    cache = (
        DynamicCache(config=config)
        if kind == "dynamic"
        else StaticCache(config=config, max_cache_len=T)
    )
    begin = T - steps
    model(input_ids=ids[:, :begin], past_key_values=cache, use_cache=True, logits_to_keep=1)
    position = torch.full((1,), begin, device=ids.device)

    def step() -> object:
        token = ids.index_select(1, position)
        position.add_(1)
        return model(
            input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits

    return step


def _caches(model: PreTrainedModel, clock: Clock, asked: Sequence[str] | None) -> Sequence[str]:
    """The kinds to measure; raise if one was asked for that cannot be."""
    problem = None
    if not clock.can_capture:
        problem = f"a CUDA device, got {model.device.type}"
    elif not all(router.can_be_captured for router in routers_of(model)):
        problem = "softmax experts, which ask nothing of the host in a step"
    if asked is None:
        return CACHES if problem is None else [kind for kind in CACHES if kind != "captured"]
    for cache in asked:
        if cache not in CACHES:
            raise ConfigError(f"caches must be of {', '.join(CACHES)}, got {cache!r}")
        if cache == "captured" and problem is not None:
            raise ConfigError(f"captured steps must have {problem}; leave them out of caches")
    return asked
