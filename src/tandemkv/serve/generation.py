"""One API request in flight: its choices, each an engine request with a text of its own.

Law: however it ends (to the end, by an error, by a client that leaves) every engine request it
started is over or aborted. The first choice of a prompt computes it, the others start after its
first token and hit what it published. Text is a function of the emitted tokens alone, so streamed
and whole answers agree. This module writes no JSON and knows no HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from tandemkv.base.errors import InvariantError, RequestError
from tandemkv.base.sampling import SamplingParams
from tandemkv.base.transfer_params import KVTransferParams
from tandemkv.engine.background import AsyncEngine, Handle
from tandemkv.kv.keys import Namespace
from tandemkv.kv.records import DraftUse
from tandemkv.sched.batch import Output
from tandemkv.serve.answers import Acceptance, Piece
from tandemkv.serve.metrics import Latencies
from tandemkv.serve.openai import Ask, Limits, params_for
from tandemkv.serve.text import TextStream


class Choice:
    """One engine request: parameters before, text and outcome after."""

    def __init__(
        self, index: int, prompt: Sequence[int], params: SamplingParams, text: TextStream
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.params = params
        self.handle: Handle | None = None
        self.num_tokens = 0
        self.last: Output | None = None
        self._text = text

    def take(self, output: Output) -> Piece:
        """What an output adds to this choice."""
        self.num_tokens += len(output.tokens)
        self._text.push(output.tokens)
        text = self._text.take()
        if output.finished:
            text += self._text.finish()
            self.last = output
        return Piece(
            index=self.index,
            text=text,
            tokens=output.tokens,
            logprobs=output.logprobs or [],
            finish_reason=str(output.finish_reason) if output.finished else None,
        )


class Generation:
    """The choices of one Ask over its prompts (token ids), and their merged news.

    Raises RequestError at once if any prompt or parameter does not fit; then nothing was submitted.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        ask: Ask,
        prompts: Sequence[Sequence[int]],
        limits: Limits,
        latencies: Latencies,
        request_id: str,
    ) -> None:
        self._engine = engine
        self._ask = ask
        self._latencies = latencies
        self._request_id = request_id
        self._arrival = time.perf_counter()
        self._times: dict[int, float] = {}
        self._over = False
        self._tasks: list[asyncio.Task[None]] = []
        self._queue: asyncio.Queue[tuple[Choice, Output] | Exception] = asyncio.Queue()
        self._by_prompt = [
            [
                Choice(
                    p * ask.n + c,
                    prompt,
                    params_for(ask, len(prompt), c, limits),
                    self._text(prompt),
                )
                for c in range(ask.n)
            ]
            for p, prompt in enumerate(prompts)
        ]

    @property
    def choices(self) -> list[Choice]:
        return [choice for choices in self._by_prompt for choice in choices]

    async def start(self) -> None:
        """Submit the first choice of each prompt. Raises RequestError, and then none runs."""
        try:
            for first, *_ in self._by_prompt:
                await self._submit(first)
        except BaseException:
            self.abort()
            raise

    async def pieces(self) -> AsyncIterator[Piece]:
        """News of all choices as they come; ends when every choice has ended.

        Raises RequestError if one of them fails (500, or 503 if the engine is down).
        """
        for first, *rest in self._by_prompt:
            self._spawn(first, rest)
        running = len(self.choices)
        try:
            while running:
                item = await self._queue.get()
                if isinstance(item, Exception):
                    self.abort("error")
                    raise item
                choice, output = item
                running -= output.finished
                self._observe(choice, output)
                yield choice.take(output)
        finally:
            self.abort()

    def abort(self, reason: str = "abort") -> None:
        """End what still runs, counted under `reason`. Safe to call twice."""
        for task in self._tasks:
            task.cancel()
        for choice in self.choices:
            if choice.handle is not None and choice.last is None and not self._over:
                choice.handle.abort()
                self._latencies.count_end(reason)
        self._over = True

    def fail(self, error: RequestError) -> None:
        """End it from outside: whoever reads the pieces gets `error`."""
        self._queue.put_nowait(error)

    def usage(self) -> tuple[int, int, int]:
        """(prompt, completion, cached) tokens: a prompt and its hit count once, whatever n is."""
        firsts = [choices[0] for choices in self._by_prompt]
        return (
            sum(len(first.prompt) for first in firsts),
            sum(choice.num_tokens for choice in self.choices),
            sum(first.last.cached_tokens for first in firsts if first.last is not None),
        )

    def acceptance(self, num_spec_tokens: int) -> Acceptance:
        """Drafts and accepted drafts, pooled over the finished choices."""
        out = Acceptance(num_spec_tokens=num_spec_tokens)
        for choice in self.choices:
            last = choice.last
            if last is not None:
                out.add(last.num_draft_steps, last.num_drafts, last.num_accepted, last.accepted_at)
        return out

    def draft_use(self) -> DraftUse:
        """What the finished choices found, missed and recomputed for the drafter, in all."""
        out = DraftUse()
        for choice in self.choices:
            if choice.last is not None:
                out.add(choice.last.draft_use)
        return out

    def transfer(self) -> KVTransferParams | None:
        """Where the rows of a finished request are held for the worker that is to generate."""
        last = self.choices[0].last
        return None if last is None else last.transfer

    def _spawn(self, choice: Choice, rest: Sequence[Choice] = ()) -> None:
        if choice.handle is None:
            raise InvariantError(f"choice {choice.index} was not submitted before it is read")
        self._tasks.append(asyncio.create_task(self._pump(choice, choice.handle, rest)))

    async def _pump(self, choice: Choice, handle: Handle, rest: Sequence[Choice]) -> None:
        """Pass on a choice's outputs; start its siblings once its prompt is computed."""
        try:
            async for output in handle:
                if output.tokens:
                    for sibling in rest:
                        await self._submit(sibling)
                        self._spawn(sibling)
                    rest = ()
                self._queue.put_nowait((choice, self._sound(output)))
        except Exception as error:
            self._queue.put_nowait(error)

    async def _submit(self, choice: Choice) -> None:
        # A text of its own for the stop strings: the engine pushes this one on its thread.
        watch = self._text(choice.prompt).push if self._ask.stop else None
        choice.handle = await self._engine.submit(
            choice.prompt,
            choice.params,
            namespace=Namespace(salt=self._ask.cache_salt),
            watch=watch,
            priority=self._ask.priority,
            request_id=f"{self._request_id}-{choice.index}",
            transfer=self._ask.transfer,
        )

    def _text(self, prompt: Sequence[int]) -> TextStream:
        return TextStream(
            self._engine.tokenizer,
            self._ask.stop,
            self._ask.include_stop,
            context=prompt,
            skip_special_tokens=self._ask.skip_special_tokens,
        )

    def _sound(self, output: Output) -> Output:
        """The output, unless it says that the request failed."""
        if output.finish_reason == "error":
            status = 500 if self._engine.alive else 503
            raise RequestError(output.error or "the request failed", status=status)
        if output.finish_reason == "abort":
            raise RequestError("the server ended the request before it was done", status=503)
        return output

    def _observe(self, choice: Choice, output: Output) -> None:
        now = time.perf_counter()
        before = self._times.get(choice.index)
        if output.tokens:
            if before is None:
                self._latencies.first_token(now - self._arrival)
            else:
                self._latencies.next_tokens(now - before, len(output.tokens))
            self._times[choice.index] = now
        if output.finished:
            self._latencies.end(now - self._arrival, str(output.finish_reason))
