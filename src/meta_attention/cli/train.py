"""``meta-attention train``: a routed language model from text."""

import json
import os
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from meta_attention.training.model_settings import Settings

# options of the command, not of the run
NOT_SETTINGS = ("recipe", "out", "resume", "capture", "tensorboard", "as_json")

EXAMPLES = """\b
examples:
  meta-attention train
  meta-attention train --recipe tiny --data wiki.train.txt --eval-data wiki.valid.txt
  meta-attention train --recipe bytes-small --data books/ --cost-weight "0->0.1@0.6:0.7"
  meta-attention train --routing gated --uncertainty-threshold "0->0.5@0.2:0.8" --out runs/gated
  meta-attention train --routing hard --training-weights one_hot --route-gradient chosen
  meta-attention train --target-cost 0.3 --out runs/cheap
  meta-attention train --controller prior_free --cost-weight "0->0.1@150s:200s" --out runs/no-prior
  meta-attention train --kl-weight "0->0.1@settled+0.2" --settle-drop 0.05 --out runs/settled
  meta-attention train --heads 8 --kv-heads 2 --route-granularity kv_head --out runs/by-head
  meta-attention train --layers 4 --depth-capacity 0.5 --out runs/depth
  meta-attention train --experts full,ssm,local --depth-capacity 0.5 --residual attention
  meta-attention train --out runs/demo --resume
  meta-attention train --experts full --out runs/full
  meta-attention train --layers 6 --layer-experts "local*5,full+local" --out runs/hybrid
  meta-attention train --task recall
  meta-attention train --task recall:pairs=16,recalls=8,copies=8 --length 128 --out runs/small
  meta-attention train --task multi_key:facts=4,questions=2 --data books/ --out runs/keys
  torchrun --nproc-per-node 2 --no-python meta-attention train --recipe bytes-small
  accelerate launch --no_python meta-attention train --recipe bytes-small

\b
experts by layer:
  --layer-experts parts layers by commas and the experts of a layer by +. A layer of one expert is
  static: nothing is routed in it. "local*2,full+local" is two local layers and one that routes
  between full and local attention; a pattern repeats to fill the layers there are.

\b
tasks:
  --task trains on questions of which it is known which need full attention, and evaluates answers
  and routes:
  recall      values of keys that stand far back, and copies from 7 back; a vocabulary of its own
  needle      a code hidden in text (--data), asked for at the end
  multi_key   several codes, some of them asked for
  Sizes follow a colon. recall: pairs, fewest_pairs (in training), recalls, copies, copy_distance,
  keys, values, noise. needle: digits. multi_key: facts, questions, digits. --length is that of a
  sequence. The settings come from the recipes recall and needle, and the last model is kept.

\b
schedules:
  --kl-weight takes a number, or START->END, or START->END@BEGIN:FINISH in fractions of training:
  "0->0.1@0.5:0.75" is 0 for the first half, rises until three quarters, and stays at 0.1.
  "0->0.1@2000s:3000s" rises between these steps; "0->0.1->0@0.5:0.7:0.8" rises and falls again.
  "0->0.1@settled+500s" waits until the task loss has settled, then rises for 500 steps
  ("settled+0.2": for a fifth of training). Settled: its mean over --settle-steps fell by less than
  --settle-drop. A run that never settles rises at its end.
  --cost-weight likewise; a prior_free controller has nothing else to make it cheap. Hard routes of
  demo and bytes-small are pressed by it, and their KL has a tenth of its weight at most (that of
  bytes-small is gone when routes are taken); --kl-weight given alone presses in its place, as it
  does in recall and needle and where routes are soft or gated. What a target steers has no peak.
  --uncertainty-threshold likewise: a token below it is hard, so a rising one makes tokens hard.

\b
target cost:
  --target-cost 0.2 asks for hard routes that cost 20% of what full attention costs in the routed
  layers: FLOPs of scores and values at the training length, without projections and controller
  (or whatever --expert-costs says). From when --cost-weight begins to rise, it is multiplied by
  what brings the cost there, between 1/100 and 100, and the KL keeps its own weight; where there is
  no --cost-weight, that of the KL is. --hold keeps a cost that falls below the target from running
  away; without it a model may end far below. --argmax-from 0.8: in the last fifth of training
  routes are those of evaluation, no longer drawn.
  metrics.jsonl has routed_cost, target_cost and multiplier. The best model is then the best of
  those at most 10% above the target.
"""


