"""Whether the first waiting request may have its pages now, in every layer group or in none.

Law: a request is admitted only if, afterwards, every running one can still take its next step:
the head-room. A suspended request needs more (`RESUME_STEPS` steps each), so that it does not come
back only to be suspended again. With nothing else running no head-room is asked, so the first in
line always gets in. A request that does not fit blocks those behind it; nothing overtakes it.
Every prefix counts: pages that other requests hold already cost nothing.
"""

from __future__ import annotations

from tandemkv.base.errors import RequestError
from tandemkv.kv.manager import Claim, KVManager
from tandemkv.sched.limits import Limits
from tandemkv.sched.queues import Queues
from tandemkv.sched.request import Request, RequestState

RESUME_STEPS = 4


class Admission:
    """Claims pages for the head of the waiting queue."""

    def __init__(self, manager: KVManager, queues: Queues, limits: Limits) -> None:
        self._manager = manager
        self._queues = queues
        self._limits = limits
        self._groups = manager.layout.groups
        self._blocked: tuple[str, list[int]] | None = None

    def check_fits(self, request: Request) -> None:
        """Raise RequestError if the request could never run to its end, alone in the pools."""
        limits, n = self._limits, len(request.prompt)
        if n == 0:
            raise RequestError("the prompt is empty; at least 1 token is needed", param="prompt")
        if n >= limits.max_model_len:
            raise RequestError(
                f"the prompt has {n} tokens; max_model_len {limits.max_model_len} leaves room for"
                f" at most {limits.max_model_len - 1}",
                param="prompt",
            )
        why = self._manager.fits(n + limits.most_output(request) - 1, 0)
        if why is not None:
            raise RequestError(f"prompt and max_tokens are too long: {why}", param="max_tokens")

    def claim(self, request: Request) -> Claim | None:
        """Pages for the request and what is left to compute, or None: not now.

        Raises RequestError if the pools can never hold it.
        """
        alone = not self._queues.running
        spare = self._spare()
        if not alone and self._still_blocked(request, spare):
            return None
        claim = self._claim_alone(request) if alone else self._claim(request)
        self._blocked = None if claim is not None else (request.id, spare)
        return claim

    def _still_blocked(self, request: Request, spare: list[int]) -> bool:
        """Whether it was refused before and no pool has more room since: not worth a look-up."""
        if self._blocked is None or self._blocked[0] != request.id:
            return False
        return all(now <= then for now, then in zip(spare, self._blocked[1], strict=True))

    def _claim_alone(self, request: Request) -> Claim | None:
        """With every page to itself: without drafts if need be, without a cache if need be."""
        claim = self._claim(request)
        if claim is None:
            claim = self._claim_rows(request, 0)
        if claim is None:
            self._manager.reset_cache()
            claim = self._claim_rows(request, 0)
        return claim

    def _claim(self, request: Request) -> Claim | None:
        """With room for drafts, unless the pools could never hold the request and them."""
        try:
            return self._claim_rows(request, self._reach(request))
        except RequestError:
            return self._claim_rows(request, 0)

    def _reach(self, request: Request) -> int:
        limits = self._limits
        return limits.reach(max(0, min(limits.drafts_of(request), limits.left(request) - 1)))

    def _claim_rows(self, request: Request, reach: int) -> Claim | None:
        """n known rows, the anchor's and what the next step's context pass and proposals write."""
        limits = self._limits
        resume = bool(request.output)
        policy = request.params.claim_policy if limits.context_pass(request) else "fast"
        policy = policy or "exact"
        return self._manager.claim(
            request.tokens,
            namespace=request.namespace,
            policy=policy,
            resume=resume,
            expected_tokens=limits.left(request),
            headroom=self._headroom(request),
            use=request.draft_use,
            reserve=min(
                request.num_tokens - resume + 1 + reach,
                len(request.prompt) + request.max_output - 1 + reach,
            ),
        )

    def _spare(self) -> list[int]:
        """Pages per group that a claim could have: free or cached."""
        return [usage.free + usage.cached for usage in self._manager.usage()]

    def _headroom(self, request: Request) -> list[int]:
        """Pages per group that those who run need for their next steps, and this one if it was
        suspended; none if it will run alone."""
        running = len(self._queues.running)
        suspended = request.state is RequestState.SUSPENDED and running > 0
        return self._growth(running + suspended, RESUME_STEPS if suspended else 1)

    def headroom_of_running(self) -> list[int]:
        """Pages per group that rows from elsewhere do not get: those who run need them soon."""
        return self._growth(len(self._queues.running), RESUME_STEPS)

    def _growth(self, count: int, steps: int) -> list[int]:
        rows = (1 + self._limits.num_draft_tokens) * steps
        return [count * -(-rows // group.page_size) for group in self._groups]
