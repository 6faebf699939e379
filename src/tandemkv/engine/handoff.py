"""The two ends of a hand-off on an engine: a prompt whose rows leave, and rows that arrive.

    prefill engine   Source: add (keep) -> steps -> first token -> (rows are read) -> close
    decode engine    Sink: open -> (rows are written) -> deliver -> the request resumes

Law: pages that rows are read from or written into are held until the end says so; what arrives is
published by the cache's own rules and claimed like any prefix, so a hand-off that fails costs time
and nothing else. Both are used between steps, on the engine's thread. No byte is moved here.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tandemkv.base.errors import InvariantError
from tandemkv.base.logprobs import TokenLogprobs
from tandemkv.base.sampling import SamplingParams
from tandemkv.base.spans import Span, SpanSet
from tandemkv.engine.engine import Engine
from tandemkv.kv.keys import Namespace
from tandemkv.kv.sequence import Sequence as KVSequence
from tandemkv.sched.batch import Output
from tandemkv.sched.request import Request
from tandemkv.transfer.offer import GroupOffer, group_offers
from tandemkv.transfer.plan import wanted


def offers_of(engine: Engine) -> tuple[GroupOffer, ...]:
    """Geometry and memory of every layer group of an engine; addresses are of this process."""
    groups = group_offers(engine.layout, engine.plan.num_pages)
    return tuple(
        msgspec.structs.replace(
            group,
            shards=tuple(
                msgspec.structs.replace(shard, address=pool.data.data_ptr())
                for shard in group.shards
            ),
        )
        for group, pool in zip(groups, engine.storage.pools, strict=True)
    )


def prefill_params(params: SamplingParams, seed: int) -> SamplingParams:
    """What the first token is sampled with elsewhere: the request's own, one token, no drafts."""
    return msgspec.structs.replace(
        params, max_tokens=1, min_tokens=min(params.min_tokens, 1), num_draft_tokens=0, seed=seed
    )


class Source:
    """A prompt that is computed here for another worker."""

    def __init__(
        self,
        engine: Engine,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        namespace: Namespace = Namespace(),
        priority: int = 0,
        request_id: str | None = None,
    ) -> None:
        """Queue the prompt. Raises RequestError if it can never run."""
        self._engine = engine
        self.request: Request = engine.add(
            prompt,
            prefill_params(params, seed),
            namespace=namespace,
            priority=priority,
            request_id=request_id,
            keep=True,
        )
        self._aside = None
        self._logprobs: TokenLogprobs | None = None
        self._closed = False

    @property
    def first_tokens(self) -> list[int]:
        """The first token, once it is known."""
        return list(self.request.output)

    @property
    def logprobs(self) -> TokenLogprobs | None:
        """Of the first token, where they were asked for and the worker kept them."""
        return self._logprobs

    def note(self, output: Output) -> None:
        """News of the request, from the engine's step: the first token's logprobs are in it."""
        if output.logprobs:
            self._logprobs = output.logprobs[0]

    @property
    def error(self) -> str | None:
        """Why the prompt could not be computed; the source is over then."""
        return self.request.error

    @property
    def _seq(self):
        if self._aside is None and self.request.finish_reason is not None:
            self._aside = self._engine.scheduler.take_aside(self.request.id)
            if self._aside is not None:
                self._engine.scheduler.lent.add(self._aside)
        return self._aside or self.request.seq

    def covered(self) -> list[SpanSet]:
        """Per group, the slots whose rows are final and may be read now."""
        seq = self._seq
        groups = range(len(self._engine.layout.groups))
        if seq is None:
            return [SpanSet() for _ in groups]
        return [SpanSet(seq.canonical(g, 0, seq.coverage[g].stop)) for g in groups]

    def pages(self) -> list[list[int]]:
        """Per group, the page table."""
        seq = self._seq
        return [list(table) for table in seq.pages] if seq is not None else []

    def close(self) -> None:
        """Nobody reads any more: publish what was computed and give the pages up. Safe twice."""
        if self._closed:
            return
        self._closed = True
        seq = self._seq
        if self._aside is not None:
            self._engine.scheduler.lent.discard(self._aside)
            self._engine.kv.finish(self._aside)
        elif seq is not None or self.request.finish_reason is None:
            self._engine.abort(self.request.id)
        self._engine.settle()


class Sink:
    """Pages for a prompt's rows that another worker computes."""

    def __init__(self, engine: Engine, prompt: Sequence[int], namespace: Namespace, claim) -> None:
        """Made by `open`."""
        self._engine = engine
        self._seq = claim.seq
        self.prompt, self.namespace = list(prompt), namespace
        self.held = claim.plan.end
        layout = engine.layout
        self.wanted: list[list[Span]] = [
            wanted(group, len(self.prompt), self._seq.coverage[g], ahead=layout.lookahead)
            for g, group in enumerate(layout.groups)
        ]
        self._over = False

    @classmethod
    def open(
        cls, engine: Engine, prompt: Sequence[int], namespace: Namespace = Namespace()
    ) -> Sink | None:
        """Hold what is here already and room for the rest; None: no room now."""
        headroom = engine.scheduler.headroom_of_running()
        claim = engine.kv.open(list(prompt), namespace=namespace, headroom=headroom)
        if claim is None:
            return None
        engine.scheduler.lent.add(claim.seq)
        engine.settle()
        engine.storage.copy(claim.copies)
        engine.kv.copied(claim.seq)
        return cls(engine, prompt, namespace, claim)

    def pages(self) -> list[list[int]]:
        """Per group, the page table; slots of `wanted` lie in pages of this sequence alone."""
        return [list(table) for table in self._seq.pages]

    def deliver(self, received: Sequence[Sequence[Span]]) -> int:
        """These slots were written, and nobody writes any more; publish them. Safe once.

        Returns how many target rows count, from 0: all, or those before the first that is lacking.
        """
        rows = self._publish(received)
        self._engine.kv.release(self._seq)
        self._engine.settle()
        return rows

    def keep(self, received: Sequence[Sequence[Span]]) -> KVSequence:
        """As deliver; the pages stay held by the sequence returned, for `Engine.submit`."""
        self._publish(received)
        return self._seq

    def _publish(self, received: Sequence[Sequence[Span]]) -> int:
        self._end()
        rows = self._whole_rows(received)
        groups = self._engine.layout.groups
        kept = [
            [(a, min(b, rows + g.lookahead)) for a, b in spans if a < rows + g.lookahead]
            for spans, g in zip(received, groups, strict=True)
        ]
        known = len(self.prompt)
        kept = [[(a, min(b, known)) for a, b in spans if a < known] for spans in kept]
        if rows < known and any(g.window is not None for g in groups):
            rows, kept = 0, []  # windows were opened for the whole prompt
        if rows > self.held:
            self._engine.kv.accept(self._seq, rows, kept)
        self._engine.kv.publish_all(self._seq)
        return max(rows, self.held)

    def cancel(self) -> None:
        """Nobody writes any more and nothing is kept."""
        self._end()
        self._engine.kv.release(self._seq)
        self._engine.settle()

    def _end(self) -> None:
        if self._over:
            raise InvariantError("a hand-off ends once")
        self._over = True
        self._engine.scheduler.lent.discard(self._seq)

    def _whole_rows(self, received: Sequence[Sequence[Span]]) -> int:
        """Target rows up to the first slot that was wanted and did not arrive, in any group."""
        rows = len(self.prompt)
        for g in self._engine.layout.target_groups:
            arrived = SpanSet(received[g])
            for start, stop in self.wanted[g]:
                missing = arrived.missing(start, stop)
                if missing:
                    rows = min(rows, missing[0][0])
        return rows
