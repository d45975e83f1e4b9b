"""One run of the study: train a variant, evaluate it, go on where it was cut off.

A run is a folder: ``config.json``, ``metrics.jsonl`` (means over ten steps), ``checkpoint.pt``
while it lasts, and ``result.json`` with ``model/`` once it is done; where values are learnt after
training, ``values.jsonl`` has that. Every step draws its text and
its routes from a seed of its own, so that a resumed run goes on as an unbroken one.

Capability first: until something presses, what will be routed is full attention and nothing else.
So the static model is the beginning of all variants routed in its full layers. It is trained once,
in ``beginnings/``, and all go on from there on the same text: they differ by their routes alone.

Shapes: B sequences, T their length.
"""

import json
import math
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from bench_training_step import capture
from study_data import Cache
from study_evaluation import evaluate, evaluate_hard
from study_training import FIRST_VALUES, PLAIN_STEPS, Training
from study_variants import SCALES, Scale, Variant, find_variant
from torch import Tensor

from meta_attention import MetaAttentionForCausalLM
from meta_attention.bench.machine import describe_machine
from meta_attention.errors import ConfigError
from meta_attention.evaluation.perplexity import evaluating
from meta_attention.training.economy import WINDOW

CONFIG, METRICS, RESULT, TIMING = "config.json", "metrics.jsonl", "result.json", "timing.json"
CHECKPOINT, BEGINNINGS = "checkpoint.pt", "beginnings"
VALUES = "values.jsonl"


def run_folder(runs: Path, scale: str, variant: str, seed: int) -> Path:
    return runs / f"{scale}-{variant}-seed{seed}"


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


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
    # the source may be another by the time that it ends
    machine = describe_machine(torch.device(device))
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
    is_afterwards = variant.priced is not None and not variant.trains_on
    if is_afterwards:
        assert variant.priced is not None
        base = (cache, runs, variant.priced, seed, scale_name)
        if run(*base, changes=changes, device=device, compile=compile, stop_at=stop_at) is None:
            return None
        learn_values_of(training, run_folder(runs, scale_name, variant.priced, seed), folder)
        training.set_price()
    elif (folder / CHECKPOINT).exists():
        training.load(folder / CHECKPOINT)
        _say(f"going on after step {training.steps_done}")
    else:
        if scale.first_steps and variant.has_beginning:
            first = Training(cache, variant.beginning, scale, seed, device, compile=compile)
            name = variant.beginning.name
            beginning = run_folder(runs / BEGINNINGS, scale_name, name, seed)
            _train_beginning(first, beginning, settings, stop_at)
            if first.steps_done < scale.first_steps:
                _say(f"time is over after step {first.steps_done} of {scale.steps}")
                return None
            training.load(beginning / CHECKPOINT)
            shutil.copy(beginning / METRICS, folder / METRICS)
        training.choose_heads()
        if variant.trains_on:
            _learn_values(training, folder, FIRST_VALUES)
            training.set_price()
    if not is_afterwards:
        _train(training, folder, scale.steps, stop_at)
    if training.steps_done < scale.steps:
        _say(f"time is over after step {training.steps_done} of {scale.steps}")
        return None
    result = {name: settings[name] for name in ("variant", "seed", "scale")}
    if variant.trains_on:
        # what it is worth that values are learnt once more
        training.set_price()
        with torch.compiler.set_stance("force_eager"):
            result["with_first_values"] = evaluate_hard(training.model, cache, scale)
        _learn_values(training, folder, 1.0 - FIRST_VALUES)
        training.set_price()
    result |= _training_figures(training, folder) | {"machine": machine}
    if training.prices is not None:
        result["prices"] = training.prices
    if training.heads is not None:
        result["experts_of_heads"] = training.heads.get()
    # other lengths and routings would each be compiled for a few batches
    with torch.compiler.set_stance("force_eager"):
        result |= evaluate(training.model, cache, scale)
    training.model.save_pretrained(folder / "model")
    (folder / RESULT).write_text(json.dumps(result, indent=1) + "\n")
    (folder / CHECKPOINT).unlink(missing_ok=True)
    return result


def learn_values_of(training: Training, base: Path, folder: Path) -> None:
    """Values of a static model that is done.

    They are the same whatever routes shall cost, but for those learnt beside routes of a cost.
    """
    shutil.copy(base / METRICS, folder / METRICS)
    figures = json.loads((base / RESULT).read_text())
    training.steps_done, training.seconds = figures["steps"], figures["seconds"]
    other = None if training.variant.around_own else _same_but_for_its_target(folder)
    if other is None:
        training.take(MetaAttentionForCausalLM.from_pretrained(base / "model").state_dict())
        _learn_values(training, folder)
    else:
        _say(f"with the values of {other.name}")
        training.take(MetaAttentionForCausalLM.from_pretrained(other / "model").state_dict())
        training.prices = json.loads((other / RESULT).read_text())["prices"]
        shutil.copy(other / VALUES, folder / VALUES)


def _learn_values(training: Training, folder: Path, part: float = 1.0) -> None:
    """Of a model as it is after so many steps; the log has what was learnt of it before, too."""
    path, after = folder / VALUES, training.steps_done
    rows = [json.loads(row) for row in path.read_text().splitlines()] if path.exists() else []
    kept = [row for row in rows if row.get("after", after) < after]
    new = [{"after": after} | row for row in training.learn_values(part)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in kept + new))


