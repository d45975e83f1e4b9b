"""The study of adapted models, at sizes a CPU runs in seconds."""

import json
import re
import shutil

import numpy as np
import pytest
import study_adapt
import study_adapt_data
import study_adapt_measure
import study_adapt_profile
import study_adapt_report
import torch
from study_adapt_data import AdaptCache, open_base
from study_adapt_measure import attention_share, measure_missing
from study_adapt_variants import (
    SCALES,
    TRAININGS,
    Variant,
    adapt_config,
    by_sensitivity,
    derived_variants,
    find_variants,
    in_force,
    keep_full,
    keep_heads_full,
    load_variant,
    nearest_static,
    source_of,
    static_variants,
)

from meta_attention.adapt import collect_routing, routed_as, routers_of
from meta_attention.bench.timing import Clock
from meta_attention.errors import ConfigError, DataError
from meta_attention.testing.pretrained import build_base, randomise_controllers
from meta_attention.training.corpus import Corpus
from meta_attention.training.tokenizer import build_tokenizer

TINY = SCALES["tiny"]
TIMES = [
    {"phase": "prefill", "cache": "dynamic", "batch": 1, "base_ms": 4.0, "adapted_ms": 2.0},
    {"phase": "decode", "cache": "dynamic", "batch": 2, "base_ms": 3.0, "adapted_ms": 6.0},
    {"phase": "decode", "cache": "static", "batch": 2, "base_ms": 8.0, "adapted_ms": 2.0},
]
WORDS = "The keeper counted the ships twice. Once for the ledger, once for luck. Then it rained. "


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    tokenizer = build_tokenizer("bytes", Corpus("none", [""]))
    base = folder / "small-llama"
    build_base("llama", vocab_size=len(tokenizer), max_position_embeddings=512).save_pretrained(
        base
    )
    tokenizer.save_pretrained(base)
    for name in ("train_a", "train_b", "valid", "test"):
        (folder / f"{name}.txt").write_text(f"{name}. " + WORDS * 30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study_adapt_data, "PART_BYTES", 20_000)
        arguments = ["--base", base, "--out", folder / "cache", "--length", 320]
        arguments += ["--train", folder / "train_a.txt", folder / "train_b.txt"]
        arguments += ["--valid", folder / "valid.txt", "--test", folder / "test.txt"]
        arguments += ["--train-tokens", 3000]
        arguments += ["--sequences", 3, "--valid-sequences", 2]
        assert study_adapt.main(["prepare", *map(str, arguments)]) == 0
    return AdaptCache.open(folder / "cache")


def test_the_commands_of_the_docstring_name_variants_that_exist():
    named = re.findall(r"--variants (\S+)", study_adapt.__doc__)
    assert len(named) == 2
    assert set(named) <= TRAININGS.keys()


def run(command, cache, out, *arguments):
    options = ["--cache", cache.folder, "--out", out, "--scale", "tiny", *arguments]
    return study_adapt.main([command, *map(str, options)])


@pytest.fixture(scope="module")
def runs(cache, tmp_path_factory):
    """Baselines, two trained adapters and one soft, with all that is derived from these."""
    out = tmp_path_factory.mktemp("runs")
    assert run("baselines", cache, out) == 0
    names = ("token-0.25", "kv-head-0.25", "kv-head-wide-0.25", "soft")
    assert run("train", cache, out, "--variants", *names) == 0
    assert run("measure", cache, out) == 0
    return out


def result_of(runs, name):
    return json.loads((runs / "variants" / name / "result.json").read_text())


def last(result):
    return result["text"]["lengths"][-1]


# --- what is carried ---


