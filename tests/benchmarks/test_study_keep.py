"""What is published of runs: their figures, and nothing that is not of the same settings."""

import json

import pytest
import study_frontier
import study_run
import study_text

ON = "value-1-5-0.45-scaled-on"
SIZES = ["steps=20", "window_size=1", "length=128", "longest=256"]


def kept(runs, path, *compared):
    arguments = ["keep", "--runs", *map(str, runs), "--note", "Two runs", "--json", str(path)]
    arguments += ["--compared", *map(str, compared)] if compared else []
    code = study_text.main(arguments)
    return code, json.loads(path.read_text()) if path.exists() else None


def test_figures_of_runs_and_their_comparison_are_kept(manual, tmp_path):
    runs, path = tmp_path / "runs", tmp_path / "kept" / "found.json"
    results = {
        name: study_run.run(manual, runs, name, 0, "tiny", changes=SIZES)
        for name in ("hybrid-1-5", ON)
    }
    comparison = tmp_path / "compared.json"
    arguments = ["--runs", str(runs), "--variant", ON, "--others", "hybrid-1-5"]
    assert study_text.main(["compare", *arguments, "--json", str(comparison)]) == 0
    code, found = kept([runs], path, comparison)
    assert code == 0
    hard = results[ON]["hard"]
    run = found["runs"][f"tiny-{ON}-seed0"]
    assert run["loss"] == hard["loss"]
    assert run["soft_loss"] == results[ON]["soft"]["loss"]
    assert run["routing"]["adaptivity"] == hard["routing"]["adaptivity"]
    assert run["with_first_values"]["loss"] == results[ON]["with_first_values"]["loss"]
    assert run["prices"] == results[ON]["prices"]
    assert run["long"]["loss"] == results[ON]["long"]["loss"] != run["loss"]
    for text, scored in ((run, hard), (run["long"], results[ON]["long"])):
        [routed] = [layer for layer in scored["routing"]["layers"] if not layer["is_static"]]
        assert text["routing"]["top_share"] == [routed["top_share"]]
    assert "top_share" not in found["runs"]["tiny-hybrid-1-5-seed0"]["routing"]
    assert "prices" not in found["runs"]["tiny-hybrid-1-5-seed0"]
    assert found["compared"] == [json.loads(comparison.read_text())]
    # a run of one seed on one machine, with another size than the scale has
    [machine] = found["machines"]
    assert run["machine"] == 0
    assert machine["torch"] == results[ON]["torch"]
    assert "date" not in machine
    assert found["settings"]["tiny"]["changes"] == {
        "length": 128,
        "window_size": 1,
        "steps": 20,
        "longest": 256,
    }
    # and the figure can be drawn of it
    rows = study_frontier.published_rows([path], "tiny")
    assert [row["variant"] for row in rows] == ["hybrid-1-5", ON]


def test_of_every_run_it_is_known_which_machine_it_is_of(write_run, tmp_path):
    runs, path = tmp_path / "runs", tmp_path / "found.json"
    for seed, commit in ((0, "a"), (1, "b"), (2, "a")):
        write_run(runs, "hybrid-1-5", seed, 3.0, 0.2)
        file = runs / f"tiny-hybrid-1-5-seed{seed}" / "result.json"
        # another time makes no other machine
        machine = {"commit": commit, "date": f"day {seed}"}
        file.write_text(json.dumps(json.loads(file.read_text()) | {"machine": machine}))
    _, found = kept([runs], path)
    assert found["machines"] == [{"commit": "a"}, {"commit": "b"}]
    assert [run["machine"] for run in found["runs"].values()] == [0, 1, 0]
    # files of before do not have it, and are drawn as these are
    rows = study_frontier.published_rows([path], "tiny")
    for run in found["runs"].values():
        del run["machine"]
    path.write_text(json.dumps(found))
    assert study_frontier.published_rows([path], "tiny") == rows


def test_runs_of_other_settings_are_not_mixed(manual, tmp_path, capsys):
    runs, path = tmp_path / "runs", tmp_path / "found.json"
    study_run.run(manual, runs, "hybrid-1-5", 0, "tiny", changes=["steps=2"])
    study_run.run(manual, runs, "hybrid-1-5", 1, "tiny", changes=["steps=3"])
    assert kept([runs], path) == (2, None)
    assert "settings and the text of the runs before it" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["a run twice", "no comparison"])
def test_what_cannot_be_kept_is_refused_and_nothing_is_written(what, write_run, tmp_path, capsys):
    runs, path = tmp_path / "runs", tmp_path / "found.json"
    write_run(runs, "hybrid-1-5", 0, 3.0, 0.2)
    if what == "a run twice":
        assert kept([runs, runs], path) == (2, None)
        assert "must be in one folder only" in capsys.readouterr().err
    else:
        assert kept([runs], path, tmp_path / "missing.json") == (2, None)
        assert "compare or study_worth.py wrote with --json" in capsys.readouterr().err
