"""``meta-attention evaluate``: every figure of a checkpoint over a text."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meta_attention.cli.checkpoint import (
    AdapterOption,
    BaseOption,
    Device,
    DeviceOption,
    Dtype,
    DtypeOption,
    JsonOption,
    OtherBaseOption,
    TextFileOption,
    TextOption,
    load_checkpoint,
    load_model,
    read_text,
)
from meta_attention.cli.compare import compare_with_base
from meta_attention.errors import ConfigError, DataError

if TYPE_CHECKING:
    from meta_attention.evaluation.evaluate import Evaluation

EXAMPLES = """\b
examples:
  meta-attention evaluate runs/tiny --text-file book.txt
  meta-attention evaluate runs/tiny --data books/ --length 1024 --stride 512
  meta-attention evaluate runs/tiny --data books/ --max-tokens 20000 --forced
  meta-attention evaluate runs/tiny --text-file book.txt --json | jq .bits_per_byte
  meta-attention evaluate runs/recall --task recall --forced
  meta-attention evaluate runs/recall --task recall:pairs=64 --sequences 512 --json | jq .accuracy
  meta-attention evaluate runs/needle --task needle --data books/
  meta-attention evaluate --adapter my-adapter --data books/
  meta-attention evaluate --adapter my-adapter --compare-base --data books/
  meta-attention evaluate --adapter my-adapter --compare-base --lengths 2048,8192 --chat --json

\b
tasks:
  --task measures answers and routes where need of full attention is known: recall, needle or
  multi_key, with sizes after a colon; see 'meta-attention train --help'. Sizes not given are those
  the checkpoint was trained with. needle and multi_key hide their facts in --data, or in Python's
  manual.

\b
adapters:
  --adapter measures a pretrained model with an adapter. With --compare-base, next to the base
  without it: loss by length and position, counted attention FLOPs, answers about facts hidden in
  the text (one fact, and one of several), and time of a prefill and of a step of batched decoding.
  Of a CPU only ratios are printed. Without --data the text is Python's manual.
