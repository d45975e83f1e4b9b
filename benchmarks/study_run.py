"""One run of the study: train a variant, evaluate it, go on where it was cut off.

A run is a folder: ``config.json``, ``metrics.jsonl`` (means over ten steps), ``checkpoint.pt``
while it lasts, and ``result.json`` with ``model/`` once it is done. Every step draws its text and
its routes from a seed of its own, so that a resumed run goes on as an unbroken one, and that runs
which differ in their target alone have the same beginning: the first of them leaves it, in
``beginnings/``, to the others.

Shapes: B sequences, T their length.
"""

import json
import math
import shutil
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from study_data import Cache
from study_evaluation import autocast, evaluate
from study_variants import SCALES, Scale, Variant, family_of, find_variant
from torch import Tensor

from meta_attention import MetaAttentionForCausalLM
from meta_attention.errors import ConfigError, DataError
from meta_attention.evaluation.perplexity import evaluating
from meta_attention.objective import routing_loss
from meta_attention.training.economy import WINDOW, Economy

CONFIG, METRICS, RESULT, TIMING = "config.json", "metrics.jsonl", "result.json", "timing.json"
CHECKPOINT, BEGINNINGS = "checkpoint.pt", "beginnings"
WARMUP = 0.05  # of the steps
# before a step is captured: kernels are compiled, the optimiser's state exists
PLAIN_STEPS = 3
Cost = TypeVar("Cost", float, Tensor)
WEIGHT_DECAY, BETAS, MAX_NORM = 0.1, (0.9, 0.95), 1.0


def run_folder(runs: Path, scale: str, variant: str, seed: int) -> Path:
    return runs / f"{scale}-{variant}-seed{seed}"


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


