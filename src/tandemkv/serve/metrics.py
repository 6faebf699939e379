"""What /metrics says, in the names that dashboards of speculative serving already read.

    AL = 1 + spec_decode_num_accepted_tokens_total / spec_decode_num_drafts_total

Law: the accepted tokens by position sum to the accepted tokens; accepted <= drafted; a hit is never
larger than its query; draft bytes are part of the bytes received; series of hand-offs are absent
where none are made; there is no `_created` series. Rendering reads one snapshot of the engine's
counters and never fails, whatever has happened so far. Nothing is registered globally.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from tandemkv.kv.coverage import HOLES, LOOKAHEAD

if TYPE_CHECKING:
    from tandemkv.engine.engine import Engine

PREFIX = "tandemkv:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

NOTHING = {LOOKAHEAD: 0, HOLES: 0}
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0)


class Pages(msgspec.Struct, frozen=True):
    """A layer group's pages by state; free + held + cached = total."""

    free: int
    held: int
    cached: int
    total: int


class Handoffs(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts that were to be computed by prefill workers.

    workers: those that would be given one now. outcomes: requests by (outcome, reason). left_out:
    draft groups not exchanged with a worker, by reason. received_bytes: by layer group name.
    """

    workers: int
    outcomes: Mapping[tuple[str, str], int]
    left_out: Mapping[str, int]
    received_bytes: Mapping[str, int]


class Snapshot(msgspec.Struct, kw_only=True):
    """The engine's counters at one moment. Tokens unless said otherwise.

    accepted_at[j]: drafts accepted at position j. pages: by layer group name. draft_hits: draft
    rows reused, by where they came from; draft_gaps: draft slots masked, by reason;
    target_recomputed: positions that the target ran for the drafter alone, by reason.
    draft_pages_held: by the drafter's layer groups. handoffs: None without prefill workers.
    """

    running: int = 0
    waiting: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_at: tuple[int, ...] = ()
    prefix_queries: int = 0
    prefix_hits: int = 0
    draft_hits: Mapping[str, int] = {}
    draft_gaps: Mapping[str, int] = {}
    draft_recomputed: int = 0
    target_recomputed: Mapping[str, int] = msgspec.field(default_factory=lambda: dict(NOTHING))
    draft_transferred_bytes: int = 0
    draft_resumed: Mapping[str, int] = {}
    pages: Mapping[str, Pages] = {}
    draft_pages_held: Mapping[str, int] = {}
    handoffs: Handoffs | None = None


class Histogram:
    """Counts by upper bound, inclusive, as Prometheus has it. Not thread-safe."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        total = 0
        out: list[tuple[str, float]] = []
        for bound, count in zip([*map(repr, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            out.append((bound, total))
        return out

    @property
    def sum(self) -> float:
        return self._sum


class Latencies:
    """What requests waited, as seen by the server, in seconds; and how they ended.

    inter_token: the time between two outputs, shared by the tokens of the later one and observed
    once for each, so that sum / count is the mean time per output token.
    """

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(SECONDS)
        self.inter_token = Histogram(SHORT_SECONDS)
        self.e2e = Histogram(SECONDS)
        self.finished: dict[str, int] = dict.fromkeys(("stop", "length", "abort", "error"), 0)

    def first_token(self, seconds: float) -> None:
        self.time_to_first_token.observe(seconds)

    def next_tokens(self, seconds: float, num_tokens: int) -> None:
        self.inter_token.observe(seconds / num_tokens, num_tokens)

    def end(self, seconds: float, reason: str) -> None:
        self.e2e.observe(seconds)
        self.count_end(reason)

    def count_end(self, reason: str) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1


class EngineCollector(Collector):
    """A Prometheus collector over one snapshot and a server's latencies."""

    def __init__(self, model: str, snapshot: Snapshot, latencies: Latencies) -> None:
        self._model = model
        self._snapshot = snapshot
        self._latencies = latencies

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges(self._snapshot)
        yield from self._counters(self._snapshot)
        if self._snapshot.handoffs is not None:
            yield from self._handoffs(self._snapshot.handoffs)
        yield from self._histograms()

    def _gauges(self, s: Snapshot) -> Iterator[Metric]:
        yield self._gauge("num_requests_running", "Requests that hold pages.", s.running)
        yield self._gauge("num_requests_waiting", "Requests queued or suspended.", s.waiting)
        yield self._gauge(
            "kv_cache_usage_perc",
            "Share of pages held by requests, of the fullest layer group; 1 is full.",
            max((p.held / p.total for p in s.pages.values() if p.total), default=0.0),
        )
        pages = GaugeMetricFamily(
            PREFIX + "kv_pages",
            "Pages by layer group and state.",
            labels=("model_name", "group", "state"),
        )
        for group, usage in s.pages.items():
            for state in ("free", "held", "cached"):
                pages.add_metric((self._model, group, state), getattr(usage, state))
        yield pages
        held = GaugeMetricFamily(
            PREFIX + "draft_kv_pages_held",
            "Pages of the drafter's layer groups held by requests.",
            labels=("model_name", "group"),
        )
        for group, count in s.draft_pages_held.items():
            held.add_metric((self._model, group), count)
        yield held

    def _counters(self, s: Snapshot) -> Iterator[Metric]:
        for name, doc, value in (
            ("num_preemptions", "Suspensions under memory pressure.", s.num_preemptions),
            ("prompt_tokens", "Prompt tokens of admitted requests.", s.prompt_tokens),
            ("generation_tokens", "Tokens emitted.", s.generation_tokens),
            ("spec_decode_num_drafts", "Verify steps with a draft.", s.num_drafts),
            ("spec_decode_num_draft_tokens", "Drafts verified.", s.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Drafts accepted.", s.num_accepted_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up.", s.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found.", s.prefix_hits),
            ("draft_kv_recomputed_tokens", "Draft rows recomputed.", s.draft_recomputed),
            ("draft_kv_transferred_bytes", "Draft KV received.", s.draft_transferred_bytes),
        ):
            yield self._counter(name, doc, value)
        positions = {str(j): n for j, n in enumerate(s.accepted_at)}
        for name, doc, label, values in (
            (
                "spec_decode_num_accepted_tokens_per_pos",
                "Drafts accepted, by position in the proposal.",
                "position",
                positions,
            ),
            ("draft_kv_hit_tokens", "Draft rows reused.", "source", s.draft_hits),
            ("draft_kv_gap_tokens", "Draft rows missing and masked.", "reason", s.draft_gaps),
            (
                "draft_kv_target_recomputed_tokens",
                "Positions that the target ran for the drafter alone.",
                "reason",
                s.target_recomputed,
            ),
            ("draft_kv_resumed", "Resumed requests, by state.", "warmth", s.draft_resumed),
            ("request_success", "Ended choices.", "finished_reason", self._latencies.finished),
        ):
            yield self._labelled(name, doc, label, values)

    def _handoffs(self, h: Handoffs) -> Iterator[Metric]:
        yield self._gauge("prefill_workers", "Prefill workers alive and reachable.", h.workers)
        outcomes = CounterMetricFamily(
            PREFIX + "kv_handoffs",
            "Requests by where their prompt was computed, and why here.",
            labels=("model_name", "outcome", "reason"),
        )
        for labels, count in h.outcomes.items():
            outcomes.add_metric((self._model, *labels), count)
        yield outcomes
        for name, doc, label, values in (
            (
                "kv_handoff_groups_left_out",
                "Draft groups not exchanged with a worker.",
                "reason",
                h.left_out,
            ),
            ("kv_transferred_bytes", "KV received, by layer group.", "group", h.received_bytes),
        ):
            yield self._labelled(name, doc, label, values)

    def _histograms(self) -> Iterator[Metric]:
        lat = self._latencies
        for name, doc, histogram in (
            ("time_to_first_token_seconds", "From arrival.", lat.time_to_first_token),
            ("inter_token_latency_seconds", "Per output token.", lat.inter_token),
            ("e2e_request_latency_seconds", "From arrival to end.", lat.e2e),
        ):
            family = HistogramMetricFamily(PREFIX + name, doc, labels=("model_name",))
            family.add_metric((self._model,), histogram.cumulative(), sum_value=histogram.sum)
            yield family

    def _gauge(self, name: str, doc: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, doc, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _counter(self, name: str, doc: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, doc, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _labelled(self, name: str, doc: str, label: str, values: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(PREFIX + name, doc, labels=("model_name", label))
        for key, value in values.items():
            family.add_metric((self._model, key), value)
        return family


class Family(NamedTuple):
    """A counter or gauge whose values were counted elsewhere; keys are values of the labels."""

    kind: str
    name: str
    doc: str
    labels: tuple[str, ...]
    values: Mapping[tuple[str, ...], float]


class FamilyCollector(Collector):
    """A Prometheus collector over families as they are."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for kind, name, doc, labels, values in self._families:
            make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            family = make(PREFIX + name, doc, labels=labels)
            for key, value in values.items():
                family.add_metric(key, value)
            yield family


def render_families(families: Sequence[Family]) -> bytes:
    """The exposition text of families, from a registry of its own."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(FamilyCollector(families))
    return generate_latest(registry)


def render(model: str, snapshot: Snapshot, latencies: Latencies) -> bytes:
    """The exposition text, from a registry of its own."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(model, snapshot, latencies))
    return generate_latest(registry)


def snapshot_of(engine: Engine) -> Snapshot:
    """The counters of an engine; consistent when read between two steps."""
    sched, kv = engine.scheduler.stats, engine.kv.stats
    drafts = sched.acceptance
    names = [group.name for group in engine.layout.groups]
    usage = engine.kv.usage()
    handoffs = _handoffs_of(engine)
    received = handoffs.received_bytes if handoffs is not None else {}
    return Snapshot(
        running=sched.num_running,
        waiting=sched.num_waiting,
        num_preemptions=sched.preemptions,
        prompt_tokens=sched.prompt_tokens,
        generation_tokens=sched.generation_tokens,
        num_drafts=drafts.num_steps,
        num_draft_tokens=drafts.num_drafts,
        num_accepted_tokens=drafts.num_accepted,
        accepted_at=tuple(drafts.accepted_at),
        prefix_queries=kv.prefix_queries_tokens,
        prefix_hits=kv.prefix_hit_tokens,
        draft_hits={"device": sum(kv.draft_hit_tokens.values())},
        draft_gaps=dict(kv.draft_gap_tokens),
        draft_recomputed=kv.draft_recomputed_tokens,
        target_recomputed=NOTHING | kv.target_recomputed_tokens,
        draft_transferred_bytes=sum(received.get(names[g], 0) for g in engine.layout.draft_groups),
        draft_resumed=dict(sched.resumed),
        pages={
            name: Pages(u.free, u.held, u.cached, u.total)
            for name, u in zip(names, usage, strict=True)
        },
        draft_pages_held={names[g]: usage[g].held for g in engine.layout.draft_groups},
        handoffs=handoffs,
    )


def _handoffs_of(engine: Engine) -> Handoffs | None:
    stats = engine.handoffs
    if stats is None:
        return None
    here = {("computed_here", reason): count for reason, count in stats.computed_here.items()}
    return Handoffs(
        workers=engine.num_prefill_workers,
        outcomes={("fetched", ""): stats.fetched, ("aborted", ""): stats.aborted, **here},
        left_out=stats.left_out,
        received_bytes=stats.received_bytes,
    )
