"""From tokens to text as they arrive: incremental detokenisation and stop strings.

Law: the text is a function of the token sequence alone, not of how it was split into pushes; what
was taken is never taken back; no text at or past a completed stop string is ever released (the
stop string itself only with include_stop). Work per token is bounded. This module knows no
requests and no HTTP; it works with any tokenizer that has Hugging Face's `decode`.

    tokens   ... settled context | window: decoded again with each token |
    text     ... released                | held: may begin a stop string | may be half a character
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tandemkv.base.errors import RequestError

REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are no character, or not one yet."""
WINDOW_TOKENS = 8
"""A window longer than this is cut at the last place where its text was complete."""
UNSETTLED_TOKENS = 32
"""A window in which nothing was complete for so long is cut anyway, keeping CHARACTER_TOKENS."""
CHARACTER_TOKENS = 4
"""A character is at most 4 bytes and each token at least one."""


class Detokenizer:
    """Text of a growing token list, a token at a time.

    context: tokens before the first (the end of the prompt), so that a tokenizer that writes a
    space between words writes it before the first word too. Text that could still change (a
    character of which some bytes are missing) is kept back until it is settled or flushed.
    """

    __slots__ = ("_complete", "_shown", "_skipped", "_tokenizer", "_window")

    def __init__(
        self, tokenizer: Any, *, context: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = _special_ids(tokenizer) if skip_special_tokens else frozenset[int]()
        self._window = [t for t in context[-WINDOW_TOKENS:] if t not in self._skipped]
        self._shown = len(self._decode(self._window))  # characters of the window's text released
        self._complete = len(self._window)  # window tokens up to the last complete text

    def push(self, token: int) -> str:
        """The text that this token settles; often "", when a character is incomplete."""
        if token in self._skipped:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        settled = len(text.rstrip(REPLACEMENT))
        new = text[self._shown : settled]
        self._shown = max(self._shown, settled)
        if settled == len(text):
            self._cut_where_complete()
        elif len(self._window) > UNSETTLED_TOKENS:
            new += self._cut_anyway(text)
        return new

    def flush(self) -> str:
        """What was kept back, incomplete characters as U+FFFD. The end: nothing may follow."""
        text = self._decode(self._window)[self._shown :]
        self._window, self._shown, self._complete = [], 0, 0
        return text

    def _cut_where_complete(self) -> None:
        if len(self._window) > WINDOW_TOKENS and self._complete:
            self._window = self._window[self._complete :]
            self._shown = len(self._decode(self._window))
        self._complete = len(self._window)

    def _cut_anyway(self, text: str) -> str:
        """Release all but the last character, the only one that may be incomplete."""
        new = text[self._shown : -1]
        self._window = self._window[-CHARACTER_TOKENS:]
        self._shown = len(self._decode(self._window)) - 1
        self._complete = 0
        return new

    def _decode(self, tokens: Sequence[int]) -> str:
        if not tokens:
            return ""
        return self._tokenizer.decode(
            tokens,
            skip_special_tokens=bool(self._skipped),
            clean_up_tokenization_spaces=False,
        )


class StopStrings:
    """Finds the first stop string to complete in a growing text; releases what is before it.

    The first to complete is the one with the smallest end; of several with that end, the longest.
    """

    __slots__ = ("_held", "_include", "_stop", "stopped")

    def __init__(self, stop: Sequence[str], *, include_stop: bool = False) -> None:
        if not all(isinstance(s, str) and s for s in stop):
            raise RequestError("stop strings must be strings that are not empty", param="stop")
        self._stop = tuple(stop)
        self._include = include_stop
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """Add text; returns what is now safe. After a stop string completed, always ""."""
        if self.stopped is not None:
            return ""
        text = self._held + text
        found = [(text.find(s) + len(s), -len(s), s) for s in self._stop if s in text]
        if found:
            end, _, self.stopped = min(found)
            self._held = ""
            return text[: end if self._include else end - len(self.stopped)]
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held because it could have begun a stop string."""
        text, self._held = self._held, ""
        return text

    def _num_held(self, text: str) -> int:
        """Length of the longest end of text that is the beginning of a stop string."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            end = text[len(text) - size :]
            if any(s.startswith(end) for s in self._stop):
                return size
        return 0


class TextStream:
    """The text of one choice while it is generated: push tokens, take text, finish.

    stop: stop strings, none empty (RequestError). include_stop: whether the stop string itself is
    part of the text. context, skip_special_tokens: see Detokenizer. `push` is a Request's watch.
    """

    __slots__ = ("_detokenizer", "_ready", "_stops")

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        *,
        context: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = Detokenizer(
            tokenizer, context=context, skip_special_tokens=skip_special_tokens
        )
        self._stops = StopStrings(stop, include_stop=include_stop)
        self._ready: list[str] = []

    @property
    def stopped(self) -> str | None:
        """The stop string that completed, None while none has."""
        return self._stops.stopped

    def push(self, tokens: Sequence[int]) -> int | None:
        """Add emitted tokens. When a stop string completes: how many of them are kept.

        The token whose text completes the stop string is the last one kept, so token ids, log
        probabilities and usage end where the text does. None: all are kept. 0 after a stop.
        """
        if self.stopped is not None:
            return 0
        for i, token in enumerate(tokens, start=1):
            self._ready.append(self._stops.push(self._detokenizer.push(token)))
            if self.stopped is not None:
                return i
        return None

    def take(self) -> str:
        """The text that became safe since the last take; may be ""."""
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def finish(self) -> str:
        """take(), and what was held back, for the generation is over. "" when called again."""
        if self.stopped is None:
            self._ready.append(self._stops.push(self._detokenizer.flush()))
            self._ready.append(self._stops.flush())
        return self.take()


@lru_cache(maxsize=8)
def _special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that decode(skip_special_tokens=True) leaves out."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    marked = (i for i, token in added.items() if getattr(token, "special", False))
    return frozenset([*getattr(tokenizer, "all_special_ids", ()), *marked])
