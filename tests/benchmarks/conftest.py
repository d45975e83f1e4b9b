"""A small text for the studies of experts of heads, rules and values; and runs made up."""

import dataclasses
import json

import pytest
from study_data import Cache, prepare
from study_variants import SCALES

from meta_attention.training.corpus import embedded_corpus


@pytest.fixture(scope="session")
def manual(tmp_path_factory):
    """A dozen documents, prepared."""
    folder = tmp_path_factory.mktemp("manual")
    text = folder / "manual.txt"
    text.write_text("\n".join(embedded_corpus().documents[:12]))
    prepare([text], folder / "cache", vocab=300, max_tokens=8000)
    return Cache.open(folder / "cache")


@pytest.fixture
def write_run():
    """Makes up a finished run of 100 steps, of which the last twenty draw no routes."""
    return _write_run


def _write_run(folder, variant, seed, loss, flops, entropy=50.0):
    routing = {"adaptivity": 0.1, "routing_entropy": entropy, "collapsed_layers": {}, "layers": []}
    hard = {"loss": loss, "attention_flops": flops, "loss_by_position": {}, "routing": routing}
    hard["attention_and_controller_flops"] = flops + 0.01
    result = {"scale": "tiny", "parameters": 1, "tokens": 1, "step_ms": 1.0, "words": {}}
    result |= {"variant": variant, "seed": seed, "hard": hard, "soft": hard}
    result |= {"device": "cpu", "torch": "2.13.0"}
    run = folder / f"tiny-{variant}-seed{seed}"
    run.mkdir(parents=True)
    (run / "result.json").write_text(json.dumps(result))
    settings = dataclasses.asdict(SCALES["tiny"]) | {"steps": 100, "argmax_from": 0.8}
    (run / "config.json").write_text(json.dumps({"settings": settings, "text": {}}))
    # drawn at steps 80 and before; the mean is of 71 to 80
    rows = [(70, 9.0), (75, loss + 1.0), (80, loss + 3.0), (90, 9.0)]
    metrics = [{"step": step, "loss": value, "routing_entropy": value} for step, value in rows]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, metrics)))


@pytest.fixture
def rounds(tmp_path):
    """Two rounds of the same seeds, whose beginnings differ by more than their variants."""
    first, second = tmp_path / "first", tmp_path / "second"
    for seed, shift in ((0, 0.0), (1, 0.3)):
        _write_run(first, "hybrid-1-5", seed, 3.0 + shift, 0.2)
        _write_run(first, "hybrid-1-5-x32-late", seed, 3.1 + shift, 0.1)
        _write_run(second, "hybrid-1-5", seed, 4.0 - shift, 0.2)
        _write_run(second, "prior-free-wide-kv_head-0.45", seed, 4.01 - shift, 0.15)
    return first, second
