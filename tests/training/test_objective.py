"""The objective: parts that add up, at weights that are scheduled and steered."""

import json
from types import SimpleNamespace

import pytest
import torch

from meta_attention import MetaAttentionConfig
from meta_attention.errors import ConfigError
from meta_attention.training.capture import StepResult
from meta_attention.training.economy import WINDOW
from meta_attention.training.objective import WATCHED, RoutingObjective
from meta_attention.training.schedule import Schedule

RISING = Schedule.parse("0->0.5@0.5:0.75")


def build_objective(num_steps=8, config=None, **options):
    return RoutingObjective(MetaAttentionConfig(**(config or {})), num_steps, **options)


def step_of(loss, cost, believed):
    figures = torch.tensor([loss, cost, believed])
    return StepResult(figures[0], WATCHED, figures, None, None, None)


def on_one_process(tensor, reduction):
    return tensor


def test_weights_left_out_are_those_of_the_config():
    weights = build_objective(config={"kl_weight": 0.7, "cost_weight": 0.2}).weights_after(3)
    assert (weights["kl_weight"], weights["cost_weight"]) == (0.7, 0.2)


def test_a_cost_is_held_up_from_when_it_is_pressed():
    objective = build_objective(kl_weight=RISING, target_cost=0.6, hold=3.0)
    assert [objective.weights_after(n)["hold_weight"] for n in (0, 3, 4)] == [0.0, 0.0, 3.0]


@pytest.mark.parametrize("steered", ["kl_weight", "cost_weight"])
def test_only_the_weight_that_presses_is_steered(steered):
    constant = Schedule.constant(0.5)
    weights = {"kl_weight": constant} | {steered: constant}
    objective = build_objective(100, target_cost=0.5, **weights)
    objective.economy.log_multiplier = 1.0
    after = objective.weights_after(10)
    for name, schedule in weights.items():
        factor = after["multiplier"] if name == steered else 1.0
        assert after[name] == pytest.approx(factor * schedule.end)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kl_weight": 0.0}, "to steer, but kl_weight ends at 0"),
        ({"controller": "prior_free"}, "to steer, but cost_weight ends at 0"),
    ],
)
def test_a_target_without_a_weight_to_steer_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        build_objective(config=config, target_cost=0.5)


def test_shares_of_the_parts_of_a_batch_add_up():
    objective = build_objective(
        config={"depth_weight": 0.5}, cost_weight=0.1, target_cost=0.6, hold=3.0
    )
    names = ("task_loss", "kl", "projected_cost", "routed_cost", "depth_loss")
    out = SimpleNamespace(
        **{name: torch.tensor(2.0 + n) for n, name in enumerate(names)},
        routed_projected_cost=torch.tensor(0.3),
        figures={"divergence": torch.tensor(8.0)},
    )
    loss, figures = objective.loss_of(out, (0.5, 0.1, 3.0))
    assert loss.item() == pytest.approx(2.0 + 0.5 * 3.0 + 0.1 * 4.0 + 3.0 * 0.25 + 0.5 * 6.0)
    assert figures["divergence"] == 8.0
    part, of_part = objective.loss_of(out, (0.5, 0.1, 3.0), task_share=0.25, num_parts=4)
    torch.testing.assert_close(4 * part, loss)
    torch.testing.assert_close({name: 4 * value for name, value in of_part.items()}, figures)


def test_state_survives_json_and_goes_on_as_it_would_have():
    def run(objective, steps):
        for step in steps:
            objective.watch(step_of(1.0, 0.9, 0.8))
            objective.observe_step(step, on_one_process)
        return objective

    def build():
        return build_objective(100, kl_weight=Schedule.constant(0.5), target_cost=0.5)

    whole = run(build(), range(1, 31))
    first, second = run(build(), range(1, WINDOW + 6)), build()
    second.load(json.loads(json.dumps(first.state(on_one_process))))
    assert run(second, range(WINDOW + 6, 31)).economy == whole.economy
    assert whole.economy.multiplier > 1.0


def test_a_state_of_before_beliefs_were_watched_can_be_loaded():
    objective = build_objective(100, kl_weight=Schedule.constant(0.5), target_cost=0.5)
    state = objective.state(on_one_process) | {"watched": [9.0, 4.5]}
    objective.load(state)
    assert objective.state(on_one_process)["watched"] == [9.0, 4.5, 0.0]
