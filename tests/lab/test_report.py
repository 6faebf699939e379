"""The verdict and the words: what breaks parity is named, what does not is not."""

import io
import json

import pytest
from rich.console import Console

from tandemkv.base.errors import ConfigError
from tandemkv.lab import provenance, report
from tandemkv.lab.command import interruption
from tandemkv.lab.measures import OutputCheck
from tandemkv.lab.progress import BarProgress
from tandemkv.lab.rows import Row


def row(path="warm", **changes):
    values = {
        "drafter": "eagle3",
        "path": path,
        "num_draft_tokens": 4,
        "prompts": 4,
        "steps": 3000,
        "al": 2.4,
        "al_interval": (2.3, 2.5),
        "al_ratio_to_cold": 1.0,
        "draft_agreement": 1.0,
        "output_equal": True,
        "acceptance_by_position": [0.6, 0.4],
        "acceptance_by_step": [2.4],
        "draft_hit_tokens": 10,
        "draft_gap_tokens": 0,
        "recomputed_target_tokens": 4,
        "recomputed_lookahead_tokens": 4,
        "recomputed_hole_tokens": 0,
        "tokens_per_s": 30.0,
        "tokens_per_s_plain": 20.0,
        "cached_tokens": 10,
        "steps_compared": 3000,
        "steps_equal": 3000,
        "ties": 0,
        "steps_unmatched": 0,
        "output_near_ties": 0,
        "output_different": 0,
        "suspensions": 0,
        "draft_row_error": 1e-6,
    }
    return Row(**(values | changes))


def test_parity_that_holds_is_said_with_its_steps():
    held, line = report.verdict([row("cold"), row("warm"), row("resumed")])
    assert held
    assert "2 paths, 6000 steps" in line


def test_an_output_that_leaves_plain_decoding_is_told_with_its_place_and_gap():
    checks = [
        OutputCheck(id="maths-3", equal=False, position=153, gap=3e-6),
        OutputCheck(id="chat-1", equal=False, position=40, gap=None),
    ]
    words = report.sentences([row(output_equal=False, divergences=checks)])
    assert "warm: output maths-3 leaves plain decoding at 153" in words[1]
    assert "3.0e-06 apart" in words[1]
    assert "chat-1 leaves plain decoding at 40, in its first token" in words[2]
    assert not any("leaves plain" in line for line in report.sentences([row()]))


def test_a_short_run_says_how_long_a_full_one_is():
    assert "a full check takes 2000 steps" in report.verdict([row(steps_compared=50)])[1]


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"draft_agreement": 0.998, "steps_equal": 2994}, "differ from the cold run at 6 of 3000"),
        ({"al_ratio_to_cold": 0.994}, "AL is 0.9940 of the cold run's"),
        ({"al_ratio_to_cold": 1.006}, "AL is 1.0060"),
        ({"ties": 7}, "7 ties in 3007 steps"),
        ({"draft_row_error": 2e-4}, "a draft row is 2.0e-04 of its norm off"),
        ({"output_equal": False, "output_different": 1}, "1 outputs differ from plain decoding"),
    ],
)
def test_each_limit_can_break_parity_and_the_path_is_named(changes, cause):
    held, line = report.verdict([row("cold"), row("second_turn", **changes)])
    assert not held
    assert "path second_turn" in line
    assert cause in line
    assert "\n" not in line


@pytest.mark.parametrize(
    "changes",
    [
        {"draft_agreement": 0.9995, "steps_equal": 2998},
        {"ties": 6},
        {"output_equal": False, "output_near_ties": 1},
        {"draft_agreement": 0.1, "fault": "withhold_draft_rows"},
        {"draft_row_error": None, "al_ratio_to_cold": None, "draft_agreement": None},
    ],
)
def test_what_is_within_the_limits_or_asked_for_does_not(changes):
    assert report.verdict([row(**changes)])[0]


def test_two_ties_in_a_short_run_are_no_verdict():
    assert report.verdict([row(steps_compared=300, steps_equal=300, ties=2)])[0]


def test_lower_precision_is_not_judged():
    held, line = report.verdict([row(draft_agreement=0.9)], judged=False)
    assert held
    assert "float32" in line


def test_the_loss_is_said_in_one_sentence():
    lost = row("warm_rows_withheld", al=1.5, fault="withhold_draft_rows")
    (sentence,) = [s for s in report.sentences([row(), lost]) if "falls from" in s]
    assert "from 2.40 to 1.50 while the text stays the same" in sentence


