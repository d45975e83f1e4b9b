"""The text study, at sizes a CPU runs in seconds."""

import json
import math
from pathlib import Path

import pytest
import study_compare
import study_evaluation
import study_report
import study_run
import study_text
import torch
from study_data import PYTHON_LIBRARY, PYTHON_PACKAGES, Cache, prepare, python_code
from study_export import CARD
from study_training import Training
from study_variants import ENDINGS, SCALES, VALUE_ENDINGS, VARIANTS, find_variant
from transformers import PreTrainedTokenizerFast

from meta_attention import MetaAttentionForCausalLM
from meta_attention.errors import ConfigError, DataError
from meta_attention.training.corpus import embedded_corpus

STEPS = "steps=20"


@pytest.fixture(scope="module")
def text():
    return embedded_corpus().documents


@pytest.fixture(scope="module")
def cache(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    (folder / "manual").mkdir()
    lines = [json.dumps({"text": document}) for document in text[:20]]
    (folder / "manual" / "train-0.jsonl").write_text("\n".join(lines[:15]))
    (folder / "manual" / "valid.jsonl").write_text("\n".join(lines[15:]))
    (folder / "words").mkdir()
    (folder / "words" / "wiki.valid.tokens").write_text(" \n = A title = \n \n two words \n")
    sources = [folder / "manual", folder / "words"]
    prepare(sources, folder / "cache", vocab=300, max_tokens=8000)
    return Cache.open(folder / "cache")


def losses(folder):
    return [json.loads(row)["loss"] for row in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_cache_has_the_tokens_it_was_asked_for_and_the_words_as_wikitext_counts_them(cache, text):
    train, valid = (cache.tokens(split, "cpu")["manual"] for split in ("train", "valid"))
    assert len(train) == 8000
    assert len(valid) == 400
    end = cache.manifest["eos_token_id"]
    first = train[: train.tolist().index(end)]
    assert cache.tokenizer.decode(first) == text[0]
    [(name, kept, words)] = cache.word_texts()
    # = A title = and two words, and four line ends
    assert (name, words) == ("words.valid", 6 + 4)
    assert kept == " \n = A title = \n \n two words \n"


@pytest.mark.parametrize("source", ["python-library", "python-packages"])
def test_the_code_of_python_and_of_its_packages_is_text_to_train_on(source, tmp_path):
    prepare([Path(source)], tmp_path, vocab=300, max_tokens=20000)
    cache = Cache.open(tmp_path)
    train, valid = (cache.tokens(split, "cpu")[source] for split in ("train", "valid"))
    assert (len(train), len(valid)) == (20000, 1000)
    assert "import" in cache.tokenizer.decode(train)


def test_packages_are_more_code_than_the_library_and_no_file_is_there_twice():
    library, packages = (python_code(name, 1 << 40) for name in (PYTHON_LIBRARY, PYTHON_PACKAGES))
    assert set(library.documents) < set(packages.documents)
    assert len(packages.documents) == len(set(packages.documents))
    assert any("class PreTrainedModel" in text for text in packages.documents)


@pytest.mark.parametrize(
    "variant",
    [
        "hybrid-1-2",
        "bayes-global-kv_head-0.4",
        "prior-free-all-0.2",
        "gated-full",
        "hybrid-1-5-residuals",
        "bayes-all-token-0.4-ssm-depth",
    ],
)
def test_a_run_leaves_config_metrics_and_result(cache, tmp_path, variant):
    arguments = ["--cache", str(cache.folder), "--out", str(tmp_path), "--scale", "tiny"]
    assert study_text.main(["run", *arguments, "--variant", variant, "--seed", "1"]) == 0
    folder = tmp_path / f"tiny-{variant}-seed1"
    assert json.loads((folder / "config.json").read_text())["routing"]["pattern"]
    assert len(losses(folder)) == 1
    result = json.loads((folder / "result.json").read_text())
    assert result["steps"] == 3
    assert 4.0 < result["hard"]["loss"] < 7.0
    assert math.isfinite(result["words"]["words.valid"]["word_perplexity"])
    assert not (folder / "checkpoint.pt").exists()


def test_a_wider_window_costs_more_than_a_narrow_one(cache):
    scale = SCALES["tiny"]
    widths = [VARIANTS[name].model_config(scale, 300).window_size for name in ("local", "local-x4")]
    assert widths == [scale.window_size, 4 * scale.window_size]


def test_static_variants_cost_what_their_layers_do(cache):
    scale = SCALES["tiny"]
    shares = {}
    for name in ("full", "local", "hybrid-1-1", "hybrid-1-2", "hybrid-1-5"):
        training = study_run.Training(cache, VARIANTS[name], scale, 0, "cpu")
        with torch.no_grad():
            shares[name] = study_evaluation.score(
                training.model.eval(), cache.tokens("valid", "cpu"), scale, scale.length
            )["attention_flops"]
    local = shares["local"]
    assert shares["full"] == pytest.approx(1.0)
    assert 0.0 < local < 0.3
    for name, share in (("hybrid-1-1", 1 / 2), ("hybrid-1-2", 1 / 3), ("hybrid-1-5", 1 / 6)):
        assert shares[name] == pytest.approx(share + (1.0 - share) * local)


def test_what_tokens_pass_by_is_missing_from_the_operations_of_the_model(cache):
    scale = SCALES["tiny"]
    shares = {}
    for name in ("full", "full-residuals", "full-depth"):
        training = study_run.Training(cache, find_variant(name), scale, 0, "cpu")
        with torch.no_grad():
            shares[name] = study_evaluation.score(
                training.model.eval(), cache.tokens("valid", "cpu"), scale, scale.length
            )["model_flops"]
    assert shares["full"] == pytest.approx(1.0)
    assert 1.0 < shares["full-residuals"] < 1.2
    assert shares["full-depth"] < 0.9


def test_a_run_is_of_the_source_that_it_began_with(cache, tmp_path, monkeypatch):
    source, window = {"commit": "first"}, study_run.Training.window

    def commit_meanwhile(training):
        source["commit"] = "second"
        return window(training)

    monkeypatch.setattr(study_run, "describe_machine", lambda device: dict(source))
    monkeypatch.setattr(study_run.Training, "window", commit_meanwhile)
    assert study_run.run(cache, tmp_path, "local", 0, "tiny")["machine"] == {"commit": "first"}
    assert source == {"commit": "second"}


def test_a_run_that_was_cut_off_goes_on_as_an_unbroken_one(cache, tmp_path, monkeypatch):
    def run(out):
        return study_run.run(cache, out, "bayes-all-token-0.2-early", 0, "tiny", changes=[STEPS])

    whole = run(tmp_path / "whole")
    save = study_run.Training.save

    def save_and_stop(training, path):
        save(training, path)
        raise KeyboardInterrupt

    monkeypatch.setattr(study_run.Training, "save", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut")
    monkeypatch.undo()
    folder = "tiny-bayes-all-token-0.2-early-seed0"
    assert len(losses(tmp_path / "cut" / folder)) == 1
    resumed = run(tmp_path / "cut")
    assert losses(tmp_path / "cut" / folder) == losses(tmp_path / "whole" / folder)
    assert resumed["hard"]["loss"] == whole["hard"]["loss"]


def test_a_run_stops_in_time_and_does_not_go_on_with_other_settings(cache, tmp_path):
    assert study_run.run(cache, tmp_path, "local", 0, "tiny", stop_at=0.0) is None
    assert not (tmp_path / "tiny-local-seed0" / "result.json").exists()
    with pytest.raises(ConfigError, match="settings it began with"):
        study_run.run(cache, tmp_path, "local", 0, "tiny", changes=["lr=0.1"])


def test_metrics_have_the_entropy_of_beliefs(cache, tmp_path):
    for variant, is_routed in (("bayes-all-token-0.2", True), ("full", False)):
        study_run.run(cache, tmp_path, variant, 0, "tiny")
        path = tmp_path / f"tiny-{variant}-seed0" / "metrics.jsonl"
        entropy = json.loads(path.read_text().splitlines()[-1])["routing_entropy"]
        # drawn routes would have none
        assert 10.0 < entropy < 90.0 if is_routed else entropy == 0.0


def test_repeated_text_is_the_beginning_of_the_whole(cache, tmp_path):
    def text(repeat):
        scale = SCALES["tiny"].with_changes([f"repeat={repeat}"])
        return study_run.Training(cache, VARIANTS["local"], scale, 0, "cpu").text

    whole = text(1)
    assert len(whole) == 8000
    for repeat in (4, 32):
        assert torch.equal(text(repeat), whole[: 8000 // repeat])
    with pytest.raises(DataError, match="lower repeat"):
        text(200)
    study_run.run(cache, tmp_path, "local", 0, "tiny", changes=["repeat=4"])
    settings = json.loads((tmp_path / "tiny-local-seed0" / "config.json").read_text())["settings"]
    assert settings["repeat"] == 4


def test_a_run_from_before_a_setting_goes_on_with_its_default(cache, tmp_path):
    first = study_run.run(cache, tmp_path, "local", 0, "tiny")
    path = tmp_path / "tiny-local-seed0" / "config.json"
    before = json.loads(path.read_text())
    del before["settings"]["repeat"]
    path.write_text(json.dumps(before))
    assert study_run.run(cache, tmp_path, "local", 0, "tiny") == first
    with pytest.raises(ConfigError, match="settings it began with"):
        study_run.run(cache, tmp_path, "local", 0, "tiny", changes=["repeat=2"])


def test_a_run_from_before_the_convolution_is_not_one_with_it(cache, tmp_path):
    study_run.run(cache, tmp_path, "local", 0, "tiny", changes=["short_conv=0"])
    path = tmp_path / "tiny-local-seed0" / "config.json"
    before = json.loads(path.read_text())
    del before["settings"]["short_conv"]
    path.write_text(json.dumps(before))
    with pytest.raises(ConfigError, match="settings it began with"):
        study_run.run(cache, tmp_path, "local", 0, "tiny")
    assert study_run.run(cache, tmp_path, "local", 0, "tiny", changes=["short_conv=0"])


@pytest.mark.parametrize("ending", ["", "-depth"])
def test_only_a_cost_below_the_target_is_held_up(ending, cache):
    """Of the layer that is routed, also where half of the tokens pass it or others by."""
    variant = find_variant(f"bayes-global-token-0.4{ending}")
    training = study_run.Training(cache, variant, SCALES["tiny"], 0, "cpu")
    with torch.no_grad():
        asked = {"output_routing": True, "output_routed_cost": True}
        out = training.model.eval()(training.batch(), **asked)
    cost = out.routed_projected_cost
    # a new model is on full attention in its routed layer
    (entered,) = [w.sum(-1).mean() for w in out.routing_weights if w.shape[-1] > 1]
    assert cost == pytest.approx(entered.item())
    assert training.economy.below_target(torch.tensor(1.0)) == 0.0
    torch.testing.assert_close(training.economy.below_target(torch.tensor(0.2)), torch.tensor(0.25))


def test_nothing_is_held_up_before_anything_presses(cache):
    variant = VARIANTS["bayes-global-token-0.4"]
    scale = SCALES["tiny"].with_changes([STEPS])
    training = study_run.Training(cache, variant, scale, 0, "cpu")
    held = []
    for _ in range(13):
        training.step()
        held.append(training.knobs["hold"].item())
    assert scale.first_steps == 10
    assert held == [0.0] * 10 + [1.0] * 3


def test_variants_go_on_from_the_static_model_they_are_routed_in(cache, tmp_path, capsys):
    def run(out, name):
        study_run.run(cache, tmp_path / out, name, 0, "tiny", changes=["steps=40"])
        folder = tmp_path / out / f"tiny-{name}-seed0"
        return [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]

    static = run("both", "hybrid-1-5")
    assert "step 40/40" in capsys.readouterr().out
    routed = run("both", "bayes-global-token-0.4")
    assert "going on after step 20" in capsys.readouterr().out
    losses = [[row["loss"] for row in rows] for rows in (static, routed)]
    assert losses[0][:2] == losses[1][:2]
    assert losses[0][2:] != losses[1][2:]
    assert [row["pressure"] > 0.0 for row in routed] == [False, False, True, True]
    # who comes first is all the same
    assert [row["loss"] for row in run("alone", "bayes-global-token-0.4")] == losses[1]
    changes = ["steps=40", "lr=0.1"]
    with pytest.raises(ConfigError, match="settings it began with"):
        study_run.run(cache, tmp_path / "both", "prior-free-global-0.4", 0, "tiny", changes=changes)


def test_a_variant_may_be_routed_from_its_first_step(cache, tmp_path):
    name = "bayes-global-token-0.4-early"
    study_run.run(cache, tmp_path, name, 0, "tiny", changes=[STEPS])
    rows = (tmp_path / f"tiny-{name}-seed0" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[0])["routing_entropy"] > 0.0
    assert not (tmp_path / "beginnings").exists()


def test_a_run_may_be_cut_off_in_its_beginning(cache, tmp_path, monkeypatch):
    def run(out, stop_at=math.inf):
        changes = ["steps=50"]
        return study_run.run(cache, out, "hybrid-1-5", 0, "tiny", changes=changes, stop_at=stop_at)

    whole = run(tmp_path / "whole")
    clock = iter([0.0, 0.0, 2.0])
    monkeypatch.setattr(study_run.time, "time", lambda: next(clock, 2.0))
    assert run(tmp_path / "cut", stop_at=1.0) is None
    monkeypatch.undo()
    resumed = run(tmp_path / "cut")
    assert resumed["hard"] == whole["hard"]
    folder = "tiny-hybrid-1-5-seed0"
    assert losses(tmp_path / "cut" / folder) == losses(tmp_path / "whole" / folder)


def test_a_process_takes_what_begins_alike_and_long_ones_come_first(tmp_path):
    names = ["local", "full", "hybrid-1-5", "bayes-global-token-0.2", "prior-free-global-0.4"]
    (tmp_path / "tiny-full-seed1").mkdir()
    (tmp_path / "tiny-full-seed1" / "result.json").write_text("{}")
    jobs = study_text.missing_jobs(tmp_path, "tiny", names, range(2))
    together = "hybrid-1-5 bayes-global-token-0.2 prior-free-global-0.4"
    assert [(job.variant, job.seeds) for job in jobs] == [
        (together, (0,)),
        ("full", (0,)),
        ("local", (0,)),
        (together, (1,)),
        ("local", (1,)),
    ]


def test_a_report_has_means_intervals_and_the_distance_to_static_variants(cache, tmp_path):
    for variant in ("full", "local", "bayes-global-token-0.4"):
        for seed in (0, 1):
            study_run.run(cache, tmp_path, variant, seed, "tiny", changes=["steps=1"])
    study_run.measure_times(cache, tmp_path / "tiny-full-seed0", repeats=1)
    rows = {row["variant"]: row for row in study_report.report([tmp_path])["tiny"]}
    full = rows["full"]["loss"]
    assert full["n"] == 2
    assert full["interval"] > 0.0
    assert rows["full"]["step_ms"]["n"] == 1
    routed, static = rows["bayes-global-token-0.4"], [rows["local"], rows["full"]]
    # between two static models alone, seed by seed
    assert routed["beyond_static"]["n"] == 2
    low, high = sorted(row["loss"]["mean"] for row in static)
    assert low - 1e-9 <= routed["loss"]["mean"] - routed["beyond_static"]["mean"] <= high + 1e-9
    assert routed["beyond_hybrid"] is None
    assert "counted attention FLOPs" in (tmp_path / "frontier-tiny.svg").read_text()
    assert json.loads((tmp_path / "report.json").read_text())["tiny"]


@pytest.mark.parametrize(
    "name",
    [
        *VARIANTS,
        *(f"bayes-all-token-0.2-{ending}" for ending in ENDINGS if ending not in VALUE_ENDINGS),
        # only what learns on has routes to shuffle meanwhile
        *(f"value-1-5-0.45-{ending}" for ending in sorted(VALUE_ENDINGS - {"shuffled"})),
        "value-1-5-0.45-on-shuffled",
    ],
)
def test_every_variant_is_a_model_of_every_scale(name):
    for scale in SCALES.values():
        config = find_variant(name).model_config(scale, 4096)
        assert len(config.layer_experts) == scale.layers


def test_an_exported_run_loads_with_its_tokenizer_and_says_what_it_is(cache, tmp_path):
    name = "bayes-global-token-0.4"
    study_run.run(cache, tmp_path, name, 0, "tiny", changes=["eval_tokens=128"])
    run, out = tmp_path / f"tiny-{name}-seed0", tmp_path / "exported"
    options = ["--cache", str(cache.folder), "--run", str(run), "--out", str(out)]
    options += ["--commit", "abc1234"]
    assert study_text.main(["export", *options, "--tokens", "128"]) == 0
    model = MetaAttentionForCausalLM.from_pretrained(out)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model.model.layers[3].attention.controller.mlp[0].weight.dtype == torch.float32
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
    assert len(tokenizer) == cache.vocab_size
    assert model.config.eos_token_id == tokenizer.eos_token_id
    card = (out / "README.md").read_text()
    assert "`bayes-global-token-0.4` of commit abc1234, with eval_tokens=128." in card
    assert study_text.main(["export", *options]) == 2


def test_the_committed_card_has_the_commands_that_would_be_written_today():
    folder = Path(__file__).parents[2] / "examples" / "routed-2m"
    commands = CARD.split("```")[1].format(folder="examples/routed-2m")
    assert commands in (folder / "README.md").read_text()


def test_errors_say_what_to_do(tmp_path, capsys):
    arguments = ["--cache", str(tmp_path), "--out", str(tmp_path / "runs"), "--variant", "full"]
    assert study_text.main(["run", *arguments]) == 2
    assert "prepare --data" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="a setting must be one of"):
        SCALES["tiny"].with_changes(["stepz=3"])
    with pytest.raises(ConfigError, match="steps must be a number"):
        SCALES["tiny"].with_changes(["steps=many"])
    with pytest.raises(ConfigError, match="repeat must be >= 1"):
        SCALES["tiny"].with_changes(["repeat=0"])


def test_endings_of_a_variant_add_up():
    base = VARIANTS["bayes-global-token-0.4"]
    variant = find_variant("bayes-global-token-0.4-linear-thompson-sparse")
    assert variant.pattern == base.pattern.replace("S", "R")
    assert (variant.draw, variant.gradient) == ("sample", "chosen")
    assert variant.target == base.target
    assert variant.has_beginning
    deep = find_variant("hybrid-1-5-depth")
    assert (deep.depth_capacity, deep.has_beginning) == (0.5, False)


@pytest.mark.parametrize("name", ["bayes-all-token-0.3", "full-sparse", "bayes-all-token-0.2-x"])
def test_an_unknown_variant_is_refused_with_the_known_ones(name):
    with pytest.raises(ConfigError, match="variant"):
        find_variant(name)


@pytest.mark.parametrize("name", ["value-1-5-0.45-depth", "bayes-all-token-0.2-brief"])
def test_endings_that_would_change_nothing_or_too_much_are_refused(name):
    known = ", ".join(f"-{ending}" for ending in sorted(VALUE_ENDINGS))
    with pytest.raises(ConfigError, match=f"{known} may follow variants that learn values"):
        find_variant(name)


def test_speed_is_that_of_steps_which_run_all_experts(cache, tmp_path, capsys):
    path = tmp_path / "out" / "speed.json"
    given = ["speed", "--cache", str(cache.folder), "--scale", "tiny", "--repeats", "2"]
    given += ["--set", "batch_size=3", "--json", str(path), "--variants"]
    assert study_text.main([*given, "full", "bayes-all-token-0.4-linear"]) == 0
    found = json.loads(path.read_text())
    assert [row["variant"] for row in found["rows"]] == ["full", "bayes-all-token-0.4-linear"]
    for row in found["rows"]:
        tokens = 3 * found["scale"]["length"]
        assert row["tokens_per_s"] == pytest.approx(1e3 * tokens / row["step_ms"])
    # others take as long as their routes make them
    assert study_text.main([*given, "bayes-all-token-0.4-sparse"]) == 2
    assert "train it, then use time" in capsys.readouterr().err


def test_routes_are_no_longer_drawn_at_the_end_if_asked(cache):
    scale = SCALES["tiny"].with_changes(["steps=4", "argmax_from=0.5"])
    training = study_run.Training(cache, VARIANTS["bayes-all-token-0.2"], scale, 0, "cpu")
    draws = []
    for _ in range(4):
        training.step()
        draws.append(training.model.config.training_weights)
    assert draws == ["one_hot", "one_hot", "mean", "mean"]


def test_routes_are_compared_with_the_best_static_model_of_their_cost_and_seed():
    def run(variant, seed, flops, loss):
        hard = {
            "loss": loss,
            "attention_flops": flops,
            "attention_and_controller_flops": flops + 0.02,
            "loss_by_position": {},
            "routing": {"adaptivity": 0.1, "collapsed_layers": {}},
        }
        rest = {"scale": "tiny", "parameters": 1, "tokens": 1, "step_ms": 1.0, "timing": {}}
        return rest | {
            "variant": variant,
            "seed": seed,
            "hard": hard,
            "soft": hard,
            "words": {},
        }

    results = []
    for seed, shift in ((0, 0.0), (1, 0.3)):
        results += [
            run("local", seed, 0.1, 4.0 + shift),
            run("hybrid-1-5", seed, 0.2, 3.0 + shift),
            run("full", seed, 1.0, 3.5 + shift),  # dearer and worse: no part of the line
            run("bayes-wide-kv_head-0.3", seed, 0.15, 3.1 + shift + 0.01 * seed),
            run("bayes-global-token-0.4", seed, 0.6, 3.2 + shift),
            run("bayes-global-token-0.2", seed, 0.05, 3.2 + shift),
        ]
    rows = {row["variant"]: row for row in study_report.summarise(results)["tiny"]}
    between, beyond = rows["bayes-wide-kv_head-0.3"], rows["bayes-global-token-0.4"]
    assert between["beyond_static"]["mean"] == pytest.approx(-0.4 + 0.005)
    # where its controller counts, a dearer static model is as dear; what is static has none
    assert between["beyond_static_and_controller"]["mean"] == pytest.approx(-0.2 + 0.005)
    # seeds differ by 0.3, and variants of a seed hardly
    assert between["beyond_static"]["interval"] < 0.1 < between["loss"]["interval"]
    assert between["beyond_hybrid"]["mean"] == pytest.approx(0.1 + 0.005)
    assert beyond["beyond_static"]["mean"] == pytest.approx(0.2)
    assert rows["bayes-global-token-0.2"]["beyond_static"] is None
    assert rows["hybrid-1-5"]["beyond_hybrid"] is None


def test_a_run_is_paired_with_the_hybrid_of_its_folder(rounds):
    rows = {row["variant"]: row for row in study_report.report(rounds)["tiny"]}
    assert rows["prior-free-wide-kv_head-0.45"]["beyond_hybrid"]["mean"] == pytest.approx(0.01)
    assert rows["hybrid-1-5-x32-late"]["beyond_hybrid"]["mean"] == pytest.approx(0.1)
    assert rows["hybrid-1-5"]["seeds"] == [0, 0, 1, 1]
    assert rows["hybrid-1-5"]["drawn_entropy"] is None
    # of losses 4.01 and 3.71, as metrics have it here
    drawn = rows["prior-free-wide-kv_head-0.45"]["drawn_entropy"]["mean"]
    assert drawn == pytest.approx(3.86 + 2.0)


def test_variants_of_two_rounds_are_compared_by_their_distance_to_the_hybrid(rounds, tmp_path):
    first, second = rounds
    arguments = ["--runs", str(second), "--variant", "prior-free-wide-kv_head-0.45"]
    others = ["--other-runs", str(first), "--others", "hybrid-1-5-x32-late"]
    path = tmp_path / "compare.json"
    assert study_text.main(["compare", *arguments, *others, "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert [run["drawn_beyond_hybrid"] for run in record["runs"]] == pytest.approx([0.01, 0.01])
    [row] = record["against"]
    assert not row["is_paired"]
    assert row["loss"]["mean"] == pytest.approx(0.01 - 0.1)
    assert row["flops_ratio"] == pytest.approx(1.5)
    # half of the way to the hybrid, and six tenths with the controller
    assert row["line"]["mean"] == pytest.approx(0.01 - 0.05)
    assert row["line_with_controller"]["mean"] == pytest.approx(0.01 - 0.04)


def test_variants_of_one_round_are_compared_seed_by_seed(write_run, tmp_path):
    for seed, loss in ((0, 3.0), (1, 3.3)):
        write_run(tmp_path, "hybrid-1-5", seed, loss, 0.2)
        write_run(tmp_path, "prior-free-wide-kv_head-0.45", seed, loss + 0.01 + loss, 0.15)
        write_run(tmp_path, "bayes-wide-kv_head-0.45", seed, loss + 0.03 + loss, 0.15)
    record = study_compare.compare(
        tmp_path, "prior-free-wide-kv_head-0.45", ["bayes-wide-kv_head-0.45"]
    )
    [row] = record["against"]
    assert row["loss"]["mean"] == pytest.approx(-0.02)
    assert row["loss"]["interval"] == pytest.approx(0.0, abs=1e-9)
    assert row["line"] is None


def test_a_comparison_seed_by_seed_leaves_out_other_seeds(write_run, tmp_path):
    for seed, flops in ((0, 0.1), (1, 0.2)):
        write_run(tmp_path, "hybrid-1-5", seed, 3.0, 0.2)
        write_run(tmp_path, "prior-free-wide-kv_head-0.45", seed, 3.0, 0.1)
        write_run(tmp_path, "bayes-wide-kv_head-0.45", seed, 3.0, flops)
    names = "prior-free-wide-kv_head-0.45", ["bayes-wide-kv_head-0.45"]
    [row] = study_compare.compare(tmp_path, *names, seeds=[1])["against"]
    assert row["flops_ratio"] == pytest.approx(0.5)
    assert row["loss"]["n"] == 1


def test_values_of_before_a_model_learnt_on_are_compared_where_they_were_judged(
    write_run, tmp_path
):
    for seed in (0, 1):
        write_run(tmp_path, "hybrid-1-5", seed, 3.0 + seed, 0.2)
        write_run(tmp_path, "value-1-5-0.45-on", seed, 3.1 + seed, 0.15)
    path = tmp_path / "tiny-value-1-5-0.45-on-seed1" / "result.json"
    first = {"with_first_values": {"loss": 4.3, "attention_flops": 0.16}}
    path.write_text(json.dumps(json.loads(path.read_text()) | first))
    runs = study_compare.compare(tmp_path, "value-1-5-0.45-on", ["hybrid-1-5"])["runs"]
    assert [run["first_values_beyond_hybrid"] for run in runs] == [None, pytest.approx(0.3)]
    assert [run["first_values_flops"] for run in runs] == [None, 0.16]


def test_distances_may_be_taken_to_another_static_model(write_run, tmp_path):
    for seed, gap in ((0, 0.1), (1, 0.3)):
        write_run(tmp_path, "hybrid-1-5-heads-0.45", seed, 3.0, 0.1)
        write_run(tmp_path, "value-1-5-0.45", seed, 3.0 - gap, 0.11)
    variant, heads = "value-1-5-0.45", "hybrid-1-5-heads-0.45"
    record = study_compare.compare(tmp_path, variant, [heads], reference=heads)
    assert record["against"][0]["loss"]["mean"] == pytest.approx(-0.2)
    with pytest.raises(DataError, match="and of hybrid-1-5 with"):
        study_compare.compare(tmp_path, variant, [heads])


def test_a_comparison_needs_runs_of_both_with_their_hybrids(rounds):
    first, second = rounds
    with pytest.raises(DataError, match="finished run of full and of hybrid-1-5"):
        study_compare.compare(first, "hybrid-1-5-x32-late", ["full"], second)


def test_a_blind_controller_has_one_route_for_each_head(cache):
    variant = find_variant("bayes-global-kv_head-0.2-blind")
    scale = SCALES["tiny"].with_changes(["steps=40", "routed_from=0", "ramp=0", "kl_weight=1"])
    training = Training(cache, variant, scale, seed=0, device="cpu")
    before = training.model.model.layers[3].attention.controller.mlp[2].weight.clone()
    training.window()
    after = training.model.model.layers[3].attention.controller.mlp[2].weight
    assert not torch.equal(before, after)
    out = training.model.eval()(training.batch(), use_cache=False, output_routing=True)
    weights = out.concentrations[3]  # [B, T, G, E]
    torch.testing.assert_close(weights, weights[:1, :1].expand_as(weights))


def test_a_tilted_variant_is_steered_by_its_cost_and_keeps_a_small_kl(cache):
    variant = find_variant("bayes-global-kv_head-0.2-tilted")
    scale = SCALES["tiny"].with_changes(["steps=40", "routed_from=0", "ramp=0"])
    training = Training(cache, variant, scale, seed=0, device="cpu")
    training.window()
    training._turn_knobs()
    assert training.economy.multiplier > 1.0  # it begins on full attention
    weights = {name: training.knobs[name].item() for name in ("kl_weight", "cost_weight")}
    assert weights["kl_weight"] == pytest.approx(scale.tilted_kl * scale.kl_weight)
    assert weights["cost_weight"] == pytest.approx(scale.cost_weight * training.economy.multiplier)


def test_the_kl_of_a_tilted_variant_may_fade_until_routes_are_taken_or_count_for_nothing(cache):
    scale = SCALES["tiny"].with_changes(
        ["steps=40", "routed_from=0.25", "ramp=0.25", "argmax_from=0.75"]
    )
    kept = scale.tilted_kl * scale.kl_weight

    def kl_weights(ending):
        variant = find_variant(f"bayes-global-kv_head-0.2-{ending}")
        training = Training(cache, variant, scale, seed=0, device="cpu")
        weights = []
        for training.steps_done in (10, 15, 20, 25, 30, 39):
            training._turn_knobs()
            weights.append(training.knobs["kl_weight"].item() / kept)
        return weights

    assert kl_weights("tilted") == pytest.approx([0, 0.5, 1, 1, 1, 1], abs=0.07)
    assert kl_weights("fading") == pytest.approx([0, 0.5, 1, 0.5, 0, 0], abs=0.07)
    assert kl_weights("flat") == [0.0] * 6


def test_a_weak_prior_is_a_tenth_of_the_others():
    strong, weak = (
        find_variant(f"bayes-global-kv_head-0.2-tilted{ending}").model_config(SCALES["tiny"], 64)
        for ending in ("", "-weak")
    )
    assert (strong.prior_strength, weak.prior_strength) == (1.0, 0.1)
