"""The lab's measures on hand-made steps: what counts, what agrees, and where it would not."""

import random

import pytest

from tandemkv.lab import measures
from tandemkv.lab.measures import Agreement, Tally, Trace, check_output, compare, counted, tally
from tandemkv.sched.batch import StepRecord

P = 10  # prompt length


def step(offset, drafts, accepted, *, draft_gap=1.0, target_gap=1.0):
    return StepRecord(
        anchor=P + offset,
        drafts=tuple(drafts),
        num_accepted=accepted,
        emitted=(),
        draft_gap=draft_gap,
        target_gap=target_gap,
    )


def trace(steps, output=range(100, 120), *, reason="length", id="a"):
    return Trace(
        id=id,
        prompt=tuple(range(P)),
        output=tuple(output),
        finish_reason=reason,
        steps=tuple(steps),
    )


COLD = trace([step(0, (101, 102), 2), step(3, (104, 9), 1), step(5, (106, 107), 2)])


def test_acceptance_length_is_one_plus_accepted_per_step_with_drafts():
    run = trace([step(0, (1, 2), 2), step(3, (), 0), step(4, (5, 6), 1)])
    assert tally(run) == Tally(2, 3)
    assert tally(run).al == 2.5


def test_without_steps_the_acceptance_length_is_one():
    assert tally(trace([])).al == 1.0


def test_drafts_accepted_past_the_end_of_a_text_do_not_count():
    run = trace([step(0, (1, 2), 2), step(3, (4, 5, 6), 3)], output=range(5), reason="stop")
    assert [a for _, a in counted(run)] == [2, 1]


def test_a_length_limit_does_not_shorten_the_last_step():
    run = trace([step(0, (1, 2), 2), step(3, (4, 5, 6), 3)], output=range(5), reason="length")
    assert [a for _, a in counted(run)] == [2, 3]


def test_a_loop_starts_where_a_12_gram_ends_for_the_third_time():
    period = list(range(6))
    assert measures.loop_start([99, *period * 5]) == 1 + 2 * 6 + 12 - 1
    assert measures.loop_start(list(range(100))) is None
    assert measures.loop_start(list(range(12)) * 2) is None


def test_a_loop_starts_where_a_search_by_force_finds_it():
    rng = random.Random(3)
    for _ in range(200):
        text = [rng.randrange(2) for _ in range(rng.randrange(60))]
        grams = [tuple(text[i : i + 4]) for i in range(len(text) - 3)]
        found = (i + 3 for i, g in enumerate(grams) if grams[:i].count(g) >= 2)
        assert measures.loop_start(text, 4) == next(found, None)


def test_steps_inside_a_loop_do_not_count():
    output = list(range(6)) * 6
    loop = measures.loop_start(output)
    run = trace([step(0, (1, 2), 2), step(loop - 2, (4, 5, 6), 3), step(loop + 2, (1,), 1)], output)
    assert [a for _, a in counted(run, cut_loops=True)] == [2, 1]
    assert len(counted(run)) == 3


def test_acceptance_by_position_falls_with_the_position():
    shares = measures.acceptance_by_position([COLD])
    assert shares == [1.0, pytest.approx(2 / 3)]


def test_acceptance_by_step_averages_over_the_requests_that_have_the_step():
    short = trace([step(0, (1, 2), 0)], id="b")
    assert measures.acceptance_by_step([COLD, short]) == [2.0, 2.0, 3.0]


def test_the_interval_holds_the_pooled_value_and_narrows_with_more_prompts():
    rng = random.Random(0)
    few = [Tally(20, rng.randrange(20, 40)) for _ in range(10)]
    low, high = measures.interval(few)
    assert low < measures.total(few).al < high
    wide, narrow = high - low, measures.interval(few * 16)
    assert narrow[1] - narrow[0] < wide / 2