class Training:
    """A model with its optimiser and its economy, between two steps.

    Args:
        cache: Text to train on.
        variant: What to train.
        scale: Its sizes.
        seed: Of weights, text and routes.
        device: Where.
        compile: Compile the blocks, which takes a while at the first step.
    """

    def __init__(
        self,
        cache: Cache,
        variant: Variant,
        scale: Scale,
        seed: int,
        device: str,
        *,
        compile: bool = False,
    ) -> None:
        self.variant, self.scale, self.seed, self.device = variant, scale, seed, device
        torch.manual_seed(seed)
        config = variant.model_config(scale, cache.vocab_size)
        self.model = MetaAttentionForCausalLM(config).train()
        self.model.to(torch.device(device))
        if compile:
            for block in self.model.model.layers:
                block.compile()
        parameters = list(self.model.parameters())
        groups: list[dict[str, Any]] = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in parameters if p.dim() <= 1]},
        ]
        names = ("kl_weight", "cost_weight", "hold", "lr")
        self.knobs = {name: torch.zeros((), device=device) for name in names}
        is_cuda = device == "cuda"
        self.optimiser = torch.optim.AdamW(
            groups,
            lr=self.knobs["lr"] if is_cuda else scale.lr,
            betas=BETAS,
            weight_decay=0.0,
            fused=is_cuda,
            capturable=is_cuda,
        )
        pressure = variant.pressure(scale)
        self.economy = Economy(scale.steps, pressure, variant.target)
        # of every corpus the beginning, so that more repetitions see a part of what fewer see
        texts = cache.tokens("train", device).values()
        self.text = torch.cat([text[: len(text) // scale.repeat] for text in texts])
        if len(self.text) <= scale.length:
            raise DataError(
                f"the training text must have more than {scale.length} tokens, got "
                f"{len(self.text)}; prepare a larger cache, or lower repeat"
            )
        controllers = [block.attention.controller for block in self.model.model.layers]
        static = [c.costs.item() for c in controllers if len(c.costs) == 1]
        # parts of the mean over all layers
        self.static_cost = sum(static) / len(controllers)
        self.routed_share = max(1, len(controllers) - len(static)) / len(controllers)
        self.ids = torch.zeros(scale.batch_size, scale.length, dtype=torch.long, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.figures: Tensor
        self._plain_steps = 0
        self.steps_done = 0
        self.seconds = 0.0

    def batch(self) -> Tensor:
        """Sequences from anywhere in the text [B, T], int64."""
        B, T = self.scale.batch_size, self.scale.length
        starts = torch.randint(len(self.text) - T + 1, (B, 1)).to(self.device, non_blocking=True)
        return self.text[starts + torch.arange(T, device=self.device)].long()

    def step(self) -> Tensor:
        """One step; task loss, KL, projected and routed cost, routing entropy, on the device."""
        # text and routes of a step depend on nothing before it
        torch.manual_seed(1_000_003 * (self.seed + 1) + self.steps_done)
        self.ids.copy_(self.batch())
        self._turn_knobs()
        if self.graph is None:
            figures = self._compute()
            self._plain_steps += 1
            if self.device == "cuda" and self._plain_steps == PLAIN_STEPS:
                self._capture()
        else:
            self.graph.replay()
            figures = self.figures
        self.steps_done += 1
        return figures

    def _turn_knobs(self) -> None:
        """What changes from step to step, where a captured step reads it."""
        scale, step = self.scale, self.steps_done
        weight = self.economy.multiplier * self.economy.value(self.economy.pressure, step)
        is_bayesian = self.variant.controller == "bayesian"
        self.knobs["kl_weight"].fill_(weight if is_bayesian else 0.0)
        self.knobs["cost_weight"].fill_(0.0 if is_bayesian else weight)
        is_held = self.variant.target is not None and self.economy.has_begun(step)
        self.knobs["hold"].fill_(scale.hold if is_held else 0.0)
        self.knobs["lr"].fill_(learning_rate(scale, step))
        if self.device != "cuda":
            for group in self.optimiser.param_groups:
                group["lr"] = learning_rate(scale, step)
        if step >= scale.argmax_from * scale.steps:
            if self.model.config.training_weights != "mean":
                # other code: captured again after some plain steps
                self.graph, self._plain_steps = None, 0
            self.model.config.training_weights = "mean"

    def _compute(self) -> Tensor:
        """Forward, backward and update: all of a step that runs on the device."""
        self.optimiser.zero_grad(set_to_none=True)
        with autocast(self.device):
            out = self.model(
                self.ids,
                labels=self.ids,
                use_cache=False,
                output_routed_cost=True,
                output_routing_entropy=True,
            )
        loss = routing_loss(
            out.task_loss,
            out.kl,
            kl_weight=self.knobs["kl_weight"],
            cost=out.projected_cost,
            cost_weight=self.knobs["cost_weight"],
        )
        (loss + self.knobs["hold"] * self.below_target(out.projected_cost)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimiser.step()
        costs = (out.projected_cost, out.routed_cost)
        return torch.stack([out.task_loss, out.kl, *costs, out.routing_entropy]).detach()

    def _capture(self) -> None:
        """Record a step, to be replayed: short kernels would wait for the host to launch them."""
        torch.cuda.synchronize()
        self.optimiser.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.figures = self._compute()

    def window(self) -> dict[str, float]:
        """The steps up to the next multiple of ``WINDOW`` or the end, and their means."""
        begin, first = time.perf_counter(), self.steps_done
        total = torch.zeros(5, device=self.device)
        while True:
            total += self.step()
            if self.steps_done % WINDOW == 0 or self.steps_done == self.scale.steps:
                break
        num_steps = self.steps_done - first
        loss, kl, projected_cost, routed_cost, routing_entropy = (total / num_steps).tolist()
        believed_cost = self.of_routed_layers(projected_cost)
        seconds = time.perf_counter() - begin
        self.seconds += seconds
        if not math.isfinite(loss):
            raise ConfigError(f"the loss must be finite, got {loss}; lower it with --set lr=...")
        if self.economy.is_watched:
            self.economy.observe(self.steps_done, loss, routed_cost)
        return {
            "step": self.steps_done,
            "loss": loss,
            "kl": kl,
            "projected_cost": projected_cost,
            "routed_cost": routed_cost,
            "believed_cost": believed_cost,
            "routing_entropy": 100.0 * routing_entropy,  # percent, as evaluation has it
            "pressure": self.economy.value(self.economy.pressure, self.steps_done),
            "multiplier": self.economy.multiplier,
            "lr": learning_rate(self.scale, self.steps_done - 1),
            "step_ms": 1e3 * seconds / num_steps,
            "tokens_per_s": num_steps * self.scale.batch_size * self.scale.length / seconds,
        }

    @property
    def is_about_to_save(self) -> bool:
        """Whether this is the last window before anything presses routes to be cheap."""
        step, has_begun = self.steps_done, self.economy.has_begun
        return not has_begun(step) and has_begun(step + WINDOW)

    def below_target(self, projected_cost: Tensor) -> Tensor:
        """Square of the share by which the mean cost of a batch is below its target, or 0.

        What makes routes cheap can only press less, never pull back: in a short run they fell far
        below every target and stayed there. Which tokens to spend the rest on is left to the task.
        """
        if self.variant.target is None:
            return torch.zeros_like(projected_cost)
        saved = 1.0 - self.of_routed_layers(projected_cost) / self.variant.target
        return saved.clamp(min=0.0).square()

    def of_routed_layers(self, projected_cost: Cost) -> Cost:
        """Mean cost of the routed layers alone; routes are drawn, so it is that of the belief."""
        return (projected_cost - self.static_cost) / self.routed_share

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "economy": self.economy.state(),
            "steps_done": self.steps_done,
            "seconds": self.seconds,
        }
        # a run that is killed while it writes has the checkpoint before
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        if self.device == "cuda":
            for group in self.optimiser.param_groups:
                group["lr"] = self.knobs["lr"]
        self.economy.load(state["economy"])
        self.steps_done, self.seconds = state["steps_done"], state["seconds"]


def run(
    cache: Cache,
    runs: Path,
    variant_name: str,
    seed: int,
    scale_name: str,
    *,
    changes: list[str] | None = None,
    device: str | None = None,
    compile: bool = False,
    stop_at: float = math.inf,
) -> dict[str, Any] | None:
    """Train and evaluate; the result, or None if ``stop_at`` (as of ``time.time``) came first."""
    variant, device = find_variant(variant_name), device or default_device()
    scale = SCALES[scale_name].with_changes(changes or [])
    folder = run_folder(runs, scale_name, variant_name, seed)
    folder.mkdir(parents=True, exist_ok=True)
    training = Training(cache, variant, scale, seed, device, compile=compile)
    settings = {
        "variant": variant_name,
        "seed": seed,
        "scale": scale_name,
        "settings": asdict(scale),
        "routing": variant.to_dict(),
        "text": cache.manifest,
        "model": training.model.config.to_diff_dict(),
    }
    _check_same(folder, settings)
    if (folder / RESULT).exists():
        return json.loads((folder / RESULT).read_text())
    beginning = None
    if variant.target is not None:
        beginning = run_folder(runs / BEGINNINGS, scale_name, family_of(variant_name), seed)
        routing = {name: value for name, value in variant.to_dict().items() if name != "target"}
        beginning.mkdir(parents=True, exist_ok=True)
        _check_same(beginning, settings | {"routing": routing})
    for source in (folder, beginning):
        if source is not None and (source / CHECKPOINT).exists():
            training.load(source / CHECKPOINT)
            if source is beginning:
                shutil.copy(source / METRICS, folder / METRICS)
            _say(f"going on after step {training.steps_done}")
            break
    _train(training, folder, stop_at, beginning)
    if time.time() >= stop_at:
        _say(f"time is over after step {training.steps_done} of {scale.steps}")
        return None
    result = {name: settings[name] for name in ("variant", "seed", "scale")}
    result |= _training_figures(training, folder)
    # other lengths and routings would each be compiled for a few batches
    with torch.compiler.set_stance("force_eager"):
        result |= evaluate(training.model, cache, scale)
    training.model.save_pretrained(folder / "model")
    (folder / RESULT).write_text(json.dumps(result, indent=1) + "\n")
    (folder / CHECKPOINT).unlink(missing_ok=True)
    return result


def _check_same(folder: Path, settings: dict[str, Any]) -> None:
    """A folder holds one run: with other settings it cannot go on."""
    path, text = folder / CONFIG, json.dumps(settings, indent=1) + "\n"
    if not path.exists():
        path.write_text(text)
        return
    before, now = json.loads(path.read_text()), json.loads(text)
    before["settings"] = asdict(Scale.of_run(before["settings"]))
    for name in ("settings", "routing", "text"):
        if before[name] != now[name]:
            raise ConfigError(
                f"a run must go on with the {name} it began with, and those of {path} differ; "
                "give another --out or remove the folder"
            )


def _train(training: Training, folder: Path, stop_at: float, beginning: Path | None) -> None:
    metrics, scale = folder / METRICS, training.scale
    rows = metrics.read_text().splitlines() if metrics.exists() else []
    # of steps that a checkpoint does not know
    kept = [row for row in rows if json.loads(row)["step"] <= training.steps_done]
    metrics.write_text("".join(f"{row}\n" for row in kept))
    saved = training.steps_done
    with metrics.open("a") as file:
        while training.steps_done < scale.steps and time.time() < stop_at:
            row = training.window()
            print(json.dumps(row), file=file, flush=True)
            done = training.steps_done
            if done % (5 * WINDOW) == 0 or done == scale.steps:
                _say(
                    f"step {done}/{scale.steps}: loss {row['loss']:.3f}, cost "
                    f"{row['projected_cost']:.3f}, {row['step_ms']:.0f} ms a step"
                )
            if done - saved >= scale.save_every:
                training.save(folder / CHECKPOINT)
                saved = done
            if beginning is not None and training.is_about_to_save:
                shutil.copy(metrics, beginning / METRICS)
                training.save(beginning / CHECKPOINT)
    if training.steps_done > saved:
        training.save(folder / CHECKPOINT)


def _training_figures(training: Training, folder: Path) -> dict[str, Any]:
    rows = [json.loads(row) for row in (folder / METRICS).read_text().splitlines()]
    late = rows[-max(1, len(rows) // 4) :]
    tokens = training.steps_done * training.scale.batch_size * training.scale.length
    return {
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "steps": training.steps_done,
        "tokens": tokens,
        "train_loss": statistics.mean(row["loss"] for row in late),
        "seconds": training.seconds,
        "tokens_per_s": tokens / training.seconds,
        # with whatever else ran on the device; timing.json is measured alone
        "step_ms": statistics.median(row["step_ms"] for row in late),
        "device": torch.cuda.get_device_name() if training.device == "cuda" else training.device,
        "torch": torch.__version__,
    }


def measure_times(cache: Cache, folder: Path, *, repeats: int = 20) -> dict[str, Any]:
    """Training step and prefill of a finished run, with the routes it has learned.

    Nothing else may run on the device meanwhile.
    """
    settings = json.loads((folder / CONFIG).read_text())
    scale, device = Scale.of_run(settings["settings"]), default_device()
    training = Training(cache, find_variant(settings["variant"]), scale, settings["seed"], device)
    trained = MetaAttentionForCausalLM.from_pretrained(folder / "model")
    training.model.load_state_dict(trained.state_dict())
    times: dict[str, Any] = {}
    with evaluating(training.model):
        for length in sorted({scale.length, scale.longest}):
            ids = training.text[:length].long().unsqueeze(0)
            ids = ids.expand(max(1, scale.batch_size * scale.length // length), -1)

            def prefill(ids: Tensor = ids) -> None:
                with autocast(device):
                    training.model(ids, use_cache=False, logits_to_keep=1)

            times[f"prefill_ms_{length}"] = _median_ms(prefill, device, repeats)
    # the last step's learning rate is next to nothing, so that routes stay what they are
    training.steps_done = scale.steps - 1

    def step() -> None:
        training.step()
        training.steps_done = scale.steps - 1

    times["step_ms"] = _median_ms(step, device, repeats)
    times["device"] = torch.cuda.get_device_name() if device == "cuda" else device
    (folder / TIMING).write_text(json.dumps(times, indent=1) + "\n")
    return times


def _median_ms(call: Any, device: str, repeats: int) -> float:
    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        wait()
        begin = time.perf_counter()
        call()
        wait()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def learning_rate(scale: Scale, step: int) -> float:
    """Up in a straight line, then down to 0 as a cosine."""
    warmup = max(1, round(WARMUP * scale.steps))
    if step < warmup:
        return scale.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, scale.steps - warmup)
    return scale.lr * 0.5 * (1.0 + math.cos(math.pi * progress))


def _say(line: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True)