def test_a_cache_holds_base_and_text_in_small_parts(cache):
    weights = cache.manifest["weights"]
    sizes = [(cache.folder / "base" / name).stat().st_size for name in weights["parts"]]
    assert len(sizes) > 2
    assert max(sizes) <= 20_000
    assert sum(sizes) == weights["bytes"]
    assert cache.sequences("test").shape == (3, 320)
    assert cache.sequences("valid").shape == (2, 320)
    assert len(cache.tokens("train")) == 3000
    # choices are made by other documents than variants are measured on
    tokenizer = build_tokenizer("bytes", Corpus("none", [""]))
    for split in ("valid", "test"):
        assert tokenizer.decode(cache.sequences(split)[0]).startswith(f"{split}. The keeper")
    assert cache.manifest["sources"]["test"][0].endswith("/test.txt")


def test_sources_of_training_take_turns(cache):
    tokenizer = build_tokenizer("bytes", Corpus("none", [""]))
    starts = cache.manifest["tokens"]["train"]["document_starts"]
    begins = [tokenizer.decode(cache.tokens("train")[at : at + 7]) for at in starts]
    assert begins == ["train_a", "train_b"]
    blocks = cache.blocks(tokenizer, 100)
    assert len(blocks.train) == 30
    assert np.array_equal(blocks.train.tokens, cache.tokens("train"))
    assert len(blocks.valid) == 6


def test_the_base_is_put_together_and_checked(cache, tmp_path):
    folder = shutil.copytree(cache.folder, tmp_path / "copy")
    copy = AdaptCache.open(folder)
    (folder / "base" / "model.safetensors").unlink(missing_ok=True)
    part = folder / "base" / cache.manifest["weights"]["parts"][1]
    data = part.read_bytes()
    part.write_bytes(data[:-1] + b"x")
    with pytest.raises(DataError, match="not what was written"):
        open_base(copy)
    part.unlink()
    with pytest.raises(DataError, match="a part of the base is missing"):
        open_base(copy)
    part.write_bytes(data)
    # a base may lie elsewhere, in parts or as others have saved it
    moved = shutil.copytree(folder / "base", tmp_path / "moved")
    assert open_base(copy, moved) == moved
    assert (moved / "model.safetensors").is_file()
    saved = tmp_path / "saved"
    saved.mkdir()
    assert open_base(copy, saved) == saved
    model = load_variant(copy, None, tmp_path, TINY, adapt_config(TINY))
    expected = build_base("llama", vocab_size=258, max_position_embeddings=512)
    ids = cache.sequences("test")[:1, :40]
    with torch.no_grad(), routed_as(model, "full"):
        # weights were rounded to bfloat16
        torch.testing.assert_close(model(ids).logits, expected(ids).logits, rtol=0.1, atol=0.2)


# --- variants ---


def test_static_choices_keep_the_most_sensitive_layers():
    sensitivity = [0.1, 0.5, 0.0, 0.3]
    assert by_sensitivity(sensitivity) == [1, 3, 0, 2]
    assert keep_full(4, [1, 3]) == ("local", "full", "local", "full")
    assert nearest_static(sensitivity, 0.55, 0.1) == ("local", "full", "local", "full")
    assert nearest_static(sensitivity, 0.1, 0.1) == ("local",) * 4
    found = {v.name: v for v in static_variants(SCALES["full"], [0.0] * 29 + [1.0], 30)}
    assert found["static-1"].layers[29] == "full"
    assert found["static-6"].layers.count("full") == 6
    assert found["every-6"].layers.count("full") == 5
    assert found["every-3"].layers[2] == "full"
    assert found["window-no-sinks"].num_sinks == 0
    assert found["window-1024"].layers == ("local:1024",) * 30
    plain = {v.name for v in static_variants(SCALES["full"], None, 30)}
    assert not plain & {"static-1", "static-heads-9"}


