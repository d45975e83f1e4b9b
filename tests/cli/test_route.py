"""``meta-attention route``."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from meta_attention import MetaAttentionConfig, MetaAttentionForCausalLM
from meta_attention.errors import ConfigError
from meta_attention.training import route
from meta_attention.training.values import with_values

SMALL = ("--length", 32, "--window", 4, "--steps", 3, "--max-bytes", 20000)


@pytest.fixture(autouse=True)
def little_text(monkeypatch):
    monkeypatch.setattr(route, "PRICING_TOKENS", 1024)
    monkeypatch.setattr(route, "JUDGED_TOKENS", 1024)


@pytest.fixture
def static(checkpoint, tmp_path) -> Path:
    folder = tmp_path / "static"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    experts = [["local"], ["full"]]
    config = MetaAttentionConfig.from_pretrained(checkpoint, layer_experts=experts)
    torch.manual_seed(0)
    MetaAttentionForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_static_checkpoint_gets_routes_and_then_another_price(run, static, tmp_path):
    out, cheaper = tmp_path / "routed", tmp_path / "cheaper"
    result = run("route", static, "--out", out, *SMALL, "--target-cost", 0.6)
    assert result.exit_code == 0, result.output
    assert "as it was" in result.output
    assert "for 0.6, written" in result.output
    record = json.loads((out / "route.json").read_text())
    before, written = record["offers"][:2]
    assert before["price"] is None
    assert written["target_cost"] == 0.6
    assert written["attention_flops"] < before["attention_flops"]
    by_head = [offer for offer in record["offers"] if offer["is_by_head"]]
    assert by_head == record["offers"][2:4]
    # heads are few: what is asked for lies between two choices
    assert by_head[0]["routed_cost"] <= 0.6 < by_head[1]["routed_cost"]
    assert result.output.count("for 0.6, by head alone") == 2
    model = MetaAttentionForCausalLM.from_pretrained(out)
    assert model.config.price == written["price"]
    assert model.config.experts_of(1) == ("full", "local:4")

    flags = ("--steps", 0, "--target-cost", 0.4, "--length", 32, "--max-bytes", 20000, "--json")
    again = run("route", out, "--out", cheaper, *flags)
    report = json.loads(again.stdout)
    assert report["offers"][1]["price"] > written["price"]
    other = MetaAttentionForCausalLM.from_pretrained(cheaper)
    assert other.config.price == report["offers"][1]["price"]
    assert report["offers"][0]["price"] == written["price"]
    assert report["model"]["layer_experts"] == [["local"], ["full", "local:4"]]
    refused = run("route", out, "--out", tmp_path / "other", *flags, "--window", 8)
    assert "window_size must not be given" in str(refused.exception)
    # nothing was learnt
    for name, parameter in model.state_dict().items():
        assert torch.equal(parameter, other.state_dict()[name])


def test_a_model_may_learn_on_with_its_routes(run, static, tmp_path):
    flags = (*SMALL, "--target-cost", 0.6, "--train-steps", 3, "--train-lr", 1e-3, "--json")
    result = run("route", static, "--out", tmp_path / "on", *flags)
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["settings"]["train_steps"] == 3
    # whose weights expect routes by token
    assert not any(offer["is_by_head"] for offer in record["offers"])
    assert record["offers"][1]["routed_cost"] == pytest.approx(0.6, rel=0.1)
    before, after = (
        MetaAttentionForCausalLM.from_pretrained(folder).state_dict()
        for folder in (static, tmp_path / "on")
    )
    assert not any(torch.equal(after[name], weight) for name, weight in before.items())


def test_values_are_learnt_beside_full_attention_and_then_beside_routes(
    run, static, tmp_path, monkeypatch
):
    asked, learn = [], route.learn_values

    def spy(model, batches, *, num_steps, target_cost, texts, **options):
        asked.append((num_steps, target_cost))
        learn(
            model,
            batches,
            num_steps=num_steps,
            target_cost=target_cost,
            texts=texts,
            **options,
        )

    monkeypatch.setattr(route, "learn_values", spy)
    flags = ("--length", 32, "--max-bytes", 20000, "--target-cost", 0.6)
    for steps, first in ((1, [(1, None)]), (2, [(1, None), (1, 0.6)]), (6, [(4, None), (2, 0.6)])):
        out = tmp_path / f"routed{steps}"
        result = run("route", static, "--out", out, *flags, "--steps", steps, "--window", 4)
        assert result.exit_code == 0, result.output
        assert asked == first
        asked.clear()
    # of a model that has learnt on, and of one that has values, something is known
    flags = (*flags, "--steps", 4, "--train-steps", 1)
    run("route", static, "--out", tmp_path / "on", *flags, "--window", 4)
    assert asked == [(3, None), (1, 0.6), (2, 0.6)]
    asked.clear()
    run("route", tmp_path / "on", "--out", tmp_path / "again", *flags)
    assert asked == [(4, 0.6), (2, 0.6)]


def test_values_that_a_checkpoint_has_yet_to_learn_begin_beside_full_attention(
    run, static, tmp_path, monkeypatch
):
    routed, asked = tmp_path / "unlearnt", []
    model = MetaAttentionForCausalLM.from_pretrained(static)
    with_values(model, window_size=4, length=32).save_pretrained(routed)
    AutoTokenizer.from_pretrained(static).save_pretrained(routed)
    monkeypatch.setattr(
        route, "learn_values", lambda *_, **given: asked.append(given["target_cost"])
    )
    flags = ("--length", 32, "--max-bytes", 20000, "--target-cost", 0.6)
    result = run("route", routed, "--out", tmp_path / "learnt", *flags, "--steps", 3)
    assert result.exit_code == 0, result.output
    assert asked == [None, 0.6]
    # it has a price, if only of nothing
    assert json.loads((tmp_path / "learnt" / "route.json").read_text())["offers"][0]["price"] == 0.0
    refused = run("route", routed, "--out", tmp_path / "priced", *flags, "--steps", 0)
    assert "steps must be above 0 where a checkpoint has no values" in str(refused.exception)


@pytest.mark.parametrize(("tokens", "few"), [(1024, 1), (2048, 2)])
def test_while_something_is_learnt_prices_are_found_on_an_eighth_of_the_text(
    run, static, tmp_path, monkeypatch, tokens, few
):
    monkeypatch.setattr(route, "PRICING_TOKENS", tokens)
    learning, judging = [], []
    learn_values, learn_on, find_price = route.learn_values, route.learn_on, route.find_price

    def learn(model, batches, *, texts, **options):
        learning.append(texts)
        learn_values(model, batches, texts=texts, **options)

    def go_on(model, batches, texts, *args, **options):
        learning.append(texts)
        learn_on(model, batches, texts, *args, **options)

    def find(model, texts, *args, **options):
        judging.append(texts)
        return find_price(model, texts, *args, **options)

    for name, spy in (("learn_values", learn), ("learn_on", go_on), ("find_price", find)):
        monkeypatch.setattr(route, name, spy)
    flags = (*SMALL, "--target-cost", 0.6, "--train-steps", 1)
    result = run("route", static, "--out", tmp_path / "routed", *flags)
    assert result.exit_code == 0, result.output
    assert len(learning) == 4
    for texts in learning:
        assert len(texts) == few
        assert all(ids is judging[0][8 * i] for i, ids in enumerate(texts))
    # in blocks of 32, four at a time
    assert {len(texts) for texts in judging} == {tokens // 128}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--target-cost", 0.01), "target_cost must be above"),
        (("--length", 65), "length must be at most 64"),
        (("--steps", 0), "steps must be above 0"),
        (("--train-steps", 2, "--train-lr", 0), "train_lr must be above 0"),
    ],
)
def test_errors_come_before_anything_is_learnt_or_written(run, static, tmp_path, flags, message):
    out = tmp_path / "routed"
    result = run("route", static, "--out", out, *SMALL, *flags)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
    assert not out.exists()


def test_a_folder_with_something_in_it_is_left_alone(run, static, checkpoint):
    result = run("route", static, "--out", checkpoint, *SMALL)
    assert "must be a new or an empty folder" in str(result.exception)


def test_a_routed_checkpoint_has_nothing_to_learn_values_for(run, checkpoint, tmp_path):
    result = run("route", checkpoint, "--out", tmp_path / "routed", *SMALL)
    assert "a model whose layers are static" in str(result.exception)
