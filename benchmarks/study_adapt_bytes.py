"""Which settings of a router keep a model's predictions? A byte model on a CPU, in many seeds.

A small Llama is trained on bytes; then routers are trained on it as ``meta-attention adapt`` does,
with one thing changed at a time. What holds here is worth a try on a model that matters, where a
training costs minutes of a GPU. Every run is a folder; what is there is not done again. It is so
small that all static choices of experts for its heads can be run: what routes are compared with.

    python benchmarks/study_adapt_bytes.py base --data books/train-00000.jsonl.xz --out runs/bytes
    python benchmarks/study_adapt_bytes.py all --out runs/bytes --seeds 4 --parallel 2
    python benchmarks/study_adapt_bytes.py static --out runs/bytes
    python benchmarks/study_adapt_bytes.py report --runs runs/bytes --json runs/bytes/rows.json

Without --data the text is Python's manual. "NAME --help" says more of each.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from study_adapt_measure import set_threshold
from study_adapt_report import save_figure
from study_adapt_variants import FADING_KL, WEAK, Scale, Variant, in_force, make_blind
from study_jobs import Job, run_command, run_side_by_side, say
from study_static_heads import ComparedModel, Point, divergence_at, search
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    set_seed,
)

from meta_attention.adapt import adapt, load_tokenizer
from meta_attention.adapt.adapters import CARD_FILE
from meta_attention.adapt.training import RouterSettings, open_router_run, train_router
from meta_attention.adapt.training.run import read_blocks
from meta_attention.bench.machine import describe_machine
from meta_attention.errors import ConfigError, DataError
from meta_attention.evaluation.statistics import half_interval
from meta_attention.training.corpus import Corpus, read_corpus
from meta_attention.training.data import Blocks, hold_out
from meta_attention.training.run import RUN_FILE, write_run
from meta_attention.training.settings import NO_WEIGHT
from meta_attention.training.tokenizer import build_tokenizer

BASE, TEXT, STATIC = "base", "text.json", "static.json"
MAX_BYTES, LENGTH, BATCH, LR = 2_500_000, 384, 8, 2e-3
# what a training changes of the defaults of meta-attention adapt; the first is compared with
VARIANTS: dict[str, dict[str, Any]] = {
    "strength 1": {"prior_strength": 1.0},
    "strength 1, fading KL": {"prior_strength": 1.0, "kl_weight": FADING_KL},
    "strength 0.1": {"prior_strength": WEAK},
    "strength 0.1, fading KL": {"prior_strength": WEAK, "kl_weight": FADING_KL},
    "strength 0.1, no KL": {"prior_strength": WEAK, "kl_weight": NO_WEIGHT},
    "prior-free": {"controller": "prior_free"},
    # one expert for every head, whatever the token
    "blind": {"is_blind": True},
    # mixed in training, one expert by a threshold on what is believed
    "soft, cut": {"routing": "soft", "target_cost": None},
    # one route for all heads of a token
    "per token": {"route_granularity": "token"},
    # what holds a cost up to its target, and what takes routes as in use at the end, left out
    "no hold": {"hold": 0.0},
    "drawn to the end": {"argmax_from": 1.0},
    "neither": {"hold": 0.0, "argmax_from": 1.0},
    "target 0.15": {"target_cost": 0.15},
    "target 0.4": {"target_cost": 0.4},
    # not pressed: what experts are worth is learnt, and the price found for each of three costs
    "by value": {"controller": "value"},
    "by value, 900 steps": {"controller": "value", "steps": 900},
    # all values told apart by their difference
    "by value, no scale": {"controller": "value", "value_scale": None},
    "by value, fine scale": {"controller": "value", "value_scale": 0.001},
}
ROUTING: dict[str, Any] = {
    "length": LENGTH,
    "window_size": 8,
    "experts": ("full", "local:32", "local"),
    "target_cost": 0.25,
    "precision": "fp32",
}
FIGURES = ("divergence", "loss_increase", "attention_share", "recall_divergence", "adaptivity")
# blocks that all static choices are tried on, and the best of them again; of the training text
FEW_BLOCKS, MANY_BLOCKS, KEPT = 8, 96, 0.05


def train_base(data: Sequence[str], out: Path, steps: int) -> None:
    """Train the byte model on all but what runs are measured on, and save it."""
    if (out / BASE / "config.json").is_file():
        raise ConfigError(f"{out} has a base already; take another folder, or remove it")
    train, _ = hold_out(read_corpus(data, max_bytes=MAX_BYTES))
    tokenizer = build_tokenizer("bytes", Corpus("none", [""]))
    ids = torch.tensor([i for text in train.documents for i in tokenizer(text)["input_ids"]])
    if len(ids) <= LENGTH:
        raise DataError(f"the text must have more than {LENGTH} bytes, got {len(ids)}")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=288,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2 * LENGTH,
            tie_word_embeddings=True,
        )
    )
    optimiser = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(steps):
        rate = min(1.0, (step + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimiser.param_groups:
            group["lr"] = LR * rate
        batch = _batch(ids)
        loss = model(batch, labels=batch).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            say(f"step {step + 1}/{steps}: loss {loss.item():.4f}")
    (out / BASE).mkdir(parents=True, exist_ok=True)
    (out / TEXT).write_text(json.dumps({"data": list(data), "steps": steps}) + "\n")
    tokenizer.save_pretrained(out / BASE)
    model.save_pretrained(out / BASE)


def _batch(ids: Tensor) -> Tensor:
    starts = torch.randint(len(ids) - LENGTH, (BATCH, 1))
    return ids[starts + torch.arange(LENGTH)]


def folder_of(out: Path, variant: str, seed: int | str) -> Path:
    return out / "runs" / f"{variant.replace(', ', '-').replace(' ', '-')}-seed{seed}"


def run_one(out: Path, variant: str, seed: int, steps: int) -> dict[str, Any]:
    folder = folder_of(out, variant, seed)
    if (folder / CARD_FILE).is_file():
        return json.loads((folder / RUN_FILE).read_text())
    given = (
        _of_base(out)
        | {"seed": seed, "steps": steps, "eval_every": steps, "save_every": steps}
        | VARIANTS[variant]
    )
    is_blind, routing = given.pop("is_blind", False), given.pop("routing", "hard")
    is_begun = (folder / RUN_FILE).is_file()
    settings = open_router_run(folder, given, resume=is_begun)
    model = AutoModelForCausalLM.from_pretrained(settings.model)
    if is_blind or routing != "hard":
        set_seed(seed)
        adapt(model, replace(settings.adapt_config(LENGTH), routing=routing))
    if is_blind:
        make_blind(model)
    tokenizer = load_tokenizer(settings.model)
    record = train_router(model, tokenizer, settings, folder, resume=is_begun, say=say)
    if routing == "soft":
        # of the mixture nothing is kept but what its cut comes to
        record["metrics"] = dict.fromkeys((*FIGURES, "layers")) | cut(out, model)
        write_run(folder, record)
    return record


def cut(out: Path, model: PreTrainedModel) -> dict[str, float]:
    """A soft router made hard: the threshold is set on training text, to the cost of the others."""
    blocks = _blocks(out)
    assert blocks.valid is not None
    some = _stack(blocks.train, _apart(blocks.train)[:FEW_BLOCKS])
    held_out = ComparedModel(model, _stack(blocks.valid, torch.arange(len(blocks.valid))))
    variant = Variant("cut", "soft cut", cost=ROUTING["target_cost"])
    threshold = set_threshold(model, variant, some, Scale())
    with in_force(model, variant, threshold=threshold):
        share, divergence = held_out.measure_routes()
    return {"attention_share": share, "divergence": divergence, "threshold": threshold}


def _of_base(out: Path) -> dict[str, Any]:
    """Settings of every router on the base of a folder."""
    if not (out / TEXT).is_file():
        raise DataError(f"{out} has no base; run the command base first")
    text = json.loads((out / TEXT).read_text())
    data = {"model": str(out / BASE), "data": tuple(text["data"]), "max_bytes": MAX_BYTES}
    return data | ROUTING


def find_static(out: Path) -> dict[str, Any]:
    """The best static choices by their cost: found on the text of training, measured on the other.

    Once for a folder.
    """
    path = out / STATIC
    if path.is_file():
        return json.loads(path.read_text())
    settings, blocks = RouterSettings.of(_of_base(out)), _blocks(out)
    model = AutoModelForCausalLM.from_pretrained(settings.model)
    adapt(model, settings.adapt_config(LENGTH))
    sizes = [FEW_BLOCKS, MANY_BLOCKS]
    few, many = (_stack(blocks.train, at) for at in _apart(blocks.train).split(sizes))
    found = search(ComparedModel(model, few), ComparedModel(model, many), keep=KEPT)
    assert blocks.valid is not None
    held_out = ComparedModel(model, _stack(blocks.valid, torch.arange(len(blocks.valid))))
    result = {
        "choices": len(held_out.choices()),
        "points": [held_out.measure(point.choice).to_dict() for point in found],
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
    return result


def _blocks(out: Path) -> Blocks:
    settings = RouterSettings.of(_of_base(out))
    return read_blocks(load_tokenizer(settings.model), settings, LENGTH)


def _apart(blocks: Any) -> Tensor:
    """Blocks to choose by, apart from each other, so that no book counts for most of them."""
    apart = torch.linspace(0, len(blocks) - 1, FEW_BLOCKS + MANY_BLOCKS).long()
    return apart[torch.randperm(len(apart), generator=torch.Generator().manual_seed(0))]


def _stack(blocks: Any, at: Tensor) -> Tensor:
    return torch.stack([blocks[index]["input_ids"] for index in at.tolist()])


def read_static(out: Path) -> list[Point]:
    """The best static choices, the cheapest first; none before they were looked for."""
    path = out / STATIC
    if not path.is_file():
        return []
    points = json.loads(path.read_text())["points"]
    return sorted((Point(**point) for point in points), key=lambda p: p.attention_share)


def report(out: Path, path: Path | None) -> list[dict[str, Any]]:
    """A row for every variant, and how far from the first it is, seed by seed."""
    by_variant: dict[str, dict[int, dict[str, Any]]] = {}
    steps = set()
    for variant in VARIANTS:
        every = folder_of(out, variant, "*").relative_to(out)
        for path_of_run in sorted(out.glob(f"{every}/{RUN_FILE}")):
            record = json.loads(path_of_run.read_text())
            if record["finished"]:
                by_variant.setdefault(variant, {})[record["seed"]] = record["metrics"]
                steps.add(record["steps"])
    if not by_variant:
        raise DataError(f"{out} has no finished runs")
    if len(steps) > 1:
        raise DataError(f"runs of one folder must have as many steps, {out} has {sorted(steps)}")
    first, static = by_variant.get(next(iter(VARIANTS)), {}), read_static(out)
    rows = []
    for variant, runs in by_variant.items():
        row: dict[str, Any] = {"variant": variant, "seeds": sorted(runs)}
        for name in FIGURES:
            row[name] = [runs[seed][name] for seed in sorted(runs)]
        row["layers"] = [runs[seed]["layers"] for seed in sorted(runs)]
        row["against_first"] = [
            runs[seed]["divergence"] - first[seed]["divergence"]
            for seed in sorted(runs)
            if seed in first
        ]
        row["against_static"] = [
            divergence - divergence_at(static, share)
            for divergence, share in zip(row["divergence"], row["attention_share"], strict=True)
            if static
        ]
        rows.append(row)
    if path is not None:
        text = json.loads((out / TEXT).read_text())
        # what was read, not where it lay
        text["data"] = ["/".join(Path(name).parts[-2:]) for name in text["data"]]
        machine = describe_machine(torch.device("cpu"))
        routing = ROUTING | {"steps": steps.pop()}
        summary = {"machine": machine, "base": text, "routing": routing, "rows": rows}
        if static:
            summary["static"] = json.loads((out / STATIC).read_text())
        path.write_text(json.dumps(summary, indent=1, default=str) + "\n")
    _print_table(rows)
    return rows


def _print_table(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title="means over seeds, +- half of the 95% interval")
    for title in ("variant", "seeds", "divergence", "against the first", "against static", "cost"):
        table.add_column(title, justify="left" if title == "variant" else "right")
    for row in rows:
        table.add_row(
            row["variant"],
            str(len(row["seeds"])),
            _mean(row["divergence"]),
            _mean(row["against_first"], "+"),
            _mean(row["against_static"], "+"),
            f"{statistics.mean(row['attention_share']):.3f}",
        )
    Console(width=120).print(table)


def _mean(values: Sequence[float], sign: str = "") -> str:
    if not values:
        return "-"
    half = half_interval(values)
    return f"{statistics.mean(values):{sign}.5f}" + ("" if half is None else f" +-{half:.5f}")


def run_all(args: argparse.Namespace) -> int:
    jobs = [
        Job(name, (seed,), (folder_of(args.out, name, seed),), CARD_FILE)
        for seed in range(args.seeds)
        for name in args.variants
        if not (folder_of(args.out, name, seed) / CARD_FILE).is_file()
    ]
    say(f"{len(jobs)} of {args.seeds * len(args.variants)} runs are missing")

    def command_of(job: Job, stop_at: float) -> list[str]:
        named = ["--variant", job.variant, "--seed", str(job.seeds[0])]
        return [__file__, "run", "--out", str(args.out), *named, "--steps", str(args.steps)]

    return run_side_by_side(jobs, command_of, parallel=args.parallel, time_limit=math.inf)


def run_named(args: argparse.Namespace) -> int:
    metrics = run_one(args.out, args.variant, args.seed, args.steps)["metrics"]
    shown = f"divergence {metrics['divergence']:.5f} at {metrics['attention_share']:.3f}"
    print(f"{args.variant} seed {args.seed}: {shown}")
    return 0


def run_static(args: argparse.Namespace) -> int:
    found = find_static(args.out)
    print(f"the best of {found['choices']} static choices:")
    for point in read_static(args.out):
        layers = ", ".join("/".join(names) for names in point.choice)
        print(f"divergence {point.divergence:.5f} at {point.attention_share:.3f}: {layers}")
    return 0


def draw(rows: Sequence[dict[str, Any]], static: Sequence[Point], path: Path) -> None:
    """Every run, and the line of the best static choices, by their cost."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    if static:
        axis.plot(
            [point.attention_share for point in static],
            [point.divergence for point in static],
            "s-",
            color="black",
            lw=1.0,
            ms=4,
            label="best of all static choices",
        )
    for row in rows:
        axis.plot(row["attention_share"], row["divergence"], "o", ms=5, label=row["variant"])
    axis.set_xlim(0.05, 0.65)
    axis.set_ylim(0.0, 0.06)
    axis.set_xlabel("attention FLOPs, share of the base's")
    axis.set_ylabel("divergence from the base, nats per token")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    save_figure(figure, path)


