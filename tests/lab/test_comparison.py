"""Drafters side by side: at equal K, on the same prompts, and a difference only outside chance."""

import msgspec
import pytest
from labs import experiment, write_prompts
from test_report import row

from tandemkv.lab import comparison, report
from tandemkv.lab.rows import PromptTally


def cold(drafter, accepted, *, k=7, prompts=20, **changes):
    """A cold row whose prompts accept about `accepted` of 20 steps' drafts."""
    tallies = [PromptTally(f"p{i}", 20, accepted + i % 5) for i in range(prompts)]
    al = 1 + sum(t.accepted for t in tallies) / (20 * prompts)
    return row("cold", drafter=drafter, num_draft_tokens=k, by_prompt=tallies, al=al, **changes)


def test_a_difference_outside_its_interval_is_one_and_is_said():
    rows = [cold("dflash", 20), cold("dspark", 30)]
    (found,) = comparison.differences(rows)
    assert found.differs
    assert found.difference == pytest.approx(-0.5)
    assert found.interval[1] < 0
    (words,) = [line for line in report.sentences(rows) if "At K 7" in line]
    assert "on 20 prompts: dflash 2.10, dspark 2.60: a difference, -0.50 with" in words


def test_a_difference_inside_its_interval_is_none():
    other = cold("dspark", 20)
    turned = [
        msgspec.structs.replace(p, accepted=24 - i % 5) for i, p in enumerate(other.by_prompt)
    ]
    rows = [cold("dflash", 20), msgspec.structs.replace(other, by_prompt=turned)]
    (found,) = comparison.differences(rows)
    assert not found.differs
    assert any("no difference" in line for line in report.sentences(rows))


def test_a_few_prompts_tell_no_difference_however_large():
    rows = [cold("dflash", 20, prompts=7), cold("dspark", 60, prompts=7)]
    (found,) = comparison.differences(rows)
    assert not found.differs
    assert any("too few prompts to tell a difference" in line for line in report.sentences(rows))


def test_prompts_are_paired_by_their_id():
    mine, other = cold("dflash", 20), cold("dspark", 20)
    other = msgspec.structs.replace(other, by_prompt=other.by_prompt[::-1])
    (found,) = comparison.differences([mine, other])
    assert found.interval == (0.0, 0.0)


def test_at_unequal_k_nothing_is_compared_and_that_is_said():
    rows = [cold("eagle3", 20, k=4), cold("dflash", 25), cold("dspark", 30)]
    assert [found.drafters for found in comparison.differences(rows)] == [("dflash", "dspark")]
    assert comparison.unequal(rows) == {"eagle3": 4, "dflash": 7, "dspark": 7}
    words = " ".join(report.sentences(rows))
    assert "here eagle3 4, dflash 7, dspark 7; --num-draft-tokens gives" in words


def test_rows_with_a_fault_or_of_another_path_are_not_compared():
    rows = [cold("dflash", 20), cold("dspark", 30, fault="x"), row("warm", drafter="eagle3")]
    assert comparison.differences(rows) == []
    assert comparison.unequal(rows) == {}


def test_a_run_of_several_drafters_has_its_k_in_every_row_and_its_comparisons(tmp_path):
    path = write_prompts(tmp_path / "p.jsonl")
    lab = experiment(path, "eagle3", "dflash", "dspark", paths=("cold",), plain=False)
    lab.run()
    content = report.document(lab.rows, options=lab.options, resolved=lab.resolved)
    assert [r["num_draft_tokens"] for r in content["rows"]] == [3, 3, 3]
    assert [c["drafters"] for c in content["comparisons"]] == [
        ("eagle3", "dflash"),
        ("eagle3", "dspark"),
        ("dflash", "dspark"),
    ]
    out = report.console()
    with out.capture() as text:
        for table in report.tables(lab.rows):
            out.print(table)
    assert "dspark, K 3: acceptance by path" in text.get()
