"""Log probabilities of an emitted token, as every layer above the model passes them on.

Law: one TokenLogprobs per emitted token, in order, of the target's own distribution (before
temperature, penalties, bias and filters), whether the token was a draft or not.
This module computes nothing.
"""

from __future__ import annotations

import msgspec


class TokenLogprobs(msgspec.Struct, frozen=True):
    """token: the emitted id; logprob: its natural log probability; top: best (id, logprob) first.

    top holds as many entries as were asked for (none when the request asked for 0); the emitted
    token is among them only if it is one of the best.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
