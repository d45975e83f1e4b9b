"""Learn a task whose need of full attention is known, and see who gets it.

Half of the questions can be answered from the window, half only from far back. The model first
learns to answer; then the KL to the prior makes full attention dear, and it stays where it is
needed. Routed is the second layer, the first is local. Two minutes or less on one CPU core.

Fails unless, at the end, 90% of the far questions are answered, 90% of the tokens on full attention
need it, and they are at most one and a half times as many as need it.

    python examples/learn_recall.py
    python examples/learn_recall.py --seed 1
    python examples/learn_recall.py --kl-weight 0    # no economy: learnt, but it fails
"""

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from meta_attention.report.terminal import print_task
from meta_attention.training.logs import read_metrics
from meta_attention.training.overrides import build_settings
from meta_attention.training.run import train_model
from meta_attention.training.schedule import Schedule

TASK = "recall:pairs=6,fewest_pairs=2,recalls=6,copies=6,copy_distance=3,keys=8,values=8,noise=4"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=800)
    kl_weight = build_settings("recall", {}).kl_weight
    parser.add_argument("--kl-weight", type=Schedule.parse, default=kl_weight)
    args = parser.parse_args()
    settings = build_settings(
        "recall",
        {
            "task": TASK,
            "length": 40,
            "window_size": 3,
            "hidden_size": 32,
            "layer_experts": (("local",), ("full", "linear", "local")),
            "lr": 5e-3,
            "kl_weight": args.kl_weight,
            "steps": args.steps,
            "eval_every": max(1, args.steps // 8),
            "save_every": args.steps,
            "seed": args.seed,
        },
    )
    with tempfile.TemporaryDirectory() as folder:
        record = train_model(settings, Path(folder) / "run")
        rows = [row for row in read_metrics(Path(folder) / "run") if row["kind"] == "eval"]

    print("held out, in the course of training")
    print(f"{'step':>6}{'far':>9}{'near':>9}{'on full':>9}{'precision':>11}{'recall':>9}")
    for row in rows:
        print(
            f"{row['step']:>6}{row['eval_far_accuracy']:>9.1%}{row['eval_near_accuracy']:>9.1%}"
            f"{row['eval_full_share_any']:>9.1%}{row.get('eval_full_precision', 0):>11.1%}"
            f"{row['eval_full_recall']:>9.1%}"
        )
    print()
    task = record["task"]
    print_task(Console(), "at the end", task)
    need, full = task["need_share"], task["any_layer"]
    if task["far_accuracy"] < 0.9:
        sys.exit(f"not learnt in {args.steps} steps; give it more by --steps")
    if (full["precision"] or 0) < 0.9 or full["full_share"] > 1.5 * need:
        sys.exit(f"{full['full_share']:.1%} of tokens are on full attention, {need:.1%} need it")


if __name__ == "__main__":
    main()
