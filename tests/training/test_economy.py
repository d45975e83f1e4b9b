"""Economy: begins when the loss has settled, and steers to the cost that was asked for."""

import json
import math

import pytest
import torch

from meta_attention import MetaAttentionConfig
from meta_attention.errors import ConfigError
from meta_attention.training.economy import (
    GAIN,
    MAX_MOVE,
    MAX_MULTIPLIER,
    PATH,
    PATH_GAIN,
    WINDOW,
    Economy,
    check_target,
)
from meta_attention.training.schedule import Schedule

NOW = Schedule.constant(0.1)
LATE = Schedule(0.0, 0.1, 0.5, 0.75)
SETTLED = Schedule.parse("0->0.1@settled+100s")


def observe(economy, losses=(), costs=(), step=0):
    """Windows one after the other; returns the steps done."""
    for index in range(max(len(losses), len(costs))):
        step += WINDOW
        loss = losses[index] if losses else 1.0
        cost = costs[index] if costs else 1.0
        economy.observe(step, loss, cost)
    return step


def settling(**kwargs):
    defaults = {"num_steps": 1000, "settle_drop": 0.1, "settle_steps": 30}
    return Economy(pressure=SETTLED, waiting=(SETTLED,), **(defaults | kwargs))


def test_without_target_or_waiting_there_is_nothing_to_watch():
    economy = Economy(1000, LATE)
    assert not economy.is_watched
    assert economy.multiplier == 1.0
    assert economy.value(LATE, 999) == 0.1
    assert Economy(1000, LATE, target=0.2).is_watched
    assert settling().is_watched


def test_a_loss_that_falls_has_not_settled_and_one_that_stands_has():
    economy = settling()
    falling = [0.9**n for n in range(20)]
    step = observe(economy, falling)
    assert economy.settled is None
    assert economy.value(SETTLED, step) == 0.0
    # three windows before and three now: the fourth that stands still leaves a fall of 6% in all
    step = observe(economy, [falling[-1]] * 3, step=step)
    assert economy.settled is None
    step = observe(economy, [falling[-1]] * 2, step=step)
    assert economy.settled == 240
    values = [economy.value(SETTLED, 240 + n) for n in (0, 50, 100, 500)]
    assert values == pytest.approx([0.0, 0.05, 0.1, 0.1])
    # once is enough, whatever the loss does later
    observe(economy, falling, step=step)
    assert economy.settled == 240


def test_noise_within_the_windows_compared_does_not_settle_a_falling_loss():
    economy = settling(settle_steps=40)
    observe(economy, [0.95**n * (1.15 if n % 2 else 0.85) for n in range(30)])
    assert economy.settled is None


def test_settling_needs_both_windows_full():
    economy = settling()
    observe(economy, [1.0] * 5)
    assert economy.settled is None
    observe(economy, [1.0], step=50)
    assert economy.settled == 60


def test_a_run_that_never_settles_is_pressed_in_time_for_its_end():
    economy = settling(num_steps=1001)
    observe(economy, [0.8**n for n in range(100)])
    assert economy.settled == 900
    assert economy.value(SETTLED, 1000) == pytest.approx(0.1)


def test_the_default_looks_at_a_tenth_of_training():
    economy = settling(settle_steps=None, num_steps=500)
    observe(economy, [1.0] * 9)
    assert economy.settled is None
    observe(economy, [1.0], step=90)
    assert economy.settled == 100


def test_nothing_is_steered_before_the_ramp_begins():
    economy = Economy(1000, LATE, target=0.2)
    observe(economy, costs=[1.0] * 49)
    assert economy.multiplier == 1.0
    observe(economy, costs=[1.0] * 2, step=490)
    assert economy.multiplier > 1.0
    assert economy.cost == 1.0


def test_a_constant_pressure_is_steered_from_the_start():
    economy = Economy(1000, NOW, target=0.2)
    observe(economy, costs=[0.2 * math.exp(0.5)])
    assert economy.log_multiplier == pytest.approx(0.5 * GAIN * WINDOW / 1000)


