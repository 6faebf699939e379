"""N-gram lookup: draft what followed the longest suffix of the text where it occurred before.

Law: drafts are a function of the sequence's own tokens; there is no KV and no state, so nothing can
be lost with a page. A draft's distribution is one-hot. This module looks at no model.

    tokens   ... a b c d e ... a b c          longest suffix "a b c", newest earlier occurrence
                       drafts: d e ...        running into the end of the text, it reads its own

Source: prompt lookup decoding (Saxena 2023); LZ77 for reading on past the end.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from tandemkv.base.errors import ConfigError
from tandemkv.kv.layout import LayerGroup
from tandemkv.model.drafter import Drafter, DrafterSpec, DraftInputs, Drafts

_WIDTH = 4


class Ngram(Drafter):
    """Suffix lookup. max_ngram, min_ngram: longest and shortest suffix looked for (vLLM's
    prompt_lookup_max and prompt_lookup_min)."""

    def __init__(
        self, *, num_draft_tokens: int = 4, max_ngram: int = 5, min_ngram: int = 2
    ) -> None:
        for name, value in (("prompt_lookup_max", max_ngram), ("prompt_lookup_min", min_ngram)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}")
        if min_ngram > max_ngram:
            raise ConfigError(
                f"prompt_lookup_min {min_ngram} exceeds prompt_lookup_max {max_ngram}"
            )
        self.max_ngram, self.min_ngram = max_ngram, min_ngram
        self.spec = DrafterSpec(
            method="ngram",
            fingerprint=f"ngram {max_ngram} {min_ngram}",
            num_draft_tokens=num_draft_tokens,
        )

    def layer_groups(self, page_size: int, dtype: str) -> tuple[LayerGroup, ...]:
        return ()

    def run(self, inputs: DraftInputs) -> Drafts:
        tokens = [
            self.propose(s.tokens[: s.num_rows + 1], s.num_drafts) if s.num_drafts else []
            for s in inputs.segments
        ]
        return Drafts(tokens, [None] * len(tokens), [float("inf")] * len(tokens))

    def propose(self, tokens: Sequence[int], num: int) -> list[int]:
        """Up to num tokens to follow `tokens`; none if no suffix of min_ngram occurred before.

        O(len(tokens)) per call, in a C search over the packed ids.
        """
        text = array("I", tokens).tobytes()
        for length in range(min(self.max_ngram, len(tokens) - 1), self.min_ngram - 1, -1):
            start = _newest(text, length)
            if start >= 0:
                return _continued(tokens, start + length, num)
        return []


def _newest(text: bytes, length: int) -> int:
    """Where the last `length` ids occurred before, newest first; -1 if nowhere. In ids."""
    suffix = text[-length * _WIDTH :]
    end = len(text) - _WIDTH  # the occurrence must have a successor
    while (at := text.rfind(suffix, 0, end)) >= 0:
        if at % _WIDTH == 0:
            return at // _WIDTH
        end = at + len(suffix) - 1  # bytes that match across id borders
    return -1


def _continued(tokens: Sequence[int], start: int, num: int) -> list[int]:
    known = list(tokens[start : start + num])
    while len(known) < num:
        known.append(known[len(known) - (len(tokens) - start)])
    return known
