"""Can a pretrained model read long texts with a fifth of its attention? The flagship's study.

SmolLM2-135M-Instruct, its weights kept, routed per token or per key-value head, against what needs
no router: windows, static choices of layers and heads, random routes, and thresholds on soft
weights. Every variant is a folder with ``config.json`` and ``result.json``; what is there is not
done again.

    # where the base and the corpora are: a folder to carry to a GPU
    python benchmarks/study_adapt.py prepare --base smollm2-135m-instruct --train books/train* \\
        wiki/train* --valid books/valid.jsonl.xz --test books/test.jsonl.xz --out cache

    # on the GPU, each for at most nine minutes; again until nothing is missing
    python benchmarks/study_adapt.py baselines --cache cache --out runs/adapt --time-limit 540
    python benchmarks/study_adapt.py train --cache cache --out runs/adapt --time-limit 540
    python benchmarks/study_adapt.py measure --cache cache --out runs/adapt --time-limit 540
    python benchmarks/study_adapt.py time --cache cache --out runs/adapt --variants token-0.25
    python benchmarks/study_adapt.py profile --cache cache --out runs/adapt --variants token-0.25

    # the table, adapt.json and the figures
    python benchmarks/study_adapt.py report --runs runs/adapt

"NAME --help" says more of each.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import study_adapt_report
import torch
from study_adapt_data import AdaptCache, prepare
from study_adapt_measure import measure_missing, measure_sensitivity, time_variants
from study_adapt_profile import profile_adapter
from study_adapt_variants import (
    ADAPTERS,
    LOCAL,
    SCALES,
    TRAININGS,
    WINDOW,
    Scale,
    Variant,
    adapt_config,
    find_variants,
    load_plain,
    make_blind,
    nearest_static,
    read_sensitivity,
)
from study_jobs import StopAt, TimeIsOver, parse_changes, run_command, say
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from meta_attention import adapt
from meta_attention.adapt import load_tokenizer, routers_of
from meta_attention.adapt.adapters import CARD_FILE
from meta_attention.adapt.training import RouterSettings, open_router_run, train_router
from meta_attention.errors import BackendUnavailableError, ConfigError
from meta_attention.training.run import RUN_FILE

# of a training, beside the settings of a router
OWN_SETTINGS = ("routing", "static_cost", "is_wide", "is_blind")


def train_one(
    cache: AdaptCache,
    base: Path | None,
    out: Path,
    scale: Scale,
    name: str,
    changes: dict[str, Any],
    *,
    stop_at: float = math.inf,
) -> dict[str, Any] | None:
    """Train an adapter; its record, or None if ``stop_at`` (as of ``time.time``) came first."""
    folder = out / ADAPTERS / name
    if (folder / CARD_FILE).is_file():
        return json.loads((folder / RUN_FILE).read_text())
    given = {
        "model": cache.base_name,
        "length": scale.length,
        "window_size": scale.window_size,
        "num_sinks": scale.num_sinks,
        "precision": "bf16" if torch.cuda.is_available() else "fp32",
        **TRAININGS[name],
        **scale.training,
        **changes,
    }
    own = {key: given.pop(key, None) for key in OWN_SETTINGS}
    given.setdefault("experts", scale.experts(is_wide=bool(own["is_wide"])))
    is_begun = (folder / RUN_FILE).is_file()
    settings = open_router_run(folder, given, resume=is_begun)
    model = load_plain(cache, base)
    tokenizer = load_tokenizer(str(cache.folder / "base" if base is None else base))
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    routes = None
    if own["routing"] is not None:
        adapt(model, adapt_config(scale, **_routing_settings(settings), routing=own["routing"]))
    if own["is_blind"]:
        adapt(model, settings.adapt_config(scale.length))
        make_blind(model)
    if own["static_cost"] is not None:
        adapt(model, adapt_config(scale, is_wide=bool(own["is_wide"])))
        routes = dict(enumerate(_static_choice(model, out, scale, own["static_cost"])))
    try:
        record = train_router(
            model,
            tokenizer,
            settings,
            folder,
            blocks=cache.blocks(tokenizer, scale.length),
            routes=routes,
            resume=is_begun,
            callbacks=(StopAt(stop_at),),
            say=say,
        )
    except TimeIsOver as over:
        say(f"{name}: {over}")
        return None
    if routes is not None:
        (folder / "routes.json").write_text(json.dumps(list(routes.values())) + "\n")
    return record


def _routing_settings(settings: RouterSettings) -> dict[str, Any]:
    names = ("route_granularity", "controller", "controller_hidden_size", "prior_strength")
    return {name: getattr(settings, name) for name in names}


def _static_choice(model: Any, out: Path, scale: Scale, cost: float | str) -> tuple[str, ...]:
    if cost == WINDOW:
        return (scale.experts(is_wide=True)[1],) * model.config.num_hidden_layers
    sensitivity = read_sensitivity(out)
    if sensitivity is None:
        raise ConfigError(
            "a static choice needs the sensitivity of all layers; run the command baselines first"
        )
    local_cost = routers_of(model)[0].controller.costs[LOCAL].item()
    return nearest_static(sensitivity, float(cost), local_cost)


def run_prepare(args: argparse.Namespace) -> int:
    if args.length < 2 or args.sequences < 1 or args.valid_sequences < 1 or args.train_tokens < 1:
        raise ConfigError("--length must be >= 2, and all numbers of tokens and sequences >= 1")
    prepare(
        args.base,
        args.train,
        args.valid,
        args.test,
        args.out,
        train_tokens=args.train_tokens,
        length=args.length,
        num_test=args.sequences,
        num_valid=args.valid_sequences,
    )
    return 0


def run_train(args: argparse.Namespace) -> int:
    cache, scale, stop_at = _begin(args)
    changes, num_skipped = parse_changes(args.set, RouterSettings), 0
    for name in args.variants:
        if time.time() >= stop_at:
            say(f"time is over before {name}; run the same command again")
            break
        try:
            record = train_one(cache, args.base, args.out, scale, name, changes, stop_at=stop_at)
        except BackendUnavailableError as error:
            # LoRA without PEFT; the others need not wait for it
            say(f"{name} left out: {error}")
            num_skipped += 1
            continue
        if record is None:
            break
        metrics = record["metrics"]
        say(
            f"{name}: attention {metrics['attention_share']:.3f}, loss "
            f"{metrics['loss_increase']:+.4f} on {record['eval_data']['blocks']} held-out blocks"
        )
    return num_skipped


def run_baselines(args: argparse.Namespace) -> int:
    cache, scale, stop_at = _begin(args)
    measure_sensitivity(cache, args.base, args.out, scale)
    return _measure(args, cache, scale, stop_at, [v for v in _found(args, scale) if not v.adapter])


def run_measure(args: argparse.Namespace) -> int:
    cache, scale, stop_at = _begin(args)
    variants = _found(args, scale)
    if args.variants:
        known = {v.name: v for v in variants}
        for name in args.variants:
            if name not in known:
                raise ConfigError(f"a variant must be one of {', '.join(known)}, got {name!r}")
        variants = [known[name] for name in args.variants]
    return _measure(args, cache, scale, stop_at, variants)


def _measure(
    args: argparse.Namespace,
    cache: AdaptCache,
    scale: Scale,
    stop_at: float,
    variants: list[Variant],
) -> int:
    measure_missing(cache, args.base, args.out, scale, variants, is_chat=args.chat, stop_at=stop_at)
    return 0


def run_time(args: argparse.Namespace) -> int:
    cache, scale, stop_at = _begin(args)
    time_variants(cache, args.base, args.out, scale, args.variants, stop_at=stop_at)
    return 0


def run_profile(args: argparse.Namespace) -> int:
    cache, scale, _ = _begin(args)
    for name in args.variants:
        profile_adapter(cache, args.base, args.out, scale, name)
    return 0


def run_report(args: argparse.Namespace) -> int:
    summary = study_adapt_report.report(args.runs, earlier=args.earlier, is_quiet=args.json)
    if args.json:
        print(json.dumps(summary, indent=1))
    return 0


def _begin(args: argparse.Namespace) -> tuple[AdaptCache, Scale, float]:
    cache, scale = AdaptCache.open(args.cache), SCALES[args.scale]
    if cache.length < scale.length:
        raise ConfigError(
            f"sequences of the cache must have >= {scale.length} tokens, got {cache.length}; "
            "prepare one with a greater --length"
        )
    return cache, scale, time.time() + args.time_limit


def _found(args: argparse.Namespace, scale: Scale) -> list[Variant]:
    folder = args.base or args.cache / "base"
    config = json.loads((folder / "config.json").read_text())
    return find_variants(args.out, scale, config["num_hidden_layers"])


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("prepare", help="a base and text as its tokens, to be carried")
    command.add_argument("--base", default="smollm2-135m-instruct", help="name or folder")
    command.add_argument("--train", type=Path, nargs="+", required=True, help="files or folders")
    command.add_argument(
        "--valid", type=Path, nargs="+", required=True, help="text that choices are made by"
    )
    command.add_argument(
        "--test", type=Path, nargs="+", required=True, help="text that variants are measured on"
    )
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--train-tokens", type=int, default=7_000_000)
    command.add_argument("--length", type=int, default=8192, help="tokens of a sequence")
    command.add_argument("--sequences", type=int, default=48, help="of --test")
    command.add_argument("--valid-sequences", type=int, default=8, help="of --valid")
    command.set_defaults(call=run_prepare)

    command = commands.add_parser("train", help="adapters, one after the other")
    _add_options(command)
    command.add_argument(
        "--variants",
        nargs="+",
        choices=list(TRAININGS),
        default=list(TRAININGS),
        metavar="NAME",
        help=f"of {', '.join(TRAININGS)}  [default: all]",
    )
    command.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="settings as of meta-attention adapt: steps=500 batch_size=2 kl_weight=0.05",
    )
    command.set_defaults(call=run_train)

    command = commands.add_parser(
        "baselines", help="sensitivity of layers and heads, and all that needs no training"
    )
    _add_options(command)
    _add_chat(command)
    command.set_defaults(call=run_baselines)

    command = commands.add_parser(
        "measure", help="all that has no result yet, also what is derived from trained adapters"
    )
    _add_options(command)
    _add_chat(command)
    command.add_argument("--variants", nargs="+", help="default: all there are")
    command.set_defaults(call=run_measure)

    command = commands.add_parser("time", help="prefill and batched decoding against the base")
    _add_options(command)
    command.add_argument("--variants", nargs="+", required=True)
    command.set_defaults(call=run_time)

    command = commands.add_parser("profile", help="GPU time of adapters by kind of kernel")
    _add_options(command)
    command.add_argument("--variants", nargs="+", required=True, help="trained ones")
    command.set_defaults(call=run_profile)

    command = commands.add_parser("report", help="table, adapt.json, adapt.md and the figures")
    command.add_argument("--runs", type=Path, required=True)
    command.add_argument(
        "--earlier", type=Path, metavar="FILE", help="adapt.json whose other rows are taken along"
    )
    command.add_argument("--json", action="store_true", help="print the summary instead")
    command.set_defaults(call=run_report)
    return parser


def _add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--cache", type=Path, required=True, help="folder of prepare")
    command.add_argument(
        "--base", type=Path, help="folder of the base, also in parts  [default: the cache's]"
    )
    command.add_argument("--out", type=Path, required=True, help="folder of the runs")
    command.add_argument("--scale", choices=list(SCALES), default="full")
    command.add_argument(
        "--time-limit",
        type=float,
        default=math.inf,
        help="seconds after which nothing begins, and a training saves what it has",
    )


def _add_chat(command: argparse.ArgumentParser) -> None:
    command.add_argument("--chat", action="store_true", help="ask through the chat template")


def main(arguments: list[str] | None = None) -> int:
    logging.disable_progress_bar()
    return run_command(build_parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
