"""Finished hybrids that learn on with routes by value, beside the same without."""

import json

import pytest
import study_learn_on
import study_run

SIZES = ["steps=10", "window_size=1", "length=128", "longest=128"]


@pytest.fixture(scope="module")
def hybrid(manual, tmp_path_factory):
    """Folder of runs with one finished hybrid."""
    runs = tmp_path_factory.mktemp("runs")
    study_run.run(manual, runs, "hybrid-1-5", 0, "tiny", changes=SIZES)
    return runs


@pytest.fixture
def arguments(manual, hybrid, tmp_path, monkeypatch):
    # 600 steps of values otherwise
    monkeypatch.setattr(study_learn_on, "VALUE_STEPS", 4)
    options = ["--cache", str(manual.folder), "--runs", str(hybrid), "--scale", "tiny"]
    return [*options, "--train-steps", "3", "--json", str(tmp_path / "on.json"), "--seeds", "0"]


def test_a_seed_has_the_hybrid_and_routes_both_as_they_were_and_learnt_on(
    arguments, tmp_path, monkeypatch
):
    asked, learn = [], study_learn_on.learn_values

    def spy(*args, num_steps, target_cost, **options):
        asked.append((num_steps, target_cost))
        learn(*args, num_steps=num_steps, target_cost=target_cost, **options)

    monkeypatch.setattr(study_learn_on, "learn_values", spy)
    assert study_learn_on.main(arguments) == 0
    record = json.loads((tmp_path / "on.json").read_text())
    rows = record["seeds"]["0"]
    # beside full attention, beside own routes, and so of a model that has learnt on
    assert asked == [(3, None), (1, 0.45), (2, 0.45)]
    static, static_on, valued, valued_on = (
        rows[name]
        for name in (
            study_learn_on.STATIC,
            study_learn_on.STATIC_ON,
            study_learn_on.VALUED,
            study_learn_on.VALUED_ON,
        )
    )
    # no routes: full attention as the hybrid has it, of other weights
    assert static_on["attention_flops"] == pytest.approx(static["attention_flops"])
    assert static_on["loss"] != static["loss"]
    assert static["price"] is None
    for row in (valued, valued_on):
        assert row["attention_flops"] < static["attention_flops"]
        assert row["price"] > 0.0
    assert record["machine"]["torch"]


def test_a_seed_that_is_there_is_not_run_again_and_other_settings_are_refused(
    arguments, tmp_path, capsys
):
    assert study_learn_on.main(arguments) == 0
    before = (tmp_path / "on.json").read_text()
    assert study_learn_on.main(arguments) == 0
    assert (tmp_path / "on.json").read_text() == before
    assert study_learn_on.main([*arguments, "--train-lr", "0.5"]) == 2
    assert "give another --json" in capsys.readouterr().err
    # of before values were learnt beside routes
    record = json.loads(before)
    record.pop("own_share", None)
    (tmp_path / "on.json").write_text(json.dumps(record))
    assert study_learn_on.main(arguments) == 2
    assert "give another --json" in capsys.readouterr().err


def test_a_hybrid_that_is_not_finished_is_one_line(arguments, capsys):
    assert study_learn_on.main([*arguments[:-1], "7"]) == 2
    assert "must be a finished run of study_text.py" in capsys.readouterr().err


def test_a_cost_that_cannot_be_is_refused_before_anything_is_learnt(arguments, capsys, monkeypatch):
    monkeypatch.setattr(study_learn_on, "learn_on", None)
    assert study_learn_on.main([*arguments, "--target-cost", "0.001"]) == 2
    assert "target_cost must be above" in capsys.readouterr().err


def test_bad_input_is_one_line_and_leaves_files_as_they_were(arguments, tmp_path, capsys):
    assert study_learn_on.main([*arguments, "--train-steps", "0"]) == 2
    assert "--train-steps must be >= 1" in capsys.readouterr().err
    path = tmp_path / "on.json"
    path.write_text("notes")
    assert study_learn_on.main(arguments) == 2
    assert "must be a file that this wrote" in capsys.readouterr().err
    assert path.read_text() == "notes"
