"""Which training keeps full attention exactly where it is needed? Recall, where need is known.

Static models and routed ones of several trainings, on the task of ``meta-attention train --recipe
recall``, through the project's own trainer. Every run is a folder as that command leaves it, with
``result.json`` once it is done; one that was cut off goes on when it is started again.

    # on a GPU: all that is missing, eight at a time, for nine minutes; again until none is missing
    python benchmarks/study_recall.py all --out runs/recall-study --parallel 8 --time-limit 540

    # first what must work: full attention alone, then our recipe
    python benchmarks/study_recall.py all --out runs/recall-study --variants full one-hot --seeds 2

    # one run with other settings; then the table, recall.json and the figure
    python benchmarks/study_recall.py run --out runs/other --variant one-hot --set steps=8000
    python benchmarks/study_recall.py report --runs runs/recall-study

"NAME --help" says more of each.
"""

import argparse
import json
import math
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import study_recall_report
import torch
from study_jobs import Job, StopAt, TimeIsOver, parse_changes, run_command, run_side_by_side, say
from study_recall_report import RESULT

from meta_attention import MetaAttentionForCausalLM
from meta_attention.errors import ConfigError
from meta_attention.evaluation.tasks import TaskDataset, TaskSpec, evaluate_task
from meta_attention.training.model_settings import Settings
from meta_attention.training.overrides import build_settings
from meta_attention.training.run import RUN_FILE, open_run, train_model
from meta_attention.training.schedule import Schedule
from meta_attention.training.tasks import build_recall

# sequences that runs are compared on
NUM_SEQUENCES = 512

SCALES: dict[str, dict[str, Any]] = {
    # seconds on a CPU: for tests
    "tiny": {
        "task": "recall:pairs=4,fewest_pairs=2,recalls=3,copies=3,copy_distance=3,keys=6,values=6,"
        "noise=4",
        "length": 40,
        "window_size": 4,
        "hidden_size": 32,
        "steps": 4,
        "batch_size": 4,
        "eval_every": 2,
        "save_every": 2,
        "log_every": 2,
    },
    # minutes on a CPU
    "small": {
        "task": "recall:pairs=16,recalls=10,copies=10,keys=32,values=16",
        "length": 96,
        "window_size": 8,
        "steps": 1800,
        "eval_every": 200,
        "save_every": 400,
    },
    # the recipe itself
    "full": {},
}

# a little more than what need costs at the scales "small" and "full"
STEERED: dict[str, Any] = {
    "cost_weight": Schedule(0.0, 0.3, 0.4, 0.6),
    "target_cost": 0.2,
    "hold": 1.0,
    "argmax_from": 0.8,
}

# what a variant changes of the recipe
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {"layer_experts": (("full",),)},
    "local": {"layer_experts": (("local",),)},
    "linear": {"layer_experts": (("linear",),)},
    "hybrid": {"layer_experts": (("local",), ("full",))},
    "hybrid-full-first": {"layer_experts": (("full",), ("local",))},
    # an expert drawn with the probabilities of the mean: the recipe
    "one-hot": {},
    # the largest of a sample of the posterior
    "thompson": {"training_weights": "sample"},
    # the largest of the mean
    "argmax": {"training_weights": "mean"},
    # new controllers believe in all experts alike
    "no-start": {"start_expert": None},
    # the strength of the prior by empirical Bayes
    "empirical": {"empirical_prior": True},
    # pressed when the task loss has settled, not at a fraction of training
    "settled": {"kl_weight": Schedule.parse("0->0.3@settled+0.2")},
    # pressed by the cost, which is steered and held, as on text
    "steered": STEERED | {"kl_weight": Schedule(0.0, 0.03, 0.4, 0.6)},
    # no prior: the expected cost is in the loss instead
    "prior-free": {"controller": "prior_free"},
    "prior-free-steered": STEERED | {"controller": "prior_free"},
    # the paper's: samples of the weights, all experts mixed, a KL of weight 1 from the first step
    "paper": {
        "routing": "soft",
        "training_weights": "sample",
        "kl_weight": Schedule.constant(1.0),
        "start_expert": None,
    },
}


def run_folder(runs: Path, scale: str, variant: str, seed: int) -> Path:
    return runs / f"{scale}-{variant}-seed{seed}"


def settings_of(variant: str, seed: int, scale: str, changes: list[str]) -> Settings:
    """Of a run; ``changes`` win over what its scale and its variant say."""
    changed = parse_changes(changes, Settings)
    if "seed" in changed:
        raise ConfigError("a seed must be given by --seed or --first-seed, as it names the folder")
    given = SCALES[scale] | VARIANTS[variant] | changed | {"seed": seed}
    return build_settings("recall", given)


