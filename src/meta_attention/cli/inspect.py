"""``meta-attention inspect``: where the tokens of a text go."""

import json
from pathlib import Path
from typing import Annotated

import typer

from meta_attention.cli.checkpoint import (
    AdapterOption,
    BaseOption,
    Device,
    DeviceOption,
    Dtype,
    DtypeOption,
    JsonOption,
    OptionalCheckpointArgument,
    OtherBaseOption,
    TextFileOption,
    TextOption,
    load_model,
    read_text,
)

EXAMPLES = """\b
examples:
  meta-attention inspect runs/tiny --text "The cat sat on the mat."
  meta-attention inspect runs/tiny --text-file page.txt --html routes.html
  meta-attention inspect runs/tiny --text "The cat" --layer 2 --signal mutual-information
  meta-attention inspect runs/tiny --text "The cat" --json | jq .layers[0].expert
  meta-attention inspect --adapter adapters/books --text-file page.txt --html routes.html
"""


def inspect(
    checkpoint: OptionalCheckpointArgument = None,
    text: TextOption = None,
    text_file: TextFileOption = None,
    layer: Annotated[
        int | None,
        typer.Option(help="layer to show in the terminal  [default: the first with a choice]"),
    ] = None,
    signal: Annotated[
        str,
        typer.Option(
            help="what the colours in the terminal mean: expert, loss, mean-entropy, margin, "
            "mutual-information, vacuity, entropy or kl"
        ),
    ] = "expert",
    html: Annotated[
        Path | None, typer.Option(help="also write a page to look at in a browser")
    ] = None,
    adapter: AdapterOption = None,
    base: BaseOption = None,
    allow_other_base: OtherBaseOption = False,
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = Dtype.auto,
    as_json: JsonOption = False,
) -> None:
    """Show where a checkpoint sends each token of a text, and how sure it is."""
    given = read_text(text, text_file)
    model, tokenizer = load_model(
        checkpoint, adapter, base, device, dtype, allow_other_base=allow_other_base
    )

    # torch and transformers load here, so that --help stays instant
    from rich.console import Console

    from meta_attention.evaluation.inspect import inspect_text
    from meta_attention.report.html import write_inspection
    from meta_attention.report.terminal import print_text, routing_table

    inspection = inspect_text(model, tokenizer, given)
    if html is not None:
        write_inspection(inspection, html, title=(adapter or checkpoint or html).resolve().name)
    if as_json:
        print(json.dumps(inspection.to_dict(), indent=2))
        return
    console = Console()
    shown = inspection.first_routed_layer if layer is None else layer
    print_text(console, inspection, shown, signal.replace("-", "_"))
    console.print(routing_table(inspection.routing))
    if html is not None:
        console.print(f"wrote {html}", markup=False, soft_wrap=True)
