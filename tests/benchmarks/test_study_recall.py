"""The recall study, at sizes a CPU runs in seconds."""

import json
import sys
import time

import pytest
import study_recall
import study_recall_report
from study_jobs import Job, run_side_by_side

from meta_attention.errors import ConfigError, DataError
from meta_attention.training.logs import read_metrics


@pytest.fixture(autouse=True)
def few_sequences(monkeypatch):
    monkeypatch.setattr("meta_attention.training.tasks.NUM_HELD_OUT", 6)
    monkeypatch.setattr(study_recall, "NUM_SEQUENCES", 8)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A static run and two routed ones, one of them soft in training."""
    folder = tmp_path_factory.mktemp("recall")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meta_attention.training.tasks.NUM_HELD_OUT", 6)
        patch.setattr(study_recall, "NUM_SEQUENCES", 8)
        for variant in ("full", "one-hot", "paper"):
            arguments = ["--out", str(folder), "--scale", "tiny", "--variant", variant]
            assert study_recall.main(["run", *arguments]) == 0
    return folder


def result_of(runs, variant):
    return json.loads((runs / f"tiny-{variant}-seed0" / "result.json").read_text())


@pytest.mark.parametrize("variant", study_recall.VARIANTS)
def test_every_variant_is_a_run_of_every_scale(variant):
    for scale in study_recall.SCALES:
        settings = study_recall.settings_of(variant, 3, scale, [])
        config = settings.model_config(vocab_size=500)
        assert settings.seed == 3
        assert config.short_conv == 3
        routed = [len(config.experts_of(i)) > 1 for i in range(settings.layers)]
        static = ("full", "local", "linear", "hybrid", "hybrid-full-first")
        assert all(routed) == (variant not in static)


def test_trainings_differ_in_what_they_are_named_for():
    of = {v: study_recall.settings_of(v, 0, "full", []) for v in study_recall.VARIANTS}
    ways = ("one-hot", "thompson", "argmax")
    assert [of[name].training_weights for name in ways] == ["one_hot", "sample", "mean"]
    for name in (*ways, "prior-free"):
        assert of[name].routing == "hard"
        assert of[name].start_expert == "full"
    # the same pressure, on the cost in place of the KL
    assert of["prior-free"].cost_weight == of["one-hot"].kl_weight
    assert (of["paper"].routing, of["paper"].kl_weight.start) == ("soft", 1.0)
    assert of["paper"].start_expert is None


def test_the_report_knows_every_variant():
    assert tuple(study_recall.VARIANTS) == study_recall_report.ORDER


def test_what_a_user_sets_wins_over_scale_and_variant():
    changes = ["steps=7", "kl_weight=0.5", "routing=hard"]
    settings = study_recall.settings_of("paper", 0, "tiny", changes)
    assert (settings.steps, settings.kl_weight.end, settings.routing) == (7, 0.5, "hard")
    assert settings.training_weights == "sample"
    # but a folder is named by its seed
    with pytest.raises(ConfigError, match="--seed"):
        study_recall.settings_of("paper", 0, "tiny", ["seed=3"])


def test_a_run_is_judged_with_one_expert_per_token(runs):
    static, paper = result_of(runs, "full"), result_of(runs, "paper")
    assert static["hard"]["any_layer"]["full_share"] == 1.0
    assert static["as_trained"] is None
    # hard routes have no entropy; those of training had
    assert paper["hard"]["routing_entropy"] == pytest.approx(0.0, abs=1e-6)
    assert paper["as_trained"]["routing_entropy"] > 1.0
    assert paper["hard"]["num_sequences"] == 8


def test_a_run_that_was_cut_off_goes_on(runs, tmp_path):
    def run(**given):
        return study_recall.run(tmp_path, "one-hot", 0, "tiny", **given)

    folder = tmp_path / "tiny-one-hot-seed0"
    assert run(stop_at=0.0) is None
    assert (folder / "checkpoint-2").is_dir()
    assert not (folder / "result.json").exists()
    resumed = run()
    assert resumed["hard"] == result_of(runs, "one-hot")["hard"]
    steps = [row["step"] for row in read_metrics(folder) if row["kind"] == "train"]
    assert steps == sorted(set(steps))
    # what is done is not done again
    assert run()["seconds"] == resumed["seconds"]


def test_a_run_does_not_go_on_with_other_settings(runs):
    with pytest.raises(ConfigError, match="holds a run whose lr is"):
        study_recall.run(runs, "full", 0, "tiny", changes=["lr=0.1"])


def test_a_report_has_a_row_per_variant_a_table_and_a_figure(runs):
    summary = study_recall_report.report(runs)
    assert [row["variant"] for row in summary["variants"]] == ["full", "one-hot", "paper"]
    assert json.loads((runs / "recall.json").read_text()) == summary
    table = (runs / "recall.md").read_text()
    assert table.count("\n| ") == 3
    assert (runs / "recall.png").stat().st_size > 0


def figures(far_accuracy, full_share, precision):
    layer = {"is_static": False, "experts": ["full"], "top_share": {"full": 1.0}}
    layer |= {"full_share": full_share, "precision": precision, "recall": 1.0}
    hard = dict.fromkeys(("accuracy", "near_accuracy", "full_share", "projected_cost"), 0.5)
    hard |= {"far_accuracy": far_accuracy, "need_share": 0.06, "adaptivity": 0.2, "kl": 1.0}
    hard |= {"any_layer": layer, "layers": [layer]}
    result = {"variant": "one-hot", "seed": 0, "scale": "full", "steps": 1, "seconds": 1.0}
    result |= {"device": "cpu", "regret": None, "hard": hard, "as_trained": None}
    return study_recall_report.figures_of(result)


@pytest.mark.parametrize(
    ("far_accuracy", "full_share", "precision", "meets"),
    [
        (0.99, 0.09, 0.95, True),
        (0.98, 0.09, 0.95, False),
        (0.99, 0.10, 0.95, False),
        (0.99, 0.09, 0.94, False),
        (0.99, 0.0, None, False),
    ],
)
def test_a_run_meets_all_targets_or_none(far_accuracy, full_share, precision, meets):
    assert figures(far_accuracy, full_share, precision)["meets_targets"] is meets


def test_runs_come_seed_by_seed_and_those_that_are_done_are_left_out(runs):
    jobs = study_recall.missing_jobs(runs, "tiny", ["full", "argmax", "paper"], range(2))
    expected = [("argmax", 0), ("full", 1), ("argmax", 1), ("paper", 1)]
    assert [(job.variant, *job.seeds) for job in jobs] == expected


def test_a_job_that_hangs_is_killed_and_has_failed(tmp_path, capsys):
    job = Job("stuck", (0,), (tmp_path / "stuck",), "result.json")
    sleep = ["-c", "import time; print('begun', flush=True); time.sleep(600)"]
    failed = run_side_by_side([job], lambda *_: sleep, parallel=1, time_limit=1.0, patience=1.0)
    assert failed == 1
    assert "stuck seed 0 FAILED" in capsys.readouterr().out


def test_jobs_run_side_by_side_and_are_told_apart(tmp_path, capsys):
    scripts = {
        "good": "import time; time.sleep(0.5); open('{0}/result.json', 'w'); print('well')",
        "bad": "raise SystemExit('no luck')",
        "slow": "print('later')",
    }
    jobs = [Job(name, (0,), (tmp_path / name,), "result.json") for name in scripts]
    begin = time.time()
    failed = run_side_by_side(
        jobs,
        lambda job, stop_at: ["-c", scripts[job.variant].format(job.log.parent)],
        parallel=3,
        time_limit=60.0,
    )
    assert failed == 1
    assert time.time() - begin < 30.0
    said = capsys.readouterr().out
    assert "good seed 0: well" in said
    assert "bad seed 0 FAILED" in said
    assert "no luck" in said
    assert "slow seed 0 cut off: later" in said
    assert "1 finished, 1 failed, 1 left; run the same command again" in said
    # when time is over none begins
    assert run_side_by_side(jobs, lambda *_: [sys.executable], parallel=1, time_limit=0.0) == 0
    assert "0 finished, 0 failed, 3 left" in capsys.readouterr().out


def test_errors_say_what_to_do(runs, tmp_path, capsys):
    assert study_recall.main(["report", "--runs", str(tmp_path)]) == 2
    assert "must have a finished one" in capsys.readouterr().err
    arguments = ["--out", str(tmp_path), "--variant", "full", "--set", "stepz=3"]
    assert study_recall.main(["run", *arguments]) == 2
    assert "a setting must be one of" in capsys.readouterr().err
    for scale in ("tiny", "small"):
        (tmp_path / scale).mkdir()
        (tmp_path / scale / "result.json").write_text(json.dumps({"scale": scale}))
    with pytest.raises(DataError, match="of one scale"):
        study_recall_report.read_results(tmp_path)
