"""``meta-attention route``: a checkpoint learns what full attention is worth to each token."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meta_attention.cli.checkpoint import (
    CheckpointArgument,
    Device,
    DeviceOption,
    JsonOption,
    load_checkpoint,
)
from meta_attention.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meta_attention.training.route import Offer

EXAMPLES = """\b
examples:
  meta-attention train --layers 6 --layer-experts "local*3,full,local*2" --target-cost 0 \\
      --out runs/hybrid
  meta-attention route runs/hybrid --target-cost 0.35 --out runs/routed
  meta-attention route runs/hybrid --data code/ --window 64 --length 2048 --out runs/routed
  meta-attention route runs/hybrid --train-steps 800 --out runs/routed
  meta-attention route runs/routed --steps 0 --target-cost 0.3 --out runs/cheaper
  meta-attention generate runs/routed --prompt "The if statement"

\b
how:
  The model stays as it is. Its full layers get a choice, full attention or a window, for every
  key-value head of a token, and controllers learn by how many nats full attention would lower the
  loss. A token takes it where that is more than its price. The price is found for --target-cost,
  the share of full attention's cost in these layers, and is 'price' in config.json: with another
  one the same model costs less or more (--steps 0). What a route is worth depends on the others,
  and at last is learnt beside those of --target-cost: far from it, learn anew. Losses are of text
  that was held out.
  With --train-steps the model then learns on with these routes, at prices that keep their cost, and
  values are learnt once more: better routes, of a model that is no longer the one you gave.

\b
does the token matter?
  'By head alone' is the model without routes by token: each head has full attention or the window
  for good, those with full attention to which it is worth most. Heads are few, so there are two
  such rows, the dearest below the cost asked for and the cheapest above. Where they lose no more
  than the row that is written, the token does not matter on your text. (Not with --train-steps,
  after which weights expect routes.)
"""


def route(
    checkpoint: CheckpointArgument,
    out: Annotated[Path, typer.Option(help="folder to write", show_default=False)],
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="file, folder, glob or hub dataset; may be given more than once  [default: "
            "Python's manual]"
        ),
    ] = None,
    target_cost: Annotated[
        float, typer.Option(help="share of full attention's cost in the layers that get a choice")
    ] = 0.35,
    window: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="tokens that the window sees before a token  [default: an eighth of --length; a "
            "checkpoint that has values keeps its own]",
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=2, help="tokens of a text  [default: 512, or what the model can take]"),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=0, help="in which values are learnt; 0: only find another price")
    ] = 600,
    batch_size: Annotated[int, typer.Option(min=1, help="texts of a step")] = 4,
    lr: Annotated[float, typer.Option(help="learning rate at its highest")] = 3e-3,
    recurrence: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=8,
            help="controllers see when the last tokens were last seen, in runs of up to so many; "
            "0: they do not  [default: 3, or its own]",
        ),
    ] = None,
    max_bytes: Annotated[int | None, typer.Option(min=1, help="of the text, only so many")] = None,
    seed: Annotated[int, typer.Option(help="of new controllers and of what they try")] = 0,
    train_steps: Annotated[
        int,
        typer.Option(
            min=0, help="in which the model itself learns on with these routes, see below; 0: none"
        ),
    ] = 0,
    train_lr: Annotated[float, typer.Option(help="learning rate of these at its highest")] = 3e-4,
    device: DeviceOption = Device.auto,
    as_json: JsonOption = False,
) -> None:
    """Give a trained checkpoint routes: by what full attention is worth to a token, at a price."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out must be a new or an empty folder, but {out} is not")
    model, tokenizer = load_checkpoint(checkpoint, device, "float32")

    # torch and transformers load here, so that --help stays instant
    from rich.console import Console
    from rich.progress import Progress

    from meta_attention.training.corpus import read_corpus
    from meta_attention.training.route import RouteSettings, record_of, route_checkpoint

    settings = RouteSettings(
        target_cost=target_cost,
        window_size=window,
        length=length,
        steps=steps,
        batch_size=batch_size,
        lr=lr,
        recurrence=recurrence,
        seed=seed,
        train_steps=train_steps,
        train_lr=train_lr,
    )
    corpus = read_corpus(data or [], max_bytes=max_bytes)
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        bar = progress.add_task("learning", total=settings.num_steps)
        routed, offers = route_checkpoint(
            model,
            tokenizer,  # type: ignore[arg-type]
            corpus,
            settings,
            on_step=lambda done, _: progress.update(bar, completed=done),
        )
    routed.save_pretrained(out)
    tokenizer.save_pretrained(out)
    record = record_of(settings, routed, offers) | {
        "checkpoint": str(checkpoint),
        "data": corpus.name,
    }
    (out / "route.json").write_text(json.dumps(record, indent=2) + "\n")
    if as_json:
        print(json.dumps(record, indent=2))
        return
    _print_offers(offers)
    print(f"wrote {out}")


def _print_offers(offers: "Sequence[Offer]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title="On held-out text. Cost: of the routed layers. FLOPs: attention's, as executed.\n"
        "Both as a share of full attention's; price and loss in nats.",
        title_justify="left",
    )
    for column in ("", "price", "cost", "FLOPs", "loss"):
        table.add_column(column, justify="left" if not column else "right")
    for offer in offers:
        name = "as it was" if offer.target_cost is None else f"for {offer.target_cost:g}"
        name += ", written" if offer is offers[1] else ", by head alone" * offer.is_by_head
        table.add_row(
            name,
            "" if offer.price is None else f"{offer.price:.4f}",
            "" if offer.routed_cost is None else f"{offer.routed_cost:.3f}",
            f"{offer.attention_flops:.3f}",
            f"{offer.loss:.4f}",
        )
    Console().print(table)