def test_static_choices_keep_the_most_sensitive_heads():
    by_head = [[0.1, 0.4], [0.0, 0.3], [0.2, 0.05]]
    assert keep_heads_full(by_head, 2) == (
        ("local", "full"),
        ("local", "full"),
        ("local", "local"),
    )
    # SmolLM2's: 30 layers of 3 heads
    rows = [[layer + head / 10 for head in range(3)] for layer in range(30)]
    found = {v.name: v for v in static_variants(SCALES["full"], None, 30, rows)}
    kept = found["static-heads-14"].layers
    assert sum(way.count("full") for way in kept) == 14
    assert kept[29] == ("full",) * 3
    assert kept[25] == ("local", "full", "full")
    config = source_of(found["static-heads-14"], SCALES["full"])
    assert config.route_granularity == "kv_head"
    assert source_of(found["window"], SCALES["full"]).route_granularity == "token"
    assert source_of(found["window-1024"], SCALES["full"]).experts == (
        "full",
        "local:1024",
        "local",
    )


def test_every_training_is_one_of_a_router(cache):
    for name, training in TRAININGS.items():
        given = {k: v for k, v in training.items() if k not in study_adapt.OWN_SETTINGS}
        settings = study_adapt.RouterSettings.of(given)
        assert settings.route_granularity == ("kv_head" if "kv-head" in name else "token")
        assert bool(training.get("is_wide")) == ("wide" in name)
        families = {v.family for v in derived_variants(SCALES["full"], name)}
        assert families <= set(study_adapt_report.FAMILIES)
    own, random, *moved = derived_variants(SCALES["full"], "kv-head-0.25")
    assert (own.family, random.family) == ("ours, key-value head", "random")
    wide, *_ = derived_variants(SCALES["full"], "kv-head-wide-0.25")
    assert wide.family == "ours, wide key-value head"
    weak, *_ = derived_variants(SCALES["full"], "weak-kv-head-wide-0.25")
    fading, *_ = derived_variants(SCALES["full"], "fading-kv-head-wide-0.25")
    assert (weak.family, fading.family) == (
        f"{wide.family}, weak prior",
        f"{wide.family}, fading KL",
    )
    (free,) = derived_variants(SCALES["full"], "prior-free-kv-head-wide-0.25")
    assert free.family == "prior-free"
    assert [v.cost for v in moved] == list(SCALES["full"].costs)
    assert [v.name for v in derived_variants(SCALES["full"], "kv-head-wide-lora-0.25")] == [
        "kv-head-wide-lora-0.25"
    ]


def make_routed(cache, tmp_path, **options):
    model = load_variant(cache, None, tmp_path, TINY, adapt_config(TINY, **options))
    randomise_controllers(model)
    return model


@torch.no_grad()
def test_routes_are_those_of_the_variant_and_then_as_before(cache, tmp_path):
    model, ids = make_routed(cache, tmp_path), cache.sequences("test")[:2]

    def routes(variant=None, **options):
        with collect_routing(model) as record:
            if variant is None:
                model(ids)
            else:
                with in_force(model, variant, **options):
                    model(ids)
        return {i: out.routes.expert for i, out in record.layers.items()}

    before = routes()
    assert all(0.05 < expert.float().mean() < 0.95 for expert in before.values())
    # a layer on full runs as the base has it, and is not recorded
    assert sorted(routes(Variant("x", "static", layers=("full", "local")))) == [1]
    shares = {0: [0.1, 0.9], 1: [0.7, 0.3]}
    drawn = routes(Variant("x", "random", adapter="y", random=True), shares=shares)
    assert (drawn[0] == 0).float().mean() == pytest.approx(0.1, abs=0.05)
    assert (drawn[1] == 0).float().mean() == pytest.approx(0.7, abs=0.08)
    few, many = (
        routes(Variant("x", "moved", adapter="y", cost=0.5), threshold=threshold)
        for threshold in (0.9, 0.1)
    )
    for index in before:
        assert (few[index] == 0).sum() < (before[index] == 0).sum() < (many[index] == 0).sum()
        assert torch.equal(routes()[index], before[index])
    # half of the belief is what the largest weight says
    same = routes(Variant("x", "moved", adapter="y", cost=0.5), threshold=0.5)
    assert all(torch.equal(same[index], before[index]) for index in before)