class Recipe(StrEnum):
    """The names of ``RECIPES``, which a test compares: importing those would load torch."""

    demo = "demo"
    tiny = "tiny"
    bytes_small = "bytes-small"
    recall = "recall"
    needle = "needle"


class Controller(StrEnum):
    bayesian = "bayesian"
    prior_free = "prior_free"


class Weights(StrEnum):
    mean = "mean"
    sample = "sample"
    one_hot = "one_hot"


class RouteGradient(StrEnum):
    all = "all"
    chosen = "chosen"


class RouteGranularity(StrEnum):
    token = "token"
    kv_head = "kv_head"


class Residual(StrEnum):
    sum = "sum"
    attention = "attention"
    block_attention = "block_attention"


class DepthRouting(StrEnum):
    top_k = "top_k"
    threshold = "threshold"


class Routing(StrEnum):
    soft = "soft"
    hard = "hard"
    gated = "gated"


class Signal(StrEnum):
    mutual_information = "mutual_information"
    mean_entropy = "mean_entropy"
    margin = "margin"
    vacuity = "vacuity"
    entropy = "entropy"


class Precision(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


def _flag(text: str, *names: str, **limits: Any) -> Any:
    return typer.Option(*names, help=text, show_default=False, **limits)


# of adapt as well
Hold = Annotated[
    float | None, _flag("weight of what keeps the cost from falling below its target", min=0.0)
]
ArgmaxFrom = Annotated[
    float | None,
    _flag("share of training after which routes are not drawn any more", min=0.0, max=1.0),
]


def train(
    recipe: Annotated[
        Recipe | None,
        _flag(
            "where the settings not given come from: demo (default; a CPU, a minute), tiny "
            "(the paper's), bytes-small (5M parameters, a GPU), recall and needle (tasks)"
        ),
    ] = None,
    task: Annotated[
        str | None,
        _flag("train on a task with known need: recall, needle or multi_key, see below"),
    ] = None,
    data: Annotated[
        list[str] | None,
        _flag("text: a file, folder, glob or hub name, repeatable; default: Python's manual"),
    ] = None,
    eval_data: Annotated[
        list[str] | None, _flag("text to evaluate on, repeatable; default: held out from the data")
    ] = None,
    max_bytes: Annotated[int | None, _flag("read this much text at most", min=1)] = None,
    train_bytes: Annotated[
        int | None, _flag("train on this much of it only, again and again", min=1)
    ] = None,
    tokenizer: Annotated[
        str | None, _flag("bytes, characters, bpe, bpe:SIZE, a folder or a hub name")
    ] = None,
    length: Annotated[int | None, _flag("tokens in a block", min=2)] = None,
    isolate_documents: Annotated[
        bool | None,
        _flag("documents of a block do not see each other", "--isolate-documents/--join-documents"),
    ] = None,
    out: Annotated[
        Path | None, _flag("folder of the run; default: runs/RECIPE or runs/TASK")
    ] = None,
    resume: Annotated[bool, _flag("go on with the run in the folder, with its settings")] = False,
    steps: Annotated[int | None, _flag("optimiser steps", min=1)] = None,
    batch_size: Annotated[
        int | None, _flag("blocks per step, over all processes and parts", min=1)
    ] = None,
    grad_accum: Annotated[
        int | None, _flag("parts a batch is computed in, to save memory", min=1)
    ] = None,
    lr: Annotated[float | None, _flag("highest learning rate")] = None,
    warmup: Annotated[int | None, _flag("steps until it is reached", min=0)] = None,
    weight_decay: Annotated[float | None, _flag("weight decay of AdamW", min=0.0)] = None,
    seed: Annotated[
        int | None, _flag("of the weights and of the order of the blocks", min=0, max=2**32 - 1)
    ] = None,
    kl_weight: Annotated[str | None, _flag("weight of the KL: a schedule, see below")] = None,
    routing: Annotated[
        Routing | None, _flag("soft: all experts by weight; hard: one; gated: hard where sure")
    ] = None,
    uncertainty_signal: Annotated[Signal | None, _flag("what gated routing is gated by")] = None,
    uncertainty_threshold: Annotated[
        str | None, _flag("tokens below it are hard: a schedule, see below")
    ] = None,
    cost_weight: Annotated[
        str | None,
        _flag("weight of the projected cost: a schedule, see below"),
    ] = None,
    target_cost: Annotated[
        float | None,
        _flag("share of full attention's cost in routed layers to steer to, see below; 0: none"),
    ] = None,
    hold: Hold = None,
    argmax_from: ArgmaxFrom = None,
    settle_drop: Annotated[
        float | None, _flag("a loss that falls by less than this share has settled, see below")
    ] = None,
    settle_steps: Annotated[
        int | None, _flag("steps over which that is looked at; default: a tenth of all")
    ] = None,
    hidden_size: Annotated[int | None, _flag("width of the model", min=1)] = None,
    layers: Annotated[int | None, _flag("number of blocks of the model", min=1)] = None,
    heads: Annotated[int | None, _flag("attention heads", min=1)] = None,
    kv_heads: Annotated[int | None, _flag("key-value heads; default: as many", min=1)] = None,
    window_size: Annotated[int | None, _flag("reach of local attention", min=1)] = None,
    experts: Annotated[
        str | None, _flag('experts of every layer, such as "full,linear,local"')
    ] = None,
    layer_experts: Annotated[str | None, _flag("experts of each layer, see below")] = None,
    expert_costs: Annotated[
        str | None, _flag('paper, flops, or a number for each expert: "1,0.15,0.3"')
    ] = None,
    controller: Annotated[Controller | None, _flag("how tokens choose")] = None,
    prior_strength: Annotated[
        float | None, _flag("scale of the prior, the paper's beta_0", min=0.0)
    ] = None,
    prior_floor: Annotated[
        float | None, _flag("smallest concentration of the prior, the paper's epsilon")
    ] = None,
    empirical_prior: Annotated[
        bool | None,
        _flag("estimate the strength of each layer's prior in training", "--empirical-prior"),
    ] = None,
    start_expert: Annotated[
        str | None,
        _flag(
            "expert that new controllers believe in, where a layer has it, such as full; or none"
        ),
    ] = None,
    training_weights: Annotated[
        Weights | None,
        _flag("routes in training: from the posterior's mean, a sample, or one_hot: one drawn"),
    ] = None,
    route_gradient: Annotated[
        RouteGradient | None,
        _flag("what hard routes run and learn from in training: all experts, or the chosen one"),
    ] = None,
    route_granularity: Annotated[
        RouteGranularity | None,
        _flag("what has a route of its own: a token, or each of its key-value heads (kv_head)"),
    ] = None,
    shared_projections: Annotated[
        bool | None,
        _flag(
            "one set of projections per layer, or the paper's one per expert",
            "--shared-projections/--own-projections",
        ),
    ] = None,
    short_conv: Annotated[
        int | None,
        _flag("taps of a causal convolution over queries, keys and values, such as 3", min=1),
    ] = None,
    recurrence: Annotated[
        int | None,
        _flag(
            "controllers also see when the last tokens, up to so many together, were seen before; "
            "such as 3",
            min=1,
        ),
    ] = None,
    depth_capacity: Annotated[
        float | None,
        _flag("Mixture of Depths: share of the tokens that enter a block, in (0, 1]; others skip"),
    ] = None,
    depth_layers: Annotated[
        str | None, _flag('blocks that tokens may skip, such as "1,3"; default: every other one')
    ] = None,
    depth_routing: Annotated[
        DepthRouting | None,
        _flag("who enters: top_k of a row, which a predictor learns to tell, or a threshold"),
    ] = None,
    depth_weight: Annotated[
        float | None, _flag("weight of what teaches who enters", min=0.0)
    ] = None,
    initializer_range: Annotated[
        float | None, _flag("standard deviation of new weights; 0.02 is small for small models")
    ] = None,
    residual: Annotated[
        Residual | None,
        _flag("what sublayers read: the sum of outputs, or attention over them or over their sums"),
    ] = None,
    residual_blocks: Annotated[
        int | None, _flag("sums that --residual block_attention reads; 8 if not given", min=1)
    ] = None,
    precision: Annotated[Precision | None, _flag("of the computation; weights are fp32")] = None,
    compile_model: Annotated[
        bool | None, _flag("compile the model", "--compile/--no-compile")
    ] = None,
    gradient_checkpointing: Annotated[
        bool | None, _flag("recompute activations, to save memory")
    ] = None,
    eval_every: Annotated[int | None, _flag("steps between evaluations; 0: none", min=0)] = None,
    save_every: Annotated[int | None, _flag("steps between checkpoints", min=1)] = None,
    log_every: Annotated[int | None, _flag("steps between rows of the log", min=1)] = None,
    capture: Annotated[
        bool, _flag("replay steps from CUDA graphs: faster where they are short, on one GPU")
    ] = False,
    tensorboard: Annotated[bool, _flag("write the figures for TensorBoard as well")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Train a routed language model, and save it with its tokenizer and its log.

    The folder then holds the model, metrics.jsonl and run.json. A run that was stopped goes on
    with --resume; on the CPU its losses are those of a run that was never stopped.
    """
    given = {
        name: value
        for name, value in locals().items()
        if value is not None and name not in NOT_SETTINGS
    }
    # torch and transformers load here, so that --help stays instant
    from meta_attention.training.logs import ConsoleProgress
    from meta_attention.training.run import open_run, train_model

    folder = out or Path("runs") / (recipe or (task or Recipe.demo).partition(":")[0])
    settings = open_run(folder, recipe and recipe.value, _parse(given), resume=resume)
    is_main = os.environ.get("RANK", "0") == "0"
    progress = ConsoleProgress() if is_main and not as_json else None
    try:
        record = train_model(
            settings,
            folder,
            resume=resume,
            tensorboard=tensorboard,
            capture=capture,
            callbacks=() if progress is None else (progress,),
        )
    finally:
        if progress is not None:
            progress.close()
    if is_main and as_json:
        print(json.dumps({"out": str(folder)} | record, indent=2))
    elif is_main:
        _print_result(folder, settings, record)


def _parse(given: dict[str, Any]) -> dict[str, Any]:
    """Flags as the settings of the same name."""
    from meta_attention.training.model_settings import (
        parse_costs,
        parse_depth_layers,
        parse_layer_experts,
        parse_names,
    )
    from meta_attention.training.schedule import Schedule

    readers: dict[str, Callable[[Any], Any]] = {
        "kl_weight": Schedule.parse,
        "uncertainty_threshold": Schedule.parse,
        "cost_weight": Schedule.parse,
        "target_cost": lambda share: share or None,
        "start_expert": lambda name: None if name == "none" else name,
        "experts": parse_names,
        "layer_experts": parse_layer_experts,
        "expert_costs": parse_costs,
        "data": tuple,
        "eval_data": tuple,
        "controller": str,
        "routing": str,
        "uncertainty_signal": str,
        "training_weights": str,
        "route_gradient": str,
        "route_granularity": str,
        "residual": str,
        "depth_layers": parse_depth_layers,
        "depth_routing": str,
        "precision": str,
    }
    settings = {
        name: readers.get(name, lambda value: value)(value) for name, value in given.items()
    }
    if "compile_model" in settings:
        settings["compile"] = settings.pop("compile_model")
    return settings


def _print_result(folder: Path, settings: "Settings", record: dict[str, Any]) -> None:
    metrics = record["metrics"]
    print(f"{folder}: {record['parameters']:,} parameters, {record['steps']} steps")
    if not metrics:
        return
    if settings.task is None:
        print(
            f"held out: {metrics['task_loss']:.4f} nats per token, perplexity "
            f"{metrics['perplexity']:.3f}, {metrics['bits_per_byte']:.4f} bits per byte"
        )
    elif "task" not in record:
        print(
            f"held out: {metrics['accuracy']:.1%} of the answers right, "
            f"{metrics['full_share']:.1%} of the tokens on full attention, "
            f"{metrics['need_share']:.1%} need it"
        )
    else:
        from rich.console import Console

        from meta_attention.report.terminal import print_task

        print_task(Console(), settings.task, record["task"])
    entered = {n.split("/")[0]: x for n, x in metrics.items() if n.endswith("/entered")}
    if entered:
        shares = ", ".join(f"{name.replace('_', ' ')} {x:.1%}" for name, x in entered.items())
        print(
            f"depth: tokens that enter, held out: {shares} (capacity {settings.depth_capacity:g})"
        )
    if "adaptivity" not in metrics:
        print("routing: none, every layer is static")
        return
    print(
        f"routing: projected cost {metrics['projected_cost']:.3f}, adaptivity "
        f"{metrics['adaptivity']:.4f} nats, entropy {metrics['routing_entropy']:.1f}%"
    )
    from meta_attention.training.economy import TOLERANCE

    target = settings.target_cost
    if target is not None:
        cost = metrics["routed_cost"]
        print(f"routed layers cost {cost:.3f} of full attention, target {target:g}")
        if cost > TOLERANCE * target:
            print("note: that is above the target; more steps bring it nearer")
        elif cost < target / TOLERANCE:
            print("note: that is below the target: the text did not ask for more")
    for number, what in (
        (metrics["expert_collapses"], "send more than 95% of their tokens to one expert"),
        (metrics["prior_collapses"], "do not tell their tokens apart"),
    ):
        if number:
            print(f"note: {number} of {settings.layers} layers {what}")
