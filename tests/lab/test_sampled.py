"""Sampled runs: new seeds on each path, a ratio with its interval instead of equal outputs."""

import msgspec
import pytest
from labs import experiment, write_prompts

from tandemkv.lab import measures, report
from tandemkv.lab.experiments import Job
from tandemkv.lab.measures import Tally
from tandemkv.lab.options import WITHHELD, Sampling
from tandemkv.lab.rows import failures

SAMPLING = Sampling(temperature=1.0, top_p=0.95, verification="block", seed=5)
TEXTS = tuple(f"{c}: what is line {i} of the page?" for i, c in enumerate("aqxwrtzk"))


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory):
    return write_prompts(tmp_path_factory.mktemp("sampled") / "prompts.jsonl", TEXTS)


@pytest.fixture(scope="module", params=["draft_model", "eagle3", "dspark"])
def sampled(request, prompts_file):
    """Finished cold, warm and warm without the drafter's rows."""
    lab = experiment(
        prompts_file,
        request.param,
        paths=("cold", "warm"),
        sampling=SAMPLING,
        plain=False,
        show_loss=True,
    )
    lab.run()
    return lab


def test_the_interval_of_a_healthy_ratio_contains_1_and_parity_holds(sampled):
    cold, warm, _ = sampled.rows
    assert cold.al_ratio_to_cold is None
    low, high = warm.al_ratio_interval
    assert low <= 1.0 <= high
    assert low <= warm.al_ratio_to_cold <= high
    assert warm.al_ratio_to_cold == pytest.approx(warm.al / cold.al)
    held, line = report.verdict(sampled.rows, judged=sampled.judged)
    assert held
    assert "Outputs are drawn anew on each path and are not compared" in line


def test_outputs_and_drafts_are_not_compared_but_the_prompts_rows_are(sampled):
    for row in sampled.rows[:2]:
        assert row.sampled
        assert (row.output_equal, row.draft_agreement, row.steps_compared) == (None, None, 0)
        assert row.divergences == []
    assert sampled.rows[1].draft_row_error < 1e-5


def test_withheld_rows_put_the_ratio_below_1_for_a_drafter_that_needs_them(sampled):
    """The random drafters accept too little to lose anything; the target as its own does not."""
    withheld = sampled.rows[2]
    assert withheld.path == WITHHELD
    if withheld.drafter != "draft_model":
        return
    assert withheld.al_ratio_interval[1] < 0.9
    (problem,) = failures([msgspec.structs.replace(withheld, fault=None)], exact=False)
    assert "does not contain 1" in problem
    assert "path warm_rows_withheld" in problem


def test_the_report_shows_the_ratio_with_its_interval(sampled):
    out = report.console()
    with out.capture() as text:
        for table in report.tables(sampled.rows):
            out.print(table)
    _, warm, _ = sampled.rows
    low, high = warm.al_ratio_interval
    assert f"{warm.al_ratio_to_cold:.3f} ({low:.2f}-{high:.2f})" in text.get()
    assert "sampled" in text.get()
    words = " ".join(report.sentences(sampled.rows))
    assert f"{warm.al_ratio_to_cold:.3f} of the fresh run's, with a 95 % interval of" in words
    row = report.document(sampled.rows, options=sampled.options, resolved={})["rows"][1]
    assert row["al_ratio_interval"] == (low, high)
    assert row["sampled"]


def test_the_same_seed_draws_the_same_and_another_does_not(prompts_file):
    def figures(seed):
        lab = experiment(
            prompts_file,
            "eagle3",
            paths=("cold", "warm"),
            sampling=msgspec.structs.replace(SAMPLING, seed=seed),
            plain=False,
            limit=4,
        )
        return [row.by_prompt for row in lab.run()]

    cold, warm = figures(5)
    assert [cold, warm] == figures(5)
    assert cold != warm
    assert cold != figures(6)[0]


def test_each_phase_and_prompt_has_a_seed_of_its_own():
    seeds = {SAMPLING.of(phase, job).seed for phase in ("cold", "warm") for job in "abc"}
    assert len(seeds) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert SAMPLING.of("cold", "a") == SAMPLING.of("cold", "a")


def test_a_sampled_job_asks_the_engine_for_what_was_asked_and_a_greedy_one_for_greedy():
    params = Job("a", (1, 2), 7, sampling=SAMPLING.of("cold", "a")).params
    assert (params.temperature, params.top_p, params.verification) == (1.0, 0.95, "block")
    assert (params.seed, params.max_tokens) == (SAMPLING.of("cold", "a").seed, 7)
    assert Job("a", (1, 2), 7).params.greedy


PAIRS = [(Tally(20, 20 + i % 3), Tally(20, 20 + (i + 1) % 3)) for i in range(30)]


def test_the_interval_of_a_ratio_holds_it_and_leaves_out_a_loss():
    low, high = measures.ratio_interval(PAIRS)
    assert low < measures.ratio(PAIRS) < high
    assert low < 1.0 < high
    lossy = [(Tally(20, 2 + i % 3), other) for i, (_, other) in enumerate(PAIRS)]
    assert measures.ratio_interval(lossy)[1] < 1.0
    assert measures.ratio_interval(PAIRS) == measures.ratio_interval(PAIRS)


def test_prompts_are_resampled_with_both_of_their_runs():
    """Prompts that differ much, with equal runs: paired, nothing is left to vary."""
    same = [(Tally(10, i), Tally(10, i)) for i in range(20)]
    assert measures.ratio_interval(same) == (1.0, 1.0)
    assert measures.difference_interval(same) == (0.0, 0.0)
    low, high = measures.interval([mine for mine, _ in same])
    assert high - low > 0.3
