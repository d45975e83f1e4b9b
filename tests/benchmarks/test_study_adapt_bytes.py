"""The byte model that settings of a router are tried on."""

import json

import pytest
import study_adapt_bytes as study

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


def test_variants_change_what_their_names_say():
    settings = {
        name: RouterSettings.of(study.ROUTING | given) for name, given in study.VARIANTS.items()
    }
    for name, given in settings.items():
        assert (given.controller == "prior_free") == (name == "prior-free")
        if name != "prior-free":
            assert name.startswith(f"strength {given.prior_strength:g}")
            assert (given.kl_weight.peak is not None) == ("fading" in name)
            assert (max(given.kl_weight.values) == 0.0) == ("no KL" in name)


def test_bad_input_is_one_line(out, tmp_path, capsys):
    assert study.main(["base", "--out", str(out), "--steps", "2"]) == 2
    assert "has a base already" in capsys.readouterr().err
    (tmp_path / "short.txt").write_text("too short to train on\n")
    assert study.main(["base", "--data", str(tmp_path / "short.txt"), "--out", str(tmp_path)]) == 2
    assert "must have more than 384 bytes" in capsys.readouterr().err
    assert study.main(["report", "--runs", str(tmp_path)]) == 2
    assert "has no finished runs" in capsys.readouterr().err
