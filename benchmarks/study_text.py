"""Does routing beat static hybrids on text? Models of one size on equal tokens, side by side.

Every run is a folder with config.json, metrics.jsonl and result.json; one that was cut off goes on
when it is started again.

    # where the corpora are: one tokenizer, token files of less than 60 MB
    python benchmarks/study_text.py prepare --data books wiki wikitext-103 --out runs/cache

    # on the GPU: missing runs, six variants at a time, nine minutes; again until none is missing
    python benchmarks/study_text.py all --cache runs/cache --out runs/study --seeds 5 \\
        --parallel 6 --time-limit 540

    # on a CPU: models of 0.5M parameters on the code of Python's library, minutes each
    python benchmarks/study_text.py prepare --data python-library --vocab 1024 \\
        --max-tokens 12000000 --out runs/cache-python
    python benchmarks/study_text.py all --cache runs/cache-python --out runs/mini --scale mini \\
        --parallel 2 --variants hybrid-1-5 hybrid-1-5-heads-0.45 prior-free-wide-kv_head-0.45

    # one run, with other sizes; then times measured alone, tables and the plot
    python benchmarks/study_text.py run --cache runs/cache --out runs/study --variant full \\
        --seed 0 --scale small --set steps=400 batch_size=32
    python benchmarks/study_text.py time --cache runs/cache --runs runs/study
    python benchmarks/study_text.py speed --cache runs/cache --variants full gated-full \\
        --json runs/speed.json
    python benchmarks/study_text.py report --runs runs/study

    # the plot again, of reports that were kept, and every variant in words
    python benchmarks/study_text.py frontier --rows benchmarks/results/study_*_h200.json \\
        --out frontier.svg --table frontier.md

    # a variant against one of another round, both by their distance to the hybrid
    python benchmarks/study_text.py compare --runs runs/study --others hybrid-1-5-x32-late \\
        --variant prior-free-wide-kv_head-0.45 --other-runs runs/earlier

    # what is published of runs, in one file
    python benchmarks/study_text.py keep --runs runs/study --note "Books, five seeds" \\
        --compared runs/comparison.json --json benchmarks/results/study_h200.json

    # a finished run as a checkpoint with a card
    python benchmarks/study_text.py export --cache runs/cache --out checkpoint --commit 8080304 \\
        --run runs/study/small-bayes-global-token-0.4-seed0

    # an eighth of the text, seen eight times as often in equal steps; runs of each its own folder
    python benchmarks/study_text.py run --cache runs/cache --out runs/repeat-8 \\
        --variant bayes-all-token-0.2 --set repeat=8

"NAME --help" says more of each.
"""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import study_compare
import study_frontier
import study_keep
import study_report
import study_run
import study_table
from study_data import Cache, prepare
from study_export import export
from study_jobs import Job, run_command, run_side_by_side, say
from study_variants import ENDINGS, REFERENCE, SCALES, VARIANTS, find_variant

KNOWN = (
    f"{', '.join(VARIANTS)}; a routed one may be followed by "
    f"{', '.join(f'-{ending}' for ending in ENDINGS)}"
)


def missing_jobs(runs: Path, scale: str, variants: list[str], seeds: Iterable[int]) -> list[Job]:
    """A process for all variants that have a beginning in common, and a seed.

    All of a seed come before the next, the longest first.
    """
    jobs = []
    for seed in seeds:
        groups: dict[str, list[str]] = {}
        for name in variants:
            if not (study_run.run_folder(runs, scale, name, seed) / study_run.RESULT).exists():
                groups.setdefault(find_variant(name).beginning.name, []).append(name)
        works = {key: sum(find_variant(n).work() for n in names) for key, names in groups.items()}
        for key in sorted(groups, key=lambda key: -works[key]):
            folders = [study_run.run_folder(runs, scale, name, seed) for name in groups[key]]
            names = " ".join(groups[key])
            jobs.append(Job(names, (seed,), tuple(folders), study_run.RESULT))
    return jobs


def run_all(args: argparse.Namespace) -> int:
    """Runs side by side; how many failed."""
    Cache.open(args.cache)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    jobs = missing_jobs(args.out, args.scale, args.variants, seeds)
    missing = sum(len(job.folders) for job in jobs)
    say(f"{missing} of {args.seeds * len(args.variants)} runs are missing")
    return run_side_by_side(
        jobs,
        lambda job, stop_at: command_of(job, args, stop_at),
        parallel=args.parallel,
        time_limit=args.time_limit,
    )


