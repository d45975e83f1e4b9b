"""What is said of uncertainty and of routes, tested on the models of the text study.

For every finished run: does a signal of the controller know where hard routing hurts, or that a
text is foreign; are predictions and routes calibrated; which tokens go to full attention; does it
matter which; and how suddenly did routes emerge. A run gets a file uncertainty.json.

    # on the GPU: every run that has no uncertainty.json yet
    python benchmarks/study_uncertainty.py measure --cache runs/cache --runs runs/study

    # one run, on less text; what was measured goes to the terminal too
    python benchmarks/study_uncertainty.py measure --cache runs/cache --again --json \\
        --runs runs/study/small-full-seed0 --tokens 32768

    # tables and figures over all runs, those of repeated text beside them
    python benchmarks/study_uncertainty.py report --runs runs/study runs/repeat-* --out runs/report

"NAME --help" says more of each.
"""

import argparse
import json
import sys
from pathlib import Path

import study_uncertainty_report
from study_data import Cache
from study_jobs import run_command
from study_measurement import Figures, Measurement
from study_reading import Run, find_runs
from study_run import default_device
from study_uncertainty_report import OUTPUT

from meta_attention.errors import ConfigError


def measure_runs(args: argparse.Namespace) -> int:
    cache, device = Cache.open(args.cache), args.device or default_device()
    if args.tokens < 1 or args.resamples < 1:
        raise ConfigError(
            f"--tokens and --resamples must be >= 1, got {args.tokens} and {args.resamples}"
        )
    for folder in find_runs(args.runs):
        run, path = Run.open(folder), folder / OUTPUT
        if path.exists() and not args.again:
            continue
        measurement = Measurement(
            run, cache, device, num_tokens=args.tokens, num_resamples=args.resamples, seed=args.seed
        )
        figures = measurement.measure()
        path.write_text(json.dumps(figures, indent=1, allow_nan=False) + "\n")
        if args.json:
            print(json.dumps(figures, allow_nan=False))
        else:
            print(f"{run.folder.name}: {summary(figures)}, {figures['seconds']:.1f} s", flush=True)
    return 0


def summary(figures: Figures) -> str:
    """One line of a run."""
    line = f"loss {figures['loss']['hard']:.4f}, ece {figures['calibration']['ece']['hard']:.4f}"
    if "adaptive" not in figures:
        return line
    if figures["note"] is not None:
        return f"{line}, routes of other tokens left out: {figures['note']}"
    costs = {name: row["cost"]["value"] for name, row in figures["adaptive"].items()}
    share = figures["explained"]["share"]
    known = "no route to explain" if share is None else f"token explains {share:.0%} of the route"
    return f"{line}, shuffled routes {costs['shuffled']:+.4f}, {known}"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("measure", help=f"write {OUTPUT} of finished runs")
    command.add_argument("--cache", type=Path, required=True, help="what prepare wrote")
    command.add_argument(
        "--runs", type=Path, nargs="+", required=True, help="runs, or folders of runs"
    )
    command.add_argument("--tokens", type=int, default=1 << 17, help="of each corpus")
    command.add_argument("--resamples", type=int, default=500, help="behind every interval")
    command.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    command.add_argument("--device", help="default: cuda where there is one")
    command.add_argument("--again", action="store_true", help=f"also where there is {OUTPUT}")
    command.add_argument("--json", action="store_true", help="print the figures, a line per run")
    command.set_defaults(call=measure_runs)

    command = commands.add_parser("report", help="one JSON file, tables and figures of all runs")
    command.add_argument(
        "--runs", type=Path, nargs="+", required=True, help="runs, or folders of runs"
    )
    command.add_argument("--out", type=Path, required=True, help="folder of the report")
    command.set_defaults(
        # models are not needed for it
        call=lambda args: not study_uncertainty_report.report(find_runs(args.runs), args.out)
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    return run_command(build_parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