def _same_but_for_its_target(folder: Path) -> Path | None:
    """A finished run beside one, of the same settings and seed."""
    mine = json.loads((folder / CONFIG).read_text())
    for path in sorted(folder.parent.glob(f"*/{RESULT}")):
        theirs = json.loads((path.parent / CONFIG).read_text())
        # as they were written: what a run does not know of is of code from before
        target = {"target": mine["routing"]["target"]}
        is_same = all(theirs[name] == mine[name] for name in ("seed", "scale", "settings", "text"))
        if is_same and theirs["routing"] | target == mine["routing"]:
            return path.parent
    return None


def _check_same(folder: Path, settings: dict[str, Any]) -> None:
    """A folder holds one run: with other settings it cannot go on."""
    path, text = folder / CONFIG, json.dumps(settings, indent=1) + "\n"
    if not path.exists():
        path.write_text(text)
        return
    before, now = json.loads(path.read_text()), json.loads(text)
    before["settings"] = asdict(Scale.of_run(before["settings"]))
    before["routing"] = Variant.of_run(before["routing"]).to_dict()
    for name in ("settings", "routing", "text"):
        if before[name] != now[name]:
            raise ConfigError(
                f"a run must go on with the {name} it began with, and those of {path} differ; "
                "give another --out or remove the folder"
            )


def _train_beginning(
    training: Training, folder: Path, settings: dict[str, Any], stop_at: float
) -> None:
    """What variants have in common, if it is not there yet; the model is as it ended."""
    folder.mkdir(parents=True, exist_ok=True)
    _check_same(folder, settings | {"routing": training.variant.to_dict()})
    if (folder / CHECKPOINT).exists():
        training.load(folder / CHECKPOINT)
        _say(f"going on after step {training.steps_done}")
    _train(training, folder, training.scale.first_steps, stop_at)


def _train(training: Training, folder: Path, until: int, stop_at: float) -> None:
    """Up to a step, or a moment; the checkpoint is of the last step done."""
    metrics, scale = folder / METRICS, training.scale
    rows = metrics.read_text().splitlines() if metrics.exists() else []
    # of steps that a checkpoint does not know
    kept = [row for row in rows if json.loads(row)["step"] <= training.steps_done]
    metrics.write_text("".join(f"{row}\n" for row in kept))
    saved = training.steps_done
    with metrics.open("a") as file:
        while training.steps_done < until and time.time() < stop_at:
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


def measure_times(
    cache: Cache, folder: Path, *, repeats: int = 20, compile: bool = False
) -> dict[str, Any]:
    """Training step and prefill of a finished run, with the routes it has learned.

    On a GPU both are replayed from graphs, so that no variant waits for Python; the prefill is of
    bfloat16 weights. Nothing else may run on the device meanwhile.
    """
    settings = json.loads((folder / CONFIG).read_text())
    scale, device = Scale.of_run(settings["settings"]), default_device()
    variant = find_variant(settings["variant"])
    trained = MetaAttentionForCausalLM.from_pretrained(folder / "model")
    # where values came afterwards, its steps were those of the static model
    base = None if variant.trains_on else variant.priced
    stepped = variant if base is None else find_variant(base)
    training = Training(cache, stepped, scale, settings["seed"], device, compile=compile)
    weights = trained.state_dict()
    training.model.load_state_dict({name: weights[name] for name in training.model.state_dict()})
    if variant.trains_on:
        training.model.set_price(trained.config.price)
    times: dict[str, Any] = {}
    model = trained.to(torch.device(device))  # type: ignore[arg-type]
    if device == "cuda":
        model.bfloat16()
    with evaluating(model):
        for length in sorted({scale.length, scale.longest}):
            ids = training.text[:length].long().unsqueeze(0)
            ids = ids.repeat(max(1, scale.batch_size * scale.length // length), 1)

            def prefill(ids: Tensor = ids) -> None:
                model(ids, use_cache=False, logits_to_keep=1)

            # who enters a block is known on the host only
            is_captured = device == "cuda" and variant.depth_capacity is None
            replay = captured(prefill) if is_captured else prefill
            times[f"prefill_ms_{length}"] = _median_ms(replay, device, repeats)
    times["step_ms"] = _step_ms(training, repeats)
    times["device"] = torch.cuda.get_device_name() if device == "cuda" else device
    times["compiled"] = compile
    (folder / TIMING).write_text(json.dumps(times, indent=1) + "\n")
    return times


def measure_speed(
    cache: Cache, name: str, scale: Scale, *, repeats: int = 20, compile: bool = False
) -> dict[str, Any]:
    """Training step of a new model, alone on the device.

    Only where all experts run on all tokens: then it is that of a trained one, whatever its routes.
    """
    variant, device = find_variant(name), default_device()
    # routes by value are taken as in evaluation, so only the chosen expert runs
    runs_all = variant.gradient == "all" and not variant.trains_on
    if variant.is_routed and not runs_all:
        raise ConfigError(f"steps of {name} depend on its routes; train it, then use time")
    training = Training(cache, variant, scale, 0, device, compile=compile)
    step_ms = _step_ms(training, repeats)
    return {
        "variant": name,
        "step_ms": step_ms,
        "tokens_per_s": 1e3 * scale.batch_size * scale.length / step_ms,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
        "compiled": compile,
    }


def _step_ms(training: Training, repeats: int) -> float:
    # the last step's learning rate is next to nothing, so that routes stay what they are
    last = training.scale.steps - 1
    training.steps_done = last

    def step() -> None:
        training.step()
        training.steps_done = last

    # captured before the clock starts
    for _ in range(PLAIN_STEPS):
        step()
    return _median_ms(step, training.device, repeats)


def captured(call: Callable[[], None]) -> Callable[[], object]:
    """A call as a graph that is replayed."""
    for _ in range(3):
        call()
    return capture(call)


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


def _say(line: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True)
