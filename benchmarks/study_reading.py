"""A finished run of the study, and what its model makes of a text: predictions, routes, beliefs.

Shapes: N sequences, T their length, R routed layers, G key-value heads that have routes of their
own, E experts, V vocabulary. What is said of a token at a position is said of the prediction made
there, so that the last of a sequence is left out: T - 1.
"""

import json
import sysconfig
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from study_data import BYTES_PER_TOKEN, Cache
from study_evaluation import autocast
from study_run import CONFIG, METRICS, RESULT
from study_variants import Scale
from torch import Tensor

from meta_attention import MetaAttentionForCausalLM
from meta_attention.controller import Posterior
from meta_attention.errors import DataError
from meta_attention.evaluation.beliefs import signals_of, watch_beliefs
from meta_attention.evaluation.forcing import attention_layers, force_routes
from meta_attention.training.tokenizer import encode_documents

FULL = "full"


@dataclass(frozen=True, slots=True)
class Run:
    """A folder that ``study_run`` has finished."""

    folder: Path
    settings: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> "Run":
        for name in (CONFIG, RESULT, METRICS, "model"):
            if not (folder / name).exists():
                raise DataError(
                    f"a finished run must have {name}, but {folder} has none; finish it with: "
                    "python benchmarks/study_text.py run"
                )
        return cls(folder, json.loads((folder / CONFIG).read_text()))

    @property
    def scale(self) -> Scale:
        return Scale.of_run(self.settings["settings"])

    @property
    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(row) for row in (self.folder / METRICS).read_text().splitlines()]

    def load(self, device: str) -> MetaAttentionForCausalLM:
        """The model, with hard routes."""
        model = MetaAttentionForCausalLM.from_pretrained(self.folder / "model").eval()
        model.to(torch.device(device))
        model.config.routing = "hard"
        return model


def find_runs(folders: list[Path]) -> list[Path]:
    """Folders of finished runs, given as they are or as the folder they lie in."""
    found = []
    for folder in folders:
        if (folder / RESULT).is_file():
            found.append(folder)
        else:
            found += sorted(path.parent for path in folder.glob(f"*/{RESULT}"))
    if not found:
        raise DataError(
            f"there must be a finished run in {', '.join(map(str, folders))}, but no {RESULT} was "
            "found there or one folder below"
        )
    return found


# --- text ---


