"""What is measured of a variant, and what must be known before: sensitivity and thresholds.

Shapes: N sequences, B of a batch, T their length, G key-value heads that have routes of their own.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from study_adapt_data import AdaptCache
from study_adapt_variants import (
    FULL,
    SENSITIVITY,
    Scale,
    Variant,
    adapt_config,
    find_variants,
    in_force,
    load_plain,
    load_variant,
    source_of,
)
from study_jobs import say
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from meta_attention.adapt import (
    AdaptConfig,
    collect_routing,
    load_tokenizer,
    routed_as,
    routers_of,
)
from meta_attention.adapt.adaptation import Way
from meta_attention.adapt.training.recall import RecallBlocks
from meta_attention.bench.adapted_suite import time_adapted
from meta_attention.bench.timing import Clock
from meta_attention.errors import ConfigError
from meta_attention.evaluation.adapted_flops import count_adapted, executed_routes
from meta_attention.evaluation.compare import compare_text, token_losses
from meta_attention.evaluation.perplexity import evaluating
from meta_attention.evaluation.tasks.facts import FactTask, measure_facts
from meta_attention.training.run import versions

VARIANTS, CONFIG, RESULT = "variants", "config.json", "result.json"
PASSAGE, TIMES = "passage.json", "times.json"
# halvings of the range of thresholds: a thousandth of it
HALVINGS = 10


def measure_sensitivity(
    cache: AdaptCache, base: Path | None, out: Path, scale: Scale
) -> dict[str, Any]:
    """Loss increase with one layer, or one head, local and all others full; once for a folder.

    Half of the text is that of routers' training in which something far back must be found again.
    """
    path = out / SENSITIVITY
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    if "loss_increase_by_head" in found:
        return found
    model = load_variant(cache, base, out, scale, adapt_config(scale, route_granularity="kv_head"))
    layers = [router.layer_idx for router in routers_of(model)]
    heads = range(routers_of(model)[0].adaptation.config.num_key_value_heads)

    full: dict[int, Way] = dict.fromkeys(layers, "full")

    def increase(count: int, ways: Sequence[Mapping[int, Way]]) -> dict[str, Any]:
        text = _text_to_choose_by(cache, base, scale, count)
        losses = []
        for way in ({}, *ways):
            with routed_as(model, {**full, **way}):
                losses.append(mean_loss(model, text, scale))
        return {"loss": losses[0], "increase": [x - losses[0] for x in losses[1:]]}

    if "loss_increase" not in found:
        by_layer = increase(scale.sensitivity_sequences, [{layer: "local"} for layer in layers])
        found = {"loss": by_layer["loss"], "loss_increase": by_layer["increase"]}
        found["sequences"] = scale.sensitivity_sequences
        for layer, nats in zip(layers, by_layer["increase"], strict=True):
            say(f"layer {layer} of {len(layers)} local: {nats:+.4f} nats")
    one_local = [tuple("local" if h == head else "full" for h in heads) for head in heads]
    ways = [{layer: way} for layer in layers for way in one_local]
    flat = increase(scale.head_sequences, ways)["increase"]
    rows = [flat[i : i + len(heads)] for i in range(0, len(flat), len(heads))]
    say(f"{len(flat)} heads local, one at a time: {min(flat):+.4f} to {max(flat):+.4f} nats")
    found |= {"loss_increase_by_head": rows, "head_sequences": scale.head_sequences}
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    return found


def _text_to_choose_by(cache: AdaptCache, base: Path | None, scale: Scale, count: int) -> Tensor:
    """Sequences ``[N, T]``, none of those that variants are compared on."""
    text = cache.sequences("valid")[:count, : scale.length]
    tokenizer = load_tokenizer(str(cache.folder / "base" if base is None else base))
    rows = RecallBlocks(
        [{"input_ids": ids} for ids in text], tokenizer, share=0.5, window=scale.window_size
    )
    return torch.stack([rows[index]["input_ids"] for index in range(len(rows))])


def mean_loss(model: PreTrainedModel, text: Tensor, scale: Scale) -> float:
    """Nats per token."""
    losses = []
    with evaluating(model):
        for ids in text.split(batch_of(scale, text.shape[1])):
            losses.append(token_losses(model, ids.to(model.device)).double().mean(dim=1).cpu())
    return torch.cat(losses).mean().item()


def batch_of(scale: Scale, length: int) -> int:
    return max(1, scale.tokens_at_once // length)


def set_threshold(model: PreTrainedModel, variant: Variant, text: Tensor, scale: Scale) -> float:
    """The threshold on the belief in full attention that makes a variant cost what it shall."""
    assert variant.cost is not None
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        with in_force(model, variant, threshold=middle):
            share = attention_share(model, text, scale)
        low, high = (middle, high) if share > variant.cost else (low, middle)
    return (low + high) / 2


def attention_share(model: PreTrainedModel, text: Tensor, scale: Scale) -> float:
    """Attention FLOPs of the routes in force, as a share of the base's."""
    routed = whole = 0.0
    with evaluating(model):
        for ids in text.split(batch_of(scale, text.shape[1])):
            with collect_routing(model) as record:
                model(input_ids=ids.to(model.device), use_cache=False, logits_to_keep=1)
            B, T = ids.shape
            counted = count_adapted(model, executed_routes(record), batch=B, length=T)
            routed, whole = routed + counted.routed.attention, whole + counted.base.attention
    return routed / whole


