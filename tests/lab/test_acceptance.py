"""The experiment on tiny engines: parity on every path, and a loss where rows are withheld."""

import json

import msgspec
import pytest
from engines import drafter_of, tiny_engine, used_pages
from labs import experiment, write_prompts

from tandemkv.lab import acceptance, experiments, report, rows
from tandemkv.lab.experiments import Job, run, run_in_turn, suspension_points
from tandemkv.lab.options import BRANCHES, CONVERSATIONS, PATHS

JOBS = [Job(f"p{i}", tuple((7 * i + j * j) % 61 for j in range(9 + 5 * i)), 24) for i in range(4)]


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory):
    return write_prompts(tmp_path_factory.mktemp("lab") / "prompts.jsonl")


@pytest.fixture(scope="module", params=["eagle3", "dflash", "dspark", "draft_model", "ngram"])
def healthy(request, prompts_file):
    """A finished experiment on every path."""
    lab = experiment(prompts_file, request.param)
    lab.run()
    return lab


@pytest.fixture(scope="module")
def withheld(prompts_file):
    """The same with the draft rows of reused blocks withheld."""
    lab = experiment(prompts_file, "draft_model", faults=("withhold_draft_rows",))
    lab.run()
    return lab


def by_path(lab):
    return {row.path: row for row in lab.rows}


def test_parity_holds_on_every_path(healthy):
    found = by_path(healthy)
    assert list(found) == list(CONVERSATIONS)
    for row in found.values():
        assert row.prompts == 3
        assert row.steps > 0
        assert row.output_equal
        assert row.draft_agreement == 1.0
        assert row.al_ratio_to_cold == 1.0
        assert row.draft_gap_tokens == 0
    assert report.verdict(healthy.rows, judged=healthy.judged)[0]
    assert found["cold"].cached_tokens == 0
    assert found["warm"].cached_tokens > 0
    assert found["second_turn"].cached_tokens > found["warm"].cached_tokens
    assert found["resumed"].suspensions >= 6


def test_a_hit_recomputes_the_lookahead_and_no_block(healthy):
    found = by_path(healthy)
    lookahead = int(found["cold"].drafter == "eagle3")
    assert found["cold"].recomputed_target_tokens == 0
    assert found["warm"].recomputed_target_tokens == 3 * lookahead
    assert found["second_turn"].recomputed_target_tokens == 3 * lookahead
    resumed = found["resumed"]
    assert resumed.recomputed_target_tokens == resumed.suspensions * lookahead
    for row in found.values():  # what the cache counts is what the target ran
        assert row.recomputed_target_tokens == row.recomputed_lookahead_tokens
        assert row.recomputed_hole_tokens == 0


def test_draft_rows_are_compared_and_equal(healthy):
    found = by_path(healthy)
    assert found["cold"].draft_row_error is None
    for path in ("warm", "second_turn", "resumed"):
        error = found[path].draft_row_error
        assert error is None if found[path].drafter == "ngram" else error < 1e-5


def test_withheld_rows_are_seen_by_every_check_but_the_output(withheld):
    found = by_path(withheld)
    warm = found["warm"]
    assert warm.fault == "withhold_draft_rows"
    assert warm.output_equal
    assert warm.draft_agreement < 0.9
    assert warm.al_ratio_to_cold < 0.95
    assert warm.draft_gap_tokens > 0
    assert found["cold"].draft_agreement == 1.0


def test_without_its_fault_the_same_row_would_break_parity(withheld):
    assert rows.failures(withheld.rows) == []
    bare = [msgspec.structs.replace(row, fault=None) for row in withheld.rows]
    held, line = report.verdict(bare)
    assert not held
    assert "path warm" in line


def test_the_loss_is_shown_beside_paths_that_hold(prompts_file):
    lab = experiment(prompts_file, "draft_model", show_loss=True, paths=("cold", "warm"))
    lab.run()
    assert [row.path for row in lab.rows] == ["cold", "warm", "warm_rows_withheld"]
    assert lab.rows[1].al > lab.rows[2].al
    assert report.verdict(lab.rows)[0]
    assert any("falls from" in sentence for sentence in report.sentences(lab.rows))


def test_only_the_paths_asked_for_are_reported(prompts_file):
    lab = experiment(prompts_file, "ngram", paths=("resumed",), plain=False)
    (row,) = lab.run()
    assert (row.path, row.output_equal, row.tokens_per_s_plain) == ("resumed", None, None)


def test_what_was_finished_outlives_an_interruption(prompts_file):
    class Impatient(acceptance.Progress):
        def phase(self, name, index, of, prompts, tokens):
            if "second" in name:
                raise KeyboardInterrupt

    lab = experiment(prompts_file, "ngram", plain=False)
    lab.progress = Impatient()
    with pytest.raises(KeyboardInterrupt):
        lab.run()
    assert [row.path for row in lab.rows] == ["cold", "warm"]
    document = report.document(lab.rows, options=lab.options, resolved={}, interrupted=True)
    assert document["provenance"]["interrupted"]


