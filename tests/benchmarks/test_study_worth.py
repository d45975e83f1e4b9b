"""What full attention is worth, measured beside other routes, and values learnt beside them."""

import dataclasses
import itertools
import json

import pytest
import study_run
import study_worth
import torch
from study_data import Cache, draw_sequences
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


@pytest.fixture
def splits(monkeypatch):
    """Of which text tokens were asked for, in order."""
    asked, tokens = [], Cache.tokens

    def spy(cache, split, device):
        asked.append(split)
        return tokens(cache, split, device)

    monkeypatch.setattr(Cache, "tokens", spy)
    return asked


def test_values_are_checked_on_both_texts_beside_both_kinds_of_routes(
    arguments, tmp_path, monkeypatch, splits
):
    path, measured, measure = tmp_path / "check.json", {}, study_worth.measure

    def spy(cache, run, split, num_tokens, *, buys_all):
        found = measure(cache, run, split, num_tokens, buys_all=buys_all)
        measured[split, buys_all] = found
        return found

    monkeypatch.setattr(study_worth, "measure", spy)
    assert study_worth.main(["check", *arguments, "--tokens", "1024", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    rows = found["rows"]
    # of two texts, two contexts, two kinds of tokens, two heads
    assert len(rows) == 16
    assert found["machine"]["torch"]
    assert splits == ["train", "train", "valid", "valid"]
    for row in rows:
        split = {"trained on": "train", "held out": "valid"}[row["text"]]
        figures = measured[split, row["beside"] == "all full"][row["layer"]]
        mask = figures.is_far if row["tokens"] == "far" else torch.ones_like(figures.is_far)
        assert row.items() >= figures.row(row["head"], mask).items()
    for text in ("trained on", "held out"):
        whole = [row for row in rows if row["text"] == text and row["tokens"] == "all"]
        beside_all, beside_own = whole[:2], whole[2:]
        for first, second in zip(beside_all, beside_own, strict=True):
            # what the controller says does not depend on what others take; what is true does
            assert first["predicted"] == second["predicted"]
            assert first["measured"] != second["measured"]
            # half of the routes try something, where a window is less than everything
            assert first["routes"] == pytest.approx(0.5 * 4 * 2 * (126 - WINDOW), rel=0.2)


def test_routes_that_try_nothing_take_full_attention_or_what_they_take_in_use(manual, runs):
    run = Run.open(study_run.run_folder(runs, "tiny", ON, 0))
    (beside_all,), (beside_own,) = (
        study_worth.measure(manual, run, "train", 1024, buys_all=buys_all).values()
        for buys_all in (True, False)
    )
    assert beside_all.took_full[~beside_all.tried].all()
    in_use = beside_own.own_full
    assert torch.equal(beside_own.took_full[~beside_own.tried], in_use[~beside_own.tried])
    assert 0.1 < in_use.float().mean() < 0.9
    # at the run's price, whatever is bought meanwhile
    assert torch.equal(beside_all.own_full, in_use)


def test_what_the_controller_says_and_what_is_far_are_as_computed_one_by_one(runs):
    run = Run.open(study_run.run_folder(runs, "tiny", ON, 0))
    model = run.load("cpu")
    layer, outputs = model.model.layers[3].attention, {}
    assert layer.expert_names == ("full", f"local:{WINDOW}")
    layer.register_forward_hook(study_worth._keep(outputs, 3))
    # few kinds of tokens, so that pairs come back from near and far, and some do not
    ids = torch.randint(12, (2, 128), generator=torch.Generator().manual_seed(0))
    with exploring(model, router_parameters(model), buys_all=False):
        model(ids, labels=ids, use_cache=False)
    output, price = outputs[3], model.config.price
    gradient = torch.zeros_like(output.posterior.score)
    figures = study_worth._figures(output, gradient, ids, WINDOW, price)
    # full attention sees more than the window from here on, and the last predicts nothing
    late = range(WINDOW + 1, 127)
    expected = {"value": [], "own_full": [], "is_far": []}
    for row, t in itertools.product(range(2), late):
        full, window = output.posterior.value.detach()[row, t].unbind(dim=-1)  # [G] each
        expected["value"].append(full - window)
        bought = full - price * output.costs[0] >= window - price * output.costs[1]
        expected["own_full"].append(bought)
        pair, text = ids[row, t - 1 : t + 1], ids[row]
        found = [s for s in range(1, t) if torch.equal(text[s - 1 : s + 1], pair)]
        # the window has the token and so many before it
        expected["is_far"].append(torch.tensor(bool(found) and found[-1] - 1 < t - WINDOW))
    for name, values in expected.items():
        torch.testing.assert_close(getattr(figures, name), torch.stack(values))
    assert 0.1 < figures.is_far.float().mean() < 0.9


def test_what_is_measured_is_the_slope_of_the_loss(runs, monkeypatch):
    run = Run.open(study_run.run_folder(runs, "tiny", ON, 0))
    model = run.load("cpu").double()
    layer, outputs = model.model.layers[3].attention, {}
    layer.register_forward_hook(study_worth._keep(outputs, 3))
    ids = torch.randint(300, (2, 128))

    def total() -> torch.Tensor:
        return model(ids, labels=ids, use_cache=False).task_loss * ids[:, 1:].numel()

    # where half of the routes try something: a sum of few is not exact enough in float32
    with exploring(model, router_parameters(model), buys_all=True):
        loss = total()
        output = outputs[3]
        (gradient,) = torch.autograd.grad(loss, output.posterior.score)
        price = model.config.price
        figures = study_worth._figures(output, gradient, ids, WINDOW, price)
        routes = output.routes
        # a little more of full attention to those routes of the first head that tried something
        step = torch.zeros_like(routes.weights)
        tried = torch.zeros_like(routes.explored)
        tried[:, WINDOW + 1 : -1, 0] = routes.explored[:, WINDOW + 1 : -1, 0]
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
    assert row["takes_full_in_use"] == pytest.approx(0.25)
    assert row["routes"] == 4
    # where one of both places was not tried, and where there is no token at all
    row = figures.row(0, took_full[:, 0])
    assert (row["measured"], row["predicted"], row["routes"]) == (None, pytest.approx(0.5), 3)
    row = figures.row(0, ~everywhere)
    assert (row["measured"], row["predicted"], row["takes_full_in_use"]) == (None, None, None)
    assert row["routes"] == 0


def test_what_too_few_tokens_tried_is_missing_and_the_rest_is_kept(
    arguments, tmp_path, monkeypatch, capsys
):
    path, measure = tmp_path / "check.json", study_worth.measure

    def nowhere_far(*args, **options):
        found = measure(*args, **options)
        return {
            index: dataclasses.replace(figures, is_far=torch.zeros_like(figures.is_far))
            for index, figures in found.items()
        }

    monkeypatch.setattr(study_worth, "measure", nowhere_far)
    assert study_worth.main(["check", *arguments, "--tokens", "256", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    measured = {
        kind: [r["measured"] for r in rows if r["tokens"] == kind] for kind in ("all", "far")
    }
    assert measured["far"] == 8 * [None]
    assert None not in measured["all"]
    [*_, last] = [line for line in capsys.readouterr().out.splitlines() if " far " in line]
    cells = [cell.strip() for cell in last.strip("\u2502").split("\u2502")]
    assert cells[-4:] == ["-", "-", "-", "0"]


@pytest.mark.parametrize("text", ["train", "valid"])
def test_values_are_learnt_once_more_in_every_way_and_cost_the_same(
    manual, arguments, tmp_path, monkeypatch, text
):
    beside, seen, learn = [], [], study_worth.learn_values

    def spy(model, batches, *, texts, target_cost, **options):
        beside.append((target_cost, options["explored_share"]))
        seen.append([*texts])

        def recorded():
            for ids in batches:
                seen[-1].append(ids)
                yield ids

        learn(model, recorded(), texts=texts, target_cost=target_cost, **options)

    monkeypatch.setattr(study_worth, "learn_values", spy)
    path = tmp_path / "relearn.json"
    options = ["--steps", "3", "--text", text, "--json", str(path), "--eval-tokens", "256"]
    options += ["--seed", "7"]
    assert study_worth.main(["relearn", *arguments, *options]) == 0
    found = json.loads(path.read_text())
    assert (found["text"], found["steps"], found["eval_tokens"]) == (text, 3, 256)
    rows = {row["values"]: row for row in found["rows"]}
    assert list(rows) == list(study_worth.LEARNT)
    assert beside == [(None, 0.5), (0.45, 0.5), (0.45, 0.125)]
    first, *learnt = (row["loss"] for row in rows.values())
    assert first not in learnt
    flops = [row["attention_flops"] for row in rows.values()]
    assert max(flops) == pytest.approx(min(flops), rel=0.2)
    # the same text in every way, that of the seed: so many batches to price it on, three to learn
    whole = manual.tokens(text, "cpu")["manual"].long()
    after = 0 if text == "train" else 256
    torch.manual_seed(7)
    expected = [draw_sequences(whole[after:], 2, 128) for _ in range(16)]
    for texts in seen:
        assert len(texts) == 19
        assert torch.equal(torch.stack(texts[:16]), torch.stack(expected))
        assert torch.equal(torch.stack(texts), torch.stack(seen[0]))
    # of text that is judged on, nothing
    starts = [
        (whole.unfold(0, 128, 1) == sequence).all(dim=1).nonzero().min().item()
        for sequence in torch.cat(seen[0])
    ]
    assert min(starts) >= after


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


def test_values_are_judged_at_another_cost(arguments, tmp_path):
    found = {}
    for cost in (0.45, 0.7):
        path = tmp_path / f"{cost}.json"
        options = ["--steps", "1", "--eval-tokens", "256", "--json", str(path)]
        assert study_worth.main(["relearn", *arguments, *options, "--target-cost", str(cost)]) == 0
        found[cost] = json.loads(path.read_text())
        assert found[cost]["target_cost"] == cost
    cheap, dear = (found[cost]["rows"][0] for cost in (0.45, 0.7))
    assert cheap["attention_flops"] < dear["attention_flops"]
    assert cheap["price"] > dear["price"]


def test_bad_input_is_one_line(arguments, runs, capsys, monkeypatch):
    for command, flag in (
        ("relearn", "--steps"),
        ("relearn", "--eval-tokens"),
        ("check", "--tokens"),
    ):
        for number in ("0", "-5"):
            assert study_worth.main([command, *arguments, flag, number]) == 2
            assert f"error: {flag} must be >= 1, got {number}\n" == capsys.readouterr().err
    assert study_worth.main(["relearn", *arguments, "--target-cost", "0"]) == 2
    assert "error: target_cost must be above 0." in capsys.readouterr().err
    run = Run.open(study_run.run_folder(runs, "tiny", ON, 0))
    other = dataclasses.replace(run, settings=run.settings | {"text": {}})
    monkeypatch.setattr(study_worth.Run, "open", lambda folder: other)
    assert study_worth.main(["check", *arguments]) == 2
    assert "was trained on another text" in capsys.readouterr().err
