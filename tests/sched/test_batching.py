"""What a step is made of: decode and verify rows, chunks, budgets, order."""

import pytest
from scheduling import (
    Rig,
    draft_model_layout,
    eagle_layout,
    target_layout,
    windowed_layout,
)

from tandemkv.base.errors import ConfigError, RequestError
from tandemkv.base.sampling import SamplingParams
from tandemkv.sched.request import Request

LAYOUTS = {
    "eagle": (eagle_layout, (60, 120)),
    "windowed": (windowed_layout, (60, 60, 60)),
    "draft_model": (draft_model_layout, (60, 60)),
    "plain": (target_layout, (60,)),
}


def rig_of(name: str, **options) -> Rig:
    layout, pages = LAYOUTS[name]
    return Rig(layout(), pages, **options)


def prompt(n: int, salt: int = 0) -> list[int]:
    return [(i * 5 + salt) % 11 for i in range(n)]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 64])
def test_text_does_not_depend_on_chunking_or_drafting(name, chunk):
    rig = rig_of(name, prefill_chunk=chunk)
    for i in range(5):
        rig.add(prompt(7 + i, salt=i % 2), max_tokens=9 + i)
    rig.run()
    for request in rig.requests.values():
        rig.check_text(request)


def test_a_step_mixes_verify_rows_with_prompt_chunks():
    rig = rig_of("eagle", prefill_chunk=4)
    rig.add(prompt(4), name="old", max_tokens=20)
    rig.step()
    rig.add(prompt(10, 3), name="new")
    kinds = [{s.request.id: s.verify for s in rig.step().segments} for _ in range(3)]
    assert kinds == [{"old": True, "new": False}] * 3
    assert rig.requests["new"].output


def test_chunks_never_cross_the_end_of_a_span_and_only_the_last_samples():
    rig = rig_of("eagle", prefill_chunk=4)
    r = rig.add(prompt(10))
    segments = [rig.step().segments[0] for _ in range(3)]
    assert [(s.start, s.stop) for s in segments] == [(0, 4), (4, 8), (8, 10)]
    assert [s.samples for s in segments] == [False, False, True]
    assert [s.num_propose for s in segments] == [0, 0, 3]
    assert r.decoding
    assert len(r.drafts) == 3


def test_no_step_exceeds_the_budget_and_it_is_used():
    rig = rig_of("eagle", max_batch_tokens=9, prefill_chunk=64)
    for i in range(6):
        rig.add(prompt(12, i), max_tokens=15)
    rig.run()
    assert max(plan.num_rows for plan in rig.plans) == 9
    for request in rig.requests.values():
        rig.check_text(request)


def test_a_prompt_moves_even_when_decoding_fills_the_batch():
    rig = rig_of("eagle", max_batch_tokens=8, accept=0)
    rig.add(prompt(4, 1), max_tokens=30)
    rig.add(prompt(4, 2), max_tokens=30)
    while not all(r.decoding for r in rig.requests.values()):
        rig.step()
    rig.scheduler.set_num_draft_tokens("r0", 2)
    late = rig.add(prompt(9, 3))
    for _ in range(6):
        rows = {s.request.id: s.num_rows for s in rig.step().segments}
        assert late.decoding or rows.get("r2", 0) >= 1, rows
        assert sum(rows.values()) <= 8


def test_a_request_that_misses_a_batch_keeps_pages_drafts_and_positions():
    rig = rig_of("eagle", max_batch_tokens=5, accept=256)
    for i in range(3):
        rig.add(prompt(3, i), max_tokens=24)
    rig.step()
    while not all(r.decoding for r in rig.requests.values()):
        rig.step()
    missed = 0
    for _ in range(6):
        before = {
            r.id: (r.seq.id, list(r.drafts), [list(t) for t in r.seq.pages], r.seq.committed)
            for r in rig.scheduler.running
        }
        ran = {s.request.id for s in rig.step().segments}
        for r in rig.scheduler.running:
            if r.id not in ran:
                missed += 1
                after = (r.seq.id, list(r.drafts), [list(t) for t in r.seq.pages], r.seq.committed)
                assert after == before[r.id]
    assert missed >= 6
    rig.run()
    assert rig.scheduler.stats.num_missed >= missed
    for request in rig.requests.values():
        rig.check_text(request)
        a = request.acceptance
        assert a.num_accepted == a.num_drafts  # all drafts come from a full context


def test_those_that_missed_a_batch_go_first_in_the_next():
    rig = rig_of("eagle", max_batch_tokens=5, num_draft_tokens=3, accept=0)
    for i in range(3):
        rig.add(prompt(2, i), max_tokens=60, num_draft_tokens=0)
    while len(rig.scheduler.running) < 3 or not all(r.decoding for r in rig.scheduler.running):
        rig.step()
    for name in rig.requests:
        rig.scheduler.set_num_draft_tokens(name, 3)
    rig.step()
    waits = dict.fromkeys(rig.requests, 0)
    for _ in range(12):
        ran = {s.request.id for s in rig.step().segments}
        waits = {name: 0 if name in ran else waits[name] + 1 for name in waits}
        assert max(waits.values()) <= 2  # one of three fits a step


