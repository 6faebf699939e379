"""Branches: one shared prompt, a fork, and what each request pays there; cold runs beside them."""

import msgspec
import pytest
from labs import Letters, experiment, make_engine, write_prompts

from tandemkv.base.config import EngineConfig
from tandemkv.base.errors import ConfigError
from tandemkv.lab import branches, report
from tandemkv.lab.experiments import run, run_in_turn
from tandemkv.lab.options import BRANCHED, BRANCHES, EVICTED
from tandemkv.lab.prompts import PromptTokens, load
from tandemkv.lab.rows import failures

SHARED = 40
SHORT = tuple(f"{c}bc" for c in "aqxwrtz")
ENCODE = PromptTokens(Letters())


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory):
    return write_prompts(tmp_path_factory.mktemp("branches") / "prompts.jsonl", SHORT)


@pytest.fixture(scope="module", params=["eagle3", "dflash", "dspark", "draft_model"])
def branched(request, prompts_file):
    """A finished experiment on both paths; dspark has an unwindowed and a windowed group."""
    lab = experiment(prompts_file, request.param, paths=BRANCHES, shared_tokens=SHARED)
    lab.run()
    return lab


def jobs_of(prompts_file, **changes):
    asked = {"branches": 4, "shared_tokens": SHARED, "max_tokens": 12} | changes
    return branches.make_jobs(ENCODE, load(prompts_file), **asked)


def test_a_branch_drafts_as_it_does_cold_and_parity_holds(branched):
    assert [row.path for row in branched.rows] == [*BRANCHES]
    for row in branched.rows:
        assert row.output_equal
        assert row.draft_agreement == 1.0
        assert (row.draft_gap_tokens, row.prompts) == (0, 6)
        assert all(branch.steps_equal == branch.steps_compared > 0 for branch in row.branches)
        assert all(branch.al == branch.al_cold for branch in row.branches)
    assert report.verdict(branched.rows, judged=branched.judged)[0]


def test_each_branch_reuses_the_shared_prompt_and_pays_the_lookahead_alone(branched):
    (row,) = [row for row in branched.rows if row.path == BRANCHED]
    ahead = int(row.drafter == "eagle3")
    for branch in row.branches:
        assert branch.cached_tokens >= SHARED
        assert branch.needed > 0
        assert branch.draft_hit_tokens >= branch.fork_context > 0
        assert branch.recomputed_lookahead_tokens == ahead
        assert branch.recomputed_hole_tokens == 0
    assert row.recomputed_target_tokens == len(row.branches) * ahead


def test_after_an_eviction_the_first_branch_pays_its_context_and_the_later_ones_nothing(branched):
    (row,) = [row for row in branched.rows if row.path == EVICTED]
    first, *later = row.branches
    rebuilt = 0 if row.drafter == "draft_model" else first.fork_context
    assert first.recomputed_hole_tokens == rebuilt
    assert first.draft_hit_tokens == 0
    assert [branch.recomputed_hole_tokens for branch in later] == [0] * 5
    assert all(branch.draft_hit_tokens >= branch.fork_context for branch in later)
    assert row.recomputed_target_tokens == rebuilt + row.recomputed_lookahead_tokens


def test_the_context_of_a_windowed_drafter_is_its_window_whatever_the_prompt(prompts_file):
    for shared in (SHARED, 3 * SHARED):
        lab = experiment(prompts_file, "dflash", paths=(EVICTED,), shared_tokens=shared)
        (row,) = lab.run()
        assert row.branches[0].recomputed_hole_tokens == row.branches[0].fork_context == 7


def test_what_the_branches_paid_is_said(branched):
    words = " ".join(report.sentences(branched.rows))
    drafter = branched.rows[0].drafter
    assert f"{drafter}, branches: for draft rows that were gone, the first branch ran 0" in words
    assert f"{drafter}, branches, evicted: " in words
    assert "and the 5 later ones 0." in words
    out = report.console()
    with out.capture() as text:
        for table in report.tables(branched.rows):
            out.print(table)
    assert "in the order in which they ran" in text.get()
    assert "cold AL" in text.get()


def test_draft_pages_evicted_between_branches_are_seen(prompts_file):
    engine = make_engine(EngineConfig(drafter="dflash"))
    first, *rest = jobs_of(prompts_file)
    run(engine, [first])
    traces = []
    for job in rest:
        branches.evict_draft_pages(engine)
        traces += run(engine, [job]).traces
    found = branches.describe(engine.layout, traces, traces)
    assert [branch.recomputed_hole_tokens for branch in found] == [7] * 4
    assert len(list(branches.problems(found))) == 3