def measure_variant(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: AdaptCache,
    scale: Scale,
    variant: Variant,
    *,
    shares: Mapping[int, Any] | None = None,
    is_chat: bool = False,
) -> dict[str, Any]:
    """Losses, counted FLOPs, answers, and who gets full attention."""
    begin = time.time()
    test = cache.sequences("test")[: scale.sequences, : scale.length]
    threshold = None
    if variant.cost is not None:
        text = cache.sequences("valid")[: scale.calibration_sequences, : scale.length]
        threshold = set_threshold(model, variant, text, scale)
    with in_force(model, variant, shares=shares, threshold=threshold):
        batch = batch_of(scale, scale.length)
        text_figures = compare_text(model, test, scale.lengths, batch_size=batch).to_dict()
        facts = {
            name: [
                measure_facts(
                    model,
                    FactTask.of(
                        tokenizer,
                        test.flatten().numpy(),
                        length=length,
                        is_chat=is_chat,
                        facts=number,
                    ),
                    per_depth=scale.questions,
                    batch_size=batch_of(scale, length),
                ).to_dict()
                for length in scale.lengths
            ]
            for name, number in (("one", 1), ("several", scale.several))
        }
        routing = routing_of(model, test[: scale.calibration_sequences], scale)
        passage = passage_of(model, tokenizer, test[:1], scale)
    return {
        "variant": variant.to_dict(),
        "base": cache.base_name,
        "device": _device_name(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "versions": versions(),
        "threshold": threshold,
        "is_chat": is_chat,
        "text": text_figures,
        "facts": facts,
        "routing": routing,
        "passage": passage,
        "seconds": time.time() - begin,
    }


def routing_of(model: PreTrainedModel, text: Tensor, scale: Scale) -> dict[str, Any]:
    """Shares of the experts by layer, or by head where heads have routes; routed layers only."""
    totals: dict[int, Tensor] = {}
    rows = 0
    with evaluating(model):
        for ids in text.split(batch_of(scale, text.shape[1])):
            with collect_routing(model) as record:
                model(input_ids=ids.to(model.device), use_cache=False, logits_to_keep=1)
            rows += len(ids)
            for index, out in record.layers.items():
                chosen = F.one_hot(out.routes.expert, out.routes.weights.shape[-1])
                share = chosen.float().mean(dim=1).sum(dim=0).cpu()  # [E] or [G, E]
                totals[index] = totals.get(index, torch.zeros_like(share)) + share
    return {str(index): (total / rows).tolist() for index, total in totals.items()}


def passage_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: Tensor, scale: Scale
) -> dict[str, Any]:
    """The last tokens of a text, and how many of their heads take full attention, by layer."""
    with evaluating(model), collect_routing(model) as record:
        model(input_ids=ids.to(model.device), use_cache=False, logits_to_keep=1)
    shown = ids[0, -scale.passage :].tolist()
    on_full = {
        str(index): (out.routes.expert[0, -scale.passage :] == FULL)
        .float()
        .reshape(scale.passage, -1)
        .mean(dim=1)
        .tolist()
        for index, out in record.layers.items()
    }
    return {"tokens": [tokenizer.decode([token]) for token in shown], "on_full": on_full}