def test_a_text_that_changed_is_not_called_the_same():
    lost = row("warm_rows_withheld", output_equal=False, fault="withhold_draft_rows")
    assert not any("stays the same" in s for s in report.sentences([row(), lost]))


def test_a_drafter_that_loses_nothing_is_not_said_to():
    warm = row()
    same = row("warm_rows_withheld", fault="withhold_draft_rows")
    drawn = row(
        "warm_rows_withheld",
        al=2.3,
        sampled=True,
        al_ratio_to_cold=0.96,
        al_ratio_interval=(0.9, 1.02),
        fault="withhold_draft_rows",
    )
    for withheld in (same, drawn):
        words = " ".join(report.sentences([warm, withheld]))
        assert "loses nothing here: 2.40 with them" in words
        assert "falls from" not in words


@pytest.mark.parametrize("interval", [(0.90, 0.99), (1.01, 1.10)])
def test_a_sampled_ratio_whose_interval_leaves_1_out_breaks_parity_at_any_precision(interval):
    changes = {"sampled": True, "al_ratio_to_cold": 0.95, "draft_agreement": None, "prompts": 8}
    drawn = row(al_ratio_interval=interval, **changes)
    held, line = report.verdict([row("cold"), drawn], judged=False)
    assert not held
    assert "path warm: AL is 0.950 of the fresh run's" in line
    assert report.verdict([row(al_ratio_interval=(0.9, 1.1), **changes)], judged=False)[0]
    few = row(al_ratio_interval=interval, **(changes | {"prompts": 7}))
    assert report.verdict([few]) == (True, "Sampled acceptance is judged from 8 prompts on.")


def test_speed_is_said_beside_the_speed_without():
    assert any("1.50 times as fast" in s for s in report.sentences([row("cold"), row()]))


def test_a_fault_that_was_asked_for_is_said():
    faulty = row(fault="withhold_draft_rows", al_ratio_to_cold=0.6, tokens_per_s_plain=None)
    assert any("60.0% of the cold AL on path warm" in s for s in report.sentences([faulty]))


def test_with_a_fault_parity_is_not_judged():
    held, line = report.verdict([row("cold", fault="x"), row(fault="x", draft_agreement=0.1)])
    assert held
    assert "not judged" in line


def test_a_results_file_is_whole_or_absent(tmp_path):
    path = tmp_path / "figures.json"
    provenance.write_figures(path, {"speed": 1.5}, threads=2)
    content = json.loads(path.read_text())
    assert content["schema"] == 1
    assert content["figures"] == {"speed": 1.5}
    assert content["provenance"]["threads"] == 2
    with pytest.raises(TypeError):
        provenance.write_json(path, {"speed": object()})
    assert json.loads(path.read_text()) == content
    with pytest.raises(ConfigError, match="--json"):
        provenance.write_json(tmp_path, {})


def test_a_results_file_that_cannot_be_written_is_refused_before_it_is_needed(tmp_path):
    provenance.check_writable(tmp_path / "rows.json")
    (tmp_path / "file").touch()
    for bad, cause in (
        (tmp_path, "it is a directory"),
        (tmp_path / "none" / "rows.json", "there is no directory"),
        (tmp_path / "file" / "rows.json", "there is no directory"),
    ):
        with pytest.raises(ConfigError, match=f"--json {bad}: {cause}"):
            provenance.check_writable(bad)
    assert not (tmp_path / "rows.json").exists()


def test_an_interruption_promises_no_rows_that_there_are_not():
    assert interruption(0) == "interrupted"
    assert interruption(1) == "interrupted: the row above is complete, the rest is missing"
    assert "the 3 rows above are complete" in interruption(3)


def told(*, terminal, verbose=False):
    """What a phase of two prompts that end early shows."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, color_system=None)
    with BarProgress(console, verbose=verbose) as progress:
        progress.loading("eagle3")
        progress.phase("eagle3: cold", 2, 9, 2, 128)
        progress.advance(30, 1, 34)
        progress.advance(64, 1, 0)
        progress.done()
    return out.getvalue()


def test_in_a_pipe_a_finished_phase_is_one_line_with_its_number_and_its_seconds():
    (line,) = told(terminal=False).splitlines()
    assert line.startswith("[2/9] eagle3: cold: 2 prompts, 94 tokens, ")
    assert line.endswith(" s")
    assert told(terminal=False, verbose=True).splitlines()[0].startswith("loading the model with")


def test_on_a_terminal_a_bar_shows_prompts_and_tokens_done():
    text = told(terminal=True)
    for part in ("loading the model", "[2/9] eagle3: cold", "2/2 prompts", "94/94 tokens", "left"):
        assert part in text