def test_the_rows_of_an_eviction_are_those_of_the_drafter_alone(prompts_file):
    engine = make_engine(EngineConfig(drafter="dspark"))
    run_in_turn(engine, jobs_of(prompts_file))
    before = [usage.cached for usage in engine.kv.usage()]
    branches.evict_draft_pages(engine)
    engine.check()
    after = [usage.cached for usage in engine.kv.usage()]
    drafts = set(engine.layout.draft_groups)
    for g, (was, now) in enumerate(zip(before, after, strict=True)):
        assert was > 0
        assert now == (0 if g in drafts else was)


def test_withheld_rows_are_seen_on_the_branches_and_not_judged(prompts_file):
    lab = experiment(
        prompts_file,
        "draft_model",
        paths=(BRANCHED,),
        shared_tokens=SHARED,
        faults=("withhold_draft_rows",),
    )
    (row,) = lab.run()
    assert row.output_equal
    assert row.draft_gap_tokens > 0
    assert row.draft_agreement < 0.9
    assert report.verdict(lab.rows)[0]
    assert failures([msgspec.structs.replace(row, fault=None)])


def branch(holes=0, **changes):
    values = {
        "id": "b",
        "prompt_tokens": 60,
        "cached_tokens": 50,
        "fork_context": 7,
        "needed": 3,
        "draft_hit_tokens": 7,
        "draft_gap_tokens": 0,
        "recomputed_lookahead_tokens": 0,
        "recomputed_hole_tokens": holes,
        "al": 2.0,
        "al_cold": 2.0,
        "steps_compared": 9,
        "steps_equal": 9,
    }
    return branches.Branch(**(values | changes))


@pytest.mark.parametrize(
    ("holes", "cause"),
    [
        ((8, 0, 0), "the first branch recomputed 8 positions for draft rows, of 7 it may"),
        ((7, 0, 1), "branch b recomputed 1 positions for draft rows that a branch before"),
        ((7, 0, 0), None),
        ((0, 0, 0), None),
    ],
)
def test_a_first_branch_may_pay_a_window_and_a_later_one_nothing(holes, cause):
    found = list(branches.problems([branch(n) for n in holes]))
    assert found == [] if cause is None else cause in found[0]


def test_all_prompts_part_at_one_token(tmp_path):
    path = write_prompts(tmp_path / "p.jsonl", ("abc", "axy", "bcd", "cde", "def", "exit"))
    jobs = jobs_of(path, branches=3)
    fork = len(ENCODE.opening([{"role": "system", "content": shared()}, *ask("")])) - 2
    assert [job.id for job in jobs] == ["1", "3", "4", "5"]
    assert {job.prompt[:fork] for job in jobs} == {jobs[0].prompt[:fork]}
    assert len({job.prompt[fork] for job in jobs}) == 4
    assert {job.namespace for job in jobs} == {branches.NAMESPACE}


def ask(text):
    return [{"role": "user", "content": text}]


def shared(num_tokens=SHARED):
    return branches.shared_text(ENCODE, num_tokens)


def test_too_few_prompts_that_part_are_refused_by_name(prompts_file):
    with pytest.raises(ConfigError, match=r"--branches 9 needs 10 prompts .* give 7"):
        jobs_of(prompts_file, branches=9)


@pytest.mark.parametrize("size", [40, 2048, 40_000])
def test_the_shared_text_has_the_length_asked_for(size):
    length = ENCODE.length(shared(size))
    assert size <= length < size + 40
    assert shared(size) == shared(size)


def test_no_branch_asks_about_a_text_that_the_shared_prompt_holds():
    found = load("bundled")
    jobs = branches.make_jobs(ENCODE, found, branches=6, shared_tokens=9000, max_tokens=8)
    kinds = {c.id: c.kind for c in found}
    assert {kinds[job.id] for job in jobs} == {"chat", "maths", "code"}


def test_a_system_message_of_its_own_comes_after_the_shared_text(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"messages": [{"role": "system", "content": "be brief"},'
        ' {"role": "user", "content": "a"}]}\n{"prompt": "b"}\n'
    )
    first, second = jobs_of(str(path), branches=1)
    assert len(first.prompt) > len(second.prompt)
    text = ENCODE.length(shared())
    assert first.prompt[:text] == second.prompt[:text]


@pytest.mark.parametrize(
    ("shared_tokens", "cause"),
    [(31, "at least 4 windows of the drafter, 32, got 31"), (190, "do not fit --max-model-len")],
)
def test_a_shared_prompt_too_short_or_too_long_is_refused_by_name(
    prompts_file, shared_tokens, cause
):
    lab = experiment(
        prompts_file, "dflash", paths=(BRANCHED,), shared_tokens=shared_tokens, plain=False
    )
    with pytest.raises(ConfigError, match=cause):
        lab.run()
