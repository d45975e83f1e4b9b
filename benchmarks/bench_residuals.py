"""Training step with Attention Residuals against the plain sum: time and peak memory.

Same weights, batch, optimiser and data; only what sublayers read differs. Before timing, every
model must begin at the loss of the plain one and learn its batch. Models take turns for some
rounds, so that a device that gets warmer is slower for all of them. Experts default to full
attention alone: the less a step costs otherwise, the more of it this is. A step that is captured
("--capture", also of "meta-attention train") takes what the device needs; otherwise also what the
host needs to launch it, of which more small kernels need more.

    python benchmarks/bench_residuals.py --out benchmarks/results/residuals_h200.json
    python benchmarks/bench_residuals.py --compile blocks --experts full linear local
    python benchmarks/bench_residuals.py --hidden-size 1024 2048 4096 --variants plain block
    python benchmarks/bench_residuals.py --capture --rounds 1 --profile
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
from torch.profiler import ProfilerActivity, profile

from meta_attention import MetaAttentionConfig, MetaAttentionForCausalLM
from meta_attention.config import ResidualName

VARIANTS: dict[str, ResidualName] = {
    "plain": "sum",
    "full": "attention",
    "block": "block_attention",
}
# what the block variant may add to a step at 24 layers
TARGET = 0.04
# kernels of a profile, the longest first
MAX_KERNELS = 25
SMOKE = {
    "hidden_sizes": [64],
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


def measure(args: argparse.Namespace, variant: str, *, profiles: bool) -> dict[str, Any]:
    """One round of one model, which is made for it and let go after it."""
    model = make_model(args, variant)
    is_cuda = args.device == "cuda"
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=3e-4, fused=is_cuda, capturable=args.capture
    )
    if args.checkpointing:
        model.gradient_checkpointing_enable()
    if args.compile == "blocks":
        for block in model.model.layers:
            block.compile()
    elif args.compile == "model":
        model.compile()
    torch.manual_seed(1)
    ids = torch.randint(args.vocabulary, (args.batch_size, args.length), device=args.device)
    losses, seconds = time_steps(model, optimiser, ids, args, captured=args.capture)
    assert losses[-1] < losses[0], f"{variant}: the loss did not fall: {losses}"
    peak = peak_mib(args)
    return {
        "first_loss": losses[0],
        "seconds": seconds,
        "peak_mib": peak,
        "parameters": sum(p.numel() for p in model.parameters()),
        "kernels": profile_step(model, optimiser, ids, args) if profiles else None,
    }


def profile_step(
    model: MetaAttentionForCausalLM,
    optimiser: torch.optim.Optimizer,
    ids: torch.Tensor,
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    """What one step runs on the device, summed by name; on a CPU its operators."""
    is_cuda = args.device == "cuda"
    activity = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
    one = argparse.Namespace(**vars(args) | {"warmup": 0, "steps": 1})
    # torch 2.11 warns of cycles, of which there is but one, unless all events are kept
    with profile(activities=[activity], acc_events=True) as recorded:
        time_steps(model, optimiser, ids, one)
    rows = []
    for event in recorded.key_averages():
        us = event.self_device_time_total if is_cuda else event.self_cpu_time_total
        # a label over others would count them twice
        if us > 0 and not event.is_user_annotation:
            rows.append({"name": event.key, "calls": event.count, "ms": us / 1e3})
    return sorted(rows, key=lambda row: -row["ms"])


def collect(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    rounds: dict[str, list[dict[str, Any]]] = {variant: [] for variant in args.variants}
    for number in range(args.rounds):
        for variant in args.variants:
            # once, when all that is timed has been
            is_last = number == args.rounds - 1
            result = measure(args, variant, profiles=args.profile and is_last)
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
                "hidden_size": args.hidden_size,
                "parameters": results[0]["parameters"],
                "first_loss": first,
                "step_ms": median * 1e3,
                "overhead": median / plain_seconds - 1.0,
                "overhead_of_rounds": overheads,
                "tokens_per_s": args.batch_size * args.length / median,
                "peak_mib": None if None in peaks else max(peaks),
            }
            | (summarise(results[-1]["kernels"]) if args.profile else {})
        )
    return rows


def summarise(kernels: list[dict[str, Any]]) -> dict[str, Any]:
    """Time of all of them together, without what lies between, and the longest."""
    return {
        "kernels_ms": sum(kernel["ms"] for kernel in kernels),
        "kernels": kernels[:MAX_KERNELS],
    }


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


def print_kernels(row: dict[str, Any]) -> None:
    total = f"{row['kernels_ms']:.2f} ms in all kernels of a step"
    print(f"{row['variant']}, D={row['hidden_size']}: {total}; ms, calls and name of the longest")
    for kernel in row["kernels"]:
        print(f"  {kernel['ms']:9.3f} {kernel['calls']:6d}  {kernel['name'][:90]}")


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
    parser.add_argument(
        "--hidden-size", dest="hidden_sizes", nargs="+", type=int, default=[1024], metavar="D"
    )
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=15, help="timed, in each round")
    parser.add_argument("--warmup", type=int, default=4, help="before them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile", choices=("none", "blocks", "model"), default="none")
    parser.add_argument("--capture", action="store_true", help="replay steps from a CUDA graph")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--impl", choices=("auto", "reference", "triton"), default="auto")
    parser.add_argument("--no-bf16", dest="bf16", action="store_false")
    parser.add_argument(
        "--profile", action="store_true", help="of one more step of each model: time by kernel"
    )
    parser.add_argument("--smoke", action="store_true", help="a size for a CPU, to see it run")
    parser.add_argument("--out", type=Path, help="write rows, machine and versions to this file")
    args = parser.parse_args()
    if args.smoke:
        vars(args).update(SMOKE)
    if args.capture and args.device != "cuda":
        parser.error("--capture must have a CUDA device")
    if args.variants[0] != "plain":
        parser.error("--variants must begin with plain: the others are compared with it")

    rows: list[dict[str, Any]] = []
    for width in args.hidden_sizes:
        args.hidden_size = width
        found = make_rows(args, collect(args))
        rows += found
        shape = f"{args.layers} layers, T={args.length}, batch {args.batch_size}"
        print_table(found, f"D={args.hidden_size}, {shape}")
        for row in found:
            if args.profile:
                print_kernels(row)
            # what was promised, of the size it was promised for
            if row["variant"] == "block" and args.device == "cuda" and args.layers == 24:
                verdict = "met" if row["overhead"] < TARGET else "missed"
                print(f"block variant under {TARGET:.0%} of a step: {verdict}")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        left_out = ("out", "variants", "hidden_size")
        settings = {k: v for k, v in vars(args).items() if k not in left_out}
        document = {"machine": machine(args.device), "settings": settings, "rows": rows}
        args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
