"""One training run from settings to a folder: text -> blocks -> model -> Trainer -> saved model.

The folder holds ``run.json`` (what was asked for, on what, and what came of it), the tokenizer,
``metrics.jsonl``, the newest and the best checkpoint, and at the end the model.
"""

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from transformers import (
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import meta_attention
from meta_attention.errors import ConfigError, MetaAttentionError
from meta_attention.evaluation.tasks import TaskDataset, evaluate_task
from meta_attention.models import MetaAttentionForCausalLM
from meta_attention.training.checkpoints import (
    check_same_model,
    clear_write_errors,
    list_checkpoints,
    newest_checkpoint,
    set_aside,
    step_of,
)
from meta_attention.training.data import Blocks, check_same_text, read_blocks
from meta_attention.training.empirical_prior import EmpiricalPrior, text_to_look_at
from meta_attention.training.logs import METRICS_FILE, MetricsLog
from meta_attention.training.model_settings import Settings
from meta_attention.training.overrides import build_settings
from meta_attention.training.recipes import default_recipe
from meta_attention.training.sampler import BlockSampler
from meta_attention.training.settings import RunSettings
from meta_attention.training.tasks import read_task_blocks
from meta_attention.training.trainer import MetaAttentionTrainer

RUN_FILE = "run.json"

SettingsType = TypeVar("SettingsType", bound=RunSettings)


def open_run(
    out: Path, recipe: str | None, overrides: Mapping[str, Any], *, resume: bool
) -> Settings:
    """Settings of a new run, or of the one that a folder holds.

    Args:
        out: Folder of the run.
        recipe: Name of a recipe; None: ``demo``, that of the task, or the one that is resumed.
        overrides: Settings that were given beside it.
        resume: Go on with the run in ``out``. Settings given anew must agree with it, unless they
            are of the kind that may change.
    """
    if not resume:
        check_free(out)
        return build_settings(recipe or default_recipe(overrides.get("task")), overrides)
    saved = read_settings(Settings, out)
    if recipe not in (None, saved.recipe):
        raise ConfigError(
            f"{out} holds a run whose recipe is {saved.recipe!r}, got {recipe!r}; leave it out, or "
            "start a new run in another folder"
        )
    return go_on_with(saved, overrides, out)


def read_settings(kind: type[SettingsType], out: Path) -> SettingsType:
    """Settings of the run that a folder holds."""
    try:
        return kind.from_dict(read_run(out)["settings"])
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{out / RUN_FILE} must hold the settings of a run of this version, but: {error}"
        ) from error


def go_on_with(saved: SettingsType, overrides: Mapping[str, Any], out: Path) -> SettingsType:
    """Settings of a resumed run; raise where one was given anew that may not change."""
    plain = {k: str(v) if k in saved.SCHEDULED else v for k, v in overrides.items()}
    merged = saved.from_dict(saved.to_dict() | plain)
    for name, (ours, theirs) in merged.differences(saved).items():
        raise ConfigError(
            f"{out} holds a run whose {name} is {theirs!r}, got {ours!r}; leave it out, or start "
            "a new run in another folder"
        )
    return merged


