"""A trained model of the study on validation text: loss by corpus, position and word, and routes.

Shapes: N sequences, T their length.
"""

import math
import statistics
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from study_data import Cache
from study_variants import Scale
from torch import Tensor

from meta_attention import MetaAttentionForCausalLM
from meta_attention.errors import DataError
from meta_attention.evaluation.flops import Flops, count_full, count_model
from meta_attention.evaluation.perplexity import evaluating, measure_perplexity
from meta_attention.evaluation.routing import RoutingTally, routed_as


def evaluate(model: MetaAttentionForCausalLM, cache: Cache, scale: Scale) -> dict[str, Any]:
    """Hard and soft at the length of training, hard at the longest, and by word."""
    device = str(model.device)
    texts = held_out(cache, device, scale.eval_tokens)
    result: dict[str, Any] = {}
    with evaluating(model):
        result["hard"] = score(model, texts, scale, scale.length)
        if scale.longest > scale.length:
            result["long"] = score(model, texts, scale, scale.longest)
        has_choice = any(len(block.attention.expert_names) > 1 for block in model.model.layers)
        result["soft"] = result["hard"]
        if has_choice:
            with routed_as(model, "soft"):
                result["soft"] = score(model, texts, scale, scale.length)
    words = {}
    for name, text, num_words in cache.word_texts():
        with autocast(device):
            scored = measure_perplexity(
                model,
                cache.tokenizer,
                text,
                length=scale.length,
                stride=scale.length // 2,
                batch_size=scale.batch_size,
            )
        words[name] = {
            "nats": scored.nats,
            "words": num_words,
            "word_perplexity": math.exp(min(scored.nats / num_words, 700.0)),
            "bits_per_byte": scored.bits_per_byte,
        }
    return result | {"words": words}


def evaluate_hard(
    model: MetaAttentionForCausalLM, cache: Cache, scale: Scale, num_tokens: int | None = None
) -> dict[str, Any]:
    """The first of these alone, on so many tokens of each corpus."""
    texts = held_out(cache, str(model.device), num_tokens or scale.eval_tokens)
    with evaluating(model):
        return score(model, texts, scale, scale.length)


def held_out(cache: Cache, device: str, num_tokens: int) -> dict[str, Tensor]:
    return {name: text[:num_tokens] for name, text in cache.tokens("valid", device).items()}


def score(
    model: MetaAttentionForCausalLM, texts: dict[str, Tensor], scale: Scale, length: int
) -> dict[str, Any]:
    """Loss, by corpus and by position, what was executed for it, and how tokens were routed."""
    device = model.device
    batch_size = max(1, scale.batch_size * scale.length // length)
    by_corpus: dict[str, Tensor] = {}  # nats at each position [T - 1]
    tally = RoutingTally.of(model)
    total, num_sequences = Flops(), 0  # of a sequence, by corpus
    for name, text in texts.items():
        nats = torch.zeros(length - 1, dtype=torch.float64, device=device)
        blocks = text[: len(text) // length * length].view(-1, length).long()  # [N, T]
        if not len(blocks):
            continue
        executed = Flops()
        for ids in blocks.split(batch_size):
            with autocast(str(device)):
                out = model(ids, use_cache=False, output_routing=True)
            logits = out.logits[:, :-1].flatten(0, 1).float()
            losses = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
            nats += losses.view(len(ids), -1).sum(dim=0, dtype=torch.float64)
            tally.add(out.routing_weights, None, out.concentrations)
            executed += count_model(model.config, out.routing_weights)
        by_corpus[name] = nats / len(blocks)
        total += executed.per(len(blocks))
        num_sequences += len(blocks)
    if not by_corpus:
        raise DataError(
            f"the validation text must have {length} tokens at least; prepare a larger cache"
        )
    # corpora count the same, however long
    by_position = torch.stack(list(by_corpus.values())).mean(dim=0)
    total = total.per(len(by_corpus))
    full = count_full(model.config, length)
    return {
        "length": length,
        "sequences": num_sequences,
        "loss": by_position.mean().item(),
        "loss_by_corpus": {name: loss.mean().item() for name, loss in by_corpus.items()},
        "loss_by_position": in_buckets(by_position.tolist()),
        "attention_flops_per_token": total.attention / length,
        # shares of what attention costs where every layer is full, and of what such a model does
        "attention_flops": total.attention / full.attention,
        "attention_and_controller_flops": (total.attention + total.controller) / full.attention,
        "model_flops": total.model / full.model,
        "routing": tally.summary().to_dict(),
    }


def in_buckets(by_position: list[float]) -> dict[str, float]:
    """Mean loss of targets at positions 1 to 127, 128 to 255, 256 to 511, and so on."""
    buckets, begin, end = {}, 1, 128
    while begin <= len(by_position):
        values = by_position[begin - 1 : end - 1]
        buckets[f"{begin}-{begin + len(values) - 1}"] = statistics.mean(values)
        begin, end = end, 2 * end
    return buckets


def autocast(device: str) -> AbstractContextManager[Any]:
    """Bfloat16 on a GPU, where weights stay in float32."""
    kind = torch.device(device).type
    return torch.autocast(kind, dtype=torch.bfloat16, enabled=kind == "cuda")