def test_the_interval_is_the_same_every_time():
    tallies = [Tally(5, i) for i in range(8)]
    assert measures.interval(tallies) == measures.interval(tallies)


def test_the_same_run_agrees_everywhere():
    result = compare(COLD, COLD)
    assert (result.compared, result.equal, result.ties, result.unmatched) == (3, 3, 0, 0)
    assert (result.share, result.al_ratio) == (1.0, 1.0)


def test_one_other_draft_is_one_disagreement():
    other = trace([step(0, (101, 102), 2), step(3, (104, 8), 1), step(5, (106, 107), 2)])
    result = compare(other, COLD)
    assert (result.compared, result.equal) == (3, 2)


def test_a_rejected_draft_that_differs_is_seen_although_output_and_acceptance_are_equal():
    other = trace([step(0, (101, 102), 2), step(3, (104, 8), 1), step(5, (106, 107), 2)])
    assert other.output == COLD.output
    assert tally(other) == tally(COLD)
    assert compare(other, COLD).share < 1


def test_a_step_without_drafts_is_a_disagreement_and_not_a_missing_step():
    other = trace(
        [step(0, (), 0), step(1, (102,), 1), step(3, (104, 9), 1), step(5, (106, 107), 2)]
    )
    result = compare(other, COLD)
    assert (result.compared, result.equal, result.unmatched) == (3, 2, 1)


def test_anchors_that_only_one_run_has_are_counted_apart_after_a_disagreement():
    other = trace([step(0, (101, 7), 1), step(2, (103, 104), 2), step(5, (106, 107), 2)])
    result = compare(other, COLD)
    assert (result.compared, result.equal, result.unmatched) == (2, 1, 2)


def test_a_tie_is_listed_apart():
    other = trace(
        [step(0, (101, 7), 1, draft_gap=5e-5), step(2, (103,), 1), step(5, (106, 107), 2)]
    )
    result = compare(other, COLD)
    assert (result.ties, result.compared, result.equal) == (1, 1, 1)
    assert result.tie_share == 0.5


def test_a_gap_above_the_limit_is_no_tie():
    other = trace([step(0, (101, 7), 1, draft_gap=2e-4)])
    assert compare(other, COLD).ties == 0


def test_nothing_is_compared_past_the_first_divergence_of_the_outputs():
    output = [*range(100, 104), 55, *range(105, 120)]
    other = trace([step(0, (101, 102), 2), step(3, (3, 3), 0), step(5, (1, 1), 0)], output)
    result = compare(other, COLD)
    assert (result.compared, result.equal) == (2, 1)
    assert (result.path.steps, result.cold.steps) == (2, 2)


def test_a_path_that_accepts_less_has_a_ratio_below_one():
    other = trace([step(i, (7, 7), 0) for i in range(8)])
    result = compare(other, COLD)
    assert result.al_ratio == pytest.approx(1.0 / (1 + 5 / 3))


def test_agreements_add_up():
    result = sum([compare(COLD, COLD)] * 3, Agreement())
    assert (result.compared, result.path.steps, result.al_ratio) == (9, 9, 1.0)


def test_an_output_that_parts_at_a_tie_is_told_from_one_that_does_not():
    plain = trace([], [*range(100, 104), 55])
    tied = trace([step(0, (1,), 0), step(3, (1,), 0, target_gap=1e-6)], range(100, 105))
    wrong = trace([step(0, (1,), 0), step(3, (1,), 0, target_gap=0.1)], range(100, 105))
    assert check_output(tied, plain).near_tie
    assert not check_output(tied, plain).equal
    assert not check_output(wrong, plain).near_tie
    assert check_output(wrong, plain).position == P + 4


def test_an_equal_output_is_equal():
    assert check_output(COLD, trace([])).equal


def test_runs_are_paired_by_id():
    other = trace([step(0, (1,), 0)], id="b")
    missing = trace([], id="c")
    assert len(measures.pair([COLD, other, missing], [other, COLD], compare)) == 2
