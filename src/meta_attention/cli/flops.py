"""``meta-attention flops``: what a mix of experts costs, from 1k to 128k tokens."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from meta_attention.cli.checkpoint import JsonOption
from meta_attention.cli.train import Residual
from meta_attention.errors import ConfigError

if TYPE_CHECKING:
    from meta_attention.evaluation.flops import CostRow

EXAMPLES = """\b
examples:
  meta-attention flops
  meta-attention flops --mix full=0.1,local=0.9 --window 1024 --num-sinks 4
  meta-attention flops --mix full=0.25,local=0.25,linear=0.5 --hidden-size 2048 --heads 16
  meta-attention flops --depth-capacity 0.25
  meta-attention flops --mix full=0.2,ssm=0.4,local=0.4 --depth-capacity 0.5 --residual attention
  meta-attention flops --mix local=1 --json | jq .rows[0].model
"""


def flops(
    mix: Annotated[
        str,
        typer.Option(
            help="share of the tokens each expert takes, spread evenly over positions; an expert "
            "of share 0 is still one to choose"
        ),
    ] = "full=0.25,local=0.25,linear=0.5",
    hidden_size: Annotated[int, typer.Option(min=1, help="width of the model")] = 1024,
    layers: Annotated[int, typer.Option(min=1, help="number of blocks of the model")] = 24,
    heads: Annotated[int, typer.Option(min=1, help="attention heads")] = 8,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="key-value heads; default: as many")
    ] = None,
    window_size: Annotated[
        int, typer.Option("--window-size", "--window", min=1, help="reach of local attention")
    ] = 256,
    num_sinks: Annotated[
        int, typer.Option(min=0, help="first tokens that local attention also sees")
    ] = 0,
    vocab_size: Annotated[int, typer.Option(min=1, help="tokens of the vocabulary")] = 32000,
    shared_projections: Annotated[
        bool,
        typer.Option(
            "--shared-projections/--own-projections",
            help="one set of projections per layer, or the paper's one per expert",
        ),
    ] = True,
    depth_capacity: Annotated[
        float | None,
        typer.Option(
            help="Mixture of Depths: share of the tokens that enter every other block; the mix is "
            "of these"
        ),
    ] = None,
    residual: Annotated[
        Residual,
        typer.Option(help="what sublayers read: the sum of outputs, or attention over them"),
    ] = Residual.sum,
    residual_blocks: Annotated[
        int | None,
        typer.Option(min=1, help="sums that --residual block_attention reads; default 8"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Count the operations of a forward: attention alone, with its projections, the whole model.

    A token pays for the expert it takes; keys, values and linear states are made for all. Beside
    each figure is its ratio to the same model with full attention in every block, no controller and
    a plain sum of residuals.
    """
    shares = _parse_mix(mix)
    if residual_blocks is not None and residual is not Residual.block_attention:
        raise ConfigError("--residual-blocks needs --residual block_attention, which reads them")
    # torch and transformers load here, so that --help stays instant
    from meta_attention.config import MetaAttentionConfig
    from meta_attention.evaluation.flops import LENGTHS, cost_table

    config = MetaAttentionConfig(
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads if kv_heads is None else kv_heads,
        window_size=window_size,
        num_sinks=num_sinks,
        vocab_size=vocab_size,
        max_position_embeddings=LENGTHS[-1],
        experts=tuple(shares),
        shared_projections=shared_projections,
        depth_capacity=depth_capacity,
        residual=residual.value,
        residual_blocks=residual_blocks or MetaAttentionConfig.residual_blocks,
    )
    rows = cost_table(config, shares)
    if as_json:
        given = {
            "mix": shares,
            "hidden_size": hidden_size,
            "layers": layers,
            "heads": heads,
            "kv_heads": config.num_key_value_heads,
            "window_size": window_size,
            "num_sinks": num_sinks,
            "vocab_size": vocab_size,
            "shared_projections": shared_projections,
            "depth_capacity": depth_capacity,
            "residual": residual.value,
            "residual_blocks": config.residual_blocks,
        }
        print(json.dumps(given | {"rows": [row.to_dict() for row in rows]}, indent=2))
    else:
        _print_table(shares, rows)


def _parse_mix(mix: str) -> dict[str, float]:
    """``"full=0.25,local=0.75"`` as shares by name."""
    shares: dict[str, float] = {}
    for part in mix.split(","):
        name, _, share = (piece.strip() for piece in part.partition("="))
        try:
            value = float(share)
        except ValueError as error:
            raise ConfigError(
                f"--mix must be expert=share, parted by commas, such as full=0.25,local=0.75, "
                f"got {part.strip()!r}"
            ) from error
        if name in shares:
            raise ConfigError(f"--mix must name each expert once, got {name!r} again")
        shares[name] = value
    return shares


def _print_table(shares: dict[str, float], rows: "list[CostRow]") -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title="GFLOP per token, and relative to full attention: "
        + ", ".join(f"{name} {share:.4g}" for name, share in shares.items()),
        title_justify="left",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )
    table.add_column("tokens", justify="right", no_wrap=True)
    for column in ("attention alone", "with projections and controller", "whole model"):
        table.add_column(column, justify="right")
        table.add_column("of full", justify="right", no_wrap=True)
    for row in rows:
        cells = []
        for name in ("attention", "layer", "model"):
            routed = getattr(row.routed, name)
            cells.append(f"{routed / row.length / 1e9:.3f}")
            cells.append(f"{routed / getattr(row.full, name):.1%}")
        table.add_row(f"{row.length // 1024}k", *cells)
    Console().print(table)
