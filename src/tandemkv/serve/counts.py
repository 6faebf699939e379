"""What a router counts, as the families that /metrics shows.

Law: each request is counted once, under its outcome, and once for each worker that it was sent to;
every label value that can be said beforehand is there from the start, at 0. metrics.py writes the
text; nothing is decided here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tandemkv.serve.fleet import Worker
from tandemkv.serve.metrics import Family
from tandemkv.serve.routing import Missing

OUTCOMES = ("answered", "refused", "failed", "unavailable", "broken", "client_gone")
"""By a worker; by a worker or the router with a 4xx; by a worker with a 5xx; by nobody, a 503; cut
in its stream, with an error; the client left."""
RETRIES = ("refused", "broken", "silent", "unavailable", "lost")
"""Why a worker let a request down: see upstream.Failed."""
ROLES = ("prefill", "decode")
DOMAINS = ("target", "draft")


class Counts:
    """Counters of one router, from its start. Not thread-safe."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self.let_down: Counter[str] = Counter(dict.fromkeys(RETRIES, 0))
        self.routed: Counter[tuple[str, str]] = Counter()
        self.rows: Counter[tuple[str, str]] = Counter(
            {(role, domain): 0 for role in ROLES for domain in DOMAINS}
        )
        self.unknown: Counter[str] = Counter(dict.fromkeys(ROLES, 0))

    def route(self, worker: Worker, missing: Missing | None) -> None:
        """A request is sent to a worker that lacks so many rows of it; None: it did not say."""
        self.routed[worker.url, worker.role] += 1
        if missing is None:
            self.unknown[worker.role] += 1
            return
        self.rows[worker.role, "target"] += missing.target
        self.rows[worker.role, "draft"] += missing.draft

    def families(self, workers: Iterable[Worker]) -> list[Family]:
        """All of it, and who is alive now."""
        up: dict[tuple[str, ...], float] = dict.fromkeys(((role,) for role in ROLES), 0)
        for worker in workers:
            up[worker.role,] += worker.alive
        return [
            Family("gauge", "router_workers_up", "Workers that are alive.", ("role",), up),
            Family(
                "counter",
                "router_requests",
                "Requests by how they ended.",
                ("outcome",),
                {(name,): n for name, n in self.requests.items()},
            ),
            Family(
                "counter",
                "router_let_down",
                "Attempts that a worker did not answer, by why; the request went to another.",
                ("reason",),
                {(name,): n for name, n in self.let_down.items()},
            ),
            Family(
                "counter",
                "router_requests_routed",
                "Requests sent to a worker, or given to it to compute the prompt.",
                ("worker", "role"),
                dict(self.routed),
            ),
            Family(
                "counter",
                "router_missing_rows",
                "Rows that the chosen workers did not hold, where they said so.",
                ("role", "domain"),
                dict(self.rows),
            ),
            Family(
                "counter",
                "router_unknown_coverage",
                "Choices of a worker that did not say in time what it holds.",
                ("role",),
                {(name,): n for name, n in self.unknown.items()},
            ),
        ]
