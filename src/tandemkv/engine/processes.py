"""Child processes that are looked after: started, noticed when they end, started again.

Law: a child ends with its parent, whatever ends that; one that has ended is noticed once, and
another takes its place, less and less often if they keep ending. One that hangs is killed by
whoever knows that it does. This module knows no worker, and sends what a child is told at first.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

RESTART_S, MAX_RESTART_S = 0.5, 60.0
"""Wait before a process is started again; doubled each time one ends before it was any use."""
CLOSE_S = 5.0


class Child:
    """`python -m module`, told `options` as a line of JSON on its stdin; it ends with that."""

    def __init__(self, module: str, options: msgspec.Struct) -> None:
        self.started = time.monotonic()
        self.ended = False
        """Whether its end has been noticed."""
        self.useful = False
        """Whether it came up; set by whoever sees it."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: alive says so
            self._process.stdin.write(msgspec.json.encode(options) + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> None:
        """Until it has ended."""
        self._process.wait()

    def kill(self) -> None:
        """At once; a process that hangs hears nothing else."""
        self._process.kill()

    def release(self) -> None:
        """Ask it to end, without waiting."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def close(self) -> None:
        """End it: its stdin closes, which it takes as the end; then by force."""
        self.release()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Places:
    """So many children, one a place. spawn(i): starts the child of place i.

    restart False: a place whose child has ended stays empty.
    """

    def __init__(self, count: int, spawn: Callable[[int], Any], *, restart: bool = True) -> None:
        self.restart = restart
        self._spawn = spawn
        self._due = [0.0] * count
        self._failures = [0] * count
        self.children: list[Any] = []
        try:
            for i in range(count):
                self.children.append(spawn(i))
        except BaseException:
            self.close()
            raise

    def look(self, now: float) -> list[tuple[Any, float]]:
        """Children whose end is new, each with the seconds until another starts; starts others."""
        gone: list[tuple[Any, float]] = []
        for i, child in enumerate(self.children):
            if child.alive:
                continue
            if not child.ended:
                child.ended = True
                self._failures[i] = 0 if child.useful else self._failures[i] + 1
                wait = min(MAX_RESTART_S, RESTART_S * 2 ** self._failures[i])
                self._due[i] = now + wait
                child.close()
                gone.append((child, wait))
            if self.restart and now >= self._due[i]:
                self.children[i] = self._spawn(i)
        return gone

    def close(self) -> None:
        """End all of them, together."""
        for child in self.children:
            child.release()
        for child in self.children:
            child.close()


def options_of(kind: Any) -> tuple[Any, Callable[[], bool]] | None:
    """In a child: what it was told, and whether its parent wants it to end; None: told nothing."""
    data = sys.stdin.buffer.readline()
    if not data:
        return None
    options = msgspec.json.decode(data, type=kind)
    parent = os.getppid()
    os.set_blocking(sys.stdin.fileno(), False)

    def ended() -> bool:
        try:
            closed = os.read(sys.stdin.fileno(), 1) == b""
        except BlockingIOError:
            closed = False
        return closed or os.getppid() != parent

    return options, ended
