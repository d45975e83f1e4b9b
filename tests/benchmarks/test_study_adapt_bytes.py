"""The byte model that settings of a router are tried on."""

import json

import pytest
import study_adapt_bytes as study
from study_static_heads import divergence_at

from meta_attention.adapt.training import RouterSettings


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    assert study.main(["base", "--out", str(folder), "--steps", "2"]) == 0
    return folder


def test_runs_are_done_once_and_compared_seed_by_seed(out, tmp_path, capsys):
    chosen = ["strength 1", "prior-free"]
    every = ["all", "--out", str(out), "--steps", "2", "--seeds", "2", "--variants", *chosen]
    assert study.main(every) == 0
    assert "4 of 4 runs are missing" in capsys.readouterr().out
    assert study.main(every) == 0
    assert "0 of 4 runs are missing" in capsys.readouterr().out
    path = tmp_path / "rows.json"
    assert study.main(["report", "--runs", str(out), "--json", str(path)]) == 0
    rows = {row["variant"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == chosen
    assert [row["seeds"] for row in rows.values()] == [[0, 1]] * 2
    assert rows["strength 1"]["against_first"] == [0.0, 0.0]
    a, b = rows["prior-free"]["divergence"], rows["strength 1"]["divergence"]
    assert rows["prior-free"]["against_first"] == [x - y for x, y in zip(a, b, strict=True)]


def test_runs_are_compared_with_the_best_static_choices(out, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(study.ROUTING, "experts", ("full", "local"))
    monkeypatch.setattr(study, "MAX_BYTES", 100_000)
    monkeypatch.setattr(study, "FEW_BLOCKS", 1)
    monkeypatch.setattr(study, "MANY_BLOCKS", 2)
    assert study.main(["run", "--out", str(out), "--variant", "blind", "--steps", "2"]) == 0
    assert study.main(["static", "--out", str(out)]) == 0
    assert "the best of 256 static choices" in capsys.readouterr().out
    path, image = tmp_path / "rows.json", tmp_path / "runs.svg"
    files = ["--json", str(path), "--image", str(image)]
    assert study.main(["report", "--runs", str(out), *files]) == 0
    assert "best of all static choices" in image.read_text()
    summary = json.loads(path.read_text())
    (blind,) = (row for row in summary["rows"] if row["variant"] == "blind")
    # a controller that has seen no token has one expert for every head: one of all choices
    record = json.loads((study.folder_of(out, "blind", 0) / "run.json").read_text())
    assert record["metrics"]["adaptivity"] == pytest.approx(0.0, abs=1e-9)
    lowest = divergence_at(study.read_static(out), blind["attention_share"][0])
    assert blind["against_static"] == [blind["divergence"][0] - lowest]
    assert [p["attention_share"] for p in summary["static"]["points"]][-1] == 1.0


def test_a_soft_router_is_cut_to_the_cost_of_the_others(out, monkeypatch):
    monkeypatch.setattr(study, "MAX_BYTES", 100_000)
    metrics = study.run_one(out, "soft, cut", 0, 2)["metrics"]
    assert metrics["attention_share"] == pytest.approx(0.25, abs=0.05)
    assert metrics["divergence"] > 0.0
    kept = json.loads((study.folder_of(out, "soft, cut", 0) / "run.json").read_text())
    assert kept["metrics"] == metrics


def test_variants_change_what_their_names_say():
    settings = {
        name: RouterSettings.of(
            study.ROUTING
            | {key: value for key, value in given.items() if key not in ("is_blind", "routing")}
        )
        for name, given in study.VARIANTS.items()
    }
    assert [name for name, given in study.VARIANTS.items() if "is_blind" in given] == ["blind"]
    assert [name for name, given in study.VARIANTS.items() if "routing" in given] == ["soft, cut"]
    for name, given in settings.items():
        assert (given.controller == "prior_free") == (name == "prior-free")
        assert (given.route_granularity == "token") == (name == "per token")
        if name.startswith("strength"):
            assert name.startswith(f"strength {given.prior_strength:g}")
            assert (given.kl_weight.peak is not None) == ("fading" in name)
            assert (max(given.kl_weight.values) == 0.0) == ("no KL" in name)


def test_bad_input_is_one_line(out, tmp_path, capsys):
    assert study.main(["base", "--out", str(out), "--steps", "2"]) == 2
    assert "has a base already" in capsys.readouterr().err
    (tmp_path / "short.txt").write_text("too short to train on\n")
    assert study.main(["base", "--data", str(tmp_path / "short.txt"), "--out", str(tmp_path)]) == 2
    assert "must have more than 384 bytes" in capsys.readouterr().err
    assert study.main(["static", "--out", str(tmp_path)]) == 2
    assert "has no base; run the command base first" in capsys.readouterr().err
    assert study.main(["report", "--runs", str(tmp_path)]) == 2
    assert "has no finished runs" in capsys.readouterr().err
