"""A finished run as a checkpoint that others can load: half the bytes, tokenizer and a card."""

import json
from pathlib import Path
from typing import Any

import torch
from study_data import Cache
from study_evaluation import score
from study_run import CONFIG, RESULT
from study_variants import SCALES, Scale

from meta_attention import MetaAttentionForCausalLM
from meta_attention.errors import DataError
from meta_attention.evaluation.perplexity import evaluating

CARD = """---
library_name: meta-attention
pipeline_tag: text-generation
language: en
license: apache-2.0
---

# A small model that routes its tokens

{parameters:,} parameters, trained by `benchmarks/study_text.py` to show routing on a real text;
far too small to write well. Six layers: five of local attention over {window} tokens, and the
fourth, in which every token takes full or local attention.

```bash
meta-attention inspect {folder} --html routes.html \\
    --text "Elizabeth Bennet and Mr. Darcy danced; Mr. Darcy said nothing to Elizabeth Bennet."
meta-attention generate {folder} --temperature 0.7 --seed 0 \\
    --prompt "The old man looked at her and said"
```

| on {sequences} validation sequences of {length} tokens | |
|---|---|
| loss, one executed expert per token | {loss:.3f} nats per token |
| loss of the weights before they were rounded to bfloat16 | {exact:.3f} |
| attention FLOPs, full attention in all layers = 1 | {flops:.3f} |
| tokens of the routed layer on full attention | {share:.1%} |
| adaptivity of that layer | {adaptivity:.2f} nats |

- Trained on {tokens:.1f}M tokens ({steps:,} steps) of whole Project Gutenberg books and long
  articles of the English Wikipedia of 2018, BPE of {vocab:,} tokens; one seed ({seed}), {device},
  torch {torch}.
- Variant `{variant}` of commit {commit}, with {settings}.
- Controllers are kept in float32, as the model loads them; all else is bfloat16.
"""


def export(
    cache: Cache, run: Path, out: Path, *, commit: str, num_tokens: int = 1 << 16
) -> dict[str, Any]:
    """Write the checkpoint of a finished run to a new folder; the figures of its card.

    Args:
        cache: Text of the run.
        run: Its folder.
        out: Folder to make.
        commit: The code it was trained with.
        num_tokens: Of each corpus, to measure the loss of what is written.
    """
    if not (run / RESULT).exists() or not (run / "model").is_dir():
        raise DataError(f"{run} must be a finished run with its model/")
    if out.exists():
        raise DataError(f"{out} must not exist yet; choose another --out")
    result = json.loads((run / RESULT).read_text())
    config = json.loads((run / CONFIG).read_text())
    scale = Scale.of_run(config["settings"])
    texts = {name: text[:num_tokens] for name, text in cache.tokens("valid", "cpu").items()}
    model = MetaAttentionForCausalLM.from_pretrained(run / "model")
    with evaluating(model):
        exact = score(model, texts, scale, scale.length)
    for saved in (model.config, model.generation_config):
        saved.eos_token_id = cache.manifest["eos_token_id"]
    # controllers stay as they are
    model.bfloat16().save_pretrained(out)
    model = MetaAttentionForCausalLM.from_pretrained(out, dtype=torch.float32)
    with evaluating(model):
        found = score(model, texts, scale, scale.length)
    (out / "model.safetensors").chmod(0o644)
    cache.tokenizer.save_pretrained(out)
    routed = next(layer for layer in found["routing"]["layers"] if not layer["is_static"])
    changed = [f"{name}={value}" for name, value in _changes(config).items()]
    figures = {
        "folder": out.as_posix(),
        "commit": commit,
        "parameters": result["parameters"],
        "window": scale.window_size,
        "sequences": found["sequences"],
        "length": found["length"],
        "loss": found["loss"],
        "exact": exact["loss"],
        "flops": found["attention_flops"],
        "share": routed["top_share"]["full"],
        "adaptivity": routed["adaptivity"],
        "tokens": result["tokens"] / 1e6,
        "vocab": cache.vocab_size,
        "settings": ", ".join(changed) or "the settings of its scale",
    }
    figures |= {name: result[name] for name in ("steps", "seed", "device", "torch", "variant")}
    (out / "README.md").write_text(CARD.format(**figures))
    return figures


def _changes(config: dict[str, Any]) -> dict[str, Any]:
    """Settings of a run that are not those of its scale."""
    usual = SCALES[config["scale"]]
    return {
        name: value
        for name, value in config["settings"].items()
        if getattr(usual, name, None) != value
    }
