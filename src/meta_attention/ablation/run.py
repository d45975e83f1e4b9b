"""One run: train a variant, measure it, and leave its figures in a folder.

The folder is that of ``meta-attention train`` (``run.json`` with all settings, ``metrics.jsonl``,
the model and its tokenizer), with ``routing.jsonl``: the same figures on held-out text over
training, and ``result.json``: all figures of the trained model. A run is done when that is there;
before, it goes on from its newest checkpoint.
"""

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meta_attention.ablation.measure import (
    measure,
    measure_gates,
    measure_uncertainty,
    read_passage,
)
from meta_attention.ablation.probes import DRAWS, GradientProbe, Probe, RoutingProbe
from meta_attention.ablation.variants import Variant
from meta_attention.errors import ConfigError, DataError
from meta_attention.models import MetaAttentionForCausalLM
from meta_attention.training.checkpoints import list_checkpoints
from meta_attention.training.data import Blocks, read_blocks
from meta_attention.training.model_settings import Settings
from meta_attention.training.packing import PackedDataset
from meta_attention.training.run import RUN_FILE, read_run, train_model

RESULT_FILE = "result.json"
# of held-out text: for the curves of a run, and for the passage a report shows
CURVE_BLOCKS, PASSAGE_BLOCKS = 32, 6


@dataclass(frozen=True, slots=True)
class Job:
    """One variant and one seed, and where their run goes."""

    variant: Variant
    seed: int
    settings: Settings
    folder: Path

    @property
    def is_done(self) -> bool:
        return (self.folder / RESULT_FILE).is_file()

    @property
    def work(self) -> float:
        """How long it takes, in steps of a routed model."""
        return self.settings.steps * (0.45 if self.variant.is_static else 1.0)

    def check_same(self) -> None:
        """Raise if the folder holds a run of other settings."""
        if not (self.folder / RUN_FILE).exists():
            return
        saved = Settings.from_dict(read_run(self.folder)["settings"])
        for name, (ours, theirs) in self.settings.differences(saved).items():
            raise ConfigError(
                f"{self.folder} holds a run whose {name} is {theirs!r}, not {ours!r}; choose "
                "another folder with --out"
            )


def execute(job: Job) -> dict[str, Any]:
    """Train and measure what is missing; the result, as ``result.json`` has it."""
    job.check_same()
    path = job.folder / RESULT_FILE
    if job.is_done:
        return json.loads(path.read_text("utf-8"))
    begin = time.perf_counter()
    blocks = read_blocks(job.settings, None)
    held_out = _ids_of(blocks.valid)
    probes: list[Probe] = [RoutingProbe(job.folder, held_out[:CURVE_BLOCKS])]
    if "gradients" in job.variant.probes:
        probes.append(GradientProbe(job.folder, _batches(blocks, job.settings)))
    is_begun = (job.folder / RUN_FILE).exists()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record = train_model(
        job.settings,
        job.folder,
        resume=is_begun,
        # many short steps, several runs side by side: Python could not launch them fast enough
        capture=device == "cuda",
        callbacks=tuple(probes),
    )
    model = MetaAttentionForCausalLM.from_pretrained(job.folder).to(device)  # type: ignore[arg-type]
    result = {
        "variant": job.variant.name,
        "title": job.variant.title,
        "value": job.variant.value,
        "seed": job.seed,
        "is_static": job.variant.is_static,
        "steps": job.settings.steps,
        "parameters": record["parameters"],
        "text": record["data"],
        "held_out": record["eval_data"],
        **measure_model(model, blocks, held_out),
        "machine": {
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "versions": record["versions"],
            # of this part of the run, if it was stopped before
            "seconds": time.perf_counter() - begin,
        },
    }
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps(result) + "\n", "utf-8")
    draft.replace(path)
    for checkpoint in list_checkpoints(job.folder):
        shutil.rmtree(checkpoint)
    return result


def measure_model(
    model: MetaAttentionForCausalLM, blocks: Blocks, held_out: Tensor
) -> dict[str, Any]:
    """All figures of a trained model on held-out text."""
    figures: dict[str, Any] = {
        "soft": measure(model, held_out, "soft", forced=True),
        "hard": measure(model, held_out, "hard", forced=True),
        "passage": read_passage(model, blocks.tokenizer, held_out[:PASSAGE_BLOCKS]),
    }
    uncertainty = measure_uncertainty(model, held_out)
    if uncertainty.values:
        figures["histograms"] = uncertainty.histograms()
        figures["gates"] = measure_gates(model, held_out, uncertainty)
    return figures


def _ids_of(blocks: Any) -> Tensor:
    """All tokens of a dataset ``[N, T]``, int64."""
    assert isinstance(blocks, PackedDataset)
    return torch.stack([blocks[index]["input_ids"] for index in range(len(blocks))])


def _batches(blocks: Blocks, settings: Settings) -> list[Tensor]:
    """Batches of training text to compare gradients on, spread over all of it."""
    needed, found = DRAWS * settings.batch_size, len(blocks.train)
    if found < needed:
        raise DataError(
            f"the training text must have {needed} blocks of {settings.length} tokens, to compare "
            f"gradients of {DRAWS} batches, got {found}; give more text"
        )
    ids = [blocks.train[i * (found // needed)]["input_ids"] for i in range(needed)]
    return list(torch.stack(ids).split(settings.batch_size))
