"""The numbers a scheduler is held to, and what they leave a request.

Law: no step has more rows than max_batch_tokens, no request more drafts than its K, its remaining
tokens or the model length allow. This module keeps no state.

    verify step    rows [n, n + 1 + k): anchor and drafts; then at most P proposals more
    reserved       rows [.., n + 1 + k + P), and the lookahead D beyond in draft groups
"""

from __future__ import annotations

import msgspec

from tandemkv.base.errors import ConfigError, RequestError
from tandemkv.sched.request import Request


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """max_batch_tokens: rows of one step. max_running: requests that hold pages. max_model_len:
    tokens of one request. num_draft_tokens: K of a request that names none; max_draft_tokens: the
    largest K a request may name. lookahead: the layout's D. prefill_chunk: rows of one request's
    chunk. patience: after how many admissions past it a waiting request goes before all others.
    """

    max_batch_tokens: int
    max_running: int
    max_model_len: int
    num_draft_tokens: int
    max_draft_tokens: int
    lookahead: int
    prefill_chunk: int
    patience: int

    def validate(self) -> None:
        """Raise one ConfigError that names every number that cannot work."""
        problems = [
            f"{name} must be at least 1, got {getattr(self, name)}"
            for name in (
                "max_batch_tokens",
                "max_running",
                "max_model_len",
                "prefill_chunk",
                "patience",
            )
            if getattr(self, name) < 1
        ]
        if not 0 <= self.num_draft_tokens <= self.max_draft_tokens:
            problems.append(
                f"num_draft_tokens {self.num_draft_tokens} is not in [0, {self.max_draft_tokens}]"
            )
        if self.max_batch_tokens < 1 + self.max_draft_tokens:
            problems.append(
                f"max_batch_tokens {self.max_batch_tokens} is below the"
                f" {1 + self.max_draft_tokens} rows of one verify step"
            )
        if problems:
            raise ConfigError("; ".join(problems))

    def check_draft_tokens(self, k: int | None) -> None:
        """Raise RequestError unless a request may ask for k drafts a step (None: the default)."""
        if k is not None and not 0 <= k <= self.max_draft_tokens:
            raise RequestError(
                f"num_draft_tokens must be in [0, {self.max_draft_tokens}], got {k}",
                param="num_draft_tokens",
            )

    def drafts_of(self, request: Request) -> int:
        """K of the request now; 0 means speculation is off."""
        k = request.num_draft_tokens
        return self.num_draft_tokens if k is None else k

    def left(self, request: Request) -> int:
        """How many more tokens the request may emit; at least 1 while it lives."""
        return request.max_output - len(request.output)

    def most_output(self, request: Request) -> int:
        """Output tokens of the request at its longest."""
        return min(request.params.max_tokens, self.max_model_len - len(request.prompt))

    def reach(self, num_propose: int) -> int:
        """Rows beyond a step's last whose slots proposals may write; the lookahead that the context
        pass writes ahead is part of every reservation."""
        return num_propose

    def context_pass(self, request: Request) -> bool:
        """Whether the drafter's rows are written for this request now."""
        return request.params.draft_context or self.drafts_of(request) > 0
