"""Byte-level language models of equal size, steps and data: soft-routed, full, static hybrid.

Runs `meta-attention train` for every corpus and variant side by side on one device, then
`meta-attention evaluate` on text no run has seen, and writes one JSON document.

    python benchmarks/train_byte_models.py --corpus wikitext-2=train.txt,valid.txt,test.txt \\
        --corpus books=books-train.jsonl.xz,books-valid.jsonl,books-test.jsonl \\
        --work runs/bytes --json benchmarks/results/byte_models_h200.json
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

# as the recipe had them when this was measured: all layers, per token
ROUTED = ["--experts", "full,linear,local", "--route-granularity", "token"]
ROUTED += ["--hold", "0", "--argmax-from", "1"]
VARIANTS = {
    "full": ["--experts", "full"],
    "static hybrid (2 of 6 full)": ["--layer-experts", "local,local,full"],
    "soft-routed": [*ROUTED, "--routing", "soft", "--start-expert", "none"],
    "hard-routed": [*ROUTED, "--target-cost", "0.2"],
}
COMMAND = [sys.executable, "-c", "from meta_attention.cli import main; main()"]


def train(args: argparse.Namespace, corpus: str, variant: str) -> subprocess.Popen[bytes]:
    name, _, files = corpus.partition("=")
    train_file, valid_file, _ = files.split(",")
    folder = args.work / f"{name}-{variant.split()[0]}"
    command = [*COMMAND, "train", "--recipe", "bytes-small", "--out", str(folder)]
    command += ["--data", train_file, "--eval-data", valid_file, "--seed", str(args.seed)]
    command += ["--steps", str(args.steps), "--save-every", str(args.steps), *VARIANTS[variant]]
    if args.compile:
        command.append("--compile")
    folder.parent.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(command, stdout=folder.with_suffix(".log").open("wb"), stderr=2)


def result(args: argparse.Namespace, corpus: str, variant: str) -> dict[str, Any]:
    name, _, files = corpus.partition("=")
    folder = args.work / f"{name}-{variant.split()[0]}"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    speeds = sorted(row["tokens_per_s"] for row in rows if row["kind"] == "train")
    evaluate = [*COMMAND, "evaluate", str(folder), "--data", files.split(",")[2], "--json"]
    evaluate += ["--length", "1024", "--stride", "512", "--max-tokens", str(args.max_tokens)]
    test = json.loads(subprocess.run(evaluate, check=True, capture_output=True).stdout)
    run = json.loads((folder / "run.json").read_text())
    return {
        "corpus": name,
        "variant": variant,
        "parameters": run["parameters"],
        "median_tokens_per_s_side_by_side": speeds[len(speeds) // 2],
        "train_task_loss_last": [r for r in rows if r["kind"] == "train"][-1]["task_loss"],
        "valid": [row for row in rows if row["kind"] == "eval"],
        "test": test,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", action="append", required=True, help="NAME=TRAIN,VALID,TEST")
    parser.add_argument("--work", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=1_000_000, help="of the test text")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()

    started = time.time()
    jobs = [(corpus, variant) for corpus in args.corpus for variant in VARIANTS]
    processes = [train(args, *job) for job in jobs]
    failed = [job for job, process in zip(jobs, processes, strict=True) if process.wait()]
    for corpus, variant in failed:
        print(f"error: {corpus.partition('=')[0]}, {variant} failed; see its log", file=sys.stderr)
    print(f"trained in {time.time() - started:.0f} s", flush=True)
    rows = [result(args, *job) for job in jobs if job not in failed]
    document = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "settings": {
            "recipe": "bytes-small",
            "steps": args.steps,
            "seed": args.seed,
            "max_tokens": args.max_tokens,
            "compile": args.compile,
        },
        "rows": rows,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(document, indent=1) + "\n")
    for row in rows:
        print(row["corpus"], row["variant"], row["test"]["bits_per_byte"])
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