def test_requests_start_first_come_first_served_within_a_priority():
    rig = rig_of("plain", max_running=1)
    for name, priority in (("a", 1), ("b", 1), ("c", 0), ("d", 2), ("e", 1)):
        rig.add(prompt(3), name=name, priority=priority, max_tokens=2)
    order = []
    while rig.scheduler.has_work:
        rig.step()
        order += [e for e in rig.ends if e not in order]
    assert order == ["c", "a", "b", "e", "d"]


def test_no_more_than_max_running_hold_pages():
    rig = rig_of("eagle", max_running=2)
    for i in range(5):
        rig.add(prompt(6, i))
    while rig.scheduler.has_work:
        rig.step()
        assert len(rig.scheduler.running) <= 2
        assert len(rig.manager.sequences) <= 2


def test_cached_tokens_are_those_of_the_first_admission():
    rig = rig_of("eagle")
    rig.add(prompt(13), name="cold")
    rig.run()
    warm = rig.add(prompt(13), name="warm")
    rig.step()
    rig.scheduler.suspend("warm")
    rig.run()
    assert rig.ends["cold"].cached_tokens == 0
    assert rig.ends["warm"].cached_tokens == warm.cached_tokens == 12
    assert rig.scheduler.stats.cached_tokens == 12
    rig.check_text(warm)


@pytest.mark.parametrize("n", [15, 16, 17])
def test_a_hit_recomputes_the_lookahead_and_the_tail_only(n):
    rig = Rig(eagle_layout(16, 16), (20, 20))
    rig.add(prompt(n))
    rig.run()
    before = rig.model.num_rows
    rig.add(prompt(n), max_tokens=1)
    rig.run()
    assert rig.model.num_rows - before == 1 + 1  # D, and the last token


def test_max_tokens_and_the_model_length_end_with_length():
    rig = rig_of("eagle", max_model_len=14)
    rig.add(prompt(4), name="tokens", max_tokens=5)
    rig.add(prompt(4), name="length", max_tokens=100)
    rig.run()
    assert [rig.ends[n].num_output_tokens for n in ("tokens", "length")] == [5, 10]
    for request in rig.requests.values():
        rig.check_text(request)


def test_usage_counts_emitted_tokens_and_acceptance_counts_verdicts():
    rig = Rig(eagle_layout(), (60, 120), vocab=5, eos=(0,), accept=256, trace=True)
    for i in range(20):
        rig.add([1 + (i + j) % 4 for j in range(4)] + [1 + i % 3], max_tokens=40)
    rig.run()
    for request in rig.requests.values():
        rig.check_text(request)
    stats = rig.scheduler.stats
    assert stats.generation_tokens == sum(map(len, rig.outputs.values()))
    steps = [step for r in rig.requests.values() for step in r.steps]
    assert any(len(step.emitted) < step.num_accepted for step in steps)  # cut inside a run
    assert stats.acceptance.num_accepted == sum(step.num_accepted for step in steps)


def test_a_stop_string_cuts_tokens_and_logprobs_alike():
    rig = rig_of("eagle", accept=256)
    want, _ = rig.expected(rig.add(prompt(6), max_tokens=12))
    rig.run()
    seen = []

    def watch(tokens):
        seen.extend(tokens)
        return len(tokens) - (len(seen) - 6) if len(seen) >= 6 else None

    rig.add(prompt(6), name="cut", max_tokens=12, watch=watch)
    rig.run()
    assert rig.outputs["cut"] == want[:6]
    assert rig.ends["cut"].finish_reason == "stop"


@pytest.mark.parametrize(
    ("tokens", "params", "message"),
    [
        ([], {}, "prompt is empty"),
        (prompt(200), {}, "200 tokens.*max_model_len 200"),
        (prompt(40), {"num_draft_tokens": 9}, r"num_draft_tokens must be in \[0, 3\], got 9"),
    ],
)
def test_a_request_that_cannot_run_is_refused_and_nothing_is_held(tokens, params, message):
    rig = rig_of("eagle")
    with pytest.raises(RequestError, match=message):
        rig.add(tokens, **params)
    assert not rig.scheduler.has_work
    assert all(u.free == u.total for u in rig.manager.usage())


def test_a_request_larger_than_a_pool_is_refused_with_both_numbers():
    rig = Rig(eagle_layout(), (10, 8))
    with pytest.raises(RequestError, match=r"needs 13 KV pages of draft for 24 tokens.* has 8"):
        rig.add(prompt(10), max_tokens=15)


def test_a_live_id_is_refused():
    rig = rig_of("plain")
    rig.add(prompt(3), name="a")
    with pytest.raises(RequestError, match="'a' is in use"):
        rig.add(prompt(3), name="a")


def test_numbers_that_cannot_work_are_named_together():
    with pytest.raises(ConfigError, match=r"max_running.*prefill_chunk.*max_batch_tokens 3"):
        rig_of("eagle", max_running=0, prefill_chunk=0, max_batch_tokens=3)


def test_an_idle_scheduler_plans_an_empty_step():
    rig = rig_of("eagle")
    assert rig.step().empty
    assert not rig.scheduler.has_work
    assert rig.scheduler.stats.num_steps == 0


def test_output_does_not_depend_on_who_else_runs():
    alone = rig_of("eagle")
    request = Request(id="x", prompt=prompt(9), params=SamplingParams(max_tokens=15))
    text, _ = alone.expected(request)
    rig = rig_of("eagle", max_batch_tokens=12)
    for i in range(7):
        rig.add(prompt(9, salt=i), max_tokens=15)
    rig.run()
    assert rig.outputs["r0"] == text
