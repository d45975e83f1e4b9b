"""Values in the text study: of a model that stays as it is, and of one that learns on."""

import json

import pytest
import study_run
import study_training
import torch
from study_training import Training
from study_variants import SCALES, find_variant

from meta_attention import MetaAttentionForCausalLM
from meta_attention.errors import ConfigError

# sixteen windows are less than a text
SIZES = ["steps=20", "window_size=1", "length=128", "longest=128"]
ON = "value-1-5-0.45-scaled-on"


def rows_of(folder):
    """Losses of the steps, which say whether the same was trained."""
    return [json.loads(row)["loss"] for row in (folder / "metrics.jsonl").read_text().splitlines()]


def test_values_are_learnt_for_a_hybrid_that_stays_as_it_is(manual, tmp_path):
    result = study_run.run(manual, tmp_path, "value-1-5-0.45", 0, "tiny", changes=SIZES)
    hybrid = study_run.run_folder(tmp_path, "tiny", "hybrid-1-5", 0)
    folder = study_run.run_folder(tmp_path, "tiny", "value-1-5-0.45", 0)
    assert result["steps"] == 20
    assert result["prices"]["value_tokens"] == 6 * 2 * 128
    assert (
        result["hard"]["attention_flops"]
        < json.loads((hybrid / "result.json").read_text())["hard"]["attention_flops"]
    )
    assert rows_of(folder) == rows_of(hybrid)
    routed, static = (
        MetaAttentionForCausalLM.from_pretrained(f / "model") for f in (folder, hybrid)
    )
    assert routed.config.price == result["prices"]["price"]
    weights = routed.state_dict()
    for name, weight in static.state_dict().items():
        assert torch.equal(weights[name], weight)
    # values are the same whatever is asked for: learnt once
    other = study_run.run(manual, tmp_path, "value-1-5-0.35", 0, "tiny", changes=SIZES)
    cheaper = study_run.run_folder(tmp_path, "tiny", "value-1-5-0.35", 0)
    assert other["prices"]["value_seconds"] == result["prices"]["value_seconds"]
    assert other["prices"]["price"] >= result["prices"]["price"]
    assert other["hard"]["attention_flops"] <= result["hard"]["attention_flops"]
    for name, weight in (
        MetaAttentionForCausalLM.from_pretrained(cheaper / "model").state_dict().items()
    ):
        assert torch.equal(weights[name], weight)
    # of others they are not
    brief = study_run.run(manual, tmp_path, "value-1-5-0.45-brief", 0, "tiny", changes=SIZES)
    assert brief["prices"]["value_tokens"] == 2 * 128