@torch.no_grad()
def test_three_experts_are_drawn_and_moved_by_cost(cache, tmp_path):
    options = {"is_wide": True, "route_granularity": "kv_head"}
    model, ids = make_routed(cache, tmp_path, **options), cache.sequences("test")[:2]

    def routes(variant, **options):
        with in_force(model, variant, **options), collect_routing(model) as record:
            model(ids)
        return {i: out.routes.expert for i, out in record.layers.items()}

    shares = {0: [[0.1, 0.2, 0.7], [0.6, 0.4, 0.0]], 1: [[0.0, 0.0, 1.0], [0.3, 0.3, 0.4]]}
    drawn = routes(Variant("x", "random", adapter="y", random=True), shares=shares)
    for index, expected in shares.items():
        found = torch.nn.functional.one_hot(drawn[index], 3).float().mean(dim=(0, 1))
        assert torch.allclose(found, torch.tensor(expected), atol=0.06)
    with collect_routing(model) as record:
        model(ids)
    moved = Variant("x", "moved", adapter="y", cost=0.5)
    cheap, same, dear = (routes(moved, threshold=t) for t in (0.9, 0.5, 0.1))
    # what the first layer reads does not depend on its routes, and its experts are cheaper by index
    assert torch.equal(same[0], record.layers[0].routes.expert)
    assert (cheap[0] >= same[0]).all()
    assert (same[0] >= dear[0]).all()
    assert all((expert == 1).any() for expert in (cheap[0], same[0], dear[0]))


@torch.no_grad()
def test_sinks_are_there_or_not(cache, tmp_path):
    model, ids = make_routed(cache, tmp_path), cache.sequences("test")[:1]
    local = Variant("x", "window", layers=("local", "local"))

    def logits(variant):
        with in_force(model, variant):
            return model(ids).logits

    with_sinks = logits(local)
    without = logits(Variant("x", "window", layers=("local", "local"), num_sinks=0))
    # the last position within the window of the first tokens, and the first beyond
    assert torch.allclose(with_sinks[:, 8], without[:, 8], atol=1e-5)
    assert not torch.allclose(with_sinks[:, 40], without[:, 40], atol=1e-3)
    assert torch.equal(logits(local), with_sinks)


def test_a_threshold_is_set_to_a_cost(cache, tmp_path):
    model, text = make_routed(cache, tmp_path), cache.sequences("valid")
    for cost in (0.2, 0.5, 0.8):
        variant = Variant("x", "moved", adapter="y", cost=cost)
        threshold = study_adapt_measure.set_threshold(model, variant, text, TINY)
        with in_force(model, variant, threshold=threshold):
            assert attention_share(model, text, TINY) == pytest.approx(cost, abs=0.05)


# --- runs ---


def test_baselines_are_what_they_say(runs):
    full, window = result_of(runs, "full"), result_of(runs, "window")
    assert last(full)["attention_share"] == 1.0
    assert last(full)["loss_increase"] == pytest.approx(0.0, abs=1e-6)
    bare = result_of(runs, "window-no-sinks")
    assert last(bare)["attention_share"] < last(window)["attention_share"] < 0.1
    static = result_of(runs, "static-1")
    assert last(static)["attention_share"] == pytest.approx(
        (1.0 + last(window)["attention_share"]) / 2
    )
    sensitivity = json.loads((runs / "sensitivity.json").read_text())
    kept = static["variant"]["layers"].index("full")
    assert sensitivity["loss_increase"][kept] == max(sensitivity["loss_increase"])
    # one of four heads
    heads, by_head = result_of(runs, "static-heads-1"), sensitivity["loss_increase_by_head"]
    assert last(heads)["attention_share"] == pytest.approx(
        (1.0 + 3.0 * last(window)["attention_share"]) / 4
    )
    (kept,) = (
        (layer, way.index("full"))
        for layer, way in enumerate(heads["variant"]["layers"])
        if "full" in way
    )
    assert by_head[kept[0]][kept[1]] == max(max(row) for row in by_head)
    wide = last(result_of(runs, "window-32"))["attention_share"]
    assert last(window)["attention_share"] < wide < 0.3
    assert [len(rows) for rows in full["facts"].values()] == [2, 2]


