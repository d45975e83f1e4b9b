"""Which suites there are, and a run of some of them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from meta_attention.bench import cpu_suite, decode_suite, layer_suite, model_suite, op_suite
from meta_attention.bench.machine import describe_machine
from meta_attention.bench.rows import Results, Row
from meta_attention.bench.session import Say, Session, one_line
from meta_attention.bench.timing import Clock, measure_ceilings
from meta_attention.errors import BackendUnavailableError, ConfigError

GPU_SUITES = ("op", "layer", "model", "train", "decode")
SUITES = (*GPU_SUITES, "cpu")

SuiteRun = Callable[[Session], list[Row]]


@dataclass(frozen=True, slots=True)
class Suite:
    """A suite at its usual size and at a small one."""

    default: SuiteRun
    quick: SuiteRun


SUITE_RUNS: dict[str, Suite] = {
    "op": Suite(op_suite.run_op, partial(op_suite.run_op, plan=op_suite.QUICK)),
    "layer": Suite(layer_suite.run_layer, partial(layer_suite.run_layer, plan=layer_suite.QUICK)),
    "model": Suite(
        model_suite.run_model, partial(model_suite.run_model, plan=model_suite.PREFILL_QUICK)
    ),
    "train": Suite(
        model_suite.run_train, partial(model_suite.run_train, plan=model_suite.TRAIN_QUICK)
    ),
    "decode": Suite(
        decode_suite.run_decode, partial(decode_suite.run_decode, plan=decode_suite.QUICK)
    ),
    "cpu": Suite(cpu_suite.run_cpu, partial(cpu_suite.run_cpu, plan=cpu_suite.QUICK)),
}


def check_suites(names: Sequence[str]) -> None:
    """Raise unless these are suites, and this machine can run them."""
    for name in names:
        if name not in SUITES:
            raise ConfigError(f"--suite must be some of {', '.join(SUITES)}, got {name!r}")
    on_gpu = [name for name in names if name in GPU_SUITES]
    if on_gpu and not torch.cuda.is_available():
        raise BackendUnavailableError(
            f"--suite {','.join(on_gpu)} needs a GPU that torch can see; '--suite cpu' runs "
            "without one"
        )


def run_suites(
    names: Sequence[str],
    *,
    quick: bool = False,
    seed: int = 0,
    time_limit: float = float("inf"),
    commit: str | None = None,
    path: Path | None = None,
    say: Say = lambda line: None,
) -> Results:
    """Measure some suites in one run.

    Args:
        names: Of the suites, in the order in which they run.
        quick: Small shapes.
        seed: Of all data and routes.
        time_limit: Seconds after which nothing new is started.
        commit: Of the source, for the record.
        path: File that is written anew after every row.
        say: Told of every row as it comes.
    """
    check_suites(names)
    arguments: dict[str, Any] = {
        "suites": list(names),
        "quick": quick,
        "seed": seed,
        "time_limit_s": None if time_limit == float("inf") else time_limit,
    }
    has_gpu = any(name in GPU_SUITES for name in names)
    device = _device("cuda" if has_gpu else "cpu")
    results = Results(describe_machine(device, commit=commit), arguments, path=path)
    results.save()
    sessions: dict[str, Session] = {}

    def run(name: str) -> None:
        kind = "cuda" if name in GPU_SUITES else "cpu"
        if kind not in sessions:
            sessions[kind] = _open(_device(kind), results, seed, say)
        session = sessions[kind]
        # of all suites together
        session.time_limit = time_limit
        session.started = min(one.started for one in sessions.values())
        suite = SUITE_RUNS[name]
        with _threads(cpu_suite.THREADS if kind == "cpu" else None):
            (suite.quick if quick else suite.default)(session)

    try:
        for name in names:
            try:
                run(name)
            # nothing that one suite does may cost the rows of another
            except Exception as error:
                reason = one_line(error)
                say(f"{name}: {reason}")
                results.add(_broken(name, reason))
    except KeyboardInterrupt:
        say("interrupted; the rows so far are kept")
        return results
    results.is_complete = True
    results.save()
    return results


def _broken(suite: str, reason: str) -> Row:
    return Row(
        suite=suite,
        name="suite",
        work="",
        shape={},
        dtype="",
        status="failed",
        reason=reason,
        is_comparable=suite in GPU_SUITES,
    )


def _device(kind: str) -> torch.device:
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _open(device: torch.device, results: Results, seed: int, say: Say) -> Session:
    if device.type == "cpu":
        # the fewest runs whose median means something, however long they take
        clock = Clock(device, budget_ms=1000.0)
        return Session(device, torch.float32, results, clock=clock, seed=seed, say=say)
    session = Session(device, torch.bfloat16, results, seed=seed, say=say)
    results.ceilings = measure_ceilings(session.clock)
    matmul, copy = results.ceilings["matmul_tflops_per_s"], results.ceilings["copy_gbytes_per_s"]
    say(f"[{session.seconds:4.0f} s] ceilings: matmul {matmul:.0f} TFLOP/s, copy {copy:.0f} GB/s")
    return session


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Let PyTorch use this many threads for a while; None: as many as it does."""
    before = torch.get_num_threads()
    try:
        if count is not None:
            torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)