@pytest.mark.parametrize("ending", ["", "-on"])
def test_values_may_be_learnt_beside_routes_of_the_targets_cost(
    manual, tmp_path, monkeypatch, ending
):
    targets = []

    def spy(model, batches, *, num_steps, texts, target_cost, **options):
        targets.append((num_steps, target_cost, len(texts) > 0))
        return learn_values(
            model,
            batches,
            num_steps=num_steps,
            texts=texts,
            target_cost=target_cost,
            **options,
        )

    learn_values = study_training.learn_values
    monkeypatch.setattr(study_training, "learn_values", spy)
    name = f"value-1-5-0.45{ending}-own"
    result = study_run.run(manual, tmp_path, name, 0, "tiny", changes=SIZES)
    folder = study_run.run_folder(tmp_path, "tiny", name, 0)
    lines = (folder / "values.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert result["prices"]["value_tokens"] == 6 * 2 * 128
    if ending:
        # before the model learns on, and after
        assert targets == [(3, None, False), (1, 0.45, True), (2, 0.45, True)]
        assert steps == [3, 4, 2]
    else:
        assert targets == [(4, None, False), (2, 0.45, True)]
        assert steps == [4, 6]
        # so those of another cost are others
        targets.clear()
        study_run.run(manual, tmp_path, "value-1-5-0.35-own", 0, "tiny", changes=SIZES)
        assert targets == [(4, None, False), (2, 0.35, True)]


def test_a_model_learns_on_with_its_routes_and_what_they_are_worth_is_learnt_again(
    manual, tmp_path
):
    result = study_run.run(manual, tmp_path, ON, 0, "tiny", changes=SIZES)
    folder = study_run.run_folder(tmp_path, "tiny", ON, 0)
    # four steps of values before, two after
    assert result["prices"]["value_tokens"] == 6 * 2 * 128
    learnt = [json.loads(row) for row in (folder / "values.jsonl").read_text().splitlines()]
    assert [(row["after"], row["step"]) for row in learnt] == [(10, 4), (20, 2)]
    before = torch.load(
        tmp_path / "beginnings" / "tiny-LLLFLL-seed0" / "checkpoint.pt", weights_only=True
    )["model"]
    after = MetaAttentionForCausalLM.from_pretrained(folder / "model")
    assert after.config.price == result["prices"]["price"]
    for name, weight in after.state_dict().items():
        assert name not in before or not torch.equal(weight, before[name]), name
    cost = result["hard"]["routing"]["layers"][3]["projected_cost"]
    assert 0.0 < cost < 1.0


def test_it_is_judged_with_the_values_that_it_learnt_on_with_too(manual, tmp_path, monkeypatch):
    judged = study_run.run(manual, tmp_path / "a", ON, 0, "tiny", changes=SIZES)
    learn_values = Training.learn_values

    def learn_first(training, part):
        # once more, on the same weights, they are left as they are
        return [] if training.prices else learn_values(training, part)

    monkeypatch.setattr(Training, "learn_values", learn_first)
    kept = study_run.run(manual, tmp_path / "b", ON, 0, "tiny", changes=SIZES)
    assert judged["with_first_values"]["loss"] == kept["hard"]["loss"]
    assert judged["with_first_values"]["attention_flops"] == kept["hard"]["attention_flops"]
    assert judged["hard"]["loss"] != kept["hard"]["loss"]


def test_steps_of_a_model_that_learns_on_are_timed_at_its_price(manual, tmp_path, monkeypatch):
    study_run.run(manual, tmp_path, ON, 0, "tiny", changes=SIZES)
    folder = study_run.run_folder(tmp_path, "tiny", ON, 0)
    price = MetaAttentionForCausalLM.from_pretrained(folder / "model").config.price
    assert price > 0.0
    timed = []

    def keep(training, repeats):
        timed.append(training.model.config.price)
        return 1.0

    monkeypatch.setattr(study_run, "_step_ms", keep)
    study_run.measure_times(manual, folder, repeats=1)
    assert timed == [price]
    with pytest.raises(ConfigError, match="depend on its routes"):
        study_run.measure_speed(manual, ON, SCALES["tiny"].with_changes(SIZES))


def test_a_model_that_learns_on_goes_on_as_an_unbroken_one(manual, tmp_path, monkeypatch):
    # a price is found every ten steps, and of a checkpoint the newest is known
    monkeypatch.setattr("study_training.REPRICED_EVERY", 10)
    changes = [*SIZES[1:], "steps=40", "save_every=10"]

    def run(out):
        return study_run.run(manual, out, ON, 0, "tiny", changes=changes)

    whole = run(tmp_path / "whole")
    window = Training.window

    def cut(training):
        if training.variant.trains_on and training.steps_done == 30:
            raise KeyboardInterrupt
        return window(training)

    monkeypatch.setattr(Training, "window", cut)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut")
    monkeypatch.setattr(Training, "window", window)
    resumed = run(tmp_path / "cut")
    assert resumed["hard"]["loss"] == whole["hard"]["loss"]
    assert resumed["prices"]["price"] == whole["prices"]["price"]
    folders = [study_run.run_folder(tmp_path / n, "tiny", ON, 0) for n in ("whole", "cut")]
    assert rows_of(folders[0]) == rows_of(folders[1])


def test_a_price_is_found_on_the_same_text_at_any_step_and_steps_draw_as_without(manual):
    scale = SCALES["tiny"].with_changes(SIZES)
    training = Training(manual, find_variant(ON), scale, 0, "cpu")
    first = training._pricing_texts(2)
    torch.rand(3)
    before = torch.get_rng_state()
    again = training._pricing_texts(2)
    assert torch.equal(torch.stack(first), torch.stack(again))
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first[0], first[1])


def test_shuffled_routes_are_as_many_in_other_places_and_only_while_the_model_learns(manual):
    scale = SCALES["tiny"].with_changes(SIZES)
    training = Training(manual, find_variant(f"{ON}-shuffled"), scale, 0, "cpu")
    plain = Training(manual, find_variant(ON), scale, 0, "cpu")
    layer, ids = 3, training.batch()
    with torch.no_grad():
        # worth something to some tokens
        for model in (training.model, plain.model):
            last = model.model.layers[layer].attention.controller.mlp[-1]
            last.weight.normal_(std=3.0, generator=torch.Generator().manual_seed(0))
            last.bias.zero_()

        def routes(model):
            out = model.eval()(ids, use_cache=False, output_routing=True)
            return out.routing_weights[layer].argmax(dim=-1)  # [B, T, G]

        expected = routes(plain.model)
        assert 0.05 < expected.float().mean() < 0.95
        assert torch.equal(routes(training.model), expected)
        training._is_in_step = True
        shuffled = routes(training.model)
    assert not torch.equal(shuffled, expected)
    assert torch.equal(shuffled.sum(dim=1), expected.sum(dim=1))
    # heads of a token together
    codes = (shuffled * torch.tensor([1, 2])).sum(dim=-1), (expected * torch.tensor([1, 2])).sum(-1)
    assert torch.equal(codes[0].sort(dim=1).values, codes[1].sort(dim=1).values)
    training._is_in_step = False
    training.step()
    assert not training._is_in_step


def test_only_what_learns_on_can_be_shuffled():
    with pytest.raises(ConfigError, match="with -on"):
        find_variant("value-1-5-0.45-scaled-shuffled")
