"""``meta-attention bench``: time and memory of routed attention against its peers."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from meta_attention.errors import ConfigError, DataError

EXAMPLES = """\b
examples:
  meta-attention bench --json results/h200.json
  meta-attention bench --suite op,decode --quick
  meta-attention bench --suite cpu --json - | jq .rows[1].speedup
  meta-attention bench --plot results/h200.json --image results/h200.svg
"""


def bench(
    suite: Annotated[
        str,
        typer.Option(
            help="some of op, layer, model, train, decode and cpu, parted by commas; all but cpu "
            "need a GPU"
        ),
    ] = "op,layer,model,train,decode",
    quick: Annotated[bool, typer.Option("--quick", help="small shapes")] = False,
    seed: Annotated[int, typer.Option(min=0, help="of data and routes")] = 0,
    time_limit: Annotated[
        float, typer.Option(min=1, help="seconds after which nothing new is started")
    ] = 360.0,
    commit: Annotated[
        str | None, typer.Option(help="commit of the source, for the record  [default: git's]")
    ] = None,
    json_path: Annotated[
        Path | None,
        typer.Option(
            "--json", help="file for all rows, written as they come; - for stdout, without tables"
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="draw these saved results in place of measuring")
    ] = None,
    image: Annotated[
        Path | None,
        typer.Option(help="where to draw, .png or .svg  [default: next to the results]"),
    ] = None,
) -> None:
    """Measure the attention op, a layer, prefill, training step and decoding against peers.

    Everything is checked before it is timed: a row that is wrong has no time. A peer that is
    missing or fails is a row that says why. Of a CPU only ratios are shown.
    """
    if plot is not None:
        _draw(plot, image)
        return
    if image is not None:
        raise ConfigError("--image needs the results to draw; add --plot RESULTS.json")
    names = list(dict.fromkeys(name.strip() for name in suite.split(",")))
    is_piped = str(json_path) == "-"
    if json_path is not None and not is_piped:
        _check_writable(json_path)
    # torch and transformers load here, so that --help stays instant
    from meta_attention.bench.run import run_suites
    from meta_attention.bench.table import build_console, print_results

    results = run_suites(
        names,
        quick=quick,
        seed=seed,
        time_limit=time_limit,
        commit=commit,
        path=None if is_piped else json_path,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if is_piped:
        print(results.to_json())
    else:
        print_results(build_console(), results)
    if not results.is_complete:
        # as a shell has it for what was interrupted
        raise typer.Exit(130)


def _draw(results: Path, image: Path | None) -> None:
    from meta_attention.bench.plot import check_format, plot_results
    from meta_attention.bench.rows import load_results

    target = results.with_suffix(".png") if image is None else image
    check_format(target)
    loaded = load_results(results)
    _check_writable(target)
    plot_results(loaded, target)
    print(f"drawn: {target}")


def _check_writable(path: Path) -> None:
    """Raise now, not after minutes of measuring."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
        with path.open("a"):
            pass
    except OSError as error:
        raise DataError(f"{path} must be a file that can be written, got: {error}") from error