def measure_missing(
    cache: AdaptCache,
    base: Path | None,
    out: Path,
    scale: Scale,
    variants: list[Variant],
    *,
    is_chat: bool = False,
    stop_at: float = float("inf"),
) -> int:
    """Measure what has no result yet; how many are left when time is over."""
    tokenizer = load_tokenizer(str(cache.folder / "base" if base is None else base))
    _check_same(out, _settings(cache, scale) | {"is_chat": is_chat})
    missing = [v for v in variants if not (out / VARIANTS / v.name / RESULT).is_file()]
    # those of an adapter together, so that it is loaded once; random ones after its own
    missing.sort(key=lambda v: (v.adapter or "", v.random))
    model: PreTrainedModel | None = None
    loaded: str | AdaptConfig | None = None
    for number, variant in enumerate(missing):
        if time.time() >= stop_at:
            say(f"time is over: {len(missing) - number} left; run the same command again")
            return len(missing) - number
        shares = read_shares(out, variant) if variant.random else None
        folder = out / VARIANTS / variant.name
        folder.mkdir(parents=True, exist_ok=True)
        config = {"variant": variant.to_dict(), "is_chat": is_chat} | _settings(cache, scale)
        (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
        source = source_of(variant, scale)
        if model is None or loaded != source:
            model = None  # before the next one comes
            model, loaded = load_variant(cache, base, out, scale, source), source
        result = measure_variant(
            model, tokenizer, cache, scale, variant, shares=shares, is_chat=is_chat
        )
        (folder / PASSAGE).write_text(json.dumps(result.pop("passage"), indent=1) + "\n")
        (folder / RESULT).write_text(json.dumps(result, indent=1) + "\n")
        row = result["text"]["lengths"][-1]
        answers = result["facts"]["one"][-1]
        say(
            f"{number + 1}/{len(missing)} {variant.name}: attention {row['attention_share']:.3f}, "
            f"loss {row['loss_increase']:+.4f}, facts {answers['accuracy']:.2f}, "
            f"{result['seconds']:.0f} s"
        )
    return 0


def _settings(cache: AdaptCache, scale: Scale) -> dict[str, Any]:
    """What results must agree in to be compared."""
    text = {k: v for k, v in cache.manifest.items() if k != "tokens"}
    # settings of training are in the adapters
    sizes = {k: v for k, v in asdict(scale).items() if k not in ("training", "decode_batch")}
    return json.loads(json.dumps({"scale": sizes, "text": text}))


def _check_same(out: Path, settings: dict[str, Any]) -> None:
    """Results of one folder are of one text and one set of sizes."""
    for path in (out / VARIANTS).glob(f"*/{CONFIG}"):
        before = json.loads(path.read_text())
        for name, value in settings.items():
            if before[name] != value:
                raise ConfigError(
                    f"results of one folder must agree in their {name}, and that of {path} "
                    "differs; give another --out"
                )


def read_shares(out: Path, variant: Variant) -> dict[int, Any]:
    """Shares of the experts by layer, as measured of the adapter itself."""
    path = out / VARIANTS / str(variant.adapter) / RESULT
    if not path.is_file():
        raise ConfigError(
            f"{variant.name} has the shares of {variant.adapter}, which is not measured; measure "
            f"that first, or leave out --variants"
        )
    routing = json.loads(path.read_text())["routing"]
    return {int(index): share for index, share in routing.items()}


def time_variants(
    cache: AdaptCache,
    base: Path | None,
    out: Path,
    scale: Scale,
    names: list[str],
    *,
    clock: Clock | None = None,
    stop_at: float = float("inf"),
) -> int:
    """Prefill and batched decoding of variants against their base; how many are left.

    What is measured of a length is kept, the longest first: if time is over, that is known.
    """
    num_layers = load_plain(cache, base).config.num_hidden_layers
    known = {v.name: v for v in find_variants(out, scale, num_layers)}
    for number, name in enumerate(names):
        path = out / VARIANTS / name / TIMES
        lengths = set(scale.lengths) - {row["length"] for row in _read_times(path)}
        if not lengths:
            continue
        if name not in known:
            raise ConfigError(f"a variant must be one of {', '.join(known)}, got {name!r}")
        variant = known[name]
        if variant.random or variant.cost is not None:
            raise ConfigError(f"{name} only stands in for routes: its time means nothing")
        model = None
        for length in sorted(lengths, reverse=True):
            if time.time() >= stop_at:
                say(f"time is over: {len(names) - number} left; run the same command again")
                return len(names) - number
            if model is None:
                model = load_variant(cache, base, out, scale, source_of(variant, scale))
                _check_same_place(path, model)
            _time_length(model, variant, cache, scale, length, path, clock)
        del model
    return 0


def _time_length(
    model: PreTrainedModel,
    variant: Variant,
    cache: AdaptCache,
    scale: Scale,
    length: int,
    path: Path,
    clock: Clock | None,
) -> None:
    """Times of one length, added to those of others."""
    with in_force(model, variant):
        rows = time_adapted(
            model,
            cache.sequences("test")[:, : scale.length],
            [length],
            prefill_batches=scale.prefill_batches,
            decode_batch=scale.decode_batch,
            clock=clock,
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    both = sorted(_read_times(path) + rows, key=lambda row: row["length"])
    figures = _where(model) | {"rows": both}
    path.write_text(json.dumps(figures, indent=1) + "\n")
    shown = [f"{r['phase']} {r['cache']} {r['batch']}: {r['speedup']:.2f} x" for r in rows]
    say(f"{variant.name}, {length} tokens: {'; '.join(shown)}")


def _where(model: PreTrainedModel) -> dict[str, str]:
    return {"device": _device_name(model), "dtype": str(model.dtype)}


def _check_same_place(path: Path, model: PreTrainedModel) -> None:
    """Times of several lengths are compared, so they must be of one kind of device."""
    kept = json.loads(path.read_text()) if path.is_file() else {}
    for name, here in _where(model).items():
        if kept.get(name, here) != here:
            raise ConfigError(
                f"{path} has times of {name} {kept[name]}, here it is {here}; go on there, or "
                "remove it to measure all lengths again"
            )


def _read_times(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["rows"] if path.is_file() else []


def _device_name(model: PreTrainedModel) -> str:
    is_cuda = model.device.type == "cuda"
    return torch.cuda.get_device_name(model.device) if is_cuda else "CPU"
