"""The hand-off paths: conversations whose prompts are computed by prefill workers.

    disaggregated              neither side has anything        against the cold run
    disaggregated_hit          the prefill worker has it all, the decode worker nothing
    disaggregated_second_turn  both have turn 1, the decode worker its output too
    each, with _no_draft       the drafter's rows are not shipped (a seeded loss)

Law: a path differs from the one it is compared with in where the prompt was computed, and in
nothing else; each transfer mode has a decode worker and namespaces of its own. What crossed is what
the data plane says, beside what was asked for. This module starts workers; it compares nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from tandemkv.kv.layout import Domain
from tandemkv.lab.experiments import Job
from tandemkv.lab.measures import Trace, common_prefix

if TYPE_CHECKING:
    from tandemkv.engine.engine import Engine

FAULT = "no_draft_transfer"


Decode = Callable[..., AbstractContextManager[Any]]
"""decode(draft_transfer=...): a decode worker, until the block ends."""


@contextmanager
def workers(engine: Engine, num_prefill: int) -> Iterator[Decode]:
    """Prefill processes, and decode workers on this engine that use them, one after the other.

    The processes end with the block: starting one takes as long as running a path.
    """
    from tandemkv.engine.decode import DecodeWorker, Prefills

    prefills = Prefills(engine, num_prefill)

    @contextmanager
    def decode(*, draft_transfer: bool) -> Iterator[Any]:
        with closing(DecodeWorker(engine, prefills, draft_transfer=draft_transfer)) as worker:
            yield worker

    with closing(prefills):
        yield decode


def apart(jobs: Sequence[Job], *, draft_transfer: bool) -> list[Job]:
    """The same jobs where nothing of another path, or of the other transfer mode, is found.

    Without the drafter's rows they are masked and not computed again, as engines do that drop them.
    """
    kind = "with" if draft_transfer else "without"
    return [
        msgspec.structs.replace(
            job,
            namespace=f"handed over {kind} draft rows/{job.id}",
            claim_policy=None if draft_transfer else "fast",
        )
        for job in jobs
    ]


def suffix_bytes(
    engine: Engine, jobs: Sequence[Job], before: Sequence[Trace], *, draft_transfer: bool
) -> int:
    """Bytes of the rows that these prompts have beyond what their first turns left.

    The last token of an output has no row yet; of a windowed group the window's rows count alone,
    and of draft groups none where they are not shipped.
    """
    held = {trace.id: (*trace.prompt, *trace.output[:-1]) for trace in before}
    new = [len(job.prompt) - common_prefix(job.prompt, held.get(job.id, ())) for job in jobs]
    groups = [
        group
        for group in engine.layout.groups
        if draft_transfer or group.domain is not Domain.DRAFT
    ]
    return sum(
        group.slot_bytes * (rows if group.window is None else min(rows, group.window))
        for group in groups
        for rows in new
    )
