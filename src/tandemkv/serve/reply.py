"""One Ask's answer, put together from what its generation says: a body, or server-sent events.

Law: the whole answer and the stream say the same, piece by piece; an error after the start of a
stream is an event too, and [DONE] comes last. A stream says nothing before its first token, so that
a router may have another worker answer until then. This module knows no HTTP.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import msgspec

from tandemkv.base.errors import RequestError
from tandemkv.base.transfer_params import FIELD as TRANSFER
from tandemkv.engine.background import AsyncEngine
from tandemkv.serve import answers
from tandemkv.serve.answers import DONE, Envelope, Format, Json, Piece, event
from tandemkv.serve.generation import Generation
from tandemkv.serve.openai import Ask

log = logging.getLogger("tandemkv")


class Answer:
    """One Ask's answer, written whole or as events from the same pieces."""

    def __init__(
        self, engine: AsyncEngine, ask: Ask, generation: Generation, form: Format, request_id: str
    ) -> None:
        self._engine = engine
        self._ask = ask
        self._generation = generation
        self._form = form
        object = form.chunk_object if ask.stream else form.object
        self._envelope = Envelope.new(request_id, object, engine.model_name)

    async def whole(self) -> Json:
        """The body of a response that is not streamed."""
        whole = [self._opening(choice.index) for choice in self._generation.choices]
        async for piece in self._generation.pieces():
            sum_up = whole[piece.index]
            sum_up.text += piece.text
            sum_up.tokens += piece.tokens
            sum_up.logprobs += piece.logprobs
            sum_up.finish_reason = piece.finish_reason
        return self._envelope.body(
            [self._form.whole(piece) for piece in whole],
            usage=self._usage(),
            **self._metrics(),
            **self._transfer(),
        )

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events; an error after the start is an event too, and [DONE] comes last."""
        try:
            async for chunk in self._chunks():
                yield event(chunk)
        except RequestError as error:
            yield event(answers.error_body(str(error), error.status, error.param))
        except Exception:
            log.exception("a stream failed")
            yield event(answers.error_body("internal error: see the server's log", 500))
        yield DONE

    async def _chunks(self) -> AsyncIterator[Json]:
        extra: Json = {"usage": None} if self._ask.include_usage else {}
        opened = False
        async for piece in self._generation.pieces():
            if not opened:
                for opening in self._openings():
                    yield self._envelope.body([opening], **extra)
                opened = True
            reason, piece.finish_reason = piece.finish_reason, None
            if self._form.says_something(piece):
                yield self._envelope.body([self._form.delta(piece)], **extra)
            if reason is not None:
                end = self._form.delta(Piece(piece.index, finish_reason=reason))
                yield self._envelope.body([end], **extra)
        if self._ask.include_usage or self._ask.return_metrics:
            usage = self._usage() if self._ask.include_usage else None
            yield self._envelope.body([], usage=usage, **self._metrics())

    def _openings(self) -> list[Json]:
        """What a stream begins with."""
        pieces = (self._opening(choice.index) for choice in self._generation.choices)
        openings = (self._form.opening(piece) for piece in pieces)
        return [opening for opening in openings if opening is not None]

    def _opening(self, index: int) -> Piece:
        """What stands before the first token: the prompt's ids and its text, if wanted."""
        prompt = list(self._generation.choices[index].prompt)
        piece = Piece(index, prompt_tokens=prompt if self._ask.return_token_ids else None)
        if self._ask.echo:
            source = self._ask.prompts[index // self._ask.n]
            text = source if isinstance(source, str) else self._engine.tokenizer.decode(source)
            piece.text = text
        return piece

    def _usage(self) -> Json:
        return answers.usage(*self._generation.usage())

    def _transfer(self) -> Json:
        """For the proxy that asked for a prompt alone: what it passes on to the decode worker."""
        held = self._generation.transfer()
        return {} if held is None else {TRANSFER: msgspec.to_builtins(held)}

    def _metrics(self) -> Json:
        if not self._ask.return_metrics:
            return {}
        engine_k = self._engine.engine.plan.num_draft_tokens
        asked_k = self._ask.params.num_draft_tokens
        k = engine_k if asked_k is None else min(asked_k, engine_k)
        use = self._generation.draft_use()
        draft_kv = {
            "hit_tokens": use.hits,
            "gap_tokens": use.gaps,
            "target_recomputed_tokens": use.recomputed,
        }
        drafts = self._generation.acceptance(k).body()
        return {"metrics": {"speculative_decoding": drafts, "draft_kv": draft_kv}}
