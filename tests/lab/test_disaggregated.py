"""The hand-off paths on tiny engines: parity with the drafter's rows, a loss without them."""

from contextlib import contextmanager

import loopback_workers
import msgspec
import pytest
from labs import experiment, make_engine, write_prompts

from tandemkv.base.config import EngineConfig
from tandemkv.lab import acceptance, disaggregated, report, rows
from tandemkv.lab.experiments import Job, run
from tandemkv.lab.options import CONVERSATIONS, HANDED_OVER, NO_DRAFT, Sampling

DRAFTERS = ("eagle3", "dflash", "dspark", "draft_model", "ngram")
FIRST, HIT, SECOND = HANDED_OVER


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory):
    return write_prompts(tmp_path_factory.mktemp("lab") / "prompts.jsonl")


def handed_over(prompts, *drafters, workers=loopback_workers.workers, **options):
    """A finished experiment with prefill workers in this process."""
    lab = experiment(prompts, *drafters, workers=workers, **({"num_prefill": 1} | options))
    lab.run()
    return lab


@pytest.fixture(scope="module", params=DRAFTERS)
def healthy(request, prompts_file):
    return handed_over(prompts_file, request.param)


@pytest.fixture(scope="module")
def lossy(prompts_file):
    """The drafter is the target itself: what it loses is all that it has."""
    return handed_over(prompts_file, "draft_model")


def by_path(lab):
    return {row.path: row for row in lab.rows}


def test_parity_holds_on_every_path_that_is_handed_over(healthy):
    found = by_path(healthy)
    lossy = () if "ngram" in healthy.options.drafters else NO_DRAFT
    assert list(found) == [*CONVERSATIONS, *HANDED_OVER, *lossy]
    for path in HANDED_OVER:
        row = found[path]
        assert row.prompts == 3
        assert row.steps > 0
        assert row.output_equal
        assert row.draft_agreement == 1.0
        assert row.al_ratio_to_cold == 1.0
        assert row.draft_gap_tokens == 0
        assert row.computed_here == 0
        assert row.fault is None
    assert found[FIRST].acceptance_by_step == found["cold"].acceptance_by_step
    held, line = report.verdict(healthy.rows, judged=healthy.judged)
    assert held
    assert "on 6 paths" in line


def test_rows_that_were_handed_over_are_those_of_the_cold_run(healthy):
    for path in HANDED_OVER:
        row = by_path(healthy)[path]
        assert row.draft_row_error is None if row.drafter == "ngram" else row.draft_row_error < 1e-5


def test_what_came_is_what_was_asked_for(healthy):
    found = by_path(healthy)
    has_rows = "ngram" not in healthy.options.drafters
    for path in found.keys() & {*HANDED_OVER, *NO_DRAFT}:
        row = found[path]
        assert row.asked_bytes == row.transferred_bytes > row.transferred_draft_bytes
        assert (row.transferred_draft_bytes > 0) == (has_rows and path in HANDED_OVER)
    assert {found[path].asked_bytes for path in CONVERSATIONS} == {0}


def test_the_hit_is_the_prefill_workers_and_ships_everything_again(healthy):
    found = by_path(healthy)
    assert found[FIRST].cached_tokens == 0
    assert found[HIT].cached_tokens == found["warm"].cached_tokens > 0
    assert found[HIT].transferred_bytes == found[FIRST].transferred_bytes


def test_second_turns_ship_their_suffix_to_the_row(healthy):
    row = by_path(healthy)[SECOND]
    ratio = row.transferred_bytes / row.suffix_bytes
    windowed = row.drafter in ("dflash", "dspark")
    assert 0.9 < ratio <= 1.0 if windowed else ratio == 1.0
    assert by_path(healthy)[FIRST].suffix_bytes is None


def test_a_hand_off_recomputes_the_lookahead_and_no_block(healthy):
    for path in HANDED_OVER:
        row = by_path(healthy)[path]
        lookahead = 3 * (row.drafter == "eagle3")
        assert row.recomputed_target_tokens == row.recomputed_lookahead_tokens == lookahead
        assert row.recomputed_hole_tokens == 0


