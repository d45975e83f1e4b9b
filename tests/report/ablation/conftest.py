"""An ablation on disk, of models that were measured but never trained."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meta_attention.ablation.measure import measure
from meta_attention.ablation.run import Job, measure_model
from meta_attention.ablation.sweep import make_plan
from meta_attention.ablation.variants import paper_base
from meta_attention.models import MetaAttentionForCausalLM
from meta_attention.training.corpus import Corpus
from meta_attention.training.data import Blocks
from meta_attention.training.tokenizer import build_tokenizer

SEEDS = 3
TEXT = "The <b>keeper</b> & the {{ships}}. "  # must be escaped
FACTS = {"name": "a <text>", "bytes": 1000}


@pytest.fixture(scope="session")
def ablation_folder(tmp_path_factory) -> Path:
    """Finished runs of every kind of experiment; one run of the last seed is missing."""
    out = tmp_path_factory.mktemp("ablation") / "out"
    base = replace(paper_base(), length=32, hidden_size=16, heads=2, window_size=4)
    experiments = ("ablation", "prior-floor", "kl-schedule", "gradient-variance")
    plan = make_plan(out, base, experiments=experiments, seeds=SEEDS, is_short=True)
    plan.save()
    measured: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for number, job in enumerate(plan.jobs):
        if (job.variant.name, job.seed) == ("linear", SEEDS - 1):
            continue
        # what was never trained differs by its architecture only
        config = job.settings.model_config(vocab_size=100)
        key = f"{config.controller} {config.experts} {config.layer_experts}"
        if key not in measured:
            measured[key] = _measure(job)
        write_run(job, *measured[key], shift=0.01 * number)
    return out


def write_run(job: Job, result: dict[str, Any], row: dict[str, Any], shift: float) -> None:
    """A finished run whose losses are a little higher than what was measured."""
    job.folder.mkdir(parents=True)
    own = json.loads(json.dumps(result)) | {
        "variant": job.variant.name,
        "title": job.variant.title,
        "value": job.variant.value,
        "seed": job.seed,
        "is_static": job.variant.is_static,
        "steps": 4,
        "parameters": 1000,
        "text": FACTS,
        "held_out": FACTS,
        "machine": {"device": "cpu", "versions": {"torch": "2"}, "seconds": 1.0},
    }
    row = json.loads(json.dumps(row))
    for mode in ("soft", "hard"):
        own[mode]["loss"] += shift
        own[mode]["perplexity"] *= 1.0 + shift
        row[mode]["loss"] += shift
    (job.folder / "result.json").write_text(json.dumps(own))
    lines = [json.dumps({"step": step} | row) for step in (1, 2, 4)]
    (job.folder / "routing.jsonl").write_text("\n".join(lines) + "\n")
    if job.variant.probes:
        kinds = ("norm", "data_noise", "sample_noise", "one_hot_noise")
        layers = [dict.fromkeys(kinds, 0.5) | {"layer": layer} for layer in range(2)]
        (job.folder / "gradients.jsonl").write_text(json.dumps({"step": 1, "layers": layers}))


def _measure(job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
    """All figures of an untrained model, and a row of its training."""
    tokenizer = build_tokenizer("characters", Corpus("text", [TEXT * 50]))
    ids = torch.tensor(tokenizer(TEXT * 8)["input_ids"])
    held_out = ids[: len(ids) // 32 * 32].view(-1, 32)
    blocks = Blocks(tokenizer, None, None, "text", None)  # type: ignore[arg-type]
    torch.manual_seed(0)
    config = job.settings.model_config(vocab_size=len(tokenizer))
    config.initializer_range = 0.3
    model = MetaAttentionForCausalLM(config)
    row = {mode: measure(model, held_out, mode) for mode in ("soft", "hard")}
    return measure_model(model, blocks, held_out), row
