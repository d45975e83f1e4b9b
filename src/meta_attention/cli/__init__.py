"""The ``meta-attention`` command. Each subcommand loads torch only when it runs."""

import sys

import typer

from meta_attention.cli import (
    ablate,
    adapt,
    bench,
    check,
    evaluate,
    flops,
    generate,
    inspect,
    report,
    route,
    train,
)
from meta_attention.errors import MetaAttentionError

app = typer.Typer(
    help="Attention that picks its algorithm per token.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def _commands() -> None:
    """Attention that picks its algorithm per token."""


app.command("check", epilog=check.EXAMPLES)(check.check)
app.command("ablate", epilog=ablate.EXAMPLES)(ablate.ablate)
app.command("report", epilog=report.EXAMPLES)(report.report)
app.command("train", epilog=train.EXAMPLES)(train.train)
app.command("route", epilog=route.EXAMPLES)(route.route)
app.command("adapt", epilog=adapt.EXAMPLES)(adapt.adapt)
app.command("evaluate", epilog=evaluate.EXAMPLES)(evaluate.evaluate)
app.command("generate", epilog=generate.EXAMPLES)(generate.generate)
app.command("flops", epilog=flops.EXAMPLES)(flops.flops)
app.command("bench", epilog=bench.EXAMPLES)(bench.bench)
app.command("inspect", epilog=inspect.EXAMPLES)(inspect.inspect)


def main() -> None:
    """Entry point: an error raised on purpose becomes one line and exit status 2."""
    try:
        app()
    except MetaAttentionError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
