"""Time and peak memory of every expert on the CPU, from 1k to 64k tokens.

Each measurement runs in a process of its own, so that a peak belongs to one expert and length.
Before any of them, every expert must agree with its definition in float64. Times are ratios
within the run: per token against 4k tokens of the same expert, and against full attention at the
same length. Absolute times of a shared machine would say nothing elsewhere.

    python benchmarks/bench_experts.py --json benchmarks/results/experts_cpu.json
    python benchmarks/bench_experts.py --experts local linear --lengths 1024 4096 --backward
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table

from meta_attention import Heads, MetaAttentionConfig
from meta_attention.experts import (
    Expert,
    GatedFullAttention,
    RecurrentExpert,
    SelectiveStateSpace,
    build_experts,
)
from meta_attention.testing import (
    naive_full_attention,
    naive_linear_attention,
    naive_local_attention,
    naive_state_space,
)

D, HEADS, WINDOW = 128, 4, 256
EXPERTS = ("full", "gated_full", "linear", "local", "ssm")
LENGTHS = (1024, 4096, 16384, 65536)
BASE = 4096  # times per token are relative to this length
MIB = 2**20


def make(name: str, length: int) -> tuple[Expert, Heads, torch.Tensor]:
    config = MetaAttentionConfig(
        hidden_size=D,
        num_attention_heads=HEADS,
        window_size=WINDOW,
        max_position_embeddings=max(LENGTHS),
        experts=(name,),
    )
    torch.manual_seed(0)
    heads = (torch.randn(1, length, HEADS, D // HEADS, requires_grad=True) for _ in range(3))
    return build_experts(config, 0)[name], Heads(*heads), torch.randn(1, length, D)


def rows_of(expert: Expert, heads: Heads, x: torch.Tensor) -> torch.Tensor:
    if isinstance(expert, RecurrentExpert):
        rows, _ = expert(heads, x, None, None)
        return rows
    return expert(heads, x, None)


def check(name: str) -> None:
    """The expert must agree with its definition before its time means anything."""
    expert, heads, x = make(name, 300)
    exact = (heads.query.double(), heads.key.double(), heads.value.double())
    if name == "local":
        expected = naive_local_attention(*exact, window=WINDOW, causal=True)
    elif name == "linear":
        expected = naive_linear_attention(*exact, causal=True)
    elif isinstance(expert, SelectiveStateSpace):
        rates = expert.rates
        step = F.softplus(expert.step_proj(x) + rates.step_bias).double()
        rate, skip = rates.log_rate.double().exp(), rates.skip.double()
        expected, _ = naive_state_space(*exact, step=step, rate=rate, skip=skip)
    else:
        expected = naive_full_attention(*exact, causal=True)
    if isinstance(expert, GatedFullAttention):
        expected = expected * torch.sigmoid(expert.gate(x)).view_as(expected)
    torch.testing.assert_close(rows_of(expert, heads, x).double(), expected, rtol=1e-4, atol=1e-4)


def measure(name: str, length: int, backward: bool) -> dict[str, float]:
    """Seconds per run and peak memory; meant for a process of its own."""
    expert, heads, x = make(name, length)

    def run() -> None:
        with torch.set_grad_enabled(backward):
            rows = rows_of(expert, heads, x)
        if backward:
            rows.backward(torch.ones_like(rows))

    before = peak_rss()
    run()
    seconds: list[float] = []
    started = time.perf_counter()
    while len(seconds) < 2 or (time.perf_counter() - started < 2.0 and len(seconds) < 50):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return {
        "seconds": statistics.median(seconds),
        "spread": (max(seconds) - min(seconds)) / statistics.median(seconds),
        "peak_mib": peak_rss() / MIB,
        "added_mib": (peak_rss() - before) / MIB,
    }


def peak_rss() -> int:
    # Linux counts in KiB, macOS in bytes
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measure_apart(name: str, length: int, backward: bool) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", name, str(length), str(int(backward))]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"error: {name} at {length} tokens failed: {result.stderr.strip()[-500:]}")
    row: dict[str, float] = json.loads(result.stdout)
    return row


def relative(rows: list[dict[str, Any]]) -> None:
    """Replace seconds, which mean nothing elsewhere, by ratios within the run."""
    seconds = {(row["expert"], row["backward"], row["length"]): row["seconds"] for row in rows}
    for row in rows:
        own = row.pop("seconds") / row["length"]
        base = seconds.get((row["expert"], row["backward"], BASE))
        full = seconds.get(("full", row["backward"], row["length"]))
        row["per_token_vs_4k"] = own / (base / BASE) if base else None
        row["time_vs_full"] = own * row["length"] / full if full else None


def print_table(rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"D={D}, {HEADS} heads, window {WINDOW}, causal, float32, one sequence")
    for column in (
        "expert",
        "pass",
        "tokens",
        "time per token vs 4k",
        "time vs full",
        "spread",
        "added MiB",
        "peak MiB",
    ):
        table.add_column(column, justify="left" if column in ("expert", "pass") else "right")
    for row in rows:
        vs_base, vs_full = row["per_token_vs_4k"], row["time_vs_full"]
        table.add_row(
            row["expert"],
            "forward + backward" if row["backward"] else "forward",
            str(row["length"]),
            f"{vs_base:.2f}x" if vs_base else "-",
            f"{vs_full:.3f}x" if vs_full else "-",
            f"{row['spread']:.0%}",
            f"{row['added_mib']:.0f}",
            f"{row['peak_mib']:.0f}",
        )
    Console(width=110).print(table)


def machine() -> dict[str, str | int | None]:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit.stdout.strip() or None,
        "seed": 0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", nargs="+", choices=EXPERTS, default=EXPERTS)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--backward", action="store_true", help="also time a training pass")
    parser.add_argument("--json", type=Path, help="write rows, machine and versions to this file")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        name, length, backward = args.measure
        print(json.dumps(measure(name, int(length), bool(int(backward)))))
        return
    if min(args.lengths) < 1 or max(args.lengths) > max(LENGTHS):
        parser.error(f"--lengths must be between 1 and {max(LENGTHS)}")

    for name in args.experts:
        check(name)
    plan = [
        {"expert": name, "backward": backward, "length": length}
        for backward in ((False, True) if args.backward else (False,))
        for name in args.experts
        for length in args.lengths
    ]
    rows: list[dict[str, Any]] = []
    for row in track(plan, "measuring", console=Console(stderr=True), transient=True):
        measured = measure_apart(str(row["expert"]), int(row["length"]), bool(row["backward"]))
        rows.append(row | measured)
    relative(rows)
    print_table(rows)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
