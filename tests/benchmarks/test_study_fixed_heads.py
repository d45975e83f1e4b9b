"""Static models whose heads differ: the best experts within a cost, and they stay."""

import itertools
import json

import pytest
import study_fixed_heads
import study_text
import torch
from study_fixed_heads import FixedHeads
from study_training import Training
from study_variants import SCALES, VARIANTS, find_variant

from meta_attention import MetaAttentionForCausalLM
from meta_attention.errors import ConfigError

NAME = "hybrid-1-5-heads-0.45"
# narrow enough for sixteen times the window to be less than everything
WINDOW = "window_size=1"
SCALE = SCALES["tiny"].with_changes([WINDOW])


@pytest.fixture
def heads():
    config = VARIANTS[NAME].model_config(SCALE, 64)
    return FixedHeads(MetaAttentionForCausalLM(config))


def harm(choice):
    """Of narrowing each head, as if heads had nothing to do with one another."""
    # the first is hardly worth its full attention, the second much
    return sum(((0.0, 0.1, 0.3), (0.0, 0.6, 2.0))[head][e] for head, e in enumerate(choice))


@pytest.mark.parametrize("max_choices", [500, 0], ids=["all tried", "one by one"])
def test_the_head_that_is_worth_least_gives_up_full_attention(heads, max_choices, monkeypatch):
    monkeypatch.setattr(study_fixed_heads, "MAX_CHOICES", max_choices)
    dear, middle, cheap = heads.costs[0]
    assert heads.find(harm, cost=dear) == (0, 0)
    assert heads.find(harm, cost=(dear + middle) / 2) == (1, 0)
    assert heads.find(harm, cost=(cheap + dear) / 2) == (2, 0)
    assert heads.find(harm, cost=cheap) == (2, 2)


def test_no_choice_within_the_cost_has_a_smaller_loss(heads):
    table = {c: torch.rand(()).item() for c in itertools.product(range(3), repeat=2)}
    found = heads.find(table.__getitem__, cost=0.5)
    assert heads.cost(found) <= 0.5
    assert table[found] == min(loss for c, loss in table.items() if heads.cost(c) <= 0.5)


def test_a_cost_below_that_of_the_cheapest_experts_is_refused(heads):
    with pytest.raises(ConfigError, match="at least that of the cheapest experts"):
        heads.find(harm, cost=0.01)


def test_heads_must_have_routes_of_their_own():
    config = VARIANTS["bayes-wide-token-0.3"].model_config(SCALE, 64)
    with pytest.raises(ConfigError, match="routed per key-value head"):
        FixedHeads(MetaAttentionForCausalLM(config))


def test_experts_of_heads_are_chosen_by_the_loss_and_training_leaves_them(manual):
    scale = SCALE.with_changes(["steps=20", "lr=0.01"])
    training = Training(manual, VARIANTS[NAME], scale, seed=0, device="cpu")
    training.choose_heads()
    assert training.heads is not None
    chosen = training.heads.get()
    before = {name: p.detach().clone() for name, p in training.model.named_parameters()}
    training.window()
    training.window()
    for name, parameter in training.model.named_parameters():
        # all else has moved
        assert torch.equal(parameter, before[name]) == (".controller." in name), name
    assert training.heads.get() == chosen
    out = training.model.eval()(training.batch(), use_cache=False, output_routing=True)
    taken = out.routing_weights[3]  # [B, T, G, E]
    expected = torch.nn.functional.one_hot(torch.tensor(chosen[0]), 3).float()
    assert torch.equal(taken, expected.expand_as(taken))


def test_a_run_says_which_experts_its_heads_have_and_keeps_them(manual, heads, tmp_path):
    folder = tmp_path / f"tiny-{NAME}-seed0"
    command = ["run", "--cache", str(manual.folder), "--out", str(tmp_path), "--scale", "tiny"]
    settings = ["--set", WINDOW, "steps=20"]
    assert study_text.main([*command, "--variant", NAME, *settings]) == 0
    result = json.loads((folder / "result.json").read_text())
    [chosen] = result["experts_of_heads"]
    assert heads.cost(tuple(chosen)) <= 0.45
    model = MetaAttentionForCausalLM.from_pretrained(folder / "model")
    bias = model.model.layers[3].attention.controller.mlp[-1].bias.view(2, 3)
    assert bias.argmax(dim=-1).tolist() == chosen


def test_it_counts_as_static():
    variant = find_variant(NAME)
    assert not variant.is_routed
    assert variant.beginning == find_variant("hybrid-1-5").beginning
    assert variant.pressure(SCALE).end == 0.0