def test_steering_goes_towards_the_target_and_stops_on_it():
    economy = Economy(1000, NOW, target=0.2)
    step = observe(economy, costs=[0.4] * 3)
    high = economy.multiplier
    assert high > 1.0
    step = observe(economy, costs=[0.2] * 3, step=step)
    assert economy.multiplier == high
    observe(economy, costs=[0.1] * 3, step=step)
    assert economy.multiplier == pytest.approx(1.0)


def test_steering_is_smooth_and_bounded():
    economy = Economy(1000, NOW, target=0.2)
    before = 0.0
    for step in range(10, 1001, 10):
        economy.observe(step, 1.0, 1.0 if step < 600 else 0.0)
        assert abs(economy.log_multiplier - before) <= GAIN * WINDOW / 1000 + 1e-12
        assert economy.multiplier >= (1 - 1e-9) / MAX_MULTIPLIER
        assert economy.multiplier <= MAX_MULTIPLIER * (1 + 1e-9)
        before = economy.log_multiplier


def test_a_short_run_is_not_steered_by_leaps():
    economy = Economy(20, NOW, target=0.2)
    observe(economy, costs=[1.0])
    assert economy.log_multiplier == MAX_MOVE


@pytest.mark.parametrize("elasticity", [0.3, 1.0])
def test_a_cost_that_falls_with_the_pressure_arrives_at_the_target(elasticity):
    """A model of a model: its cost follows the pressure with a delay of 50 steps."""
    economy, cost = Economy(2000, NOW, target=0.3), 1.0
    for step in range(10, 2001, 10):
        aim = min(1.0, 0.6 * economy.multiplier**-elasticity)
        cost += 0.2 * (aim - cost)
        economy.observe(step, 1.0, cost)
    assert cost == pytest.approx(0.3, rel=0.05)


def turning(path, delay, num_steps):
    """Costs of a model of a model whose beliefs follow the pressure late, and turn all at once.

    A route changes when its belief passes one half, and beliefs of all tokens lie close together.
    """
    economy = Economy(num_steps, NOW, target=0.3, path=path)
    belief, costs = 3.0, []  # log odds of full attention
    for step in range(WINDOW, num_steps + 1, WINDOW):
        belief += (3.0 - 2.0 * economy.log_multiplier - belief) / delay
        believed, routed = (
            0.1 + 0.9 / (1.0 + math.exp(-sharpness * belief)) for sharpness in (1.0, 4.0)
        )
        economy.observe(step, 1.0, routed, believed)
        costs.append(routed)
    return costs


@pytest.mark.parametrize("num_steps", [200, 300])
@pytest.mark.parametrize("delay", [2, 4])
def test_a_path_keeps_beliefs_that_turn_at_once_from_overshooting(delay, num_steps):
    at_once, led = (turning(path, delay, num_steps) for path in (None, PATH))
    assert min(at_once) < 0.5 * 0.3
    assert min(led) > min(at_once)
    assert led[-1] == pytest.approx(0.3, rel=0.15)


def test_on_a_path_a_run_is_pressed_only_where_it_lags():
    economy = Economy(1000, LATE, target=0.25, path=0.5)
    observe(economy, costs=[1.0] * 49)
    assert economy.begun is None
    # from 1 at step 490 to a quarter in half of the steps left; the first window is a little late
    economy.observe(500, 1.0, 1.0, 1.0)
    assert economy.begun == [490, 1.0]
    late = economy.wound
    assert 0.0 < late < 0.03
    for step in range(510, 750, WINDOW):
        cost = 0.25 ** ((step - 490) / 255)
        economy.observe(step, 1.0, cost, cost)
        assert economy.log_multiplier == pytest.approx(late)


