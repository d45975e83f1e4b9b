"""What a finished checkpoint gains by ``meta-attention route --train-steps``, on the study's text.

Static hybrids of ``study_text.py`` are given routes by value as the command gives them, with its
defaults, and learn on with these. Beside each: the same hybrid, learning on without routes in as
many steps of the same optimiser, as more training makes any model better.

    python benchmarks/study_learn_on.py --cache runs/cache-python --runs runs/mini \\
        --seeds 5 6 7 8 9 --json runs/learn_on.json
    python benchmarks/study_learn_on.py --cache runs/cache-python --runs runs/mini \\
        --seeds 5 --train-lr 1e-3 --json runs/learn_on_faster.json

A seed that is in the file already is not run again. Distances are to the hybrid as it was.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from study_data import Cache, draw_sequences
from study_evaluation import evaluate
from study_jobs import run_command, say
from study_run import CONFIG, default_device, run_folder
from study_training import PRICING_BATCHES
from study_variants import REFERENCE, SCALES, Scale
from torch import Tensor

from meta_attention import MetaAttentionForCausalLM
from meta_attention.bench.machine import describe_machine
from meta_attention.errors import ConfigError, DataError
from meta_attention.evaluation.statistics import Figure
from meta_attention.routing import check_cost
from meta_attention.training.route import OWN_SHARE, WINDOW_SHARE, RouteSettings, learn_beside
from meta_attention.training.values import (
    cost_range,
    find_price,
    learn_on,
    learn_values,
    with_values,
)

STATIC, STATIC_ON = "as it was", "learnt on, without routes"
VALUED, VALUED_ON = "by value", "by value, learnt on"
Row = dict[str, Any]
# as the command has it; half as many again at the end
VALUE_STEPS = RouteSettings().steps


class Learner:
    """A finished hybrid and text to learn on with.

    Args:
        cache: The text it was trained on.
        folder: Its run.
        settings: As of ``meta-attention route``.
        device: Where.
    """

    def __init__(self, cache: Cache, folder: Path, settings: RouteSettings, device: str) -> None:
        if not (folder / "model").is_dir():
            raise DataError(f"{folder} must be a finished run of study_text.py, and has no model")
        self.cache, self.folder, self.settings, self.device = cache, folder, settings, device
        self.scale = Scale.of_run(json.loads((folder / CONFIG).read_text())["settings"])
        self.text = torch.cat(list(cache.tokens("train", device).values()))
        self.autocast = torch.bfloat16 if device == "cuda" else None

    def load(self) -> MetaAttentionForCausalLM:
        model = MetaAttentionForCausalLM.from_pretrained(self.folder / "model")
        return model.to(torch.device(self.device))  # type: ignore[arg-type]

    def route(self) -> MetaAttentionForCausalLM:
        """The hybrid with a choice, of which nothing is known yet."""
        length = self.scale.length
        return with_values(
            self.load(), window_size=length // WINDOW_SHARE, length=length, seed=self.settings.seed
        )

    def batches(self, number: int) -> Iterator[Tensor]:
        for _ in range(number):
            yield draw_sequences(self.text, self.settings.batch_size, self.scale.length)

    def learn_values(
        self,
        model: MetaAttentionForCausalLM,
        texts: list[Tensor],
        steps: int,
        target_cost: float | None = None,
    ) -> None:
        learn_values(
            model,
            self.batches(steps),
            num_steps=steps,
            lr=self.settings.lr,
            texts=texts,
            target_cost=target_cost,
            autocast=self.autocast,
        )

    def learn_on(self, model: MetaAttentionForCausalLM, texts: list[Tensor], cost: float) -> None:
        settings = self.settings
        # with routes and without, on the same text
        torch.manual_seed(settings.seed)
        learn_on(
            model,
            self.batches(settings.train_steps),
            texts,
            cost,
            num_steps=settings.train_steps,
            lr=settings.train_lr,
            autocast=self.autocast,
        )

    def measure(self) -> dict[str, Row]:
        """Every row of a seed."""
        settings, rows = self.settings, {}
        # before anything is learnt for it
        check_cost(settings.target_cost, *cost_range(self.route()))
        torch.manual_seed(settings.seed)
        texts = list(self.batches(PRICING_BATCHES))
        rows[STATIC] = self.judge(self.load())
        # controllers that know nothing buy everything that costs no more than full attention
        static = self.route()
        self.learn_on(static, texts, 1.0)
        rows[STATIC_ON] = self.judge(static)
        routed = self.route()
        learn = partial(self.learn_values, routed, texts)
        learn_beside(settings.steps, settings.target_cost, learn)
        find_price(routed, texts, settings.target_cost)
        rows[VALUED] = self.judge(routed)
        self.learn_on(routed, texts, settings.target_cost)
        learn(settings.num_steps - settings.steps - settings.train_steps, settings.target_cost)
        find_price(routed, texts, settings.target_cost)
        rows[VALUED_ON] = self.judge(routed)
        return rows

    def judge(self, model: MetaAttentionForCausalLM) -> Row:
        found = evaluate(model, self.cache, self.scale)
        hard = found["hard"]
        return {
            "loss": hard["loss"],
            "soft_loss": found["soft"]["loss"],
            "attention_flops": hard["attention_flops"],
            "attention_and_controller_flops": hard["attention_and_controller_flops"],
            "price": model.config.price if model.config.controller == "value" else None,
        }


def read_record(path: Path, asked: Row) -> Row:
    """What is there already; of the same settings, or it could not go on."""
    try:
        record: Row = json.loads(path.read_text())
    except ValueError as error:
        raise DataError(f"{path} must be a file that this wrote: {error}; move it away") from error
    if {name: record.get(name) for name in asked} != asked:
        raise ConfigError(f"{path} is of other settings; give another --json")
    return record


def measure_all(args: argparse.Namespace) -> None:
    if args.train_steps < 1:
        raise ConfigError(f"--train-steps must be >= 1, got {args.train_steps}")
    cache, device = Cache.open(args.cache), default_device()
    settings = RouteSettings(
        target_cost=args.target_cost,
        steps=VALUE_STEPS,
        train_steps=args.train_steps,
        train_lr=args.train_lr,
    )
    asked = {"scale": args.scale, "variant": args.variant, "settings": asdict(settings)}
    # files of before have values that were learnt beside the dearest experts throughout
    asked["own_share"] = OWN_SHARE
    record: Row = asked | {"seeds": {}}
    if args.json.exists():
        record = read_record(args.json, asked)
    for seed in args.seeds:
        if str(seed) in record["seeds"]:
            continue
        begin = time.time()
        folder = run_folder(args.runs, args.scale, args.variant, seed)
        rows = Learner(cache, folder, replace(settings, seed=seed), device).measure()
        record["seeds"][str(seed)] = rows
        record["machine"] = describe_machine(torch.device(device))
        # with every seed: what comes after may be cut off
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")
        shown = [f"{name} {row['loss']:.4f}" for name, row in rows.items()]
        say(f"seed {seed}: {', '.join(shown)}, {time.time() - begin:.0f} s")
    print_table(record)


def print_table(record: Row) -> None:
    table = Table(title=f"{record['variant']}: mean over {len(record['seeds'])} seeds")
    for column in ("", "attention FLOPs", "loss", "against as it was", "hard - soft"):
        table.add_column(column, justify="right" if column else "left")
    for name in (STATIC, STATIC_ON, VALUED, VALUED_ON):
        rows = [(rows[name], rows[STATIC]) for rows in record["seeds"].values()]
        values = {
            "flops": [row["attention_flops"] for row, _ in rows],
            "loss": [row["loss"] for row, _ in rows],
            "gap": [row["loss"] - static["loss"] for row, static in rows],
            "soft": [row["loss"] - row["soft_loss"] for row, _ in rows],
        }
        shown = {key: Figure.of(found) for key, found in values.items()}
        cells = [
            "" if figure is None else figure.show(".3f" if key == "flops" else ".4f")
            for key, figure in shown.items()
        ]
        table.add_row(name, *cells)
    Console(width=110).print(table)


def build_parser() -> argparse.ArgumentParser:
    default = RouteSettings()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=Path, required=True, help="what study_text.py prepared")
    parser.add_argument("--runs", type=Path, required=True, help="folder with finished hybrids")
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--json", type=Path, required=True, help="file to write, or to go on with")
    parser.add_argument("--variant", default=REFERENCE, help=f"of the hybrids: {REFERENCE}")
    parser.add_argument("--scale", choices=list(SCALES), default="mini")
    parser.add_argument("--target-cost", type=float, default=0.45, help="of the routed layers")
    parser.add_argument("--train-steps", type=int, default=800, help="in which it learns on")
    parser.add_argument("--train-lr", type=float, default=default.train_lr)
    parser.set_defaults(call=measure_all)
    return parser


def main(arguments: list[str] | None = None) -> int:
    return run_command(build_parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