def in_domain(cache: Cache, length: int, num_tokens: int, device: str) -> dict[str, Tensor]:
    """Validation text of each corpus in sequences [N, T]."""
    texts = {
        name: text[: min(len(text), num_tokens) // length * length].view(-1, length).long()
        for name, text in cache.tokens("valid", device).items()
    }
    texts = {name: text for name, text in texts.items() if len(text)}
    if sum(map(len, texts.values())) < 2:
        raise DataError(
            f"the validation text must have two sequences of {length} tokens; prepare a larger "
            "cache, or give more --tokens"
        )
    return texts


def shuffled(ids: Tensor, seed: int) -> Tensor:
    """Every sequence in another order."""
    return ids.gather(1, permutations(ids, seed))


def permutations(ids: Tensor, seed: int) -> Tensor:
    """An order of the tokens of every sequence [N, T], drawn from a seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(ids.shape, generator=generator).argsort(dim=1).to(ids.device)


def code(cache: Cache, length: int, num_sequences: int) -> Tensor:
    """Python source [N, T]: the standard library of the Python that runs, in order of its files."""
    root, tests = Path(sysconfig.get_path("stdlib")), {"test", "tests"}
    wanted, size, sources = num_sequences * length, 0, []
    for path in sorted(root.rglob("*.py")):
        if (tests | {"site-packages", "dist-packages"}) & set(path.relative_to(root).parts):
            continue
        sources.append(path.read_text("utf-8", errors="replace"))
        size += len(sources[-1])
        # a token of code is shorter than one of English
        if size > BYTES_PER_TOKEN * wanted:
            break
    if not sources:
        raise DataError(f"Python must come with the source of its library, and {root} has none")
    tokenizer = cache.tokenizer
    end = np.array([tokenizer.eos_token_id])
    parts = [np.concatenate([ids, end]) for ids in encode_documents(tokenizer, sources)]
    ids = torch.from_numpy(np.concatenate(parts).astype(np.int64)[:wanted])
    return ids[: len(ids) // length * length].view(-1, length)


# --- passes ---


@dataclass(frozen=True, slots=True)
class Predictions:
    """Of the next token at each position [N, T - 1]."""

    loss: Tensor  # nats
    entropy: Tensor  # nats
    confidence: Tensor  # probability of the most probable token
    is_correct: Tensor  # that token comes next

    @classmethod
    def join(cls, parts: "list[Predictions]") -> "Predictions":
        names = [field.name for field in fields(cls)]
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in names))

    def of(self, rows: slice) -> "Predictions":
        """Of some sequences."""
        return Predictions(*(getattr(self, field.name)[rows] for field in fields(self)))


@dataclass(frozen=True, slots=True)
class Reading:
    """One pass over a text, with what the controllers believed."""

    ids: Tensor  # [N, T]
    predictions: Predictions
    signals: dict[str, Tensor]  # uncertainty of routes [R, N, T - 1]; empty in a static model
    routes: dict[int, Tensor]  # by layer, the expert most believed in, [N, T] or [N, T, G]

    def of(self, rows: slice) -> "Reading":
        """Of some sequences."""
        return Reading(
            self.ids[rows],
            self.predictions.of(rows),
            {name: values[:, rows] for name, values in self.signals.items()},
            {layer: expert[rows] for layer, expert in self.routes.items()},
        )


def predict(model: MetaAttentionForCausalLM, ids: Tensor) -> Predictions:
    """One batch [B, T]."""
    with autocast(str(ids.device)):
        hidden = model.model(ids, use_cache=False, output_losses=False).last_hidden_state
    # in float32: what is compared are differences between losses, and those of two passes in
    # bfloat16 logits come in steps of 0.06
    with torch.autocast(ids.device.type, enabled=False):
        logits = F.linear(hidden[:, :-1].float(), model.lm_head.weight.float())  # [B, T - 1, V]
    log_shares = logits.log_softmax(dim=-1)
    top, best = log_shares.max(dim=-1)
    targets = ids[:, 1:]
    return Predictions(
        loss=-log_shares.gather(-1, targets.unsqueeze(-1)).squeeze(-1),
        entropy=-(log_shares.exp() * log_shares).sum(dim=-1),
        confidence=top.exp(),
        is_correct=best == targets,
    )


def predict_all(
    model: MetaAttentionForCausalLM,
    ids: Tensor,
    batch_size: int,
    routes: dict[int, Tensor] | None = None,
) -> Predictions:
    """All sequences, by given routes of each or by the model's own."""
    parts = []
    for rows in torch.arange(len(ids), device=ids.device).split(batch_size):
        given = {layer: expert[rows] for layer, expert in (routes or {}).items()}
        with force_routes(model, given) if given else nullcontext():
            parts.append(predict(model, ids[rows]))
    return Predictions.join(parts)


def read(model: MetaAttentionForCausalLM, ids: Tensor, batch_size: int) -> Reading:
    """All sequences, with signals and routes."""
    predictions: list[Predictions] = []
    signals: list[dict[str, Tensor]] = []
    routes: list[dict[int, Tensor]] = []
    with watch_beliefs(model) as beliefs:
        for batch in ids.split(batch_size):
            predictions.append(predict(model, batch))
            signals.append(_stack_signals(beliefs))
            routes.append({layer: b.mean.argmax(dim=-1) for layer, b in beliefs.items()})
    return Reading(
        ids,
        Predictions.join(predictions),
        {name: torch.cat([part[name] for part in signals], dim=1) for name in signals[0]},
        {layer: torch.cat([part[layer] for part in routes]) for layer in routes[0]},
    )


def _stack_signals(beliefs: dict[int, Posterior]) -> dict[str, Tensor]:
    by_layer = [signals_of(beliefs[layer]) for layer in sorted(beliefs)]
    names = by_layer[0] if by_layer else {}
    return {name: torch.stack([layer[name][:, :-1] for layer in by_layer]) for name in names}


def full_routes(model: MetaAttentionForCausalLM, routes: dict[int, Tensor]) -> dict[int, Tensor]:
    """Every token to full attention, in every layer that has it beside others."""
    names = [layer.expert_names for layer in attention_layers(model)]
    return {
        layer: torch.full_like(expert, names[layer].index(FULL))
        for layer, expert in routes.items()
        if FULL in names[layer]
    }