def run(
    runs: Path,
    variant: str,
    seed: int,
    scale: str,
    *,
    changes: list[str] | None = None,
    stop_at: float = math.inf,
) -> dict[str, Any] | None:
    """Train and evaluate; the result, or None if ``stop_at`` (as of ``time.time``) came first."""
    folder = run_folder(runs, scale, variant, seed)
    settings = settings_of(variant, seed, scale, changes or [])
    is_begun = (folder / RUN_FILE).exists()
    if is_begun:
        given = {field.name: getattr(settings, field.name) for field in fields(settings)}
        given = {name: value for name, value in given.items() if value is not None}
        open_run(folder, None, given, resume=True)
    if (folder / RESULT).exists():
        return json.loads((folder / RESULT).read_text())
    begin = time.time()
    try:
        record = train_model(
            settings,
            folder,
            resume=is_begun,
            capture=torch.cuda.is_available(),
            callbacks=(StopAt(stop_at),),
        )
    except TimeIsOver as over:
        print(over)
        return None
    result = {"variant": variant, "seed": seed, "scale": scale}
    result |= {name: record[name] for name in ("settings", "parameters", "device", "versions")}
    # of the last part alone, where a run was cut off; with whatever else ran on the device
    result |= {"steps": record["steps"], "seconds": time.time() - begin}
    result |= measure(folder, settings) | {"regret": record["task"].get("regret")}
    (folder / RESULT).write_text(json.dumps(result, indent=1) + "\n")
    return result


def measure(folder: Path, settings: Settings) -> dict[str, Any]:
    """Answers and routes with one executed expert per token, and as trained where that differs."""
    assert settings.task is not None
    model = MetaAttentionForCausalLM.from_pretrained(folder).eval()
    model.to(torch.device(study_recall_report.default_device()))
    sizes = (settings.length, settings.window_size, settings.layers)
    task = build_recall(TaskSpec.parse(settings.task), *sizes)
    dataset = TaskDataset(task, NUM_SEQUENCES, held_out=True)

    def evaluate() -> dict[str, Any]:
        return evaluate_task(model, dataset, batch_size=settings.batch_size).to_dict()

    as_trained = None
    if model.config.routing != "hard":
        as_trained = evaluate()
        model.config.routing, model.config.uncertainty_threshold = "hard", None
    return {"hard": evaluate(), "as_trained": as_trained}


def missing_jobs(runs: Path, scale: str, variants: list[str], seeds: range) -> list[Job]:
    """All variants of a seed before the next seed."""
    jobs = [
        Job(name, (seed,), (run_folder(runs, scale, name, seed),), RESULT)
        for seed in seeds
        for name in variants
    ]
    return [job for job in jobs if not job.is_done]


def run_all(args: argparse.Namespace) -> int:
    """Runs side by side; how many failed."""
    # refused here, not in every process
    for variant in args.variants:
        settings_of(variant, args.first_seed, args.scale, args.set)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    jobs = missing_jobs(args.out, args.scale, args.variants, seeds)
    say(f"{len(jobs)} of {args.seeds * len(args.variants)} runs are missing")

    def command_of(job: Job, stop_at: float) -> list[str]:
        command = [__file__, "run", "--out", str(args.out), "--scale", args.scale]
        command += [
            "--variant",
            job.variant,
            "--seed",
            str(job.seeds[0]),
            "--stop-at",
            str(stop_at),
        ]
        return command + (["--set", *args.set] if args.set else [])

    failed = run_side_by_side(jobs, command_of, parallel=args.parallel, time_limit=args.time_limit)
    if any(args.out.glob(f"*/{RESULT}")):
        study_recall_report.report(args.out)
    return failed


def run_one(args: argparse.Namespace) -> int:
    result = run(
        args.out,
        args.variant,
        args.seed,
        args.scale,
        changes=args.set,
        stop_at=args.stop_at,
    )
    if result is not None:
        hard = result["hard"]
        print(
            f"far {hard['far_accuracy']:.3f}, near {hard['near_accuracy']:.3f}, on full "
            f"{hard['any_layer']['full_share']:.3f} of {hard['need_share']:.3f} in need, precision "
            f"{hard['any_layer']['precision'] or 0.0:.3f}, cost {hard['projected_cost']:.3f}"
        )
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("run", help="train and evaluate one variant")
    _add_run_options(command)
    command.add_argument("--variant", required=True, choices=list(VARIANTS))
    command.add_argument("--seed", type=int, default=0)
    command.add_argument(
        "--stop-at", type=float, default=math.inf, help="seconds of the clock, as of time.time()"
    )
    command.set_defaults(call=run_one)

    command = commands.add_parser("all", help="every missing run, several side by side")
    _add_run_options(command)
    command.add_argument("--seeds", type=int, default=5)
    command.add_argument(
        "--first-seed", type=int, default=0, help="others than those a recipe was chosen on"
    )
    command.add_argument("--parallel", type=int, default=8, help="runs at a time")
    command.add_argument(
        "--time-limit",
        type=float,
        default=math.inf,
        help="seconds after which no run starts and those under way save what they have",
    )
    command.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    command.set_defaults(call=run_all)

    command = commands.add_parser("report", help="table, recall.json, recall.md and the figure")
    command.add_argument("--runs", type=Path, required=True)
    command.set_defaults(call=lambda args: not study_recall_report.report(args.runs))
    return parser


def _add_run_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--out", type=Path, required=True, help="folder of the runs")
    command.add_argument("--scale", choices=list(SCALES), default="full")
    command.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="settings as of meta-attention train, which win over those of scale and variant: "
        "steps=8000 precision=bf16 compile=true",
    )


def main(arguments: list[str] | None = None) -> int:
    return run_command(build_parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
