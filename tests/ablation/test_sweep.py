"""Many runs: what is planned, kept apart, stopped and gone on with."""

import json
from dataclasses import replace

import pytest

from meta_attention.ablation.run import Job, execute
from meta_attention.ablation.sweep import (
    PLAN_FILE,
    make_plan,
    read_plan,
    run_jobs,
    steps_done,
)
from meta_attention.ablation.variants import VARIANTS
from meta_attention.errors import ConfigError, DataError


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_plan_has_every_variant_with_every_seed_the_long_runs_first(base, tmp_path):
    plan = make_plan(tmp_path / "out", base, seeds=2)
    names = [(job.variant.name, job.seed) for job in plan.jobs]
    assert len(names) == 18
    assert {name for name, _ in names} == set(VARIANTS)
    assert [seed for _, seed in names] == [0] * 9 + [1] * 9
    assert plan.jobs[8].variant.is_static
    assert not plan.jobs[0].variant.is_static
    assert len({job.folder for job in plan.jobs}) == 18


def test_layouts_are_variants_of_their_own_where_they_differ(base, tmp_path):
    plan = make_plan(
        tmp_path / "out", base, variants=["bayesian", "full"], layouts=("own", "shared")
    )
    assert [v.name for v in plan.variants] == ["bayesian", "full", "bayesian-shared"]


def test_experiments_share_their_runs(base, tmp_path):
    plan = make_plan(tmp_path / "out", base, experiments=["kl-weight", "prior-floor", "ablation"])
    names = [job.variant.name for job in plan.jobs]
    assert names.count("bayesian") == 1
    assert {"kl-weight-0", "prior-floor-0.5", "hybrid"} <= set(names)


def test_more_can_be_added_to_a_folder(base, tmp_path):
    out = tmp_path / "out"
    make_plan(out, base, variants=["full"], seeds=3).save()
    make_plan(out, base, variants=["local"], seeds=1).save()
    make_plan(out, base, experiments=["kl-weight"]).save()
    record = read_plan(out)
    assert list(record["experiments"]["ablation"]["variants"]) == ["full", "local"]
    assert record["experiments"]["kl-weight"]["variants"]["kl-weight-0.1"] == 0.1
    assert record["seeds"] == 3


def test_other_sizes_need_another_folder(base, tmp_path):
    out = tmp_path / "out"
    make_plan(out, base).save()
    before = contents(out)
    for other, message in (
        (make_plan(out, replace(base, lr=0.5)), "runs whose lr is 0.01, not 0.5"),
        (make_plan(out, base, is_short=True), "runs whose is_short is False, not True"),
    ):
        with pytest.raises(ConfigError, match=message):
            other.save()
    assert contents(out) == before


def test_a_plan_from_before_a_setting_had_its_default(base, tmp_path):
    out = tmp_path / "out"
    make_plan(out, base).save()
    record = json.loads((out / PLAN_FILE).read_text())
    assert record["settings"].pop("train_bytes") is None
    record["settings"].pop("prior_strength")
    (out / PLAN_FILE).write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=r"runs whose prior_strength is 1.0, not 2.0"):
        make_plan(out, replace(base, prior_strength=2.0)).save()
    make_plan(out, base).save()
    assert json.loads((out / PLAN_FILE).read_text())["settings"]["train_bytes"] is None


def test_a_folder_with_something_else_is_left_alone(base, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"must be a new or empty folder, .*something else"):
        make_plan(tmp_path, base).save()
    with pytest.raises(ConfigError, match="must be a new or empty folder"):
        make_plan(tmp_path / "notes.txt", base).save()
    assert contents(tmp_path) == {"notes.txt": b"mine"}
    (tmp_path / PLAN_FILE).write_text("[]")
    with pytest.raises(ConfigError, match="must be readable"):
        make_plan(tmp_path, base).save()


def test_a_run_of_other_settings_in_the_place_of_one_is_refused(base, tmp_path):
    plan = make_plan(tmp_path / "out", base, variants=["full"])
    (job,) = plan.jobs
    job.folder.mkdir(parents=True)
    other = replace(job.settings, hidden_size=32).to_dict()
    (job.folder / "run.json").write_text(json.dumps({"settings": other}))
    plan.out.joinpath(PLAN_FILE).write_text(json.dumps(plan.to_dict()))
    with pytest.raises(ConfigError, match="a run whose hidden_size is 32, not 16"):
        plan.save()


def test_bad_names_and_texts_are_refused_before_anything_runs(base, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="one of bayesian"):
        make_plan(out, base, variants=["fulll"])
    with pytest.raises(ConfigError, match="one of ablation"):
        make_plan(out, base, experiments=["windows"])
    with pytest.raises(DataError):
        make_plan(out, replace(base, data=(str(tmp_path / "missing.txt"),)))
    with pytest.raises(ConfigError, match="without the experiment ablation"):
        make_plan(out, base, experiments=["window"], variants=["full"])
    with pytest.raises(ConfigError, match="seeds must be >= 1"):
        make_plan(out, base, seeds=0)
    assert not out.exists()


def test_text_that_cannot_be_seen_as_often_is_left_out_and_said(base, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The keeper counted the ships. " * 10)  # 300 bytes, where 512 are seen
    plan = make_plan(tmp_path / "out", replace(base, data=(str(text),)), experiments=["repetition"])
    names = [v.name for v in plan.variants]
    # once needs more text; eight times would leave a single batch of it
    for repeats, is_run in ((1, False), (2, True), (4, True), (8, False), (32, False)):
        assert (f"repetition-bayesian-{repeats}" in names) == is_run
        assert (f"repetition-bayesian-{repeats}," in plan.notes[0]) == (not is_run)


def test_steps_of_a_run_are_read_from_the_end_of_its_log(base, tmp_path):
    job = Job(VARIANTS["full"], 0, base, tmp_path)
    assert steps_done(job) == (0, {})
    rows = [json.dumps({"step": step, "pad": "x" * 300}) for step in range(100)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + '\n{"step": 7')
    assert steps_done(job)[0] == 99


def test_processes_that_are_stopped_go_on_and_end_with_the_figures_of_one(base, tmp_path):
    """Three runs in two processes, ended after the first; then what is missing."""
    plan = make_plan(tmp_path / "out", base, variants=["bayesian-sampled", "full", "local"])
    plan.save()
    ended = run_jobs(plan.jobs, 2)
    _, reason = next(ended)
    assert reason is None
    ended.close()
    assert 1 <= sum(job.is_done for job in plan.jobs) < 3
    assert all(reason is None for _, reason in run_jobs(plan.jobs, 2))
    assert all(job.is_done for job in plan.jobs)
    assert list(run_jobs(plan.jobs, 2)) == []
    for job in plan.jobs:
        alone = execute(replace(job, folder=tmp_path / "alone" / job.variant.name))
        result = execute(job)
        del alone["machine"], result["machine"]
        assert json.loads(json.dumps(alone)) == result


def test_a_run_that_fails_does_not_stop_the_others(base, tmp_path):
    plan = make_plan(tmp_path / "out", base, variants=["full", "local"])
    good, bad = plan.jobs
    bad = replace(bad, settings=replace(bad.settings, batch_size=100_000))
    ended = {job.variant.name: reason for job, reason in run_jobs([good, bad], 1)}
    assert ended[good.variant.name] is None
    assert "must fill a batch" in ended[bad.variant.name]