def test_by_the_end_of_a_path_routes_count_and_not_beliefs():
    economy = Economy(100, NOW, target=0.25, path=0.1)
    economy.observe(10, 1.0, 0.25, 0.9)
    assert economy.wound == 0.0
    economy.observe(20, 1.0, 0.5, 0.25)
    assert economy.wound == pytest.approx(PATH_GAIN * MAX_MOVE * math.log(2))


def test_at_the_beginning_of_a_path_beliefs_count():
    lags, moves = (Economy(1000, NOW, target=0.1, path=PATH) for _ in range(2))
    for step in range(WINDOW, 200, WINDOW):
        lags.observe(step, 1.0, 1.0, 1.0)
        moves.observe(step, 1.0, 1.0, 0.1 ** (step / 600))
    assert lags.log_multiplier > 2.0 * moves.log_multiplier > 0.0


@pytest.mark.parametrize("path", [None, PATH])
def test_state_survives_json_and_goes_on_as_it_would_have(path):
    def build():
        options = {"settle_drop": 0.1, "settle_steps": 30, "path": path}
        return Economy(1000, SETTLED, 0.2, (SETTLED,), **options)

    whole, first, second = build(), build(), build()
    losses = [0.9**n for n in range(12)] + [0.3] * 40
    costs = [1.0 / (1 + n / 10) for n in range(52)]
    for cut in (5, 30):
        observe(whole := build(), losses, costs)
        step = observe(first := build(), losses[:cut], costs[:cut])
        second = build()
        second.load(json.loads(json.dumps(first.state())))
        observe(second, losses[cut:], costs[cut:], step=step)
        assert second == whole
    assert whole.settled is not None
    assert whole.multiplier != 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pressure": Schedule.constant(0.0), "target": 0.2}, "must have a weight to steer"),
        ({"pressure": Schedule(0.1, 0.0), "target": 0.2}, "must have a weight to steer"),
        ({"pressure": NOW, "settle_drop": 0.0}, "settle_drop must be a share between 0 and 1"),
        ({"pressure": NOW, "settle_drop": 1.5}, "between 0 and 1, got 1.5"),
        ({"pressure": NOW, "path": 1.5}, "path must be a share of the steps left, got 1.5"),
        ({"pressure": NOW, "settle_steps": 5}, "settle_steps must be >= 10, got 5"),
    ],
)
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Economy(1000, **options)


@pytest.mark.parametrize("end", ["0.5", "0"])
def test_what_a_target_steers_may_not_go_away_again(end):
    with pytest.raises(ConfigError, match=rf"but kl_weight is 0->1->{end}@0:0\.5:1"):
        Economy(100, Schedule.parse(f"0->1->{end}@0:0.5:1"), target=0.3)


def test_a_cost_counts_as_below_its_target_by_the_square_of_the_share():
    held = Economy(100, NOW, target=0.6).below_target(torch.tensor([1.0, 0.6, 0.3]))
    torch.testing.assert_close(held, torch.tensor([0.0, 0.0, 0.25]))


COSTS = [[1.0, 0.3, 0.15]] * 2


def hard_config(**fields):
    return MetaAttentionConfig(**({"num_hidden_layers": 2, "routing": "hard"} | fields))


@pytest.mark.parametrize(
    ("fields", "costs", "target", "message"),
    [
        ({"routing": "soft"}, COSTS, 0.5, "must have routing='hard'"),
        ({}, [[1.0], [0.15]], 0.5, "must have a layer to route in"),
        (
            {"depth_capacity": 0.5},
            COSTS,
            0.8,
            r"between 0\.11\d and 0.750, .* got 0.8; take",
        ),
    ],
)
def test_targets_that_cannot_be_reached_are_refused(fields, costs, target, message):
    with pytest.raises(ConfigError, match=message):
        check_target(target, hard_config(**fields), costs)


def test_a_target_may_be_below_the_cheapest_expert_where_tokens_pass_blocks_by():
    check_target(0.09, hard_config(depth_capacity=0.5, depth_layers=[0, 1]), COSTS)