def command_of(job: Job, args: argparse.Namespace, stop_at: float) -> list[str]:
    command = [__file__, "run", "--cache", str(args.cache), "--out", str(args.out)]
    command += ["--variant", *job.variant.split(), "--scale", args.scale]
    command += ["--seed", *map(str, job.seeds)]
    command += ["--stop-at", str(stop_at)]
    command += ["--compile"] if args.compile else []
    command += ["--set", *args.set] if args.set else []
    return command


def run_one(args: argparse.Namespace) -> int:
    cache = Cache.open(args.cache)
    for seed, variant in itertools.product(args.seed, args.variant):
        result = study_run.run(
            cache,
            args.out,
            variant,
            seed,
            args.scale,
            changes=args.set,
            compile=args.compile,
            stop_at=args.stop_at,
        )
        if result is None:
            break
        hard, soft = result["hard"], result["soft"]
        print(
            f"{variant} seed {seed}: loss {hard['loss']:.4f} hard, {soft['loss']:.4f} soft, "
            f"attention FLOPs {hard['attention_flops']:.3f}, {result['tokens_per_s']:,.0f} tokens/s"
        )
    return 0


def time_all(args: argparse.Namespace) -> int:
    cache = Cache.open(args.cache)
    for path in sorted(args.runs.glob(f"*-seed{args.seed}/{study_run.RESULT}")):
        variant = json.loads(path.read_text())["variant"]
        is_asked = args.variants is None or variant in args.variants
        if is_asked and not path.with_name(study_run.TIMING).exists():
            times = study_run.measure_times(
                cache, path.parent, repeats=args.repeats, compile=args.compile
            )
            shown = [f"{name} {ms:.2f}" for name, ms in times.items() if "_ms" in name]
            say(f"{path.parent.name}: {', '.join(shown)}")
    return 0


def measure_speeds(args: argparse.Namespace) -> int:
    cache, rows = Cache.open(args.cache), []
    scale = SCALES[args.scale].with_changes(args.set)
    for variant in args.variants:
        rows.append(
            study_run.measure_speed(
                cache, variant, scale, repeats=args.repeats, compile=args.compile
            )
        )
        shown = f"{rows[-1]['step_ms']:.2f} ms, {rows[-1]['tokens_per_s']:,.0f} tokens/s"
        say(f"{variant}: {shown}")
        # with every row: what comes after may be cut off
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"scale": asdict(scale), "rows": rows}, indent=1) + "\n")
    return 0


