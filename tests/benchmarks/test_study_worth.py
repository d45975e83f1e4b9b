"""What full attention is worth, measured beside other routes, and values learnt beside them."""

import dataclasses
import json

import pytest
import study_run
import study_worth
import torch
from study_reading import Run

from meta_attention.layers import attention
from meta_attention.training.values import exploring, router_parameters

SIZES = ["steps=10", "window_size=1", "length=128", "longest=128"]
ON = "value-1-5-0.45-scaled-on"
WINDOW = 16


@pytest.fixture(scope="module")
def runs(manual, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    others = ("hybrid-1-5-heads-0.45", "value-1-5-0.45-wide", "value-1-5-token-0.45")
    for variant in (ON, *others):
        study_run.run(manual, folder, variant, 0, "tiny", changes=SIZES)
    return folder


@pytest.fixture
def arguments(manual, runs):
    run = study_run.run_folder(runs, "tiny", ON, 0)
    return ["--cache", str(manual.folder), "--run", str(run)]


def test_values_are_checked_on_both_texts_beside_both_kinds_of_routes(arguments, tmp_path):
    path = tmp_path / "check.json"
    assert study_worth.main(["check", *arguments, "--tokens", "1024", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    rows = found["rows"]
    # of two texts, two contexts, two kinds of tokens, two heads
    assert len(rows) == 16
    assert found["machine"]["torch"]
    for text in ("trained on", "held out"):
        whole = [row for row in rows if row["text"] == text and row["tokens"] == "all"]
        beside_all, beside_own = whole[:2], whole[2:]
        for first, second in zip(beside_all, beside_own, strict=True):
            # what the controller says does not depend on what others take; what is true does
            assert first["predicted"] == second["predicted"]
            assert first["measured"] != second["measured"]
            # half of the routes try something, where a window is less than everything
            assert first["routes"] == pytest.approx(0.5 * 4 * 2 * (128 - WINDOW), rel=0.2)


def test_what_is_measured_is_the_slope_of_the_loss(runs, monkeypatch):
    run = Run.open(study_run.run_folder(runs, "tiny", ON, 0))
    model = run.load("cpu").double()
    layer, outputs = model.model.layers[3].attention, {}
    layer.register_forward_hook(study_worth._keep(outputs, 3))
    ids = torch.randint(300, (2, 128))

    def total() -> torch.Tensor:
        return model(ids, labels=ids, use_cache=False).task_loss * ids[:, 1:].numel()

    with exploring(model, router_parameters(model), buys_all=False):
        loss = total()
        output = outputs[3]
        (gradient,) = torch.autograd.grad(loss, output.posterior.score)
        price = model.config.price
        figures = study_worth._figures(output, gradient, ids, WINDOW, price)
        routes = output.routes
        # a little more of full attention to those routes of the first head that tried something
        step = torch.zeros_like(routes.weights)
        tried = torch.zeros_like(routes.explored)
        tried[:, WINDOW:, 0] = routes.explored[:, WINDOW:, 0]
        step[..., 0], step[..., 1] = tried.float(), -tried.float()
        # all experts run where routes have a gradient
        weights = (routes.weights + 0.02 * step).detach().requires_grad_()
        changed = dataclasses.replace(routes, weights=weights)
        choose = attention.choose_routes
        monkeypatch.setattr(
            attention,
            "choose_routes",
            lambda posterior, **options: (
                changed
                if posterior.mean.shape == changed.weights.shape
                else choose(posterior, **options)
            ),
        )
        gained = (loss - total()).item() / 0.02
    assert gained == pytest.approx(figures.gain[:, 0].sum().item(), rel=0.05)
    assert gained != pytest.approx(0.0, abs=1e-6)


def test_a_row_has_the_mean_of_both_places_whatever_was_tried_more_often():
    took_full = torch.tensor([[True], [True], [True], [False]])
    everywhere = torch.ones(4, dtype=torch.bool)
    figures = study_worth.Figures(
        gain=torch.tensor([[1.0], [1.0], [1.0], [3.0]]),
        value=torch.tensor([[0.5], [0.5], [0.5], [2.5]]),
        tried=torch.ones_like(took_full),
        took_full=took_full,
        own_full=~took_full,
        is_far=everywhere,
    )
    row = figures.row(0, everywhere)
    assert row["measured"] == pytest.approx(2.0)
    assert row["predicted"] == pytest.approx(1.0)
    assert row["takes_full"] == pytest.approx(0.25)
    assert row["routes"] == 4


@pytest.mark.parametrize("text", ["train", "valid"])
def test_values_are_learnt_once_more_in_both_ways_and_cost_the_same(
    arguments, tmp_path, monkeypatch, text
):
    beside, learn = [], study_worth.learn_values

    def spy(*args, target_cost, **options):
        beside.append(target_cost)
        learn(*args, target_cost=target_cost, **options)

    monkeypatch.setattr(study_worth, "learn_values", spy)
    path = tmp_path / "relearn.json"
    options = ["--steps", "3", "--text", text, "--json", str(path), "--eval-tokens", "256"]
    assert study_worth.main(["relearn", *arguments, *options]) == 0
    found = json.loads(path.read_text())
    assert (found["text"], found["steps"], found["eval_tokens"]) == (text, 3, 256)
    rows = {row["values"]: row for row in found["rows"]}
    assert list(rows) == list(study_worth.LEARNT)
    assert beside == [None, 0.45]
    first, *learnt = (row["loss"] for row in rows.values())
    assert first not in learnt
    flops = [row["attention_flops"] for row in rows.values()]
    assert max(flops) == pytest.approx(min(flops), rel=0.2)


@pytest.mark.parametrize("command", ["check", "relearn"])
def test_runs_without_values_are_refused_in_one_line(manual, runs, capsys, command):
    run = study_run.run_folder(runs, "tiny", "hybrid-1-5-heads-0.45", 0)
    assert study_worth.main([command, "--cache", str(manual.folder), "--run", str(run)]) == 2
    assert "values need a model with controller='value'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("value-1-5-0.45-wide", "checked are values of full and a window, got full, local:16"),
        ("value-1-5-token-0.45", "checked are values of heads, got route_granularity 'token'"),
    ],
)
def test_other_values_are_not_checked(manual, runs, capsys, variant, message):
    run = study_run.run_folder(runs, "tiny", variant, 0)
    assert study_worth.main(["check", "--cache", str(manual.folder), "--run", str(run)]) == 2
    assert message in capsys.readouterr().err


def test_bad_input_is_one_line(arguments, runs, capsys, monkeypatch):
    assert study_worth.main(["relearn", *arguments, "--steps", "0"]) == 2
    assert "--steps must be >= 1" in capsys.readouterr().err
    run = Run.open(study_run.run_folder(runs, "tiny", ON, 0))
    other = dataclasses.replace(run, settings=run.settings | {"text": {}})
    monkeypatch.setattr(study_worth.Run, "open", lambda folder: other)
    assert study_worth.main(["check", *arguments]) == 2
    assert "was trained on another text" in capsys.readouterr().err
