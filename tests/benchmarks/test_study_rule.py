"""Routes by a rule: full attention where the last two tokens stood together far back."""

import json

import pytest
import study_text
import torch
from study_rule import BY_RULE, RuledHeads, follow_rule
from study_training import Training
from study_variants import SCALES, VARIANTS, find_variant

from meta_attention import MetaAttentionForCausalLM
from meta_attention.controller import last_seen
from meta_attention.errors import ConfigError

HEADS = "rule-1-5-heads-0.45"
# windows of 16 and 1, of 64 tokens
WINDOW = "window_size=1"
SCALE = SCALES["tiny"].with_changes([WINDOW])


def few_tokens():
    """So few that many runs come again, near and far."""
    return torch.randint(8, (4, 64), generator=torch.Generator().manual_seed(0))


def test_tokens_take_full_attention_where_their_run_is_beyond_the_window():
    model = MetaAttentionForCausalLM(VARIANTS["rule-wide"].model_config(SCALE, 64)).eval()
    follow_rule(model)
    ids = few_tokens()
    out = model(ids, use_cache=False, output_routing=True)
    expert = out.routing_weights[3].argmax(dim=-1)
    distance = last_seen(ids, 2)[..., 1]
    assert torch.equal(expert == 0, distance >= 16)
    assert torch.equal(expert == 1, distance < 16)
    assert 0.05 < (expert == 0).float().mean() < 0.9


def test_nothing_of_the_rule_learns_and_nothing_presses():
    variant = find_variant("rule-wide")
    model = MetaAttentionForCausalLM(variant.model_config(SCALE, 64))
    follow_rule(model)
    attention = model.model.layers[3].attention
    for module in (attention.controller, attention.recurrence):
        assert not any(p.requires_grad for p in module.parameters())
    assert variant.is_routed
    assert variant.pressure(SCALE).end == 0.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("prior-free-wide-kv_head-0.45", "recurrence"),
        ("bayes-global-token-0.4-recurrence", "two"),
        ("prior-free-wide-kv_head-0.45-recurrence", "one route for all heads"),
    ],
)
def test_the_rule_is_refused_where_it_says_nothing(name, message):
    model = MetaAttentionForCausalLM(find_variant(name).model_config(SCALE, 64))
    with pytest.raises(ConfigError, match=message):
        follow_rule(model)


@torch.no_grad()
def test_heads_follow_the_rule_apart_from_others():
    model = MetaAttentionForCausalLM(VARIANTS[HEADS].model_config(SCALE, 64)).eval()
    heads, ids = RuledHeads(model), few_tokens()
    is_far = last_seen(ids, 2)[..., 1] >= 16
    for choice in ((BY_RULE, 0), (2, BY_RULE), (1, 1), (BY_RULE, BY_RULE)):
        heads.set(choice)
        assert heads.get() == [list(choice)]
        out = model(ids, use_cache=False, output_routing=True)
        taken = out.routing_weights[3].argmax(dim=-1)  # [B, T, G]
        for head, expert in enumerate(choice):
            expected = torch.where(is_far, 0, 1) if expert == BY_RULE else expert
            assert (taken[..., head] == expected).all()


@torch.no_grad()
def test_following_the_rule_costs_what_its_routes_cost():
    model = MetaAttentionForCausalLM(VARIANTS[HEADS].model_config(SCALE, 64)).eval()
    heads, ids = RuledHeads(model), few_tokens()
    heads.look_at(ids)
    # once more: nothing is left of what was looked at before
    heads.look_at(ids)
    assert [len(costs) for costs in heads.costs] == [4, 4]
    for choice in ((BY_RULE, 0), (1, BY_RULE)):
        heads.set(choice)
        out = model(ids, use_cache=False, output_routed_cost=True)
        assert heads.cost(choice) == pytest.approx(out.routed_cost.item(), rel=1e-5)


def test_a_run_keeps_the_experts_that_were_best_where_it_began_to_route(manual, tmp_path):
    command = ["run", "--cache", str(manual.folder), "--out", str(tmp_path), "--scale", "tiny"]
    settings = ["--set", WINDOW, "steps=20", "save_every=6"]
    assert study_text.main([*command, "--variant", HEADS, *settings]) == 0
    folder = tmp_path / f"tiny-{HEADS}-seed0"
    [chosen] = json.loads((folder / "result.json").read_text())["experts_of_heads"]
    saved = MetaAttentionForCausalLM.from_pretrained(folder / "model")
    controller = saved.model.layers[3].attention.controller
    for head, expert in enumerate(chosen):
        follows = controller.mlp[-1].weight.view(2, 3, -1)[head].any()
        assert bool(follows) == (expert == BY_RULE)
    # as a run does it, of the model that it goes on from
    training = Training(manual, VARIANTS[HEADS], SCALE.with_changes(settings[1:]), 0, "cpu")
    training.load(tmp_path / "beginnings" / "tiny-LLLFLL-seed0" / "checkpoint.pt")
    training.choose_heads()
    assert training.heads is not None
    assert training.heads.get() == [chosen]
    assert training.heads.cost(tuple(chosen)) <= 0.45


def test_what_heads_have_by_the_rule_is_not_learnt_or_pressed(manual):
    scale = SCALE.with_changes(["steps=20", "lr=0.01"])
    training = Training(manual, VARIANTS[HEADS], scale, seed=0, device="cpu")
    assert training.heads is not None
    assert training.economy.target is None
    training.heads.set((BY_RULE, 1))
    before = {name: p.detach().clone() for name, p in training.model.named_parameters()}
    training.window()
    training.window()
    for name, parameter in training.model.named_parameters():
        is_of_router = ".controller." in name or ".recurrence." in name
        assert torch.equal(parameter, before[name]) == is_of_router, name
    assert training.heads.get() == [[BY_RULE, 1]]
