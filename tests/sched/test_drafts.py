"""K per request, speculation off and on again, and what the drafter's rows miss meanwhile."""

import pytest
from scheduling import Rig, draft_model_layout, eagle_layout, target_layout

from tandemkv.base.errors import RequestError


def prompt(n: int, salt: int = 0) -> list[int]:
    return [(i * 5 + salt) % 11 for i in range(n)]


def decoding(rig: Rig, **params):
    r = rig.add(prompt(9), max_tokens=30, **params)
    while not r.decoding:
        rig.step()
    return r


@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_a_request_may_ask_for_fewer_drafts_than_the_engine_makes(k):
    rig = Rig(eagle_layout(), (40, 80), accept=256, trace=True)
    r = decoding(rig, num_draft_tokens=k)
    rig.run()
    rig.check_text(r)
    assert max((len(step.drafts) for step in r.steps), default=0) == k
    assert r.acceptance.mean_length == 1 + k or r.steps[-1].drafts != r.steps[0].drafts


def test_k_changes_while_a_request_runs():
    rig = Rig(eagle_layout(), (40, 80), accept=256, trace=True, max_draft_tokens=5)
    r = decoding(rig)
    seen = []
    for k in (0, 5, 1, None):
        rig.scheduler.set_num_draft_tokens("r0", k)
        rig.step()
        rig.step()
        seen.append(len(r.steps[-1].drafts))
    assert seen == [0, 5, 1, 3]
    rig.run()
    rig.check_text(r)


def test_a_k_beyond_the_drafters_is_refused_and_changes_nothing():
    rig = Rig(eagle_layout(), (40, 80))
    r = decoding(rig)
    with pytest.raises(RequestError, match=r"num_draft_tokens must be in \[0, 3\], got 4"):
        rig.scheduler.set_num_draft_tokens("r0", 4)
    assert r.num_draft_tokens is None


def test_speculation_off_and_on_again_leaves_no_cold_drafter():
    rig = Rig(eagle_layout(), (40, 80), accept=256, trace=True)
    r = decoding(rig)
    rig.scheduler.set_num_draft_tokens("r0", 0)
    for _ in range(6):
        rig.step()
    assert not r.drafts
    rig.scheduler.set_num_draft_tokens("r0", None)
    rig.run()
    rig.check_text(r)
    assert all(step.num_accepted == len(step.drafts) for step in r.steps)
    assert sum(len(step.drafts) == 3 for step in r.steps) > 3
    assert not rig.manager.stats.draft_gap_tokens


def test_without_the_context_pass_the_gap_is_counted_and_felt():
    rig = Rig(eagle_layout(), (40, 80), accept=256, trace=True)
    r = decoding(rig, draft_context=False)
    rig.scheduler.set_num_draft_tokens("r0", 0)
    start = r.num_tokens
    for _ in range(6):
        rig.step()
    off = r.num_tokens - start
    rig.scheduler.set_num_draft_tokens("r0", None)
    rig.run()
    rig.check_text(r)
    assert rig.manager.stats.draft_gap_tokens == {"speculation_off": off}
    assert any(step.num_accepted < len(step.drafts) for step in r.steps)  # the hole is real


def test_a_prompt_prefilled_without_context_pass_counts_its_gap():
    rig = Rig(eagle_layout(), (40, 80), prefill_chunk=4)
    r = decoding(rig, draft_context=False, num_draft_tokens=0)
    assert rig.manager.stats.draft_gap_tokens == {"speculation_off": 9}
    rig.run()
    rig.check_text(r)


def test_drafts_never_reach_beyond_the_last_token():
    rig = Rig(eagle_layout(), (40, 80), accept=256, trace=True)
    for n in range(1, 9):
        rig.add(prompt(5, n), max_tokens=n)
    rig.run()
    for r in rig.requests.values():
        rig.check_text(r)
        for step in r.steps:
            assert len(step.drafts) + 1 <= r.params.max_tokens - (step.anchor - 4)
            assert len(step.emitted) == step.num_accepted + 1  # nothing is verified in vain


def test_an_engine_without_a_drafter_asks_for_nothing():
    rig = Rig(target_layout(), (40,))
    r = decoding(rig)
    rig.run()
    rig.check_text(r)
    assert all(s.num_propose == s.num_drafts == 0 for p in rig.plans for s in p.segments)
    assert rig.scheduler.stats.acceptance.mean_length == 1.0


def test_the_record_of_a_step_names_anchor_drafts_and_what_was_emitted():
    rig = Rig(eagle_layout(), (40, 80), trace=True)
    r = decoding(rig)
    rig.run()
    position = len(r.prompt)
    for step in r.steps:
        assert step.anchor == position
        assert step.emitted[: step.num_accepted] == step.drafts[: step.num_accepted]
        assert list(step.emitted) == (r.prompt + r.output)[position + 1 :][: len(step.emitted)]
        position += len(step.emitted)
    assert position == r.num_tokens - 1


def test_acceptance_is_reported_with_the_last_output():
    rig = Rig(eagle_layout(), (40, 80))
    r = decoding(rig)
    rig.run()
    end = rig.ends["r0"]
    assert end.num_draft_steps == r.acceptance.num_steps > 0
    assert sum(end.accepted_at) == end.num_accepted <= end.num_drafts


def test_a_draft_model_rebuilds_a_lost_context_alone_before_it_drafts():
    rig = Rig(draft_model_layout(), (40, 12), accept=256, trace=True, prefill_chunk=5)
    first = rig.add(prompt(20), max_tokens=4, name="first")
    rig.run()
    rig.add(prompt(34, 4), max_tokens=4, name="other")  # pushes the first's draft pages out
    rig.run()
    again = rig.add(prompt(20), max_tokens=4, name="again")
    before = len(rig.plans)
    rig.run()
    alone = [s for p in rig.plans[before:] for s in p.segments if s.num_rows == 0 and any(s.write)]
    assert alone
    assert max(b - a for s in alone for w in s.write for a, b in w) <= 5
    assert again.cached_tokens > 0
    assert [s.drafts for s in again.steps] == [s.drafts for s in first.steps]
    for r in rig.requests.values():
        rig.check_text(r)


def test_withheld_draft_rows_change_the_drafts_and_not_the_text():
    rig = Rig(
        eagle_layout(), (40, 80), accept=256, trace=True, faults=frozenset({"withhold_draft_rows"})
    )
    cold = rig.add(prompt(20), max_tokens=12, name="cold")
    rig.run()
    warm = rig.add(prompt(20), max_tokens=12, name="warm")
    rig.run()
    assert rig.outputs["warm"] == rig.outputs["cold"]
    assert warm.acceptance.mean_length < cold.acceptance.mean_length
    assert rig.manager.stats.draft_gap_tokens["fault"] > 0
