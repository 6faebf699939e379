"""The lab's report: a table to read, sentences that say what it shows, a JSON file, a verdict.

Law: it shows the rows as they are; no number is computed here. Nothing is dropped: what a path
lacks is printed as "-".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tandemkv.lab.comparison import Difference, differences, unequal
from tandemkv.lab.measures import MIN_PROMPTS, OutputCheck
from tandemkv.lab.options import EVICTED, HANDED_OVER, NO_DRAFT, SEEDED, WITHHELD
from tandemkv.lab.provenance import SCHEMA, provenance
from tandemkv.lab.rows import MIN_STEPS, Row, failures

_NAMES = {
    "second_turn": "second turn",
    EVICTED: "branches, evicted",
    WITHHELD: "warm, rows withheld",
    "disaggregated": "handed over",
    "disaggregated_hit": "handed over, hit",
    "disaggregated_second_turn": "handed over, 2nd",
    "disaggregated_no_draft": "no draft rows",
    "disaggregated_hit_no_draft": "no draft rows, hit",
    "disaggregated_second_turn_no_draft": "no draft rows, 2nd",
}
MIN_WIDTH = 118
MAX_DIVERGENCES = 10
"""Outputs told one by one for a path; the JSON file has them all."""


def console(*, stderr: bool = False) -> Console:
    """A console at least as wide as the tables need, so that no figure is cut."""
    found = Console(stderr=stderr)
    return found if found.width >= MIN_WIDTH else Console(stderr=stderr, width=MIN_WIDTH)


def path_name(path: str) -> str:
    """A path as a reader reads it."""
    return _NAMES.get(path, path)


def tables(rows: Sequence[Row]) -> list[Table]:
    """For each drafter, how well each path drafts, where its rows came from, and its branches."""
    drafters = dict.fromkeys(row.drafter for row in rows)
    out: list[Table] = []
    for name in drafters:
        mine = [row for row in rows if row.drafter == name]
        title = f"{name}, K {mine[0].num_draft_tokens}"
        out += [_acceptance_table(title, mine), _cache_table(title, mine)]
        out += [_branch_table(title, row) for row in mine if row.branches]
        if any(row.path in HANDED_OVER for row in mine):
            out += [_transfer_table(title, mine), _step_table(title, mine)]
    return out


def _acceptance_table(title: str, rows: Sequence[Row]) -> Table:
    table = _table(
        f"{title}: acceptance by path",
        *("AL", "95 %", "of cold", "same drafts", "ties", "steps", "output", "tok/s", "plain"),
    )
    for row in rows:
        low, high = row.al_interval
        table.add_row(
            path_name(row.path),
            f"{row.al:.2f}",
            f"{low:.2f}-{high:.2f}",
            _ratio(row),
            "-" if row.sampled else f"{row.steps_equal}/{row.steps_compared}",
            "-" if row.sampled else str(row.ties),
            str(row.steps),
            _output(row),
            f"{row.tokens_per_s:.1f}",
            _number(row.tokens_per_s_plain, ".1f"),
            style="yellow" if row.fault else None,
        )
    return table


def _cache_table(title: str, rows: Sequence[Row]) -> Table:
    table = _table(
        f"{title}: tokens reused, positions run again for the drafter, steps that accept draft"
        " 1, 2, ...",
        *("cached", "draft hit", "draft gap", "lookahead", "holes", "row error", "accepted, %"),
    )
    for row in rows:
        table.add_row(
            path_name(row.path),
            str(row.cached_tokens),
            str(row.draft_hit_tokens),
            str(row.draft_gap_tokens),
            str(row.recomputed_lookahead_tokens),
            str(row.recomputed_hole_tokens),
            _number(row.draft_row_error, ".0e"),
            " ".join(f"{share:.0%}".rstrip("%") for share in row.acceptance_by_position) or "-",
            style="yellow" if row.fault else None,
        )
    return table


def _branch_table(title: str, row: Row) -> Table:
    table = _table(
        f"{title}: {path_name(row.path)}, in the order in which they ran",
        *("prompt", "cached", "draft hit", "draft gap", "lookahead", "holes"),
        *("AL", "cold AL", "same drafts"),
    )
    for branch in row.branches:
        table.add_row(
            branch.id,
            str(branch.prompt_tokens),
            str(branch.cached_tokens),
            str(branch.draft_hit_tokens),
            str(branch.draft_gap_tokens),
            str(branch.recomputed_lookahead_tokens),
            str(branch.recomputed_hole_tokens),
            f"{branch.al:.2f}",
            f"{branch.al_cold:.2f}",
            "-" if row.sampled else f"{branch.steps_equal}/{branch.steps_compared}",
        )
    return table


def _transfer_table(title: str, rows: Sequence[Row]) -> Table:
    """What crossed between workers, beside what was asked for and what second turns add."""
    table = _table(
        f"{title}: bytes handed over",
        *("prompts", "computed here", "asked", "received", "draft, %", "of the new rows"),
    )
    for row in rows:
        if row.path not in (*HANDED_OVER, *NO_DRAFT):
            continue
        share = row.transferred_draft_bytes / row.transferred_bytes if row.transferred_bytes else 0
        new = row.transferred_bytes / row.suffix_bytes if row.suffix_bytes else None
        table.add_row(
            path_name(row.path),
            str(row.prompts),
            str(row.computed_here),
            f"{row.asked_bytes:,}",
            f"{row.transferred_bytes:,}",
            f"{share:.1%}".rstrip("%"),
            _number(new, ".3f"),
            style="yellow" if row.fault else None,
        )
    return table


def _step_table(title: str, rows: Sequence[Row]) -> Table:
    """AL by step, from a request's first one on."""
    paths = ("cold", HANDED_OVER[0], NO_DRAFT[0])
    mine = [row for row in rows if row.path in paths]
    table = _table(f"{title}: by step", "AL in step 1, 2, ...")
    for row in mine:
        table.add_row(
            path_name(row.path),
            " ".join(f"{al:.2f}" for al in row.acceptance_by_step),
            style="yellow" if row.fault else None,
        )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("path", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _ratio(row: Row) -> str:
    if row.al_ratio_to_cold is None or row.al_ratio_interval is None:
        return _number(row.al_ratio_to_cold, ".3f")
    low, high = row.al_ratio_interval
    return f"{row.al_ratio_to_cold:.3f} ({low:.2f}-{high:.2f})"


def _output(row: Row) -> str:
    if row.sampled:
        return "sampled"
    if row.output_equal is None:
        return "-"
    if row.output_equal:
        return "equal"
    if not row.output_different:
        return f"{row.output_near_ties} near ties"
    return f"{row.output_different} differ"


def sentences(rows: Sequence[Row]) -> list[str]:
    """What the tables show, in words."""
    out: list[str] = []
    by_key = {(row.drafter, row.path): row for row in rows}
    for (drafter, path), row in by_key.items():
        warm = by_key.get((drafter, "warm"))
        if path == WITHHELD and warm is not None:
            out.append(_loss(warm, row))
        elif path == NO_DRAFT[0] and (whole := by_key.get((drafter, HANDED_OVER[0]))):
            out.append(_unshipped(whole, row))
        elif path == ("cold" if warm is None else "warm") and row.tokens_per_s_plain:
            ratio = row.tokens_per_s / row.tokens_per_s_plain
            out.append(
                f"With {drafter} the {path} run, prompts batched, is {ratio:.2f} times as fast as"
                " without a drafter."
            )
        out += [_parted(row, check) for check in row.divergences[:MAX_DIVERGENCES]]
        out += _branched(row)
        if row.al_ratio_interval is not None:
            low, high = row.al_ratio_interval
            out.append(
                f"{drafter}, {path_name(path)}: sampled anew, AL is {row.al_ratio_to_cold:.3f} of"
                f" the fresh run's, with a 95 % interval of {low:.3f} to {high:.3f}."
            )
        if row.fault and path not in (*SEEDED, "cold"):
            out.append(
                f"With the fault {row.fault}, {drafter} drafts at"
                f" {_number(row.al_ratio_to_cold, '.1%')} of the cold AL on path {path_name(path)}."
            )
    out += [_compared(found) for found in differences(rows)]
    if ks := unequal(rows):
        out.append(
            f"Drafters are compared at equal K alone, here {_listed(ks)}; --num-draft-tokens gives"
            " all of them the same."
        )
    return out


def _branched(row: Row) -> list[str]:
    """What the first branch paid, and what the later ones did."""
    if not row.branches:
        return []
    first, *later = row.branches
    if not first.fork_context:
        return []
    again = sum(branch.recomputed_hole_tokens for branch in later)
    out = [
        f"{row.drafter}, {path_name(row.path)}: for draft rows that were gone, the first branch ran"
        f" {first.recomputed_hole_tokens} positions again, of {first.fork_context} that the drafter"
        f" reads there, and the {len(later)} later ones {again}."
    ]
    if free := sum(not branch.needed for branch in row.branches):
        out.append(
            f"{free} of these {len(row.branches)} read no draft row before the fork: the rest of"
            " their prompt is longer than the drafter's window."
        )
    return out


def _compared(found: Difference) -> str:
    (a, b), (al_a, al_b), (low, high) = found.drafters, found.als, found.interval
    said = "a difference" if found.differs else "no difference"
    said = said if found.enough else "too few prompts to tell a difference"
    return (
        f"At K {found.num_draft_tokens}, cold, on {found.prompts} prompts: {a} {al_a:.2f},"
        f" {b} {al_b:.2f}: {said}, {found.difference:+.2f} with a 95 % interval of {low:+.2f} to"
        f" {high:+.2f}."
    )


def _listed(ks: Mapping[str, int]) -> str:
    return ", ".join(f"{drafter} {k}" for drafter, k in ks.items())


def _parted(row: Row, check: OutputCheck) -> str:
    """Where an output leaves plain decoding's, and how close the target's best two were there."""
    where = f"{path_name(row.path)}: output {check.id} leaves plain decoding at {check.position}"
    if check.gap is None:
        return f"{where}, in its first token."
    return f"{where}, where the target's best two logits are {check.gap:.1e} apart."


def _loss(warm: Row, withheld: Row) -> str:
    """What a cache costs that forgets the drafter; sampled, if the interval says that it does."""
    _, high = withheld.al_ratio_interval or (0.0, 0.0)
    if withheld.al >= warm.al or high >= 1.0:
        return (
            f"Without its rows of the reused prompt {warm.drafter} loses nothing here:"
            f" {warm.al:.2f} with them, {withheld.al:.2f} without."
        )
    same = " while the text stays the same" if withheld.output_equal else ""
    return (
        f"Take the drafter's rows of the reused prompt away, as a cache that forgets the drafter"
        f" does, and {warm.drafter}'s acceptance length falls from {warm.al:.2f} to"
        f" {withheld.al:.2f}{same}: only the speed shows it."
    )


def _unshipped(whole: Row, without: Row) -> str:
    """What a hand-off costs that leaves the drafter's rows behind."""
    if without.al >= whole.al:
        return (
            f"Handed over without the drafter's rows {whole.drafter} loses nothing here:"
            f" {whole.al:.2f} with them, {without.al:.2f} without."
        )
    same = " while the text stays the same" if without.output_equal else ""
    return (
        f"Hand the prompt over without the drafter's rows, as prefill/decode disaggregation does,"
        f" and {whole.drafter}'s acceptance length falls from {whole.al:.2f} to"
        f" {without.al:.2f}{same}."
    )


def verdict(rows: Sequence[Row], *, judged: bool = True) -> tuple[bool, str]:
    """Whether parity held, and one line that says so or names the first path that broke it."""
    if problems := failures(rows, exact=judged):
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return False, f"parity broken: {problems[0]}{more}"
    sampled = any(row.sampled for row in rows)
    if not judged and not sampled:
        return (
            True,
            "Parity is judged in float32 alone: rounding may turn drafts at lower precision.",
        )
    checked = [row for row in rows if row.fault is None and row.path != "cold"]
    if any(row.fault and row.path not in SEEDED for row in rows):
        return True, "A fault was asked for, so parity is not judged."
    if not checked:
        return True, "No path was compared with a cold run."
    checked = [row for row in checked if not row.sampled or row.prompts >= MIN_PROMPTS]
    if not checked:
        return True, f"Sampled acceptance is judged from {MIN_PROMPTS} prompts on."
    if sampled:
        return True, (
            f"Parity held on {_paths(len(checked))}: the interval of AL over the fresh run's"
            " contains 1. Outputs are drawn anew on each path and are not compared."
        )
    steps = sum(row.steps_compared for row in checked)
    ties = sum(row.ties for row in checked)
    note = (
        ""
        if steps >= MIN_STEPS
        else f"; a full check takes {MIN_STEPS} steps (--limit, --max-tokens)"
    )
    return True, f"Parity held on {_paths(len(checked))}, {steps} steps, ties: {ties}{note}."


def _paths(count: int) -> str:
    return f"{count} path{'s' if count != 1 else ''}"


def document(
    rows: Sequence[Row], *, options: Any, resolved: Any, interrupted: bool = False
) -> dict[str, Any]:
    """The JSON file's content."""
    origin = provenance(options=msgspec.to_builtins(options), resolved=resolved)
    if interrupted:
        origin["interrupted"] = True
    return {
        "schema": SCHEMA,
        "provenance": origin,
        "rows": [msgspec.to_builtins(row) for row in rows],
        "comparisons": [msgspec.to_builtins(found) for found in differences(rows)],
    }
