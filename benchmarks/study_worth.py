"""What full attention is worth to tokens: as controllers of values say it, and as it is.

What a route is worth depends on what the other routes take. ``check`` measures it where values are
learnt of which nothing is known, beside full attention, where half of the routes try any expert,
and nearer to where they are used, beside a model's own routes, where an eighth does; on text that
it was trained on, and on text that it was not. ``relearn`` learns the values of a finished run once
more, in either way, and evaluates it before and after.

    python benchmarks/study_worth.py check --cache runs/cache-packages --tokens 49152 \\
        --run runs/code/small-value-1-5-0.45-scaled-on-seed0 --json runs/check.json
    python benchmarks/study_worth.py relearn --cache runs/cache-packages --steps 150 \\
        --run runs/code/small-value-1-5-0.45-scaled-on-seed0 --json runs/relearn.json

Shapes: B sequences, T their length, G key-value heads, E experts.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, TaskID, track
from rich.table import Table
from study_data import Cache, draw_sequences
from study_evaluation import autocast, evaluate_hard
from study_jobs import run_command, say
from study_reading import Run
from study_run import default_device
from study_variants import find_variant
from torch import Tensor, nn

from meta_attention import MetaAttentionForCausalLM
from meta_attention.bench.machine import describe_machine
from meta_attention.controller import ValuePosterior, last_seen
from meta_attention.errors import ConfigError, DataError
from meta_attention.layers import BayesianMetaAttentionLayer, LayerOutput
from meta_attention.routing import check_cost
from meta_attention.training.values import (
    EXPLORED,
    EXPLORED_IN_USE,
    cost_range,
    exploring,
    find_price,
    learn_values,
    router_parameters,
)

Row = dict[str, Any]
TEXTS = {"trained on": "train", "held out": "valid"}
# what routes that try nothing take
CONTEXTS = ("all full", "own routes")
# sequences of a step, and of the text on which prices are found
BATCH_SIZE, PRICING_SEQUENCES = 2, 32
RUN = 1  # the last two tokens together
# values of a finished run: not learnt again, or beside what, and how many routes try something
LEARNT = {
    "as they were": None,
    "beside full attention": (False, EXPLORED),
    "beside its own routes, half try": (True, EXPLORED),
    "beside its own routes": (True, EXPLORED_IN_USE),
}


@dataclass(frozen=True, slots=True)
class Figures:
    """Of the routes of a layer that tried an expert, [N] each but for the heads [N, G]."""

    gain: Tensor  # of full attention on the window, in nats, at the expert that was tried
    value: Tensor  # the same as the controller says it
    tried: Tensor  # bool: this route was one of those
    took_full: Tensor
    own_full: Tensor  # what it takes in use, at the run's price
    is_far: Tensor  # [N]: the last two tokens stood together before, beyond the window

    def row(self, head: int, mask: Tensor) -> Row:
        """Over tokens of a mask [N]; the gain is the mean over both places it is measured at.

        What there are no tokens for is None.
        """
        tried, took = self.tried[:, head] & mask, self.took_full[:, head]
        at = [_mean(self.gain[:, head][tried & place]) for place in (took, ~took)]
        known = [gain for gain in at if gain is not None]
        return {
            "head": head,
            "measured": 0.5 * sum(known) if len(known) == 2 else None,
            "predicted": _mean(self.value[:, head][mask]),
            "takes_full_in_use": _mean(self.own_full[:, head][mask].float()),
            "routes": int(tried.sum()),
        }


def _mean(values: Tensor) -> float | None:
    return values.mean().item() if values.numel() else None


def check(args: argparse.Namespace) -> int:
    _check_at_least_one("--tokens", args.tokens)
    cache, run = _open(args)
    rows: list[Row] = []
    for text, split in TEXTS.items():
        for context in CONTEXTS:
            figures = measure(cache, run, split, args.tokens, buys_all=context == CONTEXTS[0])
            for layer, found in figures.items():
                anywhere = torch.ones_like(found.is_far)
                for kind, mask in (("all", anywhere), ("far", found.is_far)):
                    heads = range(found.gain.shape[1])
                    where = {"text": text, "beside": context, "layer": layer, "tokens": kind}
                    rows += [where | found.row(head, mask) for head in heads]
    table = Table(
        title="Nats that full attention is worth to a token: measured beside other routes, and as "
        "the controller says.\nFar: the last two tokens stood together before, beyond the window."
    )
    for column in rows[0]:
        table.add_column(column.replace("_", " "))
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    Console(width=130).print(table)
    _write(args.json, {"run": run.folder.name, "tokens": args.tokens, "rows": rows})
    return 0


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def measure(
    cache: Cache, run: Run, split: str, num_tokens: int, *, buys_all: bool
) -> dict[int, Figures]:
    """What trying experts does to the loss, by routed layer; positions that see all are left out.

    Args:
        cache: The text it was trained on.
        run: With values, of two experts.
        split: ``"train"`` or ``"valid"``.
        num_tokens: To try experts on, about.
        buys_all: Routes that try nothing take full attention; else what they take in use.
    """
    device = default_device()
    model = run.load(device)
    parameters = router_parameters(model)
    layers = {
        index: block.attention
        for index, block in enumerate(model.model.layers)
        if len(block.attention.expert_names) > 1
    }
    windows = {index: _window(layer) for index, layer in layers.items()}
    outputs: dict[int, LayerOutput] = {}
    for index, layer in layers.items():
        layer.register_forward_hook(_keep(outputs, index))
    parts: dict[int, list[Figures]] = {index: [] for index in layers}
    torch.manual_seed(0)
    number = max(1, num_tokens // (BATCH_SIZE * run.scale.length))
    batches = _batches(cache, split, number, run, device)
    with exploring(model, parameters, buys_all=buys_all):
        for ids in track(batches, f"{split}, {'all full' if buys_all else 'own'}", total=number):
            with autocast(device):
                out = model(ids, labels=ids, use_cache=False)
            scores = [_values_of(outputs[index]).score for index in layers]
            # of the sum of the text's losses
            total = out.task_loss * ids[:, 1:].numel()
            gradients = torch.autograd.grad(total, scores)
            for index, gradient in zip(layers, gradients, strict=True):
                kept = _figures(outputs[index], gradient, ids, windows[index], model.config.price)
                parts[index].append(kept)
    return {index: _joined(found) for index, found in parts.items()}


def _figures(
    output: LayerOutput, gradient: Tensor, ids: Tensor, window: int, price: float
) -> Figures:
    """Of one batch, from the gradient of its loss with respect to the scores."""
    posterior, routes = _values_of(output), output.routes
    assert routes.explored is not None
    full, other = posterior.dearest, 1 - posterior.dearest
    # a window sees so many tokens and its own: only after these does full attention see more; the
    # last token predicts nothing
    late = slice(window + 1, -1)
    values = posterior.value.detach()
    surplus = values - price * output.costs
    distance = last_seen(ids, RUN + 1)[..., RUN]

    def flat(x: Tensor) -> Tensor:
        return x[:, late].flatten(0, 1).cpu()

    return Figures(
        gain=flat(posterior.num_shares * gradient[..., other]),
        value=flat(values[..., full] - values[..., other]),
        tried=flat(routes.explored),
        took_full=flat(routes.expert == full),
        own_full=flat(surplus[..., full] >= surplus[..., other]),
        is_far=flat(distance >= window),
    )


def _joined(parts: list[Figures]) -> Figures:
    names = Figures.__dataclass_fields__
    return Figures(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def _values_of(output: LayerOutput) -> ValuePosterior:
    if not isinstance(output.posterior, ValuePosterior):
        raise ConfigError("values are of a run whose variant learns them, such as value-1-5-0.45")
    return output.posterior


def _window(layer: BayesianMetaAttentionLayer) -> int:
    names, granularity = layer.expert_names, layer.config.route_granularity
    if granularity != "kv_head":
        raise ConfigError(f"checked are values of heads, got route_granularity {granularity!r}")
    if len(names) != 2 or names[0] != "full" or not names[1].startswith("local:"):
        raise ConfigError(f"checked are values of full and a window, got {', '.join(names)}")
    return int(names[1].removeprefix("local:"))


def _keep(outputs: dict[int, LayerOutput], index: int) -> Any:
    def keep(_: nn.Module, __: Any, output: LayerOutput) -> None:
        outputs[index] = output

    return keep


def _open(args: argparse.Namespace) -> tuple[Cache, Run]:
    cache, run = Cache.open(args.cache), Run.open(args.run)
    if run.settings["text"] != cache.manifest:
        raise DataError(f"{run.folder} was trained on another text than {args.cache} has")
    return cache, run


def _batches(
    cache: Cache, split: str, number: int, run: Run, device: str, *, after: int = 0
) -> Iterator[Tensor]:
    """Token ids [B, T] from anywhere in a text, as often from each corpus as it is long."""
    length, repeat = run.scale.length, run.scale.repeat if split == "train" else 1
    texts = cache.tokens(split, device).values()
    text = torch.cat([text[after : len(text) // repeat] for text in texts])
    if len(text) <= length:
        raise DataError(
            f"there must be more than {length} tokens of {split} text, got {len(text)}; prepare a "
            "larger cache"
        )
    for _ in range(number):
        yield draw_sequences(text, BATCH_SIZE, length)


def relearn(args: argparse.Namespace) -> int:
    _check_at_least_one("--steps", args.steps)
    if args.eval_tokens is not None:
        _check_at_least_one("--eval-tokens", args.eval_tokens)
    cache, run = _open(args)
    device, scale = default_device(), run.scale
    possible = cost_range(run.load(device))
    target = args.target_cost
    if target is None:
        target = find_variant(run.settings["variant"]).target
        assert target is not None  # variants with values have one
    check_cost(target, *possible)
    asked = scale.eval_tokens if args.eval_tokens is None else args.eval_tokens
    eval_tokens = min(asked, scale.eval_tokens)
    # held out of the training, and of the evaluation
    after = scale.eval_tokens if args.text == "valid" else 0
    rows = []
    for name, beside in LEARNT.items():
        model = run.load(device)
        # the same text, and the same is tried, whatever the others take
        torch.manual_seed(args.seed)
        texts = list(
            _batches(cache, args.text, PRICING_SEQUENCES // BATCH_SIZE, run, device, after=after)
        )
        if beside is not None:
            is_own, explored = beside
            batches = _batches(cache, args.text, args.steps, run, device, after=after)
            with Progress() as progress:
                bar = progress.add_task(name, total=args.steps)
                learn_values(
                    model,
                    batches,
                    num_steps=args.steps,
                    lr=scale.value_lr,
                    texts=texts,
                    target_cost=target if is_own else None,
                    explored_share=explored,
                    autocast=torch.bfloat16 if device == "cuda" else None,
                    on_step=partial(_show, progress, bar),
                )
        with autocast(device):
            find_price(model, texts, target)
        rows.append({"values": name} | _judged(model, cache, run, eval_tokens))
        say(
            f"{name}: loss {rows[-1]['loss']:.4f}, attention FLOPs "
            f"{rows[-1]['attention_flops']:.4f}, price {rows[-1]['price']:.4f}"
        )
    settings = {"run": run.folder.name, "steps": args.steps, "text": args.text, "seed": args.seed}
    settings |= {"target_cost": target, "eval_tokens": eval_tokens}
    _write(args.json, settings | {"rows": rows})
    return 0


def _show(progress: Progress, bar: TaskID, done: int, _: dict[str, float]) -> None:
    progress.update(bar, completed=done)


def _judged(model: MetaAttentionForCausalLM, cache: Cache, run: Run, num_tokens: int) -> Row:
    hard = evaluate_hard(model, cache, run.scale, num_tokens)
    layers = [layer for layer in hard["routing"]["layers"] if not layer["is_static"]]
    return {
        "loss": hard["loss"],
        "attention_flops": hard["attention_flops"],
        "adaptivity": hard["routing"]["adaptivity"],
        "takes_full": [layer["top_share"]["full"] for layer in layers],
        "price": model.config.price,
    }


def _check_at_least_one(flag: str, number: int) -> None:
    if number < 1:
        raise ConfigError(f"{flag} must be >= 1, got {number}")


def _write(path: Path | None, found: Row) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    machine = describe_machine(torch.device(default_device()))
    path.write_text(json.dumps(found | {"machine": machine}, indent=1) + "\n")
    print(f"written: {path}")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("check", help="values beside what they should be")
    _add_options(command)
    command.add_argument("--tokens", type=int, default=1 << 16, help="of each text, about")
    command.set_defaults(call=check)
    command = commands.add_parser("relearn", help="values once more, and what they are worth then")
    _add_options(command)
    command.add_argument("--steps", type=int, default=150, help="of two sequences each")
    command.add_argument(
        "--eval-tokens", type=int, help="of each corpus; at most, and by default, the run's"
    )
    command.add_argument(
        "--target-cost", type=float, help="share of full attention's; default: that of the run"
    )
    command.add_argument("--text", choices=("train", "valid"), default="train")
    command.add_argument("--seed", type=int, default=0, help="of the text and of what is tried")
    command.set_defaults(call=relearn)
    return parser


def _add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--cache", type=Path, required=True, help="what prepare wrote")
    command.add_argument("--run", type=Path, required=True, help="folder of a finished run")
    command.add_argument("--json", type=Path, help="file to write")


def main(arguments: list[str] | None = None) -> int:
    return run_command(build_parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