def test_without_the_drafters_rows_acceptance_falls_and_the_text_stays(lossy):
    found = by_path(lossy)
    for with_rows, without in zip(HANDED_OVER, NO_DRAFT, strict=True):
        row = found[without]
        assert row.al < 0.5 * found[with_rows].al
        assert row.acceptance_by_step[0] < found[with_rows].acceptance_by_step[0]
        assert row.draft_gap_tokens > 0
        assert row.recomputed_hole_tokens == 0
        assert row.output_equal
        assert row.asked_bytes < found[with_rows].asked_bytes
        assert row.fault == disaggregated.FAULT


def test_the_loss_is_not_judged_and_would_break_parity(lossy):
    assert rows.failures(lossy.rows) == []
    for path in NO_DRAFT:
        bare = msgspec.structs.replace(by_path(lossy)[path], fault=None)
        held, line = report.verdict([bare])
        assert not held
        assert f"path {path}: drafts differ from the cold run" in line


@pytest.mark.parametrize(
    ("path", "changes", "cause"),
    [
        (FIRST, {"asked_bytes": 118273}, "118272 bytes came, 118273 were asked for"),
        (HIT, {"transferred_bytes": 9}, "9 bytes came, 118272 were asked for"),
        (SECOND, {"suffix_bytes": 53760}, "64512 bytes came for a suffix of 53760"),
        (FIRST, {"computed_here": 2}, "2 prompts were not computed by a prefill worker"),
    ],
)
@pytest.mark.parametrize("exact", [True, False])
def test_each_law_of_a_hand_off_can_break_parity(lossy, path, changes, cause, exact):
    altered = [
        msgspec.structs.replace(row, **changes) if row.path == path else row for row in lossy.rows
    ]
    assert rows.failures(altered, exact=exact) == [f"draft_model, path {path}: {cause}"]


def test_a_suffix_just_under_the_limit_is_one(lossy):
    row = msgspec.structs.replace(by_path(lossy)[SECOND], suffix_bytes=53761)
    assert rows.failures([row]) == []


def test_prefill_workers_that_end_are_told_by_the_verdict(prompts_file):
    @contextmanager
    def mortal(*args):
        @contextmanager
        def dying(**how):
            with loopback_workers.workers(*args) as decode, decode(**how) as worker:
                worker.lose_prefill_workers()
                yield worker

        yield dying

    lab = handed_over(prompts_file, "draft_model", workers=mortal)
    assert by_path(lab)[FIRST].computed_here == 3
    assert by_path(lab)[FIRST].asked_bytes == 0
    assert by_path(lab)[FIRST].output_equal
    held, line = report.verdict(lab.rows)
    assert not held
    assert f"path {FIRST}: 3 prompts were not computed by a prefill worker" in line


class Counting(acceptance.Progress):
    def __init__(self):
        self.phases, self.num_done = [], 0

    def phase(self, name, index, of, prompts, tokens):
        self.phases.append((index, of))

    def done(self):
        self.num_done += 1


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("eagle3", {}),
        ("ngram", {"num_prefill": 2}),
        ("draft_model", {"show_loss": True, "plain": False}),
        ("dspark", {"paths": ("cold",)}),
        ("dflash", {"paths": ("second_turn",), "plain": False}),
        ("ngram", {"paths": ("branches",), "branches": 2, "shared_tokens": 40}),
        ("draft_model", {"sampling": Sampling(), "plain": False}),
    ],
)
def test_phases_are_as_many_as_begin(prompts_file, drafter, options):
    lab = experiment(
        prompts_file, drafter, workers=loopback_workers.workers, **({"num_prefill": 1} | options)
    )
    lab.progress = seen = Counting()
    lab.run()
    total = lab.num_phases
    assert seen.phases == [(i, total) for i in range(1, total + 1)]
    assert seen.num_done == total
    assert report.verdict(lab.rows)[0]


def test_without_second_turns_that_path_is_left_out(prompts_file):
    lab = handed_over(prompts_file, "draft_model", paths=("cold",))
    assert list(by_path(lab)) == ["cold", FIRST, HIT, *NO_DRAFT[:2]]


def test_rows_are_compared_also_where_cold_is_all_that_was_asked_for(prompts_file):
    lab = handed_over(prompts_file, "draft_model", paths=("cold",))
    assert by_path(lab)[FIRST].draft_row_error < 1e-5
    assert by_path(lab)[NO_DRAFT[0]].draft_row_error > 0.1


