"""The engine on a thread of its own, for a server: submit from an event loop, read outputs there.

Law: one thread steps the engine and touches the cache; everything else sends it messages. Each
submitted request ends exactly once, with a result or an error, also when the engine dies. A handle
that is aborted or closed frees its pages at the next step. This module does no I/O.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from tandemkv.base.errors import RequestError, TandemError
from tandemkv.base.sampling import SamplingParams
from tandemkv.base.transfer_params import KVTransferParams
from tandemkv.engine.engine import Engine
from tandemkv.kv.keys import Namespace
from tandemkv.sched.batch import Output

log = logging.getLogger("tandemkv")

CHECK_IDLE_S = 5.0


class Handle:
    """One submitted request. `async for output in handle` ends after the finished output."""

    def __init__(self, owner: AsyncEngine, request_id: str) -> None:
        self.request_id = request_id
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._outputs: asyncio.Queue[Output] = asyncio.Queue()
        self._over = False

    def abort(self) -> None:
        """End the request; its last output says finish_reason "abort". Safe to call twice."""
        if not self._over:
            self._owner.post(lambda engine: self._owner.abort_on_thread(self.request_id))

    def deliver(self, output: Output) -> None:
        """Called on the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._outputs.put_nowait, output)
        except RuntimeError:  # the event loop is closed: nobody reads any more
            self._over = True

    async def __aiter__(self) -> AsyncIterator[Output]:
        try:
            while not self._over:
                output = await self._outputs.get()
                self._over = output.finished
                yield output
        finally:
            self.abort()


class AsyncEngine:
    """Owns the engine's thread. Create inside or outside of an event loop; submit inside one.

    The engine may be a DecodeWorker, which is closed with it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[Callable[[Engine], Any] | None] = queue.SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._handles: dict[str, Handle] = {}
        self._count = 0
        self._lock = threading.Lock()
        self.error: str | None = None
        self._closing = False
        self._over = False
        self._thread = threading.Thread(target=self._run, name="tandemkv-engine", daemon=True)
        self._thread.start()

    @property
    def tokenizer(self) -> Any:
        return self._engine.tokenizer

    @property
    def model_name(self) -> str:
        return self._engine.model_name

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._engine.target.spec.vocab_size

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.error is None and not self._closing

    @property
    def engine(self) -> Engine:
        """The engine itself; read-only from other threads."""
        return self._engine

    async def submit(
        self,
        prompt_tokens: Sequence[int],
        params: SamplingParams,
        *,
        namespace: Namespace = Namespace(),
        watch: Callable[[Sequence[int]], int | None] | None = None,
        priority: int = 0,
        request_id: str | None = None,
        transfer: KVTransferParams | None = None,
    ) -> Handle:
        """Queue a request. Raises RequestError (400: cannot run as asked; 503: engine is down)."""
        if not self.alive:
            raise RequestError(self.error or "the engine is shut down", status=503)
        with self._lock:
            self._count += 1
            request_id = request_id or f"req-{self._count}"
        handle = Handle(self, request_id)

        def add(engine: Engine) -> None:
            engine.add(
                prompt_tokens,
                params,
                namespace=namespace,
                request_id=request_id,
                priority=priority,
                watch=watch,
                transfer=transfer,
            )
            self._handles[request_id] = handle

        try:
            await self.call(add)
        except asyncio.CancelledError:
            self.post(lambda engine: self.abort_on_thread(request_id))
            raise
        return handle

    async def call(self, work: Callable[[Engine], Any]) -> Any:
        """Run `work(engine)` between two steps on the engine's thread and return its result."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def run(engine: Engine) -> None:
            result, error = None, None
            if self.error is not None:
                error = RequestError(self.error, status=503)
            else:
                try:
                    result = work(engine)
                except TandemError as raised:
                    error = raised
            loop.call_soon_threadsafe(settle, result, error)

        if not self.post(run):
            raise RequestError(self.error or "the engine is shut down", status=503)
        return await future

    def post(self, work: Callable[[Engine], Any]) -> bool:
        """Run `work(engine)` on the engine's thread, some time soon; no result.

        False: the thread has ended, and the work is not done.
        """
        with self._lock:
            if not self._over:
                self._put(work)
            return not self._over

    def abort_on_thread(self, request_id: str) -> None:
        output = self._engine.abort(request_id)
        if output is not None:
            self._deliver(output)

    def stats(self) -> Any:
        """Scheduler and cache counters; see Engine."""
        return self._engine.scheduler.stats

    def usage(self) -> Any:
        """Pages by group and state."""
        return self._engine.kv.usage()

    def close(self, timeout_s: float = 30.0) -> None:
        """Abort what runs, stop the thread. Safe to call twice."""
        self._closing = True
        with self._lock:
            if not self._over:
                self._put(None)
        self._thread.join(timeout_s)

    def _deliver(self, output: Output) -> None:
        handle = self._handles.get(output.request_id)
        if handle is None:
            return
        if output.finished:
            del self._handles[output.request_id]
        handle.deliver(output)

    def _run(self) -> None:
        try:
            while self._serve_inbox():
                for output in self._engine.step():
                    self._deliver(output)
        except Exception as error:
            log.exception("the engine stopped")
            self.error = f"the engine stopped: {error}"
        finally:
            self._end_all()
            close = getattr(self._engine, "close", None)  # a worker's, which owns processes
            if close is not None:
                close()

    def _put(self, work: Callable[[Engine], Any] | None) -> None:
        """Post, and wake the thread if it waits. The lock is held."""
        self._inbox.put(work)
        os.eventfd_write(self._bell, 1)

    def _serve_inbox(self) -> bool:
        """Do what was posted; wait when idle. False: close."""
        checked = time.monotonic()
        while True:
            try:
                work = self._inbox.get_nowait()
            except queue.Empty:
                if self._engine.has_work:
                    return True
                self._wait()
                if time.monotonic() - checked >= CHECK_IDLE_S:
                    self._engine.check()
                    checked = time.monotonic()
                continue
            if work is None:
                return False
            work(self._engine)

    def _wait(self) -> None:
        """Until something is posted, or the engine hears of something, or so long."""
        self._engine.wait(self._bell, CHECK_IDLE_S)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    def _end_all(self) -> None:
        reason = self.error or "the engine was shut down"
        for request_id in list(self._handles):
            output = None
            if self.error is None:
                output = self._engine.abort(request_id)
            self._deliver(output or Output.failed(request_id, reason))
        with self._lock:
            self._over = True
            os.close(self._bell)
        while not self._inbox.empty():
            work = self._inbox.get_nowait()
            if work is not None:
                if self.error is None:
                    self.error = reason
                work(self._engine)