def run_report(args: argparse.Namespace) -> int:
    rows = report(args.runs, args.json)
    if args.image is not None:
        draw(rows, read_static(args.runs), args.image)
        print(f"wrote {args.image}")
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("base", help="train the byte model; minutes")
    command.add_argument("--data", nargs="+", default=[], help="files or folders of text")
    command.add_argument("--out", type=Path, required=True, help="folder of base and runs")
    command.add_argument("--steps", type=int, default=900)
    command.set_defaults(call=lambda args: train_base(args.data, args.out, args.steps))

    command = commands.add_parser("run", help="train one router")
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--variant", choices=list(VARIANTS), required=True)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--steps", type=int, default=300)
    command.set_defaults(call=run_named)

    command = commands.add_parser("all", help="every missing run, several side by side")
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    command.add_argument("--seeds", type=int, default=4)
    command.add_argument("--parallel", type=int, default=2, help="processes at a time")
    command.add_argument("--steps", type=int, default=300)
    command.set_defaults(call=run_all)

    command = commands.add_parser(
        "static", help="the best static choices of experts for heads, of all; minutes"
    )
    command.add_argument("--out", type=Path, required=True)
    command.set_defaults(call=run_static)

    command = commands.add_parser("report", help="the table, and its figures as JSON")
    command.add_argument("--runs", type=Path, required=True, help="the folder of --out")
    command.add_argument("--json", type=Path, help="file to write")
    command.add_argument("--image", type=Path, help="figure to draw, such as bytes.svg")
    command.set_defaults(call=run_report)
    return parser


def main(arguments: list[str] | None = None) -> int:
    return run_command(build_parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