def train_model(
    settings: Settings,
    out: Path,
    *,
    resume: bool = False,
    tensorboard: bool = False,
    capture: bool = False,
    callbacks: tuple[TrainerCallback, ...] = (),
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> dict[str, Any]:
    """Train, evaluate and save; returns what ``run.json`` then holds.

    Args:
        settings: From :func:`open_run`.
        out: Folder of the run.
        resume: Go on from the newest complete checkpoint in ``out``.
        tensorboard: Write the figures for TensorBoard as well, to ``out/tensorboard``.
        capture: Replay steps from CUDA graphs, which is faster where they are short.
        callbacks: For Trainer, such as a progress bar.
        say: Called with a line about what a resumed run goes on from.
    """
    out = out.resolve()
    if resume and (record := read_run(out)).get("finished"):
        say(f"{out} holds a finished run: nothing to do")
        return record
    args = training_arguments(settings, out)
    # a bar for each of Trainer's saves would break ours
    transformers.utils.logging.disable_progress_bar()
    read = read_blocks if settings.task is None else read_task_blocks
    blocks = read(settings, out if resume else None)
    BlockSampler(blocks.train, settings.batch_size, settings.seed)
    set_seed(settings.seed)
    model = MetaAttentionForCausalLM(
        settings.model_config(
            vocab_size=len(blocks.tokenizer),
            bos_token_id=blocks.tokenizer.bos_token_id,
            eos_token_id=blocks.tokenizer.eos_token_id,
            pad_token_id=blocks.tokenizer.pad_token_id,
        )
    )
    if settings.compile:
        # block by block: equal blocks share one graph, so compiling takes seconds
        for block in model.model.layers:
            block.compile()
    if resume:
        check_same_text(read_run(out), blocks)
    checkpoint = choose_checkpoint(out, args, say) if resume else None
    if checkpoint is not None:
        check_same_model(checkpoint, model.config)

    prior = None
    if settings.empirical_prior:
        prior = EmpiricalPrior(out, text_to_look_at(blocks.train), settings.prior_strength)
    with run_folder(out):
        trainer = MetaAttentionTrainer(
            model,
            args,
            train_dataset=blocks.train,
            eval_dataset=blocks.valid,
            kl_weight=settings.kl_weight,
            uncertainty_threshold=settings.uncertainty_threshold,
            cost_weight=settings.cost_weight,
            target_cost=settings.target_cost,
            hold=settings.hold,
            argmax_from=settings.argmax_from,
            settle_drop=settings.settle_drop,
            settle_steps=settings.settle_steps,
            capture=capture,
            processing_class=blocks.tokenizer,
            callbacks=[MetricsLog(out), *([] if prior is None else [prior]), *callbacks],
        )
        # last, as it writes a file
        for callback in _tensorboard(out, checkpoint, tensorboard):
            trainer.add_callback(callback)
    # only now, when nothing is left to refuse, does the folder become a run
    record = _describe(settings, blocks, model, args)
    if _is_main():
        with clear_write_errors(RUN_FILE, out):
            write_run(out, record)
            blocks.tokenizer.save_pretrained(out)
    trainer.train_from(checkpoint)
    if prior is not None:
        prior.restore(trainer.accelerator.unwrap_model(trainer.model), trainer.model_step)
    metrics = {}
    if blocks.valid is not None:
        best = trainer.evaluate(metric_key_prefix="best")
        metrics = {name.removeprefix("best_"): value for name, value in best.items()}
    if isinstance(blocks.valid, TaskDataset) and args.world_size == 1:
        # forcing experts would compile every block anew for each
        with torch.compiler.set_stance("force_eager") if settings.compile else nullcontext():
            record["task"] = _judge(model, blocks.valid, args.per_device_eval_batch_size)
    with clear_write_errors("the model", out):
        trainer.save_whole_model(out)
        record |= {"finished": True, "steps": trainer.state.global_step, "metrics": metrics}
        if _is_main():
            # Trainer's pickled arguments are of no use beside a finished model
            (out / "training_args.bin").unlink(missing_ok=True)
            write_run(out, record)
    trainer.close()
    return record


def _judge(
    model: MetaAttentionForCausalLM, held_out: TaskDataset, batch_size: int
) -> dict[str, Any]:
    """All figures on a task, with the regret where a layer has a choice."""
    has_choice = any(len(layer.attention.expert_names) > 1 for layer in model.model.layers)
    return evaluate_task(model, held_out, batch_size=batch_size, forced=has_choice).to_dict()


def read_run(out: Path) -> dict[str, Any]:
    """What ``run.json`` of a run holds."""
    try:
        return json.loads((out / RUN_FILE).read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"there must be a run to resume, but {out} has no {RUN_FILE}; leave --resume out"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{out / RUN_FILE} must be readable, got: {error}") from error


def write_run(out: Path, record: Mapping[str, Any]) -> None:
    """Write ``run.json`` whole or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    draft = out / f"{RUN_FILE}.new"
    draft.write_text(json.dumps(record, indent=2) + "\n", "utf-8")
    draft.replace(out / RUN_FILE)


def _is_main() -> bool:
    """Whether this is the first of all processes, also before they know each other."""
    return int(os.environ.get("RANK", 0)) == 0


@contextmanager
def run_folder(out: Path) -> Iterator[None]:
    """Make the folder of a run; where the run is refused meanwhile, take away what was made."""
    made = [path for path in (out, *out.parents) if not path.exists()]
    try:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the folder of a run must be one that can be made, got {out}: {error.strerror}"
            ) from error
        yield
    except MetaAttentionError:
        for path in made:
            # one that holds anything stays
            with suppress(OSError):
                path.rmdir()
        raise


def check_free(out: Path, *files: str) -> None:
    """Raise where a folder holds a run or a model; ``files`` are further signs of one."""
    # the other processes may already see what the first one writes
    if not (_is_main() and out.exists()):
        return
    if not out.is_dir():
        raise ConfigError(f"the folder of a run must be a folder, got the file {out}")
    signs = (RUN_FILE, METRICS_FILE, "config.json", *files)
    if any((out / name).exists() for name in signs) or list_checkpoints(out):
        raise ConfigError(
            f"{out} already holds a run or a model; go on with it by --resume, or choose another "
            "folder"
        )


def choose_checkpoint(
    out: Path, args: TrainingArguments, say: Callable[[str], None]
) -> Path | None:
    """The newest complete checkpoint; the first process decides for all."""
    choice: list[Path | None] = [None]
    if _is_main():
        choice[0], flaws = newest_checkpoint(out)
        for checkpoint, flaw in flaws.items():
            kept = set_aside(checkpoint).name
            say(f"warning: {checkpoint.name} is incomplete ({flaw}); skipped, kept as {kept}")
        where = "the beginning" if choice[0] is None else f"step {step_of(choice[0])}"
        say(f"resuming {out} from {where}")
    if args.world_size > 1:
        torch.distributed.broadcast_object_list(choice)
    return choice[0]


def training_arguments(settings: RunSettings, out: Path) -> TrainingArguments:
    """Trainer's own arguments for a run."""
    has_device = torch.accelerator.is_available()
    if settings.precision == "fp16" and not has_device:
        raise ConfigError("precision fp16 must have a GPU, and there is none; use bf16 or fp32")
    processes = int(os.environ.get("WORLD_SIZE", 1))
    size, rest = divmod(settings.batch_size, processes * settings.grad_accum)
    if rest:
        raise ConfigError(
            f"batch_size must be a multiple of processes times grad_accum, got "
            f"{settings.batch_size} and {processes} x {settings.grad_accum}"
        )
    return TrainingArguments(
        output_dir=str(out),
        max_steps=settings.steps,
        per_device_train_batch_size=size,
        per_device_eval_batch_size=size,
        gradient_accumulation_steps=settings.grad_accum,
        learning_rate=settings.lr,
        lr_scheduler_type="cosine",
        warmup_steps=settings.warmup,
        weight_decay=settings.weight_decay,
        seed=settings.seed,
        bf16=settings.precision == "bf16",
        fp16=settings.precision == "fp16",
        use_cpu=not has_device,
        gradient_checkpointing=settings.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        logging_steps=settings.log_every,
        # a loss that is not a number must show, and looking for it would wait for the device
        logging_nan_inf_filter=False,
        eval_strategy="steps" if settings.eval_every else "no",
        eval_steps=settings.eval_every or None,
        save_strategy="steps",
        save_steps=settings.save_every,
        save_total_limit=2,
        metric_for_best_model="task_loss" if settings.keeps_best else None,
        greater_is_better=False,
        # the saved config is of the model, not of its training
        use_cache=True,
        remove_unused_columns=False,
        dataloader_pin_memory=has_device,
        # while the device works
        dataloader_num_workers=int(has_device and settings.loads_slowly),
        # a copy that waits for the device would make every step wait for the one before
        accelerator_config={"non_blocking": has_device},
        # every parameter has a gradient
        ddp_find_unused_parameters=False,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        log_level_replica="error",
    )


def _tensorboard(out: Path, checkpoint: Path | None, wanted: bool) -> list[TrainerCallback]:
    if not (wanted and _is_main()):
        return []
    from transformers.integrations.integration_utils import TensorBoardCallback

    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "--tensorboard needs the package tensorboard; run: "
            "pip install 'meta-attention[tensorboard]'"
        ) from error
    # rows after the checkpoint will be written again
    purge = None if checkpoint is None else int(step_of(checkpoint)) + 1
    return [TensorBoardCallback(SummaryWriter(str(out / "tensorboard"), purge_step=purge))]


def _describe(
    settings: Settings, blocks: Blocks, model: MetaAttentionForCausalLM, args: TrainingArguments
) -> dict[str, Any]:
    return {
        "recipe": settings.recipe,
        "seed": settings.seed,
        "settings": settings.to_dict(),
        **blocks.to_dict(),
        "parameters": model.num_parameters(),
        "processes": args.world_size,
        "device": args.device.type,
        "versions": versions(),
        "finished": False,
    }


def versions() -> dict[str, str]:
    """Of what a run was made with."""
    return {
        "meta_attention": meta_attention.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": importlib.metadata.version("accelerate"),
        "python": platform.python_version(),
    }