class Counting(acceptance.Progress):
    """Keeps what it is told, a list of advances for each phase."""

    def __init__(self):
        self.phases, self.advances, self.num_done = [], [], 0

    def phase(self, name, index, of, prompts, tokens):
        self.phases.append((index, of, prompts, tokens))
        self.advances.append([])

    def advance(self, tokens, prompts, spared):
        self.advances[-1].append((tokens, prompts, spared))

    def done(self):
        self.num_done += 1


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("ngram", {}),
        ("ngram", {"paths": ("resumed",), "plain": False, "show_loss": True}),
        ("draft_model", {"paths": ("cold", "warm"), "show_loss": True}),
        ("dflash", {"paths": ("branches",), "branches": 2, "shared_tokens": 40}),
        (
            "ngram",
            {"paths": ("warm", *BRANCHES), "branches": 2, "shared_tokens": 40, "plain": False},
        ),
    ],
)
def test_each_phase_is_told_with_its_number_and_its_end(prompts_file, drafter, options):
    lab = experiment(prompts_file, drafter, **options)
    lab.progress = seen = Counting()
    lab.run()
    total = len(seen.phases)
    assert [(index, of) for index, of, *_ in seen.phases] == [
        (i, total) for i in range(1, total + 1)
    ]
    assert seen.num_done == total
    for (_, _, prompts, tokens), advances in zip(seen.phases, seen.advances, strict=True):
        emitted, ended, spared = map(sum, zip(*advances, strict=True))
        assert ended == prompts
        assert emitted + spared == tokens


def test_an_interrupted_run_leaves_nothing_in_the_engine():
    engine = tiny_engine("eagle3")

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(engine, JOBS, on_step=stop)
    assert not engine.has_work
    assert used_pages(engine) == [0] * len(engine.layout.groups)


def test_prompts_run_together_find_nothing_of_each_other():
    engine = tiny_engine("eagle3")
    same = [Job(f"copy {i}", JOBS[3].prompt, 8) for i in range(3)]
    run(engine, same)
    assert engine.kv.stats.prefix_hit_tokens == 0


def test_prompts_run_in_turn_in_one_namespace_find_what_the_others_left():
    engine = tiny_engine("dflash")
    same = [Job(f"copy {i}", JOBS[3].prompt, 8, "all") for i in range(3)]
    done = run_in_turn(engine, same, keep_rows=True)
    assert [trace.cached_tokens for trace in done.traces] == [0, 23, 23]
    assert {job for job, _ in done.rows} == {job.id for job in same}


def test_a_request_is_suspended_at_several_points():
    engine = tiny_engine("eagle3")
    done = run(engine, JOBS, suspend=True)
    assert done.num_suspensions >= 2 * len(JOBS)
    assert engine.kv.stats.suspensions == done.num_suspensions


@pytest.mark.parametrize("max_tokens", [1, 2, 8, 64, 256])
def test_suspension_points_lie_inside_the_output(max_tokens):
    points = suspension_points("any", max_tokens)
    assert all(1 <= point < max_tokens for point in points)
    assert max_tokens < 8 or len(points) >= 2


def test_a_wrong_row_is_seen():
    cold = run(tiny_engine("eagle3"), JOBS, keep_rows=True)
    again = run(tiny_engine("eagle3"), JOBS, keep_rows=True)
    assert experiments.row_error(again, cold) < 1e-6
    kept = again.rows[JOBS[0].id, 1][0]
    kept.values[2] *= 1.01
    assert experiments.row_error(again, cold) > 1e-3


def test_a_failed_request_names_its_prompt():
    engine = tiny_engine("ngram")
    with pytest.raises(Exception, match="prompt big: "):
        run(engine, [Job("big", (1,) * 500, 8)])


def test_the_json_rows_have_the_published_names(prompts_file):
    lab = experiment(prompts_file, "ngram", paths=("cold",))
    content = report.document(lab.run(), options=lab.options, resolved=lab.resolved)
    content = json.loads(json.dumps(content))
    assert content["comparisons"] == []
    assert content["schema"] == 1
    assert {"argv", "commit", "versions", "hardware"} <= content["provenance"].keys()
    assert {
        *("drafter", "path", "prompts", "steps", "al", "al_ratio_to_cold", "draft_agreement"),
        *("output_equal", "acceptance_by_position", "acceptance_by_step", "draft_hit_tokens"),
        *("draft_gap_tokens", "recomputed_target_tokens", "transferred_bytes", "tokens_per_s"),
        *("tokens_per_s_plain", "num_draft_tokens", "recomputed_lookahead_tokens"),
        *("recomputed_hole_tokens", "al_ratio_interval", "by_prompt", "branches"),
    } <= content["rows"][0].keys()


def test_the_tables_show_every_row(prompts_file):
    lab = experiment(prompts_file, "ngram", paths=("cold", "warm"))
    lab.run()
    out = report.console()
    with out.capture() as text:
        for table in report.tables(lab.rows):
            out.print(table)
    lines = [line.split() for line in text.get().splitlines()]
    assert [line[0] for line in lines if line and line[0] in PATHS] == [
        *("cold", "warm"),
        *("cold", "warm"),
    ]
    assert "…" not in text.get()


def test_the_self_drafter_is_really_the_target():
    assert drafter_of("self", tiny_engine("none").target, 3) is not None
    (trace,) = run(tiny_engine("self"), JOBS[:1]).traces
    assert all(step.num_accepted == len(step.drafts) for step in trace.steps[:-1])