def test_trained_routers_are_measured_with_what_is_derived(runs):
    names = {path.name for path in (runs / "variants").iterdir()}
    for name in ("token-0.25", "kv-head-0.25", "kv-head-wide-0.25"):
        assert {name, f"{name}-random", f"{name}-moved-0.4"} <= names
        own, random = result_of(runs, name), result_of(runs, f"{name}-random")
        assert sorted(own["routing"]) == ["0", "1"]
        for index, share in own["routing"].items():
            drawn = torch.tensor(random["routing"][index])
            assert torch.allclose(drawn, torch.tensor(share), atol=0.1)
    assert "soft-cut-0.4" in names
    assert "soft" not in names
    # shares of two experts; of each of two heads; of three experts
    for name, shape in (
        ("token-0.25", (2,)),
        ("kv-head-0.25", (2, 2)),
        ("kv-head-wide-0.25", (2, 3)),
    ):
        routing = torch.tensor(result_of(runs, name)["routing"]["0"])
        assert routing.shape == shape
        assert torch.allclose(routing.sum(dim=-1), torch.ones(shape[:-1]))


def test_what_is_done_is_not_done_again(cache, runs, capsys):
    path = runs / "variants" / "window" / "result.json"
    before = path.stat().st_mtime_ns
    assert run("measure", cache, runs) == 0
    assert run("train", cache, runs, "--variants", "token-0.25") == 0
    assert path.stat().st_mtime_ns == before


def test_a_study_that_was_cut_off_goes_on(cache, tmp_path, capsys):
    assert run("baselines", cache, tmp_path, "--time-limit", 0) == 0
    assert "7 left" in capsys.readouterr().out
    assert not list(tmp_path.glob("variants/*/result.json"))
    arguments = ("--variants", "token-0.25", "--set", "save_every=1", "steps=3")
    # time that is over after the first step
    assert (
        study_adapt.train_one(
            cache, None, tmp_path, TINY, "token-0.25", {"save_every": 1, "steps": 3}, stop_at=0.0
        )
        is None
    )
    assert (tmp_path / "adapters" / "token-0.25" / "run.json").is_file()
    assert run("train", cache, tmp_path, *arguments) == 0
    record = json.loads((tmp_path / "adapters" / "token-0.25" / "run.json").read_text())
    assert record["steps"] == 3


