"""Training step of a soft-routed language model against full attention and static baselines.

Same width, depth, batch, optimiser and data; only the experts differ. Before timing, each model's
loss must be finite and fall over a few steps on one batch. Soft routing runs every expert on every
token, so its ratio says what three experts cost, not what routing saves.

    python benchmarks/bench_training_step.py --json benchmarks/results/training_step_h200.json
    python benchmarks/bench_training_step.py --device cpu --hidden-size 64 --layers 2 --length 128
"""

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader
from transformers import default_data_collator

from meta_attention import MetaAttentionConfig, MetaAttentionForCausalLM
from meta_attention.training.corpus import Corpus, embedded_corpus
from meta_attention.training.packing import pack
from meta_attention.training.tokenizer import build_tokenizer

VARIANTS: dict[str, dict[str, Any]] = {
    "full": {"experts": ("full",)},
    "local": {"experts": ("local",)},
    "linear": {"experts": ("linear",)},
    "soft: full, linear, local": {},
    "soft, sampled weights": {"training_weights": "sample"},
    "soft, own projections": {"shared_projections": False},
}


def make_model(args: argparse.Namespace, variant: str) -> MetaAttentionForCausalLM:
    torch.manual_seed(0)
    config = MetaAttentionConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden_size // 64,
        num_key_value_heads=args.kv_heads,
        window_size=args.window,
        max_position_embeddings=args.length,
        **VARIANTS[variant],
    )
    return MetaAttentionForCausalLM(config).to(args.device).train()


def measure(args: argparse.Namespace, variant: str) -> dict[str, Any]:
    model = make_model(args, variant)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=args.device == "cuda")
    if args.compile:
        # block by block: they share one graph, so compiling takes seconds
        for block in model.model.layers:
            block.compile()
    ids = torch.randint(args.vocabulary, (args.batch_size, args.length), device=args.device)
    losses, seconds = time_steps(model, optimiser, ids, args)
    assert losses[-1] < losses[0], f"{variant}: the loss did not fall: {losses}"
    median = statistics.median(seconds)
    return {
        "variant": variant,
        "compile": args.compile,
        "parameters": sum(p.numel() for p in model.parameters()),
        "step_ms": median * 1e3,
        "spread": (max(seconds) - min(seconds)) / median,
        "tokens_per_s": args.batch_size * args.length / median,
        "peak_mib": peak_mib(args),
    }


def time_steps(
    model: MetaAttentionForCausalLM,
    optimiser: torch.optim.Optimizer,
    ids: torch.Tensor,
    args: argparse.Namespace,
    *,
    captured: bool = False,
) -> tuple[list[float], list[float]]:
    """Losses of the steps before the clock starts, and seconds of those it measures.

    Captured, these are replayed from a CUDA graph; the optimiser must be ``capturable``.
    """
    is_cuda = args.device == "cuda"

    def step() -> torch.Tensor:
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.bf16):
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return loss.detach()

    losses = [step().item() for _ in range(args.warmup)]
    run = capture(step) if captured else step
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(args.steps):
        if is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return losses, seconds


def capture(step: Callable[[], object]) -> Callable[[], object]:
    """Replay a step that has run before, with nothing for the host to launch one by one."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def peak_mib(args: argparse.Namespace) -> float | None:
    """Of the steps that were timed last."""
    return torch.cuda.max_memory_allocated() / 2**20 if args.device == "cuda" else None


def measure_loader(args: argparse.Namespace) -> float:
    """Tokens/s of the data loader alone, over packed bytes of the embedded corpus."""
    corpus = embedded_corpus()
    corpus = Corpus(corpus.name, corpus.documents * 32)
    blocks = pack(corpus, build_tokenizer("bytes", corpus), args.length)
    loader = DataLoader(blocks, args.batch_size, shuffle=True, collate_fn=default_data_collator)
    start = time.perf_counter()
    num_tokens = sum(batch["input_ids"].numel() for batch in loader)
    return num_tokens / (time.perf_counter() - start)


def print_table(rows: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title)
    for column in ("variant", "compiled", "M params", "step", "vs full", "tokens/s", "peak MiB"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    base = {row["compile"]: row["step_ms"] for row in rows if row["variant"] == "full"}
    for row in rows:
        row["vs_full"] = row["step_ms"] / base[row["compile"]]
        table.add_row(
            row["variant"],
            "yes" if row["compile"] else "no",
            f"{row['parameters'] / 1e6:.1f}",
            f"{row['step_ms']:.2f} ms +-{row['spread'] / 2:.0%}",
            f"{row['vs_full']:.2f}x",
            f"{row['tokens_per_s']:,.0f}",
            "-" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}",
        )
    Console(width=120).print(table)


def machine(device: str) -> dict[str, str | None]:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit.stdout.strip() or None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--hidden-size", type=int, default=512, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, help="default: one per head")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--no-bf16", dest="bf16", action="store_false")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--json", type=Path, help="write rows, machine and versions to this file")
    args = parser.parse_args()
    args.compile = not args.eager

    rows = []
    for variant in args.variants:
        rows.append(measure(args, variant))
        print(json.dumps(rows[-1]), flush=True)
        torch._dynamo.reset()
    title = f"D={args.hidden_size}, {args.layers} layers, T={args.length}, batch {args.batch_size}"
    print_table(rows, title)
    loader = measure_loader(args)
    print(f"data loader alone: {loader:,.0f} tokens/s")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        settings = {k: v for k, v in vars(args).items() if k not in ("json", "variants")}
        document = {
            "machine": machine(args.device),
            "settings": settings,
            "loader_tokens_per_s": loader,
            "rows": rows,
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
