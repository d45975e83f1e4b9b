"""Schedules: the direction is the one written, and the text form says it all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meta_attention.errors import ConfigError
from meta_attention.training.schedule import Schedule


def test_a_number_is_constant():
    schedule = Schedule.parse("0.1")
    assert schedule.is_constant
    assert [schedule(p) for p in (0.0, 0.5, 1.0)] == [0.1, 0.1, 0.1]


def test_a_rise_waits_for_its_beginning_and_stays_at_its_end():
    schedule = Schedule.parse("0->0.1@0.5:0.75")
    assert schedule == Schedule(0.0, 0.1, 0.5, 0.75)
    values = [schedule(p) for p in (0.0, 0.5, 0.625, 0.75, 1.0)]
    assert values == pytest.approx([0.0, 0.0, 0.05, 0.1, 0.1])


def test_the_direction_is_the_one_written():
    assert Schedule.parse("1 -> 0")(0.25) == 0.75
    assert Schedule.parse("0 -> 1")(0.25) == 0.25
    assert Schedule.parse("-2->-1e-1@0:1")(1.0) == -0.1


def test_equal_moments_are_a_jump():
    schedule = Schedule(0.0, 1.0, 0.5, 0.5)
    assert (schedule(0.499), schedule(0.5)) == (0.0, 1.0)


def test_a_peak_is_reached_in_a_straight_line_and_left_in_another():
    schedule = Schedule.parse("0->0.1->0.02@0.2:0.4:0.8")
    assert schedule == Schedule(0.0, 0.02, 0.2, 0.8, peak=0.1, turn=0.4)
    values = [schedule(p) for p in (0.0, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)]
    assert values == pytest.approx([0.0, 0.0, 0.05, 0.1, 0.06, 0.02, 0.02])
    assert not Schedule.parse("0->0.1->0@0.2:0.4:0.8").is_constant


def test_a_peak_may_be_given_in_steps():
    schedule = Schedule.parse("0->1->0@10s:20s:40s")
    values = [schedule.at(step, 1000) for step in (0, 10, 15, 20, 30, 40, 999)]
    assert values == pytest.approx([0.0, 0.0, 0.5, 1.0, 0.5, 0.0, 0.0])


@pytest.mark.parametrize("text", ["0->1->0@0.5:0.4:0.8", "0->1->0@0.2:0.9:0.8"])
def test_a_peak_outside_its_span_is_refused(text):
    with pytest.raises(ConfigError, match="peak between the moments"):
        Schedule.parse(text)


def test_a_peak_without_its_moment_or_with_two_beginnings_is_refused():
    with pytest.raises(ConfigError, match="a peak and its moment"):
        Schedule(0.0, 1.0, peak=2.0)
    with pytest.raises(ConfigError, match="waits for a settled loss must have no peak"):
        Schedule(0.0, 0.0, 0.0, 1.0, when_settled=True, peak=2.0, turn=0.5)
    with pytest.raises(ConfigError, match=r"time for its peak, but begins and finishes at 0\.5"):
        Schedule.parse("0->1->0@0.5:0.5:0.5")


@given(peak=st.floats(-10, 10), at=st.lists(st.integers(0, 100), min_size=3, max_size=3))
def test_a_peak_reads_back_with_all_its_digits(peak, at):
    begin, turn, finish = (moment / 100 for moment in sorted(at))
    if begin == finish:
        return
    schedule = Schedule(0.0, 0.5, begin, finish, peak=peak, turn=turn)
    again = Schedule.parse(str(schedule))
    for moment in (0.0, begin, turn, finish, 1.0):
        assert again(moment) == pytest.approx(schedule(moment), rel=1e-9, abs=1e-12)


def test_a_weight_keeps_its_digits_when_it_is_written():
    for schedule in (Schedule.constant(0.123456789), Schedule(0.0, 0.123456789, 0.5, 0.75)):
        assert Schedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize("text", ["0->1@0.2:0.5", "0->1->0@0.2:0.4:0.5", "0->1@10s:50s"])
def test_a_schedule_is_over_once_it_has_reached_its_end(text):
    """A peak may end where it began, and is not over before it has begun."""
    schedule = Schedule.parse(text)
    assert [schedule.is_over(step, 101) for step in (0, 15, 49, 50, 100)] == [False] * 3 + [
        True
    ] * 2


def test_a_schedule_that_waits_is_over_when_its_time_has_passed():
    schedule = Schedule.parse("0->1@settled+20s")
    assert not schedule.is_over(90, 101)
    assert [schedule.is_over(step, 101, settled=50) for step in (60, 70)] == [False, True]
    assert Schedule.constant(0.5).is_over(0, 101)


values = st.integers(-100, 100).map(lambda n: n / 10)
moments = st.tuples(st.integers(0, 100), st.integers(0, 100)).map(sorted)


@given(start=values, end=values, moment=moments, progress=st.floats(0, 1))
def test_values_stay_between_the_ends_and_the_text_reads_back(start, end, moment, progress):
    schedule = Schedule(start, end, moment[0] / 100, moment[1] / 100)
    low, high = sorted((start, end))
    assert low - 1e-9 <= schedule(progress) <= high + 1e-9
    again = Schedule.parse(str(schedule))
    assert again(progress) == pytest.approx(schedule(progress), abs=1e-9)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "high",
        "0->",
        "->1",
        "0->1@0.5",
        "0->1@:",
        "0 1",
        "0->1@0.5:0.7:1",
        "0->1->0",
        "0->1->0@0.5:0.7",
        "0->1->0@settled+0.5",
        "nan",
        "inf",
        "0->1@settled",
    ],
)
def test_other_text_is_refused_with_the_forms_there_are(text):
    with pytest.raises(ConfigError, match="START->END@BEGIN:FINISH"):
        Schedule.parse(text)


def test_steps_are_written_with_an_s():
    schedule = Schedule.parse("0->0.1@2000s:3000s")
    assert schedule == Schedule(0.0, 0.1, 2000, 3000, in_steps=True)
    values = [schedule.at(step, 5000) for step in (0, 2000, 2500, 3000, 4999)]
    assert values == pytest.approx([0.0, 0.0, 0.05, 0.1, 0.1])
    # the length of the run does not matter
    assert schedule.at(2500, 2600) == pytest.approx(0.05)


def test_fractions_are_of_all_steps():
    schedule = Schedule.parse("0->1@0.5:1")
    values = [schedule.at(step, 5) for step in range(6)]
    assert values == pytest.approx([0.0, 0.0, 0.0, 0.5, 1.0, 1.0])
    assert schedule.at(0, 1) == 0.0


@pytest.mark.parametrize("text", ["0->0.1@settled+100s", "0->0.1@settled+0.1"])
def test_a_schedule_may_wait_until_the_loss_has_settled(text):
    schedule = Schedule.parse(text)
    assert schedule.when_settled
    assert schedule.at(900, 1001) == 0.0
    values = [schedule.at(step, 1001, settled=300) for step in (300, 350, 400, 1000)]
    assert values == pytest.approx([0.0, 0.05, 0.1, 0.1])
    assert schedule.last_moment_to_settle(1001) == pytest.approx(900)


@pytest.mark.parametrize(
    "text",
    [
        "0.1",
        "0->0.1",
        "0->1@0.25:0.5",
        "0->1@20s:3000s",
        "0->1@settled+5s",
        "1->0@settled+1",
        "0->0.1->0@0.2:0.4:0.8",
        "0->0.1->0.05@20s:40s:80s",
        "0->1->0@0:0.5:1",
    ],
)
def test_every_form_is_written_as_it_is_read(text):
    assert str(Schedule.parse(text)) == text


@pytest.mark.parametrize("text", ["0->1@0.5:300s", "0->1@20s:0.5", "0->1->0@0.1:0.2:5s"])
def test_steps_and_fractions_do_not_mix(text):
    with pytest.raises(ConfigError, match="all its moments at steps, or all at fractions"):
        Schedule.parse(text)


def test_steps_in_the_wrong_order_are_refused():
    with pytest.raises(ConfigError, match="between two steps, 0 <= begin <= finish, got 30 and 20"):
        Schedule.parse("0->1@30s:20s")


@pytest.mark.parametrize("text", ["0->1@0.7:0.5", "0->1@0:2", "0->1@-1:1"])
def test_moments_outside_training_or_reversed_are_refused(text):
    with pytest.raises(ConfigError, match="0 <= begin <= finish"):
        Schedule.parse(text)


def test_values_that_are_not_finite_are_refused():
    with pytest.raises(ConfigError, match="finite values"):
        Schedule(0.0, float("inf"))