def test_one_transfer_mode_finds_nothing_of_another():
    jobs = [Job("a", (1, 2), 4), Job("b", (3,), 4)]
    whole = disaggregated.apart(jobs, draft_transfer=True)
    without = disaggregated.apart(jobs, draft_transfer=False)
    assert len({job.namespace for job in (*jobs, *whole, *without)}) == 5
    assert {job.claim_policy for job in whole} == {None}
    assert {job.claim_policy for job in without} == {"fast"}
    assert [job.prompt for job in without] == [(1, 2), (3,)]


def test_the_suffix_is_what_no_row_of_the_first_turn_covers():
    engine = make_engine(EngineConfig(drafter="draft_model"))
    (first,) = run(engine, [Job("a", tuple(range(9)), 4)]).traces
    target, draft = (group.slot_bytes for group in engine.layout.groups)

    def size(job, **how):
        return disaggregated.suffix_bytes(engine, [job], [first], **how)

    then = (*first.prompt, *first.output, 5, 6)
    cases = {
        then: 3,
        (*first.prompt, 60, 60): 2,
        first.prompt: 0,
        (59, *first.prompt): 10,
    }
    for prompt, new in cases.items():
        job = Job("a", prompt, 4)
        assert size(job, draft_transfer=True) == new * (target + draft)
        assert size(job, draft_transfer=False) == new * target
    assert size(Job("other", then, 4), draft_transfer=True) == 15 * (target + draft)


def test_of_a_windowed_group_the_suffix_is_the_window_at_most():
    engine = make_engine(EngineConfig(drafter="dflash"))
    target, draft = engine.layout.groups[0], engine.layout.groups[1]
    assert draft.window is not None
    new = draft.window + 5
    whole = disaggregated.suffix_bytes(engine, [Job("a", (1,) * new, 4)], [], draft_transfer=True)
    others = sum(g.slot_bytes * min(new, g.window or new) for g in engine.layout.groups[2:])
    assert whole == target.slot_bytes * new + draft.slot_bytes * draft.window + others


def printed(found):
    out = report.console()
    with out.capture() as text:
        for table in report.tables(found):
            out.print(table)
    assert "…" not in text.get()
    return text.get()


def test_the_tables_show_what_crossed_and_how_requests_start(lossy):
    text = printed(lossy.rows)
    _, _, transfers = text.partition("bytes handed over")
    transfers, _, steps = transfers.partition("by step")
    lines = {line[:20].strip(): line.split() for line in transfers.splitlines()}
    assert lines["handed over"][2:] == ["3", "0", "118,272", "118,272", "50.0", "-"]
    assert lines["handed over, 2nd"][3:] == ["3", "0", "64,512", "64,512", "50.0", "1.000"]
    assert lines["no draft rows"][3:] == ["3", "0", "59,136", "59,136", "0.0", "-"]
    names = ["cold", "handed over", "no draft rows"]
    told = [line.strip() for line in steps.splitlines()]
    assert [name for line in told for name in names if line.startswith(name + " ")] == names
    assert not any("hit" in line or "2nd" in line for line in told)


def test_no_transfer_is_told_where_nothing_is_handed_over(lossy):
    text = printed([row for row in lossy.rows if row.path in CONVERSATIONS])
    assert "handed over" not in text
    assert "by step" not in text


def test_a_sentence_says_what_a_hand_off_without_draft_rows_costs(lossy):
    said = [line for line in report.sentences(lossy.rows) if "over without the" in line]
    found = by_path(lossy)
    assert said == [
        "Hand the prompt over without the drafter's rows, as prefill/decode disaggregation does,"
        f" and draft_model's acceptance length falls from {found[FIRST].al:.2f} to"
        f" {found[NO_DRAFT[0]].al:.2f} while the text stays the same."
    ]
    assert not any("With the fault" in line for line in report.sentences(lossy.rows))


def test_a_hand_off_that_loses_nothing_is_said_to_lose_nothing(lossy):
    found = by_path(lossy)
    same = msgspec.structs.replace(found[NO_DRAFT[0]], al=found[FIRST].al)
    (line,) = (s for s in report.sentences([found[FIRST], same]) if "over without" in s)
    assert "loses nothing here: 3.83 with them, 3.83 without." in line


def test_text_that_changed_is_not_said_to_stay(lossy):
    found = by_path(lossy)
    other = msgspec.structs.replace(found[NO_DRAFT[0]], output_equal=False)
    (line,) = (s for s in report.sentences([found[FIRST], other]) if "over without" in s)
    assert "the text stays" not in line