"""


def evaluate(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(help="folder with a saved model and its tokenizer", show_default=False),
    ] = None,
    text: TextOption = None,
    text_file: TextFileOption = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="file, folder, glob or hub dataset; may be given more than once"),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="a task in place of a text: recall, needle or multi_key, see below"),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="tokens in a window or sequence  [default: 1024, or what the model can take; of a "
            "task, as trained]",
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="how much further each window reaches  [default: half of it]"),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="windows run at once  [default: 8, with --compare-base 1]"),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=2, help="stop after this many tokens")
    ] = None,
    sequences: Annotated[
        int | None,
        typer.Option(
            min=1, help="sequences of a task  [default: 128], or of text with --compare-base  [8]"
        ),
    ] = None,
    forced: Annotated[
        bool,
        typer.Option(
            "--forced",
            help="also judge the routes, by forcing each expert of each layer: slow",
        ),
    ] = False,
    adapter: AdapterOption = None,
    base: BaseOption = None,
    allow_other_base: OtherBaseOption = False,
    compare_base: Annotated[
        bool, typer.Option("--compare-base", help="the adapted model next to its base")
    ] = False,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="tokens to compare at, parted by commas  [default: those of 2048,4096,8192 that "
            "the base can take]"
        ),
    ] = None,
    questions: Annotated[
        int | None,
        typer.Option(min=0, help="questions for each depth of a fact; 0: none  [default: 4]"),
    ] = None,
    distractors: Annotated[
        int | None,
        typer.Option(
            min=0, help="sentences with other numbers, hidden beside the facts  [default: none]"
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="ask through the chat template")] = False,
    decode_batch: Annotated[
        int | None, typer.Option(min=1, help="rows of a timed step of decoding  [default: 8]")
    ] = None,
    no_time: Annotated[bool, typer.Option("--no-time", help="leave out times")] = False,
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = Dtype.auto,
    as_json: JsonOption = False,
) -> None:
    """Measure a checkpoint on a text, or on a task whose need of full attention is known.

    On a text: perplexity, bits per byte, calibration and routing.

    Windows slide over the text, and every token is scored once. Documents do not see each other.

    Or measure an adapter, also next to its base.
    """
    _check_target(checkpoint, adapter, base, allow_other_base)
    if compare_base:
        if adapter is None:
            raise ConfigError("--compare-base must be given with --adapter; add its folder")
        given = {"task": task, "length": length, "stride": stride, "max_tokens": max_tokens}
        _refuse("--compare-base", **given, forced=forced or None)
        has_text = bool(text is not None or text_file is not None or data)
        compare_with_base(
            adapter,
            base,
            _read(text, text_file, data) if has_text else None,
            lengths=lengths,
            sequences=8 if sequences is None else sequences,
            batch_size=batch_size or 1,
            questions=4 if questions is None else questions,
            distractors=distractors or 0,
            is_chat=chat,
            decode_batch=decode_batch or 8,
            is_timed=not no_time,
            allow_other_base=allow_other_base,
            device=device,
            dtype=dtype,
            as_json=as_json,
        )
        return
    options = {"lengths": lengths, "questions": questions, "distractors": distractors}
    options |= {"decode_batch": decode_batch, "chat": chat or None, "no_time": no_time or None}
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"--{name.replace('_', '-')} must be given with --compare-base only")
    batch_size = batch_size or 8
    if task is not None:
        if checkpoint is None:
            raise ConfigError("--task must not be given with --adapter; try --compare-base")
        _refuse("--task", text=text, text_file=text_file, stride=stride, max_tokens=max_tokens)
        _evaluate_task(
            checkpoint,
            task,
            data or [],
            length,
            sequences,
            batch_size,
            forced,
            device,
            dtype,
            as_json,
        )
        return
    _refuse("a text", sequences=sequences)
    documents = _read(text, text_file, data)
    model, tokenizer = load_model(
        checkpoint, adapter, base, device, dtype, allow_other_base=allow_other_base
    )

    # torch and transformers load here, so that --help stays instant
    from rich.console import Console
    from rich.progress import Progress

    from meta_attention.evaluation.evaluate import evaluate_text

    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        bar = progress.add_task("tokens", total=None)
        result = evaluate_text(
            model,
            tokenizer,
            documents,
            length=length,
            stride=stride,
            batch_size=batch_size,
            max_tokens=max_tokens,
            forced=forced,
            advance=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        _print_tables(result)


def _evaluate_task(
    checkpoint: Path,
    task: str,
    data: list[str],
    length: int | None,
    sequences: int | None,
    batch_size: int,
    forced: bool,
    device: Device,
    dtype: Dtype,
    as_json: bool,
) -> None:
    model, tokenizer = load_checkpoint(checkpoint, device, dtype)
    from rich.console import Console
    from rich.progress import Progress

    from meta_attention.evaluation.tasks import evaluate_task
    from meta_attention.report.terminal import print_task, routing_table, verdict_table
    from meta_attention.training.tasks import held_out_task

    spec, dataset = held_out_task(model, tokenizer, checkpoint, task, data, length, sequences)
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        bar = progress.add_task("passes", total=None)
        result = evaluate_task(
            model,
            dataset,
            batch_size=batch_size,
            forced=forced,
            advance=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    figures = {"task": str(spec)} | result.to_dict()
    if as_json:
        print(json.dumps(figures, indent=2))
        return
    console = Console()
    print_task(console, str(spec), figures)
    console.print(routing_table(result.routing))
    if result.forced is not None:
        console.print(verdict_table(result.forced))


def _check_target(
    checkpoint: Path | None, adapter: Path | None, base: str | None, allow_other_base: bool
) -> None:
    if (checkpoint is None) == (adapter is None):
        raise ConfigError("either a checkpoint or --adapter must be given, and not both")
    if base is not None and adapter is None:
        raise ConfigError("--base must be given with --adapter only: a checkpoint has none")
    if allow_other_base and adapter is None:
        raise ConfigError("--allow-other-base must be given with --adapter only")


def _refuse(what: str, **options: object) -> None:
    """Raise if one of the options was given, which mean nothing for what is evaluated."""
    for name, value in options.items():
        if value is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} must not be given with {what}; leave it out")


def _read(text: str | None, text_file: Path | None, data: list[str] | None) -> list[str]:
    if not data:
        if text is None and text_file is None:
            raise DataError("one of --text, --text-file, --data and --task must be given")
        return [read_text(text, text_file)]
    if text is not None or text_file is not None:
        raise DataError("--data must not be given together with --text or --text-file")
    from meta_attention.training.corpus import read_corpus

    return read_corpus(data).documents


def _print_tables(result: "Evaluation") -> None:
    from rich.console import Console
    from rich.table import Table

    from meta_attention.report.terminal import routing_table, verdict_table

    console = Console()
    text, routing = result.text, result.routing
    figures = Table(
        title=f"{text.num_tokens:,} tokens, {text.num_bytes:,} bytes, windows of {result.length} "
        f"every {result.stride}, {result.dtype} on {result.device}",
        title_justify="left",
        show_header=False,
    )
    rows: list[tuple[str, float | None, str, str]] = [
        ("loss", text.loss, ".4f", "nats per token"),
        ("perplexity", text.perplexity, ".3f", "per token"),
        ("bits per byte", text.bits_per_byte, ".4f", ""),
        ("calibration error", result.ece, ".4f", "of next-token prediction, 15 bins"),
        ("KL to the prior", routing.kl, ".4f", "nats, mean over routed layers"),
        ("projected cost", routing.projected_cost, ".2%", "of full attention, from the weights"),
        ("adaptivity", routing.adaptivity, ".4f", "nats; zero: every token the same weights"),
        ("routing entropy", routing.routing_entropy, ".1f", "percent of ln E"),
    ]
    if result.forced is not None:
        rows += [
            ("regret", result.forced.regret, ".4f", "nats to each token's best expert"),
            ("static regret", result.forced.static_regret, ".4f", "nats to each layer's best"),
            ("routing calibration error", result.forced.routing_ece, ".4f", "top is best"),
        ]
    for name, value, form, note in rows:
        figures.add_row(name, "none" if value is None else format(value, form), note)
    console.print(figures)
    console.print(routing_table(routing))
    if result.forced is not None:
        console.print(verdict_table(result.forced))