def export_run(args: argparse.Namespace) -> int:
    cache = Cache.open(args.cache)
    figures = export(cache, args.run, args.out, commit=args.commit, num_tokens=args.tokens)
    say(f"{args.out}: loss {figures['loss']:.4f}, {figures['exact']:.4f} before rounding")
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("prepare", help="train the tokenizer, write token files")
    command.add_argument(
        "--data",
        type=Path,
        nargs="+",
        required=True,
        help="folders or files, or python-library or python-packages",
    )
    command.add_argument("--out", type=Path, required=True, help="folder of the cache")
    command.add_argument("--vocab", type=int, default=4096)
    command.add_argument("--max-tokens", type=int, default=24_000_000, help="to train on, in all")
    command.set_defaults(call=lambda args: bool(prepare_cache(args)))

    command = commands.add_parser("run", help="train and evaluate variants, seed after seed")
    _add_run_options(command)
    command.add_argument("--variant", nargs="+", required=True, help=KNOWN)
    command.add_argument("--seed", type=int, nargs="+", default=[0])
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
    command.add_argument("--parallel", type=int, default=6, help="processes at a time")
    command.add_argument(
        "--time-limit",
        type=float,
        default=math.inf,
        help="seconds after which no run starts and those under way save what they have",
    )
    command.add_argument(
        "--variants", nargs="+", default=list(VARIANTS), metavar="VARIANT", help=KNOWN
    )
    command.set_defaults(call=run_all)

    command = commands.add_parser("time", help="steps and prefills of finished runs, one by one")
    command.add_argument("--cache", type=Path, required=True)
    command.add_argument("--runs", type=Path, required=True)
    command.add_argument("--seed", type=int, default=0, help="the seed whose runs are timed")
    command.add_argument("--variants", nargs="+", metavar="VARIANT", help="only these")
    command.add_argument("--repeats", type=int, default=20)
    command.add_argument("--compile", action="store_true", help="compile the blocks, to train")
    command.set_defaults(call=time_all)

    command = commands.add_parser("speed", help="training steps of new models, one by one")
    command.add_argument("--cache", type=Path, required=True)
    command.add_argument("--variants", nargs="+", required=True, metavar="VARIANT", help=KNOWN)
    command.add_argument("--scale", choices=list(SCALES), default="small")
    command.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="change the scale: steps=400"
    )
    command.add_argument("--repeats", type=int, default=20)
    command.add_argument("--compile", action="store_true", help="compile the blocks")
    command.add_argument("--json", type=Path, required=True, help="file to write")
    command.set_defaults(call=measure_speeds)

    command = commands.add_parser("export", help="a finished run as a checkpoint with a card")
    command.add_argument("--cache", type=Path, required=True)
    command.add_argument("--run", type=Path, required=True, help="folder of the run")
    command.add_argument("--out", type=Path, required=True, help="folder to make")
    command.add_argument("--commit", required=True, help="of the code it was trained with")
    command.add_argument("--tokens", type=int, default=1 << 16, help="of each corpus, to check it")
    command.set_defaults(call=export_run)

    command = commands.add_parser("report", help="table, report.json and plots")
    command.add_argument("--runs", type=Path, nargs="+", required=True, help="written to the first")
    command.set_defaults(call=lambda args: not study_report.report(args.runs))

    command = commands.add_parser("frontier", help="the plot of reports that were kept")
    command.add_argument("--rows", type=Path, nargs="+", required=True, help="their JSON")
    command.add_argument("--scale", choices=list(SCALES), default="small")
    command.add_argument("--out", type=Path, required=True, help="SVG file to write")
    command.add_argument("--table", type=Path, help="Markdown file to write: variants in words")
    command.set_defaults(call=draw_frontier)

    command = commands.add_parser("compare", help="a variant against others, also of other runs")
    command.add_argument("--runs", type=Path, required=True, help="with the variant and its hybrid")
    command.add_argument("--variant", required=True)
    command.add_argument("--others", nargs="+", required=True, metavar="VARIANT")
    command.add_argument("--other-runs", type=Path, help="of the others; default: the same")
    command.add_argument("--seeds", type=int, nargs="+", help="of the variant, only these")
    command.add_argument(
        "--reference",
        default=REFERENCE,
        help="static variant that distances are taken to, where no hybrid was run to its end",
    )
    command.add_argument("--json", type=Path, help="file to write")
    command.set_defaults(call=compare)

    command = commands.add_parser("keep", help="figures of runs in one file, to publish")
    command.add_argument("--runs", type=Path, nargs="+", required=True, help="folders of runs")
    command.add_argument("--note", required=True, help="what they are, in a sentence")
    command.add_argument(
        "--compared",
        type=Path,
        nargs="+",
        default=[],
        help="what compare or study_worth.py wrote with --json",
    )
    command.add_argument("--json", type=Path, required=True, help="file to write")
    command.set_defaults(call=keep)
    return parser


def draw_frontier(args: argparse.Namespace) -> int:
    rows = study_frontier.draw_published(args.rows, args.scale, args.out)
    if args.table:
        study_table.write_table(rows, args.scale, args.table, figure=args.out)
    return 0


def keep(args: argparse.Namespace) -> int:
    study_keep.keep(args.runs, args.json, note=args.note, compared=args.compared)
    return 0


def compare(args: argparse.Namespace) -> int:
    study_compare.compare(
        args.runs,
        args.variant,
        args.others,
        args.other_runs,
        seeds=args.seeds,
        reference=args.reference,
        path=args.json,
    )
    return 0


def _add_run_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--cache", type=Path, required=True, help="what prepare wrote")
    command.add_argument("--out", type=Path, required=True, help="folder of the runs")
    command.add_argument("--scale", choices=list(SCALES), default="small")
    command.add_argument("--compile", action="store_true", help="compile the blocks")
    command.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="change the scale: steps=400"
    )


def prepare_cache(args: argparse.Namespace) -> int:
    prepare(args.data, args.out, vocab=args.vocab, max_tokens=args.max_tokens)
    return 0


def main(arguments: list[str] | None = None) -> int:
    return run_command(build_parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