def test_what_needs_peft_is_left_out_without_it(cache, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("meta_attention.adapt.lora.find_spec", lambda name: None)
    steps = ("--set", "steps=1", "warmup=0")
    assert (
        run(
            "train", cache, tmp_path, "--variants", "kv-head-wide-lora-0.25", "kv-head-0.25", *steps
        )
        == 1
    )
    shown = capsys.readouterr().out
    assert "kv-head-wide-lora-0.25 left out" in shown
    assert "kv-head-0.25: attention" in shown


def test_blind_routers_learn_a_route_for_every_head_and_none_for_tokens(cache, tmp_path):
    name, steps = "blind-kv-head-wide-0.25", ("--set", "steps=3", "warmup=0", "lr=0.1")
    assert run("train", cache, tmp_path, "--variants", name, *steps) == 0
    model = load_variant(cache, None, tmp_path, TINY, name)
    for router in routers_of(model):
        first, last = router.controller.mlp[0], router.controller.mlp[-1]
        assert not first.weight.any()
        assert last.weight.any()
    ids = cache.sequences("test")[:2]
    with torch.no_grad(), collect_routing(model) as record:
        model(ids)
    for out in record.layers.values():
        weights = out.routes.weights
        assert torch.equal(weights, weights[:1, :1].expand_as(weights))
    (variant,) = (v for v in find_variants(tmp_path, TINY, 2) if v.adapter)
    assert variant.family == "blind"


def test_a_static_choice_is_trained_with_the_same_lora(cache, runs, monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.setitem(TRAININGS["static-lora-0.25"], "static_cost", 0.5)
    assert run("train", cache, runs, "--variants", "static-lora-0.25") == 0
    (variant,) = (v for v in find_variants(runs, TINY, 2) if v.family == "static + LoRA")
    assert sorted(variant.layers) == ["full", "local"]
    measure_missing(cache, None, runs, TINY, [variant])
    trained, plain = result_of(runs, "static-lora-0.25"), result_of(runs, "static-1")
    assert last(trained)["attention_share"] == last(plain)["attention_share"]
    assert last(trained)["adapted_loss"] != last(plain)["adapted_loss"]
    # the base is without it
    assert last(trained)["base_loss"] == pytest.approx(last(plain)["base_loss"], abs=1e-5)


def test_times_of_a_variant_are_ratios_to_its_base(cache, runs, monkeypatch):
    clock = Clock(torch.device("cpu"), budget_ms=1.0, min_runs=1, max_runs=1)
    left = study_adapt_measure.time_variants(cache, None, runs, TINY, ["token-0.25"], clock=clock)
    assert left == 0
    rows = json.loads((runs / "variants" / "token-0.25" / "times.json").read_text())["rows"]
    assert {(row["phase"], row["cache"]) for row in rows} == {
        ("prefill", "dynamic"),
        ("decode", "dynamic"),
        ("decode", "static"),
    }
    assert {row["length"] for row in rows} == set(TINY.lengths)
    row = {"length": 8, "times": [t | {"length": 8} for t in TIMES]}
    assert study_adapt_report.speedups_of(row, "prefill") == {1: 2.0}
    assert study_adapt_report.speedups_of(row, "decode") == {2: 1.5}
    assert study_adapt_report.speedups_of({"length": 9, "times": row["times"]}, "decode") == {}
    with pytest.raises(ConfigError, match="only stands in for routes"):
        study_adapt_measure.time_variants(cache, None, runs, TINY, ["token-0.25-random"])


def test_times_go_on_where_they_were_cut_off(cache, runs, monkeypatch):
    path = runs / "variants" / "window" / "times.json"
    asked = []

    def time_adapted(model, sequences, lengths, **given):
        asked.append(lengths)
        row = {"phase": "prefill", "cache": "dynamic", "batch": 1, "speedup": 1.0}
        return [row | {"length": length} for length in lengths]

    monkeypatch.setattr(study_adapt_measure, "time_adapted", time_adapted)
    time_variants = study_adapt_measure.time_variants
    with monkeypatch.context() as patched:
        # nothing is loaded in vain
        patched.setattr(study_adapt_measure, "load_variant", None)
        assert time_variants(cache, None, runs, TINY, ["window"], stop_at=0.0) == 1
    assert not path.exists()
    *_, longest = sorted(TINY.lengths)
    path.write_text(json.dumps({"device": "another", "rows": [{"length": longest}]}))
    with pytest.raises(ConfigError, match=r"has times of device another, here it is "):
        time_variants(cache, None, runs, TINY, ["window"])
    path.write_text(json.dumps({"rows": [{"length": longest}]}))
    assert time_variants(cache, None, runs, TINY, ["window"]) == 0
    assert asked == [[length] for length in sorted(TINY.lengths, reverse=True)[1:]]
    assert [row["length"] for row in json.loads(path.read_text())["rows"]] == sorted(TINY.lengths)
    path.unlink()


def test_kernels_are_summed_by_kind():
    times = {
        "routed_attention_fwd": 700.0,
        "route_plan_kernel": 20.0,
        "cudnn_sdpa": 300.0,
        "mm": 80.0,
    }
    sums = study_adapt_profile.by_kind(times)
    assert sums == {"routing": 0.02, "attention": 1.0, "rest": 0.08, "all": pytest.approx(1.1)}


def test_a_profile_needs_a_gpu(cache, runs, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert run("profile", cache, runs, "--variants", "token-0.25") == 2
    assert "needs a GPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_profile_has_base_and_adapter(cache, runs):
    assert run("profile", cache, runs, "--variants", "token-0.25") == 0
    rows = json.loads((runs / "variants" / "token-0.25" / "profile.json").read_text())["rows"]
    assert {row["phase"] for row in rows} == {"prefill", "decode"}
    for row in rows:
        assert row["base"]["routing"] == 0.0
        assert 0.0 < row["adapted"]["routing"] < row["adapted"]["all"]


def test_a_report_has_every_variant_and_figures(runs, capsys):
    assert study_adapt.main(["report", "--runs", str(runs), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    names = [row["name"] for row in summary["rows"]]
    assert sorted(names) == sorted(path.name for path in (runs / "variants").iterdir())
    assert names[0] == "full"
    compared = {row["name"]: row["better_by"] for row in summary["at_equal_cost"]}
    ours = ("token-0.25", "kv-head-0.25", "kv-head-wide-0.25")
    assert set(compared) == {*ours, *(f"{name}-moved-0.4" for name in ours)}
    assert {"static", "static heads", "window", "random", "soft cut", "every"} <= set(
        compared["token-0.25"]
    )
    table = (runs / "adapt.md").read_text()
    assert all(f"| {name} |" in table for name in names)
    assert "The base is the last point of every family, also of those measured at lower" in table
    for name in ("adapt_frontier", "adapt_passage_token-0.25", "adapt_passage_kv-head-0.25"):
        assert (runs / f"{name}.svg").stat().st_size > 0


def test_a_report_takes_along_rows_of_an_earlier_one(runs, tmp_path):
    whole = study_adapt_report.report(runs, is_quiet=True)
    earlier = tmp_path / "adapt.json"
    earlier.write_text(json.dumps(whole))
    few = tmp_path / "few"
    for name in ("full", "window"):
        shutil.copytree(runs / "variants" / name, few / "variants" / name)
    timed = few / "variants" / "static-1"
    timed.mkdir()
    (timed / "times.json").write_text(json.dumps({"rows": [{"phase": "prefill", "length": 1}]}))
    found = study_adapt_report.report(few, earlier=earlier, is_quiet=True)
    times = {row["name"]: row["times"] for row in found["rows"]}
    assert times.pop("static-1") == [{"phase": "prefill", "length": 1}]
    others = [row for row in found["rows"] if row["name"] != "static-1"]
    assert others == [row for row in whole["rows"] if row["name"] != "static-1"]
    assert found["at_equal_cost"] == whole["at_equal_cost"]
    for row in whole["rows"]:
        row["loss"] += 0.5
    earlier.write_text(json.dumps(whole))
    with pytest.raises(DataError, match="of the same base and text, but its base has loss"):
        study_adapt_report.report(few, earlier=earlier, is_quiet=True)
    with pytest.raises(DataError, match="there is no"):
        study_adapt_report.report(few, earlier=tmp_path / "no.json", is_quiet=True)


# --- verdicts ---


def test_losses_are_compared_at_equal_cost():
    points = [(0.1, 0.2), (0.3, 0.1), (0.5, 0.0)]
    assert study_adapt_report.loss_at(points, 0.2) == pytest.approx(0.15)
    assert study_adapt_report.loss_at(points, 0.3) == pytest.approx(0.1)
    # all that is cheaper could be had, too; what is dearer could not
    assert study_adapt_report.loss_at(points, 0.9) == 0.0
    assert study_adapt_report.loss_at([(0.1, 0.05), *points], 0.2) == 0.05
    assert study_adapt_report.loss_at(points, 0.05) is None
    assert study_adapt_report.loss_at([(0.2, 0.3)], 0.2) == 0.3


def test_families_reach_from_the_window_to_the_base():
    def row(name, family, share, loss):
        return {"name": name, "family": family, "attention_share": share, "loss_increase": loss}

    ours = row("a", "ours, token", 0.3, 0.02)
    rows = [row("full", "base", 1.0, 0.0), row("window", "window", 0.1, 0.2), ours]
    rows += [row("window-no-sinks", "window", 0.09, 0.9), row("static-3", "static", 0.5, 0.06)]
    rows += [row("a-random", "random", 0.31, 0.3), row("b-random", "random", 0.3, 0.4)]
    rows += [row("static-lora", "static + LoRA", 0.2, 0.08), row("b", "blind", 0.4, 0.01)]
    found = study_adapt_report.compare_at_cost(ours, rows)["better_by"]
    # half way between the window and three layers; random routes of its own shares
    expected = {"static": 0.13 - 0.02, "random": 0.28}
    # measured at lower costs only: on the line to the base
    expected |= {"window": 0.2 * 7 / 9 - 0.02, "static + LoRA": 0.08 * 7 / 8 - 0.02}
    # all of its points are dearer, and it does not begin at the window
    assert found.pop("blind") is None
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("share", "loss", "accuracy", "meets"),
    [
        (0.30, 0.02, 0.76, True),
        (0.31, 0.02, 0.76, False),
        (0.30, 0.021, 0.76, False),
        (0.30, 0.02, 0.75, False),
    ],
)
def test_targets_are_met_or_not(share, loss, accuracy, meets):
    row = {"length": 8192, "attention_share": share, "loss_increase": loss, "adapted_loss": 3.0}
    variant = {"name": "x", "family": "ours"}
    text = {"lengths": [row], "positions": [], "num_sequences": 1}
    facts = {n: [{"accuracy": accuracy, "log_probability": -1.0}] for n in ("one", "several")}
    base = {n: [{"accuracy": 0.8, "log_probability": -1.0}] for n in ("one", "several")}
    result = {"variant": variant, "text": text, "facts": facts, "device": "CPU"} | {
        "dtype": "float32",
        "versions": {},
    }
    assert study_adapt_report.figures_of(result, base, None)["meets_targets"] is meets


# --- mistakes ---


def test_mistakes_are_one_sentence(cache, runs, tmp_path, capsys):
    def error_of(*arguments):
        assert study_adapt.main([str(a) for a in arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        return error

    assert "has none; make it with" in error_of("measure", "--cache", tmp_path, "--out", tmp_path)
    common = ("--cache", cache.folder, "--out", tmp_path)
    assert "must have >= 8192 tokens" in error_of("measure", *common)
    tiny = (*common, "--scale", "tiny")
    assert "a variant must be one of" in error_of("measure", *tiny, "--variants", "nothing")
    assert "a setting must be one of" in error_of("train", *tiny, "--set", "nothing=1")
    assert "run the command baselines first" in error_of(
        "train", *tiny, "--variants", "static-lora-0.25"
    )
    assert "must have the variant full" in error_of("report", "--runs", tmp_path)
    missing = [x for name in ("train", "valid", "test") for x in (f"--{name}", tmp_path / "no")]
    missing += ["--out", tmp_path]
    assert "that exists" in error_of("prepare", *missing)
    other = ("--cache", cache.folder, "--out", runs, "--scale", "tiny", "--chat")
    assert "must agree in their is_chat" in error_of("measure", *other)


def test_random_routes_need_those_they_are_like(cache, runs, tmp_path):
    shutil.copytree(runs / "adapters" / "token-0.25", tmp_path / "adapters" / "token-0.25")
    (random,) = (v for v in find_variants(tmp_path, TINY, 2) if v.random)
    with pytest.raises(ConfigError, match="measure that first"):
        measure_missing(cache, None, tmp_path, TINY, [random])
