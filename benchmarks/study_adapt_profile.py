"""Where the time of an adapted model goes against its base: GPU time by kind of kernel.

Times are sums over the kernels of a call, so gaps between launches are not in them.
"""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from profile_routed import RUNS, WARM_UP, kernel_times
from study_adapt_data import AdaptCache
from study_adapt_measure import VARIANTS
from study_adapt_variants import Scale, load_variant
from study_jobs import say
from torch import Tensor
from transformers import PreTrainedModel

from meta_attention.bench.adapted_suite import make_prefill, make_step, take_rows
from meta_attention.bench.machine import describe_machine
from meta_attention.errors import ConfigError
from meta_attention.evaluation.compare import as_base
from meta_attention.evaluation.perplexity import evaluating

PROFILE = "profile.json"
# parts of the names of kernels; what has none of them is the rest of the model
KINDS = {
    "routing": ("route_tokens", "route_plan", "controller_logits", "split_weights"),
    "attention": ("routed_attention", "routed_decode", "sdpa", "flash", "fmha"),
}
# kernels that are kept, the longest first
MAX_KERNELS = 20


def profile_adapter(
    cache: AdaptCache, base: Path | None, out: Path, scale: Scale, name: str
) -> list[dict[str, Any]]:
    """Prefills and a step with a static cache of the longest length, base and adapter."""
    model = load_variant(cache, base, out, scale, name)
    if model.device.type != "cuda":
        raise ConfigError("a profile needs a GPU that torch can see")
    text = cache.sequences("test")[:, : scale.length]
    kinds = [("prefill", batch) for batch in scale.prefill_batches]
    rows: list[dict[str, Any]] = []
    with evaluating(model):
        for phase, batch in (*kinds, ("decode", scale.decode_batch)):
            ids = take_rows(text, batch).to(model.device)
            rows.append({"phase": phase, "batch": batch, "length": scale.length})
            for who in ("base", "adapted"):
                with as_base(model) if who == "base" else nullcontext():
                    rows[-1][who] = profile_call(model, phase, ids)
            shown = [f"{who} {show(rows[-1][who])}" for who in ("base", "adapted")]
            say(f"{name}, {phase} {batch} x {scale.length}: {'; '.join(shown)}")
    machine = describe_machine(model.device, commit=None)
    path = out / VARIANTS / name / PROFILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1, default=str) + "\n")
    return rows


def profile_call(model: PreTrainedModel, phase: str, ids: Tensor) -> dict[str, Any]:
    """Milliseconds by kind of kernel, and of the longest kernels."""
    if phase == "prefill":
        times = kernel_times(make_prefill(model, ids))
    else:
        times = kernel_times(make_step(model, ids, "static", WARM_UP + RUNS))
    longest = {kernel: us / 1e3 for kernel, us in list(times.items())[:MAX_KERNELS]}
    return by_kind(times) | {"kernels": longest}


def by_kind(times: Mapping[str, float]) -> dict[str, float]:
    """Milliseconds of each kind, and of all kernels, from microseconds of each."""
    sums = dict.fromkeys((*KINDS, "rest"), 0.0)
    for name, us in times.items():
        kind = next((k for k, parts in KINDS.items() if any(p in name for p in parts)), "rest")
        sums[kind] += us / 1e3
    return sums | {"all": sum(sums.values())}


def show(times: Mapping[str, Any]) -> str:
    kinds = ", ".join(f"{kind} {times[kind]:.2f}" for kind in (*KINDS, "rest"))
    return f"{times['all']:.2f} ms ({kinds})"
