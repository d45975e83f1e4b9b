"""Training step with Attention Residuals against the plain sum: time and peak memory.

Same weights, batch, optimiser and data; only what sublayers read differs. Before timing, every
model must begin at the loss of the plain one and learn its batch. Models take turns for some
rounds, so that a device that gets warmer is slower for all of them. Experts default to full
attention alone: the less a step costs otherwise, the more of it this is.

    python benchmarks/bench_residuals.py --out benchmarks/results/residuals_h200.json
    python benchmarks/bench_residuals.py --compile blocks --experts full linear local
    python benchmarks/bench_residuals.py --smoke
"""

import argparse
import gc
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from bench_training_step import machine, peak_mib, time_steps
from rich.console import Console
from rich.table import Table

from meta_attention import MetaAttentionConfig, MetaAttentionForCausalLM
from meta_attention.config import ResidualName

VARIANTS: dict[str, ResidualName] = {
    "plain": "sum",
    "full": "attention",
    "block": "block_attention",
}
# what the block variant may add to a step at 24 layers
TARGET = 0.04
SMOKE = {
    "hidden_size": 64,
    "layers": 4,
    "length": 64,
    "batch_size": 2,
    "vocabulary": 64,
    "steps": 2,
    "warmup": 2,
    "rounds": 1,
}


def make_model(args: argparse.Namespace, variant: str) -> MetaAttentionForCausalLM:
    torch.manual_seed(0)
    config = MetaAttentionConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden_size // args.head_dim,
        max_position_embeddings=args.length,
        experts=tuple(args.experts),
        residual=VARIANTS[variant],
        residual_blocks=args.blocks,
        impl=args.impl,
    )
    return MetaAttentionForCausalLM(config).to(args.device).train()


def measure(args: argparse.Namespace, variant: str) -> dict[str, Any]:
    """One round of one model, which is made for it and let go after it."""
    model = make_model(args, variant)
    is_cuda = args.device == "cuda"
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=is_cuda)
    if args.checkpointing:
        model.gradient_checkpointing_enable()
    if args.compile == "blocks":
        for block in model.model.layers:
            block.compile()
    elif args.compile == "model":
        model.compile()
    torch.manual_seed(1)
    ids = torch.randint(args.vocabulary, (args.batch_size, args.length), device=args.device)
    losses, seconds = time_steps(model, optimiser, ids, args)
    assert losses[-1] < losses[0], f"{variant}: the loss did not fall: {losses}"
    return {
        "first_loss": losses[0],
        "seconds": seconds,
        "peak_mib": peak_mib(args),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def collect(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    rounds: dict[str, list[dict[str, Any]]] = {variant: [] for variant in args.variants}
    for number in range(args.rounds):
        for variant in args.variants:
            result = measure(args, variant)
            rounds[variant].append(result)
            # the model goes before the next one comes
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()
            torch._dynamo.reset()
            shown = statistics.median(result["seconds"]) * 1e3
            print(f"round {number + 1}, {variant}: {shown:.2f} ms", flush=True)
    return rounds


def make_rows(
    args: argparse.Namespace, rounds: dict[str, list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    rows = []
    plain = rounds["plain"]
    plain_seconds = statistics.median(s for result in plain for s in result["seconds"])
    for variant, results in rounds.items():
        first, expected = results[0]["first_loss"], plain[0]["first_loss"]
        # queries of zero are the plain sum, up to the rounding of another order of additions
        assert abs(first - expected) < 0.01 * expected, f"{variant} starts at {first}: {expected}"
        seconds = [s for result in results for s in result["seconds"]]
        median = statistics.median(seconds)
        # of each round against its own plain model
        overheads = [
            statistics.median(ours["seconds"]) / statistics.median(theirs["seconds"]) - 1.0
            for ours, theirs in zip(results, plain, strict=True)
        ]
        peaks = [result["peak_mib"] for result in results]
        rows.append(
            {
                "variant": variant,
                "parameters": results[0]["parameters"],
                "first_loss": first,
                "step_ms": median * 1e3,
                "overhead": median / plain_seconds - 1.0,
                "overhead_of_rounds": overheads,
                "tokens_per_s": args.batch_size * args.length / median,
                "peak_mib": None if None in peaks else max(peaks),
            }
        )
    return rows


def print_table(rows: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title)
    for column in ("residuals", "M params", "step", "overhead", "rounds", "tokens/s", "peak MiB"):
        table.add_column(column, justify="left" if column == "residuals" else "right")
    for row in rows:
        low, high = min(row["overhead_of_rounds"]), max(row["overhead_of_rounds"])
        table.add_row(
            row["variant"],
            f"{row['parameters'] / 1e6:.2f}",
            f"{row['step_ms']:.2f} ms",
            f"{row['overhead']:+.1%}",
            f"{low:+.1%} to {high:+.1%}",
            f"{row['tokens_per_s']:,.0f}",
            "-" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}",
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument(
        "--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), help="plain first"
    )
    parser.add_argument("--experts", nargs="+", default=["full"])
    parser.add_argument("--blocks", type=int, default=8, help="of the block variant")
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=15, help="timed, in each round")
    parser.add_argument("--warmup", type=int, default=4, help="before them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile", choices=("none", "blocks", "model"), default="none")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--impl", choices=("auto", "reference", "triton"), default="auto")
    parser.add_argument("--no-bf16", dest="bf16", action="store_false")
    parser.add_argument("--smoke", action="store_true", help="a size for a CPU, to see it run")
    parser.add_argument("--out", type=Path, help="write rows, machine and versions to this file")
    args = parser.parse_args()
    if args.smoke:
        vars(args).update(SMOKE)
    if args.variants[0] != "plain":
        parser.error("--variants must begin with plain: the others are compared with it")

    rows = make_rows(args, collect(args))
    title = f"D={args.hidden_size}, {args.layers} layers, T={args.length}, batch {args.batch_size}"
    print_table(rows, title)
    for row in rows:
        # what was promised, of the size it was promised for
        if row["variant"] == "block" and args.device == "cuda" and args.layers == 24:
            verdict = "met" if row["overhead"] < TARGET else "missed"
            print(f"block variant under {TARGET:.0%} of a step: {verdict}")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        settings = {k: v for k, v in vars(args).items() if k not in ("out", "variants")}
        document = {"machine": machine(args.device), "settings": settings, "rows": rows}
        args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
