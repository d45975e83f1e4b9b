"""``meta-attention adapt``: train a small router for a pretrained model."""

import json
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from meta_attention.cli.train import (
    ArgmaxFrom,
    Hold,
    RouteGradient,
    RouteGranularity,
)
from meta_attention.errors import ConfigError

EXAMPLES = """\b
examples:
  meta-attention adapt smollm2-135m-instruct --data books/ --target-cost 0.25 --out adapters/books
  meta-attention adapt Qwen/Qwen2.5-0.5B --data books/ --data wiki.jsonl.xz --out adapters/qwen
  meta-attention adapt ./my-model --data text.txt --length 2048 --window-size 128
  meta-attention adapt ./my-model --data text.txt --granularity token --out adapters/by-token
  meta-attention adapt ./my-model --data text.txt --experts full,local --out adapters/two
  meta-attention adapt ./my-model --data text.txt --recall-share 0.5 --out adapters/looks-up
  meta-attention adapt ./my-model --data text.txt --layers 3,9,15 --lora-rank 8 --out adapters/lora
  meta-attention adapt ./my-model --data text.txt --steps 1000 --cost-weight "0->0.02@0.1:0.4"
  meta-attention adapt ./my-model --data text.txt --controller value --out adapters/by-value
  meta-attention adapt --out adapters/books --resume
  meta-attention generate --adapter adapters/books --prompt "The lighthouse"

\b
what is trained:
  One router per layer, some 40,000 parameters each; every weight of the model stays as it is. Each
  step runs the text twice, by the model itself and routed, and lowers the divergence between the
  predictions (--loss distill; lm: the loss on the text; both: their mean). Tokens start on full
  attention. Then the weight of their cost rises (--cost-weight, a schedule as in 'meta-attention
  train --help'), and is steered until routes cost --target-cost of full attention in the adapted
  layers: FLOPs of scores and values at --length. The KL to a prior that knows costs has a small
  weight (--kl-weight); with --cost-weight 0 it is what is steered. --hold keeps a cost that falls
  below the target from running away. Routes are drawn, and from --argmax-from on those of use.

\b
by value:
  With --controller value nothing is pressed. Half of the routes of a step try any expert, and
  routers learn by how many nats each expert brings predictions nearer to the model's own. A token
  takes what is worth most at the going price, and the price is found that makes routes cost
  --target-cost; the folder's README.md lists others, and meta_attention.adapt.set_price(model,
  price) takes one of them without any training. It may take more steps: try --steps 900.

\b
what it is trained on:
  Blocks of --length tokens of --data. In --recall-share of them something further back than the
  window must be found again: passages that stand in the block once more, and by turns short lines
  that give a name a word or a number, and ask for it later. The next word of a text needs this
  rarely, so a router trained on text alone gives it up: raise the share where answers from far
  back matter, set it to 0 for plain text. Held-out text is plain; eval_recall_divergence in
  metrics.jsonl is of held-out blocks that were changed the same way.

\b
the folder:
  adapter.safetensors and adapter.json are the adapter, README.md says what was measured, lora/ is
  there with --lora-rank. run.json and metrics.jsonl are the log of the training.
"""


class Controller(StrEnum):
    bayesian = "bayesian"
    prior_free = "prior_free"
    value = "value"


class Loss(StrEnum):
    distill = "distill"
    lm = "lm"
    both = "both"


class Precision(StrEnum):
    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


def _flag(text: str, *names: str, **limits: Any) -> Any:
    return typer.Option(*names, help=text, show_default=False, **limits)


