"""``meta-attention evaluate --adapter``: a pretrained model with an adapter, next to its base."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meta_attention.errors import (
    BackendUnavailableError,
    ConfigError,
    MetaAttentionError,
    OtherBaseError,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from meta_attention.evaluation.perplexity import Advance

LENGTHS = (2048, 4096, 8192)
# facts that lie in the text where one of several is asked for
SEVERAL = 6


def load_adapted(
    adapter: Path,
    base: str | None,
    device: str = "auto",
    dtype: str = "auto",
    *,
    allow_other_base: bool = False,
) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """A base with its adapter, in evaluation mode on its device, and its tokenizer.

    Args:
        adapter: Folder of an adapter.
        base: Folder or name of its base; None: as the adapter says.
        device: ``"auto"`` (a GPU if there is one), ``"cpu"`` or ``"cuda"``.
        dtype: ``"auto"`` (as it was saved) or the name of one.
        allow_other_base: Load it also for a base of other weights, if the shapes fit.
    """
    import torch

    from meta_attention.adapt import load_adapter, load_base, load_tokenizer, read_card, routers_of
    from meta_attention.cli.checkpoint import be_quiet, one_line

    name = base or read_card(adapter)["base"]["name"]
    if not name:
        raise ConfigError(f"{adapter} does not say what its base is called; add --base")
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise BackendUnavailableError("--device cuda needs a GPU that torch can see; use cpu")
    be_quiet()
    try:
        model, tokenizer = load_base(name, dtype=str(dtype)), load_tokenizer(name)
    except MetaAttentionError:
        raise
    # the hub, the network and every file format have errors of their own
    except Exception as error:
        raise ConfigError(
            f"the base {name} cannot be loaded; add --base with a folder that holds it whole, or "
            f"another name: {one_line(error)}"
        ) from error
    try:
        load_adapter(model, adapter, allow_other_base=allow_other_base)
    except OtherBaseError as error:
        raise OtherBaseError(error.difference, "add --allow-other-base") from None
    if not routers_of(model)[0].adaptation.config.causal:
        raise ConfigError(
            f"{adapter} is of a bidirectional model, which predicts no next token; use it in Python"
        )
    place = torch.device("cuda" if device != "cpu" and has_gpu else "cpu")
    model.to(place)  # type: ignore[arg-type]  # Transformers wraps it out of its type
    return model.eval(), tokenizer


def compare_with_base(
    adapter: Path,
    base: str | None,
    documents: list[str] | None,
    *,
    lengths: str | None,
    sequences: int,
    batch_size: int,
    questions: int,
    distractors: int,
    is_chat: bool,
    decode_batch: int,
    is_timed: bool,
    allow_other_base: bool,
    device: str,
    dtype: str,
    as_json: bool,
) -> None:
    """What ``--compare-base`` does; arguments are its options."""
    asked = None if lengths is None else _parse_lengths(lengths)
    model, tokenizer = load_adapted(adapter, base, device, dtype, allow_other_base=allow_other_base)
    from rich.console import Console

    from meta_attention.bench.adapted_suite import time_adapted
    from meta_attention.evaluation.compare import (
        check_lengths,
        compare_facts,
        compare_text,
        cut_sequences,
    )
    from meta_attention.evaluation.tasks.facts import FactTask
    from meta_attention.training.corpus import read_corpus

    positions = model.config.max_position_embeddings
    chosen = asked or [n for n in LENGTHS if n <= positions] or [positions]
    check_lengths(model, chosen, positions)
    if documents is None:
        documents = read_corpus().documents
    longest = max(chosen)
    text = cut_sequences(model, tokenizer, documents, length=longest, count=sequences)
    # more of it than is scored, so that facts lie in other text each time
    haystack = cut_sequences(
        model, tokenizer, documents, length=longest, count=max(sequences, 4 * questions)
    )
    kinds = {"one fact": 1, f"one of {SEVERAL}": SEVERAL} if questions else {}
    # made first: what cannot be asked is known before anything is measured
    tasks = {
        name: [
            FactTask.of(
                tokenizer,
                haystack.flatten().numpy(),
                length=length,
                is_chat=is_chat,
                facts=facts,
                distractors=distractors,
            )
            for length in chosen
        ]
        for name, facts in kinds.items()
    }
    result: dict[str, Any] = {
        "adapter": str(adapter),
        "base": base or model.config._name_or_path,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    with _progress("text") as advance:
        compared = compare_text(model, text, chosen, batch_size=batch_size, advance=advance)
    result |= compared.to_dict()
    result["facts"] = {}
    for name, asked_for in tasks.items():
        with _progress(name) as advance:
            result["facts"][name] = compare_facts(
                model,
                asked_for,
                per_depth=questions,
                batch_size=batch_size,
                advance=advance,
            )
    result["times"] = []
    if is_timed:
        with _progress("times") as advance:
            result["times"] = time_adapted(
                model, text, chosen, decode_batch=decode_batch, advance=advance
            )
    if model.device.type == "cpu":
        # a shared CPU says nothing but which is faster, if that
        result["times"] = [
            {k: v for k, v in row.items() if not k.endswith("_ms") and k != "timings"}
            for row in result["times"]
        ]
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print_comparison(Console(), result)


def print_comparison(console: "Console", result: dict[str, Any]) -> None:
    """Tables of what was compared."""
    title = (
        f"{result['num_sequences']} sequences, {result['dtype']} on {result['device']}: the first "
        "tokens of each, nats per token"
    )
    table = _table(
        title, ["tokens", "base", "adapted", "increase", "perplexity", "attention FLOPs"]
    )
    for row in result["lengths"]:
        perplexity = (math.exp(row["base_loss"]), math.exp(row["adapted_loss"]))
        table.add_row(
            str(row["length"]),
            f"{row['base_loss']:.4f}",
            f"{row['adapted_loss']:.4f}",
            f"{row['loss_increase']:+.4f}",
            f"{perplexity[0]:.3f} -> {perplexity[1]:.3f}",
            f"{row['attention_share']:.1%} of the base's",
        )
    console.print(table)
    table = _table("By position", ["positions", "base", "adapted", "increase"])
    for row in result["positions"]:
        table.add_row(
            f"{row['begin']} to {row['end'] - 1}",
            f"{row['base_loss']:.4f}",
            f"{row['adapted_loss']:.4f}",
            f"{row['loss_increase']:+.4f}",
        )
    console.print(table)
    if result["facts"]:
        columns = ["asked for", "tokens", "base", "adapted", "log-probability", "adapted by depth"]
        first = next(iter(result["facts"].values()))[0]["adapted"]
        title = f"Answers that are right in percent, by depth: {', '.join(first['by_depth'])}"
        table = _table(title + "; their log-probability in nats", columns)
        for name, rows in result["facts"].items():
            for row in rows:
                a, b = row["base"], row["adapted"]
                depths = [f"{100 * x['accuracy']:.0f}" for x in b["by_depth"].values()]
                table.add_row(
                    name,
                    str(row["length"]),
                    f"{100 * a['accuracy']:.0f}",
                    f"{100 * b['accuracy']:.0f}",
                    f"{a['log_probability']:.2f} -> {b['log_probability']:.2f}",
                    " ".join(depths),
                )
        console.print(table)
    if result["times"]:
        _print_times(console, result["times"])


def _print_times(console: "Console", rows: Sequence[dict[str, Any]]) -> None:
    has_times = "base_ms" in rows[0]
    columns = ["", "tokens", "rows", "cache", *(["base ms", "adapted ms"] if has_times else [])]
    table = _table("Measured time, median", [*columns, "faster by"])
    for row in rows:
        cells = [row["phase"], str(row["length"]), str(row["batch"]), row["cache"]]
        if has_times:
            cells += [f"{row['base_ms']:.2f}", f"{row['adapted_ms']:.2f}"]
        table.add_row(*cells, f"{row['speedup']:.2f} x")
    console.print(table)
    if not has_times:
        console.print("Ratios of a CPU are no result: kernels are for GPUs.")


def _table(title: str, columns: Sequence[str]) -> "Table":
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name == columns[0] else "right")
    return table


@contextmanager
def _progress(name: str) -> Iterator["Advance"]:
    from rich.console import Console
    from rich.progress import Progress

    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        bar = progress.add_task(name, total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)


def _parse_lengths(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 1 for part in parts):
        raise ConfigError(f"--lengths must be numbers above 1, parted by commas, got {text!r}")
    return sorted({int(part) for part in parts})
