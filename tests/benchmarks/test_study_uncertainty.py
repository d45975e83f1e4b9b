"""What the study says of uncertainty, on small models and on routes that are known."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import study_evaluation
import study_measurement
import study_run
import study_uncertainty
import study_uncertainty_report
import torch
from study_classes import (
    TokenTable,
    distance_to_repeat,
    explained_by_token,
    frequency_deciles,
    positions,
    repeats,
    routes_by_token,
    share_of_full,
)
from study_data import Cache, prepare
from study_measurement import Measurement, sharpest_fall, swapped_routes
from study_reading import Run, code, find_runs, read, shuffled

from meta_attention import MetaAttentionForCausalLM
from meta_attention.evaluation.beliefs import SIGNALS
from meta_attention.evaluation.forcing import attention_layers
from meta_attention.training.corpus import embedded_corpus

TOKEN, HEAD, PLAIN = "bayes-all-token-0.2-linear", "bayes-wide-kv_head-0.3", "prior-free-all-0.2"
STATIC, DEPTH = "hybrid-1-2", "bayes-all-token-0.2-linear-depth"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    texts = embedded_corpus().documents
    for name, part in (("books", texts[:20]), ("wiki", texts[20:40])):
        (folder / name).mkdir()
        lines = [json.dumps({"text": text}) for text in part]
        (folder / name / "train-0.jsonl").write_text("\n".join(lines[:15]))
        (folder / name / "valid.jsonl").write_text("\n".join(lines[15:]))
    prepare([folder / "books", folder / "wiki"], folder / "cache", vocab=400, max_tokens=12000)
    return Cache.open(folder / "cache")


@pytest.fixture(scope="module")
def runs(cache, tmp_path_factory):
    """Finished runs, of which a few steps have not made controllers adaptive: chance has."""
    out = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    for variant in (TOKEN, HEAD, PLAIN, STATIC, DEPTH):
        study_run.run(cache, out, variant, 0, "tiny")
        folder = out / f"tiny-{variant}-seed0" / "model"
        model = MetaAttentionForCausalLM.from_pretrained(folder)
        for layer in attention_layers(model):
            for parameter in layer.controller.parameters():
                torch.nn.init.normal_(parameter, std=0.7)
            for parameter in layer.projections.parameters():
                torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(folder)
    return out


def measurement(runs, cache, variant):
    run = Run.open(runs / f"tiny-{variant}-seed0")
    return Measurement(run, cache, "cpu", num_tokens=256, num_resamples=20)


@pytest.fixture(scope="module")
def figures(runs, cache):
    return {v: measurement(runs, cache, v).measure() for v in (TOKEN, HEAD, PLAIN, STATIC, DEPTH)}


@pytest.fixture
def reading(runs, cache):
    made = measurement(runs, cache, TOKEN)
    with torch.inference_mode():
        return made.model, read(made.model, made.ids, 4)


# --- a run as a whole ---


@pytest.mark.parametrize("variant", [TOKEN, HEAD, PLAIN])
def test_a_routed_run_has_every_part(figures, variant):
    found = figures[variant]
    json.dumps(found, allow_nan=False)
    signals = ["mean_entropy", "margin"] if variant == PLAIN else list(SIGNALS)
    num_layers = 1 if variant == HEAD else 6
    top = found["hurts"]["soft"]["definitions"]["top 10%"]
    assert list(top["signals"]) == signals
    assert len(top["signals"]["margin"]) == num_layers + 2
    assert top["share"] == pytest.approx(0.1, abs=0.01)
    assert list(top["baselines"]) == ["predictive entropy", "1 - top probability"]
    for auroc in top["signals"]["margin"].values():
        assert 0.0 <= auroc["low"] <= auroc["high"] <= 1.0
    assert list(found["shift"]) == ["code", "shuffled", "wiki against books"]
    for shift in found["shift"].values():
        assert list(shift["token"]["signals"]) == signals
        assert list(shift["sequence"]["baselines"])[-1] == "loss"
    assert len(found["calibration"]["routing"]["layers"]) == num_layers
    assert 0.0 < found["classes"]["full"] < 1.0
    assert found["controller"] == ("prior_free" if variant == PLAIN else "bayesian")


def test_a_static_run_has_what_needs_no_router(figures):
    found = figures[STATIC]
    json.dumps(found, allow_nan=False)
    assert found["controller"] == "static"
    assert found["calibration"]["routing"] is None
    assert found["calibration"]["ece"]["hard"] == found["calibration"]["ece"]["soft"]
    assert found["loss"]["hard"] == found["loss"]["soft"]
    assert "hurts" not in found
    assert found["shift"]["code"]["sequence"]["signals"] == {}
    assert 0.0 <= found["shift"]["code"]["sequence"]["baselines"]["loss"]["value"] <= 1.0


def test_where_tokens_pass_blocks_by_figures_that_need_a_route_of_each_are_left_out(
    figures, runs, cache
):
    found = figures[DEPTH]
    json.dumps(found, allow_nan=False)
    assert "pass blocks by" in found["note"]
    assert (found["loss"]["full"], found["hurts"]["full"]) == (None, None)
    assert [found[name] for name in ("classes", "explained", "adaptive")] == [None] * 3
    assert figures[TOKEN]["note"] is None
    # the others are there, and routes are judged where tokens have one
    assert found["hurts"]["soft"]["mean"]["value"] != 0.0
    made = measurement(runs, cache, DEPTH)
    with torch.inference_mode():
        weights = made.model(made.ids, output_routing=True).routing_weights
        judged = made.judge()
    for layer in (0, 1):
        has_entered = weights[layer][:, :-1].sum(dim=-1) > 0.0
        assert judged.num_tokens[layer] == has_entered.sum()
    assert judged.num_tokens[1] < judged.num_tokens[0]


def test_losses_are_those_of_the_study(runs, cache, figures):
    run = Run.open(runs / f"tiny-{TOKEN}-seed0")
    model, scale = run.load("cpu"), run.scale
    texts = {name: text[:256] for name, text in cache.tokens("valid", "cpu").items()}
    with torch.no_grad():
        hard = study_evaluation.score(model, texts, scale, scale.length)["loss"]
        model.config.routing = "soft"
        soft = study_evaluation.score(model, texts, scale, scale.length)["loss"]
    assert hard != pytest.approx(soft, abs=1e-6)
    assert figures[TOKEN]["loss"]["hard"] == pytest.approx(hard, abs=1e-5)
    assert figures[TOKEN]["loss"]["soft"] == pytest.approx(soft, abs=1e-5)
    assert figures[TOKEN]["hurts"]["soft"]["mean"]["value"] == pytest.approx(hard - soft, abs=1e-5)


@pytest.mark.parametrize("variant", [TOKEN, HEAD, PLAIN])
def test_its_own_routes_cost_nothing_and_those_of_others_change_something(figures, variant):
    adaptive = figures[variant]["adaptive"]
    assert adaptive["own"]["cost"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    for swap in ("shuffled", "another text", "random", "token alone"):
        assert adaptive[swap]["cost"]["value"] != 0.0
        assert adaptive[swap]["loss"] == pytest.approx(
            adaptive["own"]["loss"] + adaptive[swap]["cost"]["value"], abs=1e-5
        )
    assert adaptive["shuffled"]["full"] == pytest.approx(adaptive["own"]["full"])
    assert adaptive["another text"]["full"] == pytest.approx(adaptive["own"]["full"])


def test_a_signal_that_is_the_harm_is_found_and_one_that_is_not_is_not(runs, cache, reading):
    made, found = measurement(runs, cache, TOKEN), reading[1]
    harm = found.signals["vacuity"].mean(dim=0)
    top = made.hurts(found, harm)["definitions"]["top 10%"]
    assert top["signals"]["vacuity"]["mean"]["value"] == 1.0
    assert top["beyond_entropy"]["vacuity"]["mean"]["value"] == 1.0
    noise = torch.rand_like(harm)
    auroc = made.hurts(found, noise)["definitions"]["top 10%"]["signals"]["vacuity"]["mean"]
    assert auroc["low"] - 0.05 < 0.5 < auroc["high"] + 0.05


# --- texts ---


def test_shuffled_text_has_the_same_tokens_in_another_order():
    ids = torch.arange(60).view(3, 20)
    other = shuffled(ids, seed=0)
    assert torch.equal(other.sort(dim=1).values, ids)
    assert not torch.equal(other, ids)
    assert torch.equal(other, shuffled(ids, seed=0))


def test_code_is_the_standard_library(cache):
    ids = code(cache, 64, 5)
    assert ids.shape == (5, 64)
    text = cache.tokenizer.decode(ids.flatten())
    first = Path(json.__file__).parents[1] / "__future__.py"
    assert text.startswith(first.read_text()[:40])


# --- classes ---


def test_tokens_are_of_the_classes_their_text_says(cache, reading):
    sentence = 'I met John. He said "no" 42 times,\nI think. I saw. '
    table = TokenTable(cache, "cpu")
    ids = torch.tensor([cache.tokenizer.encode(sentence, add_special_tokens=False)])
    texts = [cache.tokenizer.decode([index]) for index in ids[0].tolist()]
    T = ids.shape[1]
    found = reading[1]
    made = replace(
        found.predictions, **{n: torch.rand(1, T - 1) for n in ("loss", "entropy", "confidence")}
    )
    families = table.families(replace(found, ids=ids, predictions=made), window=8)

    def tokens(family, label):
        index = families[family].names.index(label)
        return [texts[t] for t in range(T - 1) if families[family].of_token[0, t] == index]

    [name] = tokens("name", "capitalised in a sentence")
    assert name.strip().startswith("J")
    assert "".join(tokens("digit", "digit")).strip() == "42"
    assert all("\n" in text for text in tokens("newline", "newline"))
    assert len(tokens("newline", "newline")) == 1
    quotes = tokens("quote", "quotation mark")
    assert [text.strip() for text in quotes] == ['"', '"']
    assert len(tokens("quote", "after one")) == 2
    assert tokens("quote", "after one")[0].startswith("n")
    assert {text.strip() for text in tokens("punctuation", "punctuation")} >= {".", ",", '"'}
    starts = tokens("word", "starts a word")
    assert starts[0] == "I"
    # every word has one start: I met John He said no 42 times I think I saw
    assert len(starts) == 12
    for family in families.values():
        assert family.of_token.shape == (1, T - 1)
        assert family.of_token.max() < len(family.names)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_repeats_are_found_as_far_back_as_they_are(n):
    ids = torch.randint(3, (4, 40))
    expected = torch.zeros_like(ids)
    for row, line in enumerate(ids.tolist()):
        for t in range(n - 1, 40):
            for earlier in range(t - 1, n - 2, -1):
                if line[earlier - n + 1 : earlier + 1] == line[t - n + 1 : t + 1]:
                    expected[row, t] = t - earlier
                    break
    assert torch.equal(distance_to_repeat(ids, n), expected)
    family = repeats(ids, n, window=5)
    near = (expected > 0) & (expected <= 6)
    assert torch.equal(family.of_token == family.names.index("inside the window"), near)
    assert torch.equal(family.of_token == family.names.index("new"), expected == 0)


def test_positions_are_doublings_of_the_window():
    family = positions(torch.zeros(2, 40, dtype=torch.long), 8)
    assert family.names == ("0-7", "8-15", "16-31", "32-39")
    assert torch.bincount(family.of_token[1]).tolist() == [8, 8, 16, 8]


def test_deciles_are_tenths_of_the_text():
    # 20 tokens, each 5% of the text, but for one that is half of it
    even = torch.arange(20).repeat_interleave(3)
    deciles = frequency_deciles({"a": even[:30], "b": even[30:]}, 22)
    assert torch.bincount(deciles[:20]).tolist() == [2] * 10
    assert deciles[20:].tolist() == [9, 9]
    half = torch.cat([even, torch.full((60,), 20)])
    deciles = frequency_deciles({"a": half}, 21)
    assert deciles[20] == 2  # its middle is at a quarter
    assert deciles[:20].min() == 5


def known_routes(reading, route_of):
    """A reading whose routes are a function of ids and places."""
    ids = torch.randint(30, (400, 64))
    route = route_of(ids)
    made = replace(
        reading.predictions,
        **{name: torch.rand(400, 63) for name in ("loss", "entropy", "confidence", "is_correct")},
    )
    return replace(reading, ids=ids, predictions=made, routes=dict.fromkeys(range(6), route))


def test_routes_that_are_a_function_of_the_token_are_explained_by_it(reading):
    found = known_routes(reading[1], lambda ids: ids % 3)
    explained = explained_by_token(found)
    # thirty tokens, ten of each route
    assert explained["entropy"] == pytest.approx(math.log(3.0), abs=1e-3)
    assert explained["share"] == pytest.approx(1.0, abs=0.01)
    alone = routes_by_token(found, [3] * 6)
    assert torch.equal(alone[0], found.routes[0])


def test_routes_that_are_a_function_of_the_place_are_not(reading):
    model, found = reading
    found = known_routes(found, lambda ids: (torch.arange(64) >= 32).long().expand_as(ids))
    assert abs(explained_by_token(found)["share"]) < 0.01
    classes = share_of_full(model, found, {"place": positions(found.ids[:, :-1], 32)})
    # full attention is the first expert: the first half of all, and nobody else
    of_place = classes["families"]["place"]
    assert classes["full"] == pytest.approx(32 / 63)
    assert of_place["classes"]["0-31"]["lift"] == pytest.approx(63 / 32)
    assert of_place["classes"]["32-62"]["lift"] == 0.0
    share = torch.tensor([32 / 63, 31 / 63])
    assert of_place["information"] == pytest.approx(-(share * share.log()).sum().item(), abs=1e-6)


def test_swapped_routes_keep_what_they_should(reading):
    model, found = reading
    found = known_routes(found, lambda ids: (ids < 7).long() + (ids < 2).long())
    swaps = swapped_routes(model, found, seed=0)
    own = found.routes[2]
    assert torch.equal(swaps["shuffled"][2].sort(dim=1).values, own.sort(dim=1).values)
    # one token's routes of all layers stay together
    assert torch.equal(swaps["shuffled"][2], swaps["shuffled"][5])
    assert torch.equal(swaps["another text"][2][1:], own[:-1])
    assert torch.equal(swaps["token alone"][2], own)
    shares = [torch.bincount(r.flatten(), minlength=3) for r in (swaps["random"][2], own)]
    assert (shares[0] - shares[1]).abs().max() < 0.05 * own.numel()
    for swap in ("shuffled", "another text", "random"):
        assert not torch.equal(swaps[swap][2], own)


# --- emergence ---


def test_a_line_falls_evenly_and_a_jump_at_once():
    steps = [float(10 * k) for k in range(1, 101)]
    line = sharpest_fall(steps, [1.0 - k / 99 for k in range(100)], 50.0)
    assert line["share"] == pytest.approx(5 / 99)
    jump = sharpest_fall(steps, [2.0] * 40 + [1.0] * 60, 50.0)
    assert (jump["fall"], jump["share"], jump["to"]) == (1.0, 1.0, 410.0)
    # what rises first falls from where it had risen to
    hill = sharpest_fall(steps, [0.1 * min(k, 50) for k in range(60)] + [4.0] * 40, 50.0)
    assert hill["fall"] == pytest.approx(1.0)
    assert sharpest_fall(steps, [0.01 * k for k in range(100)], 50.0) is None
    # no finer than what was written down
    assert sharpest_fall([10.0, 20.0], [1.0, 0.0], 1.0)["within"] == 10.0
    assert sharpest_fall([10.0], [1.0], 1.0) is None


def test_runs_from_before_the_entropy_was_written_have_the_rest():
    rows = [{"step": 10.0, "loss": 2.0}, {"step": 20.0, "loss": 1.0}]
    found = study_measurement.emergence(rows, 20)["sharpest"]
    assert list(found) == ["loss"]


# --- commands and report ---


def test_runs_are_measured_once_and_reported(cache, runs, tmp_path, capsys):
    for repeat in (1, 4):
        study_run.run(cache, tmp_path / str(repeat), HEAD, 1, "tiny", changes=[f"repeat={repeat}"])
    arguments = ["measure", "--cache", str(cache.folder), "--tokens", "256", "--resamples", "20"]
    folders = [str(tmp_path / "1"), str(tmp_path / "4")]
    folders += [str(runs / f"tiny-{variant}-seed0") for variant in (STATIC, DEPTH)]
    for folder in [*folders, str(runs / f"tiny-{HEAD}-seed0")]:
        assert study_uncertainty.main([*arguments, "--device", "cpu", "--runs", folder]) == 0
    said = capsys.readouterr().out
    assert "shuffled routes" in said
    assert "left out: tokens pass blocks by" in said
    path = tmp_path / "1" / f"tiny-{HEAD}-seed1" / "uncertainty.json"
    before = path.read_text()
    assert study_uncertainty.main([*arguments, "--device", "cpu", "--runs", folders[0]]) == 0
    assert path.read_text() == before
    assert capsys.readouterr().out == ""
    assert study_uncertainty.main([*arguments, "--again", "--json", "--runs", folders[0]]) == 0
    assert json.loads(capsys.readouterr().out)["variant"] == HEAD

    out = tmp_path / "report"
    everything = ["report", "--out", str(out), "--runs", *folders, str(runs)]
    assert study_uncertainty.main(everything) == 0
    rows = json.loads((out / "uncertainty.json").read_text())["tiny"]
    assert [row["label"] for row in rows] == [STATIC, DEPTH, HEAD, f"{HEAD}, text x4"]
    loss = rows[2]["loss"]["hard"]
    assert rows[2]["seeds"] == [0, 1]
    assert (loss["n"], loss["interval"] > 0.0) == (2, True)
    text = (out / "uncertainty.md").read_text()
    assert f"{DEPTH}: tokens pass blocks by" in text
    for title in ("hurts", "Calibration", "foreign? code", "token alone", "again and again"):
        assert title in text
    for name in ("shift", "hurts", "classes", "adaptive", "emergence", "repeat"):
        for kind in ("png", "svg"):
            assert (out / f"uncertainty-{name}-tiny.{kind}").stat().st_size > 0


def test_figures_of_seeds_become_means_with_intervals():
    trees = [
        {"a": 1.0, "b": {"value": 0.5, "low": 0.4, "high": 0.6}, "c": [1, 2], "d": "x", "e": None},
        {"a": 3.0, "b": {"value": 0.7, "low": 0.6, "high": 0.8}, "c": [3, 4], "d": "x"},
    ]
    merged = study_uncertainty_report.merge(trees)
    assert merged["a"]["mean"] == 2.0
    assert merged["a"]["interval"] == pytest.approx(12.71 * math.sqrt(2.0) / math.sqrt(2.0))
    assert (merged["b"]["mean"], merged["b"]["n"]) == (pytest.approx(0.6), 2)
    assert [value["mean"] for value in merged["c"]] == [2, 3]
    assert (merged["d"], merged["e"]) == ("x", None)
    # of a single seed the interval is that over its sequences
    alone = study_uncertainty_report.merge(trees[:1])
    assert alone["a"]["interval"] is None
    assert alone["b"] == {"mean": 0.5, "interval": pytest.approx(0.1), "n": 1}


def test_errors_say_what_to_do(cache, runs, tmp_path, capsys):
    def fails(*arguments):
        assert study_uncertainty.main([str(one) for one in arguments]) == 2
        return capsys.readouterr().err

    assert "finished run" in fails("measure", "--cache", cache.folder, "--runs", tmp_path)
    unmeasured = runs / f"tiny-{PLAIN}-seed0"
    assert "measure it first" in fails("report", "--runs", unmeasured, "--out", tmp_path)
    measure = ("measure", "--cache", cache.folder, "--runs", unmeasured)
    assert "must be >= 1" in fails(*measure, "--resamples", 0)
    assert "give more --tokens" in fails(*measure, "--tokens", 32, "--again")
    half = tmp_path / "half"
    half.mkdir()
    (half / "result.json").write_text("{}")
    measure_half = ("measure", "--cache", cache.folder, "--runs", half)
    assert "must have config.json" in fails(*measure_half)
    assert "measure it first" in fails("report", "--runs", half, "--out", tmp_path)
    assert [folder.name for folder in find_runs([runs])] == sorted(
        f"tiny-{variant}-seed0" for variant in (TOKEN, HEAD, PLAIN, STATIC, DEPTH)
    )