def adapt(
    model: Annotated[
        str | None,
        typer.Argument(
            help="a causal language model: a folder, a hub name, or smollm2-135m-instruct, which "
            "pip installs",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        list[str] | None, _flag("text: a file, folder, glob or hub name, repeatable")
    ] = None,
    eval_data: Annotated[
        list[str] | None, _flag("text to evaluate on, repeatable; default: held out from the data")
    ] = None,
    max_bytes: Annotated[int | None, _flag("read this much text at most", min=1)] = None,
    out: Annotated[
        Path | None, _flag("folder of the adapter; default: adapters/NAME OF THE MODEL")
    ] = None,
    resume: Annotated[bool, _flag("go on with the run in the folder, with its settings")] = False,
    target_cost: Annotated[
        float | None,
        _flag("share of full attention's cost to steer to; default 0.25; 0: none"),
    ] = None,
    length: Annotated[
        int | None, _flag("tokens in a block; default: 8192, or what the model can take", min=2)
    ] = None,
    recall_share: Annotated[
        float | None,
        _flag(
            "share of the blocks in which something far back must be found again, see below; "
            "default 0.25",
            min=0.0,
            max=1.0,
        ),
    ] = None,
    steps: Annotated[int | None, _flag("optimiser steps; default 300", min=1)] = None,
    batch_size: Annotated[int | None, _flag("blocks per step; default 4", min=1)] = None,
    grad_accum: Annotated[
        int | None, _flag("parts a batch is computed in, to save memory", min=1)
    ] = None,
    lr: Annotated[
        float | None,
        _flag("highest learning rate of the routers; default: by width, at most 0.01"),
    ] = None,
    warmup: Annotated[int | None, _flag("steps until it is reached", min=0)] = None,
    weight_decay: Annotated[float | None, _flag("weight decay of AdamW", min=0.0)] = None,
    seed: Annotated[
        int | None, _flag("of routers, routes and the order of blocks", min=0, max=2**32 - 1)
    ] = None,
    loss: Annotated[Loss | None, _flag("what to lower, see below; default distill")] = None,
    kl_weight: Annotated[str | None, _flag("weight of the KL: a schedule, see below")] = None,
    cost_weight: Annotated[
        str | None, _flag("weight of the cost, which the target steers: a schedule")
    ] = None,
    hold: Hold = None,
    argmax_from: ArgmaxFrom = None,
    experts: Annotated[
        str | None,
        _flag(
            'experts of a layer; default "full,local:1024,local", or with four times another '
            '--window-size; "full,local" where --length is less than twice that'
        ),
    ] = None,
    window_size: Annotated[
        int | None,
        _flag(
            "reach of local attention; default 256, or a 32nd of --length where that is less", min=1
        ),
    ] = None,
    num_sinks: Annotated[
        int | None, _flag("first tokens that local attention sees as well; default 4", min=0)
    ] = None,
    layers: Annotated[
        str | None, _flag("layers to adapt, such as 0,5,10; default: all of full attention")
    ] = None,
    granularity: Annotated[
        RouteGranularity | None,
        _flag("what has a route of its own: kv_head of a token (default), or token"),
    ] = None,
    route_gradient: Annotated[
        RouteGradient | None,
        _flag("what routes run and learn from in training: all experts (default), or the chosen"),
    ] = None,
    controller: Annotated[
        Controller | None, _flag("how tokens choose; value: by what is worth its price, see below")
    ] = None,
    prior_strength: Annotated[
        float | None, _flag("scale of the prior, the paper's beta_0; default 1", min=0.0)
    ] = None,
    lora_rank: Annotated[
        int | None, _flag("also train a LoRA of the attention projections (needs peft)", min=0)
    ] = None,
    lora_lr: Annotated[float | None, _flag("highest learning rate of it")] = None,
    precision: Annotated[
        Precision, _flag("of the computation; auto: bf16 on a GPU, fp32 on a CPU")
    ] = Precision.auto,
    gradient_checkpointing: Annotated[
        bool | None, _flag("recompute activations, to save memory")
    ] = None,
    eval_every: Annotated[int | None, _flag("steps between evaluations", min=1)] = None,
    save_every: Annotated[int | None, _flag("steps between checkpoints", min=1)] = None,
    log_every: Annotated[int | None, _flag("steps between rows of the log", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Make a pretrained model's attention cheaper: train a small router, and save it as an adapter.

    The model's weights stay. A run that was stopped goes on with --resume.
    """
    given = {
        name: value
        for name, value in locals().items()
        if value is not None and name not in ("out", "resume", "as_json", "precision")
    }
    if out is None and model is None:
        raise ConfigError("name a model to adapt, or with --resume the folder of a run by --out")
    folder = out or Path("adapters") / Path(str(model)).name
    if not resume and (model is None or data is None):
        raise ConfigError("adapt must have a model and text to train on; name it, and give --data")

    # torch and transformers load here, so that --help stays instant
    from meta_attention.adapt.training import open_router_run, train_router
    from meta_attention.cli.checkpoint import load_pretrained
    from meta_attention.training.logs import ConsoleProgress

    overrides = _parse(given)
    if precision is not Precision.auto or not resume:
        overrides["precision"] = _resolve(precision)
    settings = open_router_run(folder, overrides, resume=resume)
    base, tokenizer = load_pretrained(settings.model)
    progress = None if as_json else ConsoleProgress()
    try:
        record = train_router(
            base,
            tokenizer,
            settings,
            folder,
            resume=resume,
            callbacks=() if progress is None else (progress,),
        )
    finally:
        if progress is not None:
            progress.close()
    if as_json:
        # a sample of the base's weights is for resuming, not for reading
        shown = {name: value for name, value in record.items() if name != "base_weights"}
        print(json.dumps({"out": str(folder)} | shown, indent=2))
    else:
        _print_result(folder, record)


def _resolve(precision: Precision) -> str:
    if precision is not Precision.auto:
        return precision.value
    import torch

    return "bf16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "fp32"


def _parse(given: dict[str, Any]) -> dict[str, Any]:
    """Flags as the settings of the same name."""
    from meta_attention.training.model_settings import parse_names
    from meta_attention.training.schedule import Schedule

    readers: dict[str, Callable[[Any], Any]] = {
        "kl_weight": Schedule.parse,
        "cost_weight": Schedule.parse,
        "target_cost": lambda share: share or None,
        "experts": parse_names,
        "layers": _parse_layers,
        "data": tuple,
        "eval_data": tuple,
        "loss": str,
        "granularity": str,
        "route_gradient": str,
        "controller": str,
    }
    settings = {
        name: readers.get(name, lambda value: value)(value) for name, value in given.items()
    }
    if "granularity" in settings:
        settings["route_granularity"] = settings.pop("granularity")
    return settings


def _parse_layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--layers must be indices of layers separated by commas, such as 0,5,10, got {text!r}"
        ) from None


def _print_result(folder: Path, record: dict[str, Any]) -> None:
    from rich.console import Console

    from meta_attention.report.terminal import adapter_table, price_table
    from meta_attention.training.economy import TOLERANCE

    measured = record["metrics"]
    console = Console()
    console.print(
        f"{folder}: {record['parameters']:,} parameters trained beside "
        f"{record['base_parameters']:,}, {record['steps']} steps",
        markup=False,
        soft_wrap=True,
    )
    held_out = record["eval_data"]["tokens"]
    print(
        f"held out ({held_out:,} tokens): {measured['lm_loss']:.4f} nats per token, the base "
        f"{measured['base_loss']:.4f} ({measured['loss_increase']:+.4f}), divergence "
        f"{measured['divergence']:.4f}"
    )
    print(
        f"attention: {measured['attention_share']:.1%} of the base's FLOPs at {measured['length']} "
        f"tokens, adapted layers cost {measured['routed_cost']:.3f} of full attention"
    )
    console.print(adapter_table(measured["layers"]))
    if "offers" in measured:
        console.print(price_table(measured["offers"]))
    target, cost = measured["target_cost"], measured["routed_cost"]
    if "offers" in measured:
        if not target / TOLERANCE <= cost <= TOLERANCE * target:
            print(
                f"note: the target was {target:g}, on the training text that the price was found "
                "on; meta_attention.adapt.find_price finds another on text of your own"
            )
    elif target is not None and cost > TOLERANCE * target:
        print(f"note: that is above the target {target:g}; more steps bring it nearer")
    elif target is not None and cost < target / TOLERANCE:
        print(f"note: that is below the target {target:g}; a larger --hold brings it nearer")
