"""The soak over HTTP: workers of both roles behind their router, clients that come and go.

Clients ask as users do, streamed and not; some go away before the first token or after a few; now
and then a worker of one role, then of the other, is killed, and started again by the product. A
request may end without an answer only where its stream had begun at a worker that was killed, and
then with an error that names it. This module judges nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from typing import Any

import httpx
from soaking.talks import LIMIT_S, REPORT_EVERY_S, Talk, Tally, compared, talks

ROLES = ("prefill", "decode")
MAX_WAIT_S = 0.2
"""A client that goes before its first token goes at some time until then."""
AGAIN_S = 0.05


class Gone(Exception):
    """Raised in a client that goes away in the middle of its answer."""


class DeploymentSoak:
    """Requests at one router, what becomes of them, and what is done to its workers."""

    def __init__(self, together: Any, url: str, args: argparse.Namespace) -> None:
        self._together, self._url, self._args = together, url, args
        self._rng = random.Random(args.seed)
        self._counts: Counter[str] = Counter()
        self._tallies: dict[str, Tally] = {}
        self._due: list[int] = []
        """Requests that have ended when a worker is killed next."""
        self._killed: set[str] = set()
        self._flying = 0
        self._told = time.monotonic()
        self._http = httpx.AsyncClient(
            timeout=LIMIT_S, limits=httpx.Limits(max_connections=None), trust_env=False
        )

    async def run(self) -> dict[str, float]:
        """The whole soak; its figures."""
        num, kills, seed = self._args.requests, self._args.kills, self._args.seed
        edge = max(1, num // 10)
        middle = max(0, num - 2 * edge)
        self._due = [edge + middle * (i + 1) // (kills + 1) for i in range(kills)]
        start = time.monotonic()
        first = await self._part("first", talks("first", edge, random.Random(seed)), rough=False)
        await self._part("middle", talks("middle", middle, self._rng), rough=True)
        waited = await self._whole()
        last = await self._part("last", talks("last", edge, random.Random(seed)), rough=False)
        seconds = time.monotonic() - start - waited
        held = await self._settled()
        counts, al = self._counts, {name: tally.al for name, tally in self._tallies.items()}
        router = await self._samples(self._url)
        workers = [await self._samples(self._url_of(i)) for i in range(self._num_workers)]
        here = "kv_handoffs_total{"
        return {
            "requests": counts["ended"],
            "requests_per_s": counts["ended"] / seconds,
            "answered": counts["answered"],
            **{name: counts[name] for name in ("aborted_waiting", "aborted_decoding")},
            "kills": sum(counts[f"killed_{role}"] for role in ROLES),
            **{f"killed_{role}": counts[f"killed_{role}"] for role in ROLES},
            "streams_cut_by_a_kill": counts["cut"],
            "asked_again_by_the_router": _total(router, "router_let_down_total{"),
            "workers_missing": counts["missing"],
            "back_after_s": waited,
            "fetched": sum(_total(w, here, 'outcome="fetched"') for w in workers),
            "computed_here": sum(_total(w, here, 'outcome="computed_here"') for w in workers),
            "hung": counts["hung"],
            "failed": counts["failed"],
            "pages_leaked": held,
            **compared(first, last, al["first"], al["last"]),
        }

    # -- clients -----------------------------------------------------------------------------------

    async def _part(self, name: str, talks: list[Talk], *, rough: bool) -> list[Talk]:
        """Run conversations to their end, a few at a time. rough: with aborts and kills."""
        self._tallies[name] = Tally()
        queue = list(reversed(talks))

        async def client() -> None:
            while queue:
                talk = queue.pop()
                while not talk.over and await self._turn(name, talk, rough):
                    self._tell(name)

        watch = asyncio.create_task(self._kill()) if rough else None
        await asyncio.gather(*(client() for _ in range(self._args.in_flight)))
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        return talks

    async def _turn(self, part: str, talk: Talk, rough: bool) -> bool:
        """Ask the next turn; whether the conversation goes on."""
        gone = rough and self._rng.random() < self._args.aborts
        stream = self._rng.random() < 0.5
        after = self._rng.randint(1, 4) if gone and stream else None
        wait_s = self._rng.uniform(0, MAX_WAIT_S) if gone and not stream else None
        tokens: list[int] = []
        self._flying += 1
        try:
            asking = self._ask(part, talk, stream, after, tokens)
            how = await asyncio.wait_for(asking, LIMIT_S if wait_s is None else wait_s)
        except Gone:
            how = "aborted_decoding"
        except TimeoutError:
            how = "hung" if wait_s is None else "aborted_waiting"
        except httpx.HTTPError as error:
            self._say(f"{talk.name}: {type(error).__name__} {error}")
            how = "failed"
        finally:
            self._flying -= 1
        self._counts["ended"] += 1
        self._counts[how] += 1
        talk.answers.append(tokens)
        return how not in ("hung", "failed")

    async def _ask(
        self, part: str, talk: Talk, stream: bool, after: int | None, tokens: list[int]
    ) -> str:
        """One request to its end; how it ended. after: parts with tokens until the client goes."""
        body = {
            "prompt": talk.prompt(), "max_tokens": talk.max_tokens[len(talk.answers)],
            "temperature": 0, "stream": stream, "return_token_ids": True, "return_metrics": True,
            "cache_salt": talk.name,
        }  # fmt: skip
        ended = False
        async with self._http.stream("POST", f"{self._url}/v1/completions", json=body) as answer:
            if not stream or answer.status_code != 200:
                said = json.loads(await answer.aread())
                return self._take(part, talk, said, tokens) or "answered"
            async for line in answer.aiter_lines():
                ended = ended or line == "data: [DONE]"
                if not line or ended:
                    continue
                before = len(tokens)
                wrong = self._take(part, talk, json.loads(line.removeprefix("data: ")), tokens)
                if wrong:
                    return wrong
                if after is not None and len(tokens) > before:
                    after -= 1
                    if not after:
                        raise Gone
        return "answered" if ended else "failed"

    def _take(self, part: str, talk: Talk, said: dict[str, Any], tokens: list[int]) -> str:
        """A body or an event; what is wrong with it, "" if nothing."""
        if "error" in said:
            message = said["error"]["message"]
            if any(f"the worker {url} failed in the middle" in message for url in self._killed):
                return "cut"
            self._say(f"{talk.name}: {message}")
            return "failed"
        for choice in said.get("choices", ()):
            tokens += choice.get("token_ids", ())
        if said.get("metrics"):
            drafts = said["metrics"]["speculative_decoding"]
            self._tallies[part].accepted += drafts["num_accepted_draft_tokens"]
            self._tallies[part].steps += drafts["num_spec_steps"]
        return ""

    # -- workers -----------------------------------------------------------------------------------

    @property
    def _num_workers(self) -> int:
        return len(self._together.options)

    def _url_of(self, i: int) -> str:
        options = self._together.options[i]
        return f"http://{options.host}:{options.port}"

    async def _kill(self) -> None:
        """Kill a worker when it is time, of one role and of the other in turn, under load. Another
        one of its role must be there to go on."""
        while self._due:
            await asyncio.sleep(AGAIN_S)
            if self._counts["ended"] < self._due[0] or not self._flying:
                continue
            role = ROLES[sum(self._counts[f"killed_{role}"] for role in ROLES) % 2]
            there = await self._alive(role)
            if not there or (role == "decode" and len(there) < 2):
                continue
            i = self._rng.choice(there)
            self._killed.add(self._url_of(i))
            os.kill(self._together.children[i].pid, signal.SIGKILL)
            self._counts[f"killed_{role}"] += 1
            self._due.pop(0)

    async def _alive(self, role: str | None = None) -> list[int]:
        """Workers that the router would use now."""
        try:
            about = (await self._http.get(f"{self._url}/worker")).json()["workers"]
        except httpx.HTTPError:
            return []
        seen = {worker["url"] for worker in about if worker["alive"]}
        return [
            i
            for i, options in enumerate(self._together.options)
            if role in (None, options.role)
            and self._url_of(i) in seen
            and self._together.children[i].alive
        ]

    async def _whole(self) -> float:
        """Seconds until every worker is there again; not part of the rate."""
        start = time.monotonic()
        while len(await self._alive()) < self._num_workers:
            if time.monotonic() - start > LIMIT_S:
                break
            await asyncio.sleep(AGAIN_S)
        self._counts["missing"] = self._num_workers - len(await self._alive())
        return time.monotonic() - start

    async def _settled(self) -> float:
        """Pages that are held on any side although nobody waits for anything any more."""
        held, until = 1.0, time.monotonic() + LIMIT_S
        while held and time.monotonic() < until:
            await asyncio.sleep(AGAIN_S)
            samples = [await self._samples(self._url_of(i)) for i in range(self._num_workers)]
            held = sum(_total(found, "kv_pages{", 'state="held"') for found in samples)
        return held

    async def _samples(self, url: str) -> dict[str, float]:
        """What GET /metrics says, by name and labels."""
        text = (await self._http.get(f"{url}/metrics")).text
        found = re.findall(r"^tandemkv:(\S+) (\S+)$", text, re.M)
        return {name: float(value) for name, value in found}

    # -- remarks -----------------------------------------------------------------------------------

    def _tell(self, part: str) -> None:
        now = time.monotonic()
        if now - self._told > REPORT_EVERY_S:
            self._told = now
            self._say(f"{part}: {self._counts['ended']} of {self._args.requests} requests")

    def _say(self, text: str) -> None:
        print(f"soak: {text}", file=sys.stderr)


def _total(samples: dict[str, float], prefix: str, label: str = "") -> float:
    return sum(v for name, v in samples.items() if name.startswith(prefix) and label in name)


def soak_deployment(
    config: Any, num: tuple[int, int], args: argparse.Namespace
) -> dict[str, float]:
    """Start so many prefill and decode workers and their router, soak them, end them."""
    from tandemkv.serve.address import bind
    from tandemkv.serve.together import Together

    async def whole(url: str) -> dict[str, float]:
        return await DeploymentSoak(together, url, args).run()

    together = Together(config, *num, grace_s=1.0)
    try:
        server = together.server(bind("127.0.0.1", 0), grace_s=1.0)
        thread = threading.Thread(target=server.run, name="router", daemon=True)
        thread.start()
        try:
            return asyncio.run(whole(server.url))
        finally:
            server.stop()
            thread.join(LIMIT_S)
    finally:
        together.close()
