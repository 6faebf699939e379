"""Soak: many hand-offs between real processes, with aborts and killed prefill processes.

A tiny random model whose drafter is a noisy copy of it; one decode worker, its prefill processes,
and conversations of two turns. The first and the last tenth are the same conversations, cold each
time and none of them aborted: what they answer and accept must not have moved. Held to nothing hung
(LIMIT_S each), nothing leaked, every law, and AL within DRIFT. Exit status 1 names what failed.
Leaks of a prefill process show as requests that hang: each computes many times what its pool holds.

With --deployment NpMd: workers of both roles behind their router, asked over HTTP, and workers of
both roles killed in turn; see soaking/deployment.py.

    OMP_NUM_THREADS=1 python benchmarks/soak.py [--requests N] [--kills N] [--aborts SHARE]
        [--deployment NpMd]
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soaking.talks import (
    DRIFT,
    LIMIT_S,
    REPORT_EVERY_S,
    Talk,
    Tally,
    compared,
    engine_config,
    talks,
)

from tandemkv.base.errors import ConfigError, InvariantError
from tandemkv.base.sampling import SamplingParams
from tandemkv.kv.keys import Namespace
from tandemkv.lab.provenance import write_figures
from tandemkv.lab.script import count, lines, parser, run


@dataclass(slots=True)
class Flight:
    """A request under way. gone_after: turns, or outputs once decoding, until it is aborted."""

    talk: Talk
    since: float
    gone_after: int | None
    gone_decoding: bool
    turns: int = 0
    outputs: int = 0
    tokens: list[int] = field(default_factory=list[int])


class Soak:
    """Requests in flight on one decode worker, what becomes of them, and what is done to them."""

    def __init__(self, worker: Any, args: argparse.Namespace) -> None:
        self.worker, self.args = worker, args
        self.rng = random.Random(args.seed)
        self.flying: dict[str, Flight] = {}
        self.ended: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.tallies: dict[str, Tally] = {}
        self.due: list[int] = []
        """Requests that have ended when a prefill process is killed next."""
        self._told = time.monotonic()

    def run(self) -> dict[str, float]:
        """The whole soak; its figures."""
        num, kills = self.args.requests, self.args.kills
        edge = max(1, num // 10)
        middle = max(0, num - 2 * edge)
        self.due = [edge + middle * (i + 1) // (kills + 1) for i in range(kills)]
        start = time.monotonic()
        first = self.part("first", talks("first", edge, random.Random(self.args.seed)), False)
        self.part("middle", talks("middle", middle, self.rng), True)
        waited = self.wait_for_processes()
        last = self.part("last", talks("last", edge, random.Random(self.args.seed)), False)
        seconds = time.monotonic() - start - waited
        self.drain()
        al, al_last = self.tallies["first"].al, self.tallies["last"].al
        stats = self.worker.handoffs
        return {
            "requests": len(self.ended),
            "requests_per_s": len(self.ended) / seconds,
            **{name: self.counts[name] for name in ("aborted_waiting", "aborted_decoding")},
            "kills": self.counts["kills"],
            "prefill_processes_missing": self.args.prefill - self.worker.num_prefill_workers,
            "back_after_s": waited,
            "fetched": stats.fetched,
            **{f"computed_here_{why}": n for why, n in sorted(stats.computed_here.items())},
            "hung": self.counts["hung"],
            "failed": self.counts["failed"],
            "ended_twice": self.counts["ended_twice"],
            "pages_leaked": sum(usage.held for usage in self.worker.kv.usage()),
            **compared(first, last, al, al_last),
        }

    # -- how it goes ------------------------------------------------------------------------------

    def part(self, name: str, talks: list[Talk], rough: bool) -> list[Talk]:
        """Run conversations to their end, a few at a time. rough: with aborts and kills."""
        self.tallies[name] = Tally()
        queue = list(reversed(talks))
        while queue or self.flying:
            while queue and len(self.flying) < self.args.in_flight:
                self.add(queue.pop(), rough)
            if rough:
                self.kill()
            for output in self.worker.step():
                talk = self.note(name, output)
                if talk is not None and not talk.over:
                    self.add(talk, rough)
            for request_id, flight in list(self.flying.items()):
                talk = self.look_at(request_id, flight)
                if talk is not None and not talk.over:
                    self.add(talk, rough)
            if self.counts["hung"] >= self.args.in_flight:
                break  # nothing moves any more
            self.tell(name)
        return talks

    def add(self, talk: Talk, rough: bool) -> None:
        """The next turn of a conversation."""
        turn = len(talk.answers)
        gone = rough and self.rng.random() < self.args.aborts
        decoding = gone and self.rng.random() < 0.5
        name = f"{talk.name}/{turn}"
        self.flying[name] = Flight(
            talk,
            time.monotonic(),
            self.rng.randrange(1 if decoding else 0, 4) if gone else None,
            decoding,
        )
        self.worker.add(
            talk.prompt(),
            SamplingParams(temperature=0.0, max_tokens=talk.max_tokens[turn]),
            request_id=name,
            namespace=Namespace(salt=talk.name),
        )

    def note(self, part: str, output: Any) -> Talk | None:
        """News of a request; its conversation if the turn has ended well."""
        flight = self.flying.get(output.request_id)
        if flight is None:
            self.counts["ended_twice"] += 1
            return None
        flight.outputs += 1
        flight.tokens += output.tokens
        if not output.finished:
            return None
        self.end(output.request_id)
        tally = self.tallies[part]
        tally.accepted += output.num_accepted
        tally.steps += output.num_draft_steps
        if output.finish_reason not in ("length", "stop"):
            self.counts["failed"] += 1
            return None
        flight.talk.answers.append(flight.tokens)
        return flight.talk

    def end(self, request_id: str) -> None:
        del self.flying[request_id]
        self.ended.add(request_id)

    def look_at(self, request_id: str, flight: Flight) -> Talk | None:
        """Abort a request whose moment has come, or which hangs; one aborted may be talked on."""
        flight.turns += 1
        hung = time.monotonic() - flight.since > LIMIT_S
        moment = flight.outputs if flight.gone_decoding else flight.turns
        if not hung and (flight.gone_after is None or moment < flight.gone_after):
            return None
        known = self.worker.abort(request_id) is not None
        self.end(request_id)
        if hung or not known:
            self.counts["hung"] += 1
            print(f"soak: {request_id} has not ended within {LIMIT_S:g} s", file=sys.stderr)
            return None
        self.counts["aborted_decoding" if flight.outputs else "aborted_waiting"] += 1
        flight.talk.answers.append(flight.tokens)
        return flight.talk

    def kill(self) -> None:
        """Kill a prefill process if it is time, while prompts are with it."""
        if not self.due or len(self.ended) < self.due[0]:
            return
        waiting = sum(not flight.outputs for flight in self.flying.values())
        alive = [process for process in self.worker.prefill if process.alive]
        if alive and waiting >= min(len(alive), self.args.in_flight) and self.worker.exchange.busy:
            os.kill(self.rng.choice(alive).pid, signal.SIGKILL)
            self.counts["kills"] += 1
            self.due.pop(0)

    def wait_for_processes(self) -> float:
        """Seconds until every prefill process is there again; not part of the rate."""
        start = time.monotonic()
        while self.worker.num_prefill_workers < self.args.prefill:
            if time.monotonic() - start > LIMIT_S:
                break
            self.worker.step()
        return time.monotonic() - start

    def drain(self) -> None:
        """Let hand-offs that nobody waits for come to their end; then every law must hold."""
        until = time.monotonic() + LIMIT_S
        while self.worker.has_work and time.monotonic() < until:
            for output in self.worker.step():
                self.note("last", output)
        if self.worker.has_work:
            self.counts["hung"] += 1
        self.worker.check()

    def tell(self, part: str) -> None:
        now = time.monotonic()
        if now - self._told > REPORT_EVERY_S:
            self._told = now
            self.worker.check()
            done = f"{len(self.ended)} of {self.args.requests} requests"
            print(
                f"soak: {part}: {done}, {self.worker.num_prefill_workers} prefill processes",
                file=sys.stderr,
            )


def wrong(figures: dict[str, float], args: argparse.Namespace) -> list[str]:
    """What failed, in words."""
    found = [
        f"{figures[name]:g} {name}"
        for name in (
            "hung", "failed", "ended_twice", "pages_leaked", "conversations_that_differ",
            "prefill_processes_missing", "workers_missing",
        )
        if figures.get(name)
    ]  # fmt: skip
    if figures["al_moved"] > DRIFT:
        found.append(f"AL moved by {figures['al_moved']:.2%}, more than {DRIFT:.0%}")
    if figures["kills"] < args.kills:
        found.append(f"{figures['kills']:g} of {args.kills} kills were done")
    if not figures.get("fetched"):
        found.append("nothing was fetched")
    if figures["requests"] < args.requests:
        found.append(f"{figures['requests']:g} of {args.requests} requests were asked")
    return found


def soak_one(config: Any, args: argparse.Namespace) -> dict[str, float]:
    """One decode worker in this process, with prefill processes of its own."""
    from tandemkv.engine.decode import DecodeWorker
    from tandemkv.engine.engine import Engine

    worker = DecodeWorker(Engine.from_config(config), args.prefill)
    try:
        return Soak(worker, args).run()
    except InvariantError as error:
        raise SystemExit(f"soak.py: a law is broken: {error}") from None
    finally:
        worker.close()


def main(args: argparse.Namespace) -> None:
    from soaking.deployment import soak_deployment

    from tandemkv.cli.disaggregate import num_workers

    num = num_workers(args.deployment) if args.deployment else None
    if num is not None and num[1] < 2 and args.kills > 1:
        raise ConfigError(
            f"--deployment {args.deployment}: at least two decode workers, or none can be killed"
        )
    with tempfile.TemporaryDirectory(prefix="tandemkv-soak-") as place:
        config = engine_config(Path(place), args.seed)
        figures = soak_deployment(config, num, args) if num else soak_one(config, args)
    limits = dict.fromkeys(("hung", "failed", "ended_twice", "pages_leaked"), 0.0)
    limits |= {"conversations_that_differ": 0.0, "al_moved": DRIFT}
    print(*lines(figures, limits), sep="\n")
    failed = wrong(figures, args)
    if num is not None:
        print(summary(args.deployment, figures, failed))
    if args.json:
        write_figures(args.json, {**figures, "limit": DRIFT})
    if failed:
        raise SystemExit(f"soak.py: {'; '.join(failed)}")


def summary(deployment: str, figures: dict[str, float], failed: list[str]) -> str:
    """One line."""
    f = figures
    aborted = f["aborted_waiting"] + f["aborted_decoding"]
    return (
        f"{deployment}: {f['requests']:g} requests, {aborted:g} aborted,"
        f" {f['killed_prefill']:g} prefill and {f['killed_decode']:g} decode workers killed;"
        f" {f['streams_cut_by_a_kill']:g} streams cut, {f['failed']:g} failed, {f['hung']:g} hung,"
        f" {f['pages_leaked']:g} pages leaked; AL {f['al_first_tenth']:.3f} ->"
        f" {f['al_last_tenth']:.3f}: {'failed' if failed else 'all within limits'}"
    )


def number(text: str) -> int:
    """A number from 0 on, for argparse."""
    return 0 if text == "0" else count(text)


def share(text: str) -> float:
    """A number from 0 to 1, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 1, got {text!r}")
    return value


def options() -> argparse.ArgumentParser:
    found = parser(__doc__)
    add = found.add_argument
    add("--requests", type=count, default=2000, help="requests in all (default: %(default)s)")
    add("--kills", type=number, default=2, help="processes to kill (default: %(default)s)")
    add("--aborts", type=share, default=0.05, help="share to abort (default: %(default)s)")
    add("--deployment", metavar="NpMd", help="over HTTP: N prefill and M decode workers, a router")
    add("--prefill", type=count, default=2, help="prefill processes (default: %(default)s)")
    add("--in-flight", type=count, default=8, help="requests at a time (default: %(default)s)")
    add("--seed", type=int, default=1, help="of model, prompts and aborts (default: %(default)s)")
    return found


if __name__ == "__main__":
    sys.exit(run(main, options()))
