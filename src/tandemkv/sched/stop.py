"""The stop rules: how many of a step's tokens a request keeps, and whether it ends there.

Law: tokens count one by one, in this order: end of sequence or a stop token, then a stop string,
then the length; so a stop inside an accepted run is a stop, never a length, and nothing after it
is kept. This module keeps no state.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tandemkv.sched.request import FinishReason, Watch


def cut(
    tokens: Sequence[int],
    room: int,
    stop_tokens: Collection[int],
    watch: Watch | None = None,
) -> tuple[list[int], FinishReason | None]:
    """What is kept of newly emitted tokens, and why the request ends (None: it goes on).

    room: how many more tokens the request may have, at least 1. The stop token itself is kept.
    watch is called at most once, with the tokens that the other two rules keep.
    """
    kept = list(tokens[:room])
    reason = FinishReason.LENGTH if len(kept) == room else None
    for i, token in enumerate(kept):
        if token in stop_tokens:
            kept, reason = kept[: i + 1], FinishReason.STOP
            break
    if watch is not None and kept:
        num_kept = watch(kept)
        if num_kept is not None:
            kept, reason = kept[:num_kept], FinishReason.STOP
    return kept, reason
