"""When a run reports, and where its figures go: ``metrics.jsonl`` and the console."""

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from meta_attention.evaluation.routing import RoutingSummary
from meta_attention.training.checkpoints import clear_write_errors

if TYPE_CHECKING:
    from meta_attention.training.trainer import MetaAttentionTrainer

METRICS_FILE = "metrics.jsonl"


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Rows of a run; a last line that was cut off is left out."""
    return read_rows(folder / METRICS_FILE)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a file of one JSON document a line, up to the first that was cut off."""
    rows = []
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


class Flow(TrainerCallback):
    """When to log and save beyond Trainer's own intervals, and which epoch it is."""

    def __init__(self, trainer: "MetaAttentionTrainer") -> None:
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer.window.steps_before = state.global_step
        self.trainer.restore()
        self.trainer.find_best()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        sampler = self.trainer.sampler
        assert sampler is not None
        sampler.epoch = state.global_step // sampler.steps_per_epoch

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer.observe_step()
        control.should_log |= self.trainer.is_logged_step(state.global_step)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        name = args.metric_for_best_model
        if (
            metrics
            and name is not None
            and self.trainer.is_in_train
            and args.save_strategy == "steps"
            and self.trainer.may_be_best(metrics)
        ):
            value = metrics[f"eval_{name.removeprefix('eval_')}"]
            best = math.inf if state.best_metric is None else state.best_metric
            control.should_save |= value < best


class RowLog(TrainerCallback):
    """A file of the run's folder with a row of JSON for some of its steps.

    A run that goes on from an earlier step first drops the rows after it: they will be written
    again, and the curve stays one.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            path = self.folder / self.name
            rows = [row for row in read_rows(path) if row["step"] <= state.global_step]
            with clear_write_errors(self.name, self.folder):
                draft = self.folder / f"{self.name}.new"
                draft.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
                draft.replace(path)

    def write(self, row: dict[str, Any]) -> None:
        """Append a row."""
        with (
            clear_write_errors(self.name, self.folder),
            (self.folder / self.name).open("a", encoding="utf-8") as stream,
        ):
            stream.write(json.dumps(row) + "\n")


class MetricsLog(RowLog):
    """Appends a row to ``metrics.jsonl`` for every logged step and every evaluation."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, METRICS_FILE)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        kind = kind_of(logs)
        if kind is not None and state.is_world_process_zero:
            self.write({"step": state.global_step, "kind": kind} | (logs or {}))


def kind_of(logs: dict[str, Any] | None) -> str | None:
    """``"train"``, ``"eval"``, or None for what Trainer logs at the very end."""
    if logs is None:
        return None
    return "train" if "loss" in logs else "eval" if "eval_task_loss" in logs else None


class ConsoleProgress(TrainerCallback):
    """A progress bar with the newest figures; plain lines where there is no terminal."""

    def __init__(self, seconds_between_lines: float = 10.0) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self.console = Console(stderr=True)
        self.progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self.task = self.progress.add_task("")
        self.pause, self.due = seconds_between_lines, 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.progress.update(self.task, total=state.max_steps, completed=state.global_step)
        self.progress.start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.progress.update(self.task, completed=state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        kind = kind_of(logs)
        if logs is None or kind is None:
            return
        text = describe(logs)
        if kind == "train":
            self.progress.update(self.task, description=text)
        is_last = state.global_step >= state.max_steps
        if kind == "eval" or (
            not self.console.is_terminal and (is_last or time.monotonic() >= self.due)
        ):
            self.due = time.monotonic() + self.pause
            self.console.print(
                f"step {state.global_step}/{state.max_steps}  {text}", soft_wrap=True
            )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the terminal back; called again after an error it does nothing."""
        self.progress.stop()


def flatten_routing(
    routing: RoutingSummary, indices: Sequence[int] | None = None
) -> dict[str, float]:
    """A summary as names and numbers, as logs want it; what a static layer lacks is left out.

    ``indices`` are those of its layers in their model; default: counted from 0.
    """
    figures: dict[str, float | None] = {
        "adaptivity": routing.adaptivity,
        "routing_entropy": routing.routing_entropy,
        "expert_collapses": len(routing.collapsed_layers["expert"]),
        "prior_collapses": len(routing.collapsed_layers["prior"]),
    }
    if indices is None:
        indices = range(len(routing.layers))
    for index, layer in zip(indices, routing.layers, strict=True):
        name = f"layer_{index}"
        for expert in layer.experts:
            figures[f"{name}/share/{expert}"] = layer.share[expert]
            parts = layer.adaptivity_by_expert or {}
            figures[f"{name}/adaptivity/{expert}"] = parts.get(expert)
        figures[f"{name}/adaptivity"] = layer.adaptivity
        figures[f"{name}/routing_entropy"] = layer.routing_entropy
        figures[f"{name}/projected_cost"] = layer.projected_cost
        figures[f"{name}/kl"] = layer.kl
    return {name: value for name, value in figures.items() if value is not None}


def describe(logs: dict[str, Any]) -> str:
    """The figures a reader follows, in one line."""
    if kind_of(logs) == "eval" and "eval_base_loss" in logs:
        return (
            f"held out: {logs['eval_lm_loss']:.4f} nats (base {logs['eval_base_loss']:.4f}), "
            f"divergence {logs['eval_divergence']:.4f}, attention share "
            f"{logs['eval_attention_share']:.3f}"
        )
    if kind_of(logs) == "eval":
        text = f"held out: {logs['eval_task_loss']:.4f} nats"
        if "eval_bits_per_byte" in logs:
            text += f", {logs['eval_bits_per_byte']:.3f} bits/byte"
        if "eval_accuracy" in logs:
            text += (
                f", accuracy {logs['eval_accuracy']:.3f} (far {logs['eval_far_accuracy']:.3f}), "
                f"on full {logs['eval_full_share']:.1%}"
            )
        if "eval_routed_cost" in logs:
            return f"{text}, cost of routed layers {logs['eval_routed_cost']:.3f}"
        return f"{text}, projected cost {logs['eval_projected_cost']:.3f}"
    cost = f"cost {logs['projected_cost']:.3f}"
    if "target_cost" in logs:
        cost = f"routed cost {logs['routed_cost']:.3f} (target {logs['target_cost']:g})"
    return (
        f"loss {logs['loss']:.4f}  kl {logs['kl']:.3f}  "
        f"{cost}  {logs['tokens_per_s']:,.0f} tokens/s"
    )
