"""/metrics: the laws that the exposition keeps, and that they can fail."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandemkv.serve.metrics import (
    SECONDS,
    Handoffs,
    Histogram,
    Latencies,
    Pages,
    Snapshot,
    render,
    snapshot_of,
)

Samples = dict[tuple[str, ...], float]


def scrape(snapshot: Snapshot, latencies: Latencies | None = None) -> Samples:
    """(name, label values but the model's) -> value, as a scraper reads it."""
    text = render("tiny", snapshot, latencies or Latencies()).decode()
    out: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny"
            rest = [v for k, v in sample.labels.items() if k != "model_name"]
            out[(sample.name.removeprefix("tandemkv:"), *rest)] = sample.value
    return out


def broken_laws(samples: Samples) -> list[str]:
    """Every law of the exposition that these samples break."""

    def total(name: str) -> float:
        return sum(v for k, v in samples.items() if k[0] == name)

    accepted = total("spec_decode_num_accepted_tokens_total")
    drafted = total("spec_decode_num_draft_tokens_total")
    drafts = total("spec_decode_num_drafts_total")
    laws = {
        "accepted by position": total("spec_decode_num_accepted_tokens_per_pos_total") == accepted,
        "accepted <= drafted": accepted <= drafted,
        "drafts <= drafted": drafts <= drafted,
        "hits <= queries": total("prefix_cache_hits_total") <= total("prefix_cache_queries_total"),
        "draft bytes <= bytes": total("draft_kv_transferred_bytes_total")
        <= total("kv_transferred_bytes_total"),
        "no created series": not any(k[0].endswith("_created") for k in samples),
        "finite": all(math.isfinite(v) for v in samples.values()),
    }
    return [law for law, kept in laws.items() if not kept]


BUSY = Snapshot(
    running=2,
    waiting=3,
    num_preemptions=1,
    prompt_tokens=100,
    generation_tokens=50,
    num_drafts=10,
    num_draft_tokens=30,
    num_accepted_tokens=17,
    accepted_at=(9, 6, 2),
    prefix_queries=100,
    prefix_hits=48,
    draft_hits={"device": 47},
    draft_gaps={"evicted": 3},
    draft_recomputed=2,
    target_recomputed={"lookahead": 4, "holes": 2},
    draft_resumed={"warm": 1, "cold": 0},
    pages={"target": Pages(5, 3, 2, 10), "draft": Pages(1, 9, 0, 10)},
    draft_pages_held={"draft": 9},
)
HANDOFFS = Handoffs(
    workers=2,
    outcomes={("fetched", ""): 5, ("computed_here", "given_up"): 1},
    left_out={"switched_off": 2},
    received_bytes={"target": 4096, "draft": 512},
)
OF_HANDOFFS = {
    "prefill_workers",
    "kv_handoffs_total",
    "kv_handoff_groups_left_out_total",
    "kv_transferred_bytes_total",
}


def changed(**changes: Any) -> Snapshot:
    return Snapshot(**{name: getattr(BUSY, name) for name in BUSY.__struct_fields__} | changes)


@pytest.fixture(scope="module")
def start_engine(tiny_model: Callable[..., Path]) -> Callable[[], Any]:
    """A tiny model that drafts for itself, in an engine."""

    def start() -> Any:
        from tandemkv.base.config import EngineConfig
        from tandemkv.engine.engine import Engine

        path = str(tiny_model())
        options = {"model": path, "drafter": "draft_model", "drafter_path": path, "threads": 1}
        limits = {"kv_cache_tokens": 1024, "max_model_len": 200, "num_draft_tokens": 3}
        return Engine.from_config(
            EngineConfig(**options, **limits, device="cpu", dtype="float32", debug=True)
        )

    return start


def serve_one(engine: Any, num_tokens: int) -> None:
    from tandemkv.base.sampling import SamplingParams

    engine.add(list(range(1, num_tokens + 1)), SamplingParams(temperature=0.0, max_tokens=8))
    until = time.monotonic() + 60
    while engine.has_work:
        assert time.monotonic() < until
        engine.step()


def test_a_server_that_did_nothing_yet_can_be_scraped() -> None:
    samples = scrape(Snapshot())
    assert broken_laws(samples) == []
    assert samples[("spec_decode_num_drafts_total",)] == 0
    assert samples[("kv_cache_usage_perc",)] == 0
    assert samples[("time_to_first_token_seconds_count",)] == 0
    for reason in ("lookahead", "holes"):
        assert samples[("draft_kv_target_recomputed_tokens_total", reason)] == 0


def test_a_busy_server_keeps_the_laws() -> None:
    samples = scrape(BUSY)
    assert broken_laws(samples) == []
    assert samples[("spec_decode_num_accepted_tokens_per_pos_total", "1")] == 6
    assert samples[("draft_kv_hit_tokens_total", "device")] == 47
    assert samples[("draft_kv_gap_tokens_total", "evicted")] == 3
    assert samples[("draft_kv_recomputed_tokens_total",)] == 2
    assert samples[("draft_kv_target_recomputed_tokens_total", "lookahead")] == 4
    assert samples[("draft_kv_target_recomputed_tokens_total", "holes")] == 2
    assert samples[("draft_kv_pages_held", "draft")] == 9
    assert samples[("draft_kv_transferred_bytes_total",)] == 0
    assert samples[("draft_kv_resumed_total", "warm")] == 1
    assert samples[("num_requests_running",)] == 2
    assert samples[("num_requests_waiting",)] == 3


def test_acceptance_length_is_what_dashboards_compute() -> None:
    samples = scrape(BUSY)
    accepted = samples[("spec_decode_num_accepted_tokens_total",)]
    assert 1 + accepted / samples[("spec_decode_num_drafts_total",)] == 2.7


@pytest.mark.parametrize(
    ("fault", "law"),
    [
        ({"accepted_at": (9, 6, 3)}, "accepted by position"),
        ({"num_draft_tokens": 16}, "accepted <= drafted"),
        ({"num_drafts": 31}, "drafts <= drafted"),
        ({"prefix_hits": 101}, "hits <= queries"),
        ({"draft_transferred_bytes": 1}, "draft bytes <= bytes"),
        ({"draft_transferred_bytes": 4609, "handoffs": HANDOFFS}, "draft bytes <= bytes"),
        ({"generation_tokens": float("nan")}, "finite"),
    ],
)
def test_each_law_can_fail(fault: dict, law: str) -> None:
    assert broken_laws(scrape(changed(**fault))) == [law]


def test_usage_is_that_of_the_fullest_group_and_pages_are_told_apart() -> None:
    samples = scrape(BUSY)
    assert samples[("kv_cache_usage_perc",)] == 0.9
    assert samples[("kv_pages", "target", "cached")] == 2
    assert samples[("kv_pages", "draft", "held")] == 9


def test_handoffs_are_told_by_outcome_reason_and_group() -> None:
    samples = scrape(changed(handoffs=HANDOFFS, draft_transferred_bytes=512))
    assert broken_laws(samples) == []
    assert samples[("kv_handoffs_total", "fetched", "")] == 5
    assert samples[("kv_handoffs_total", "computed_here", "given_up")] == 1
    assert samples[("kv_handoff_groups_left_out_total", "switched_off")] == 2
    assert samples[("kv_transferred_bytes_total", "target")] == 4096
    assert samples[("kv_transferred_bytes_total", "draft")] == 512
    assert samples[("draft_kv_transferred_bytes_total",)] == 512
    assert samples[("prefill_workers",)] == 2


def test_an_engine_without_handoffs_says_nothing_of_them(start_engine) -> None:
    engine = start_engine()
    serve_one(engine, 20)
    text = render("tiny", snapshot_of(engine), Latencies()).decode()
    assert not any("tandemkv:" + name.removesuffix("_total") in text for name in OF_HANDOFFS)
    samples = scrape(snapshot_of(engine))
    assert samples[("draft_kv_transferred_bytes_total",)] == 0
    assert not OF_HANDOFFS & {name for name, *_ in samples}


def test_a_decode_worker_is_read_before_during_and_after_its_prefill_worker(start_engine) -> None:
    pytest.importorskip("nixl_cu13", reason="NIXL is not installed")
    from tandemkv.engine.decode import DecodeWorker

    worker = DecodeWorker(start_engine(), 1)
    try:
        samples = scrape(snapshot_of(worker))
        assert samples[("kv_handoffs_total", "fetched", "")] == 0
        assert samples[("prefill_workers",)] == 1
        serve_one(worker, 50)
        fetched = scrape(snapshot_of(worker))
        os.kill(worker.prefill[0].pid, signal.SIGKILL)
        until = time.monotonic() + 30
        while scrape(snapshot_of(worker))[("prefill_workers",)]:
            assert time.monotonic() < until
        worker.check()
        serve_one(worker, 60)
        alone = scrape(snapshot_of(worker))
    finally:
        worker.close()
    assert broken_laws(fetched) == broken_laws(alone) == []
    assert fetched[("kv_handoffs_total", "fetched", "")] == 1
    received = {k[1]: v for k, v in fetched.items() if k[0] == "kv_transferred_bytes_total"}
    target, draft = worker.layout.groups
    assert (target.required, draft.required) == (True, False)
    assert received.keys() == {target.name, draft.name}
    assert fetched[("draft_kv_transferred_bytes_total",)] == received[draft.name] > 0
    assert received[target.name] > 0
    assert alone[("kv_handoffs_total", "computed_here", "no_prefill_worker")] == 1
    assert alone[("kv_handoffs_total", "aborted", "")] == 0
    assert alone[("kv_transferred_bytes_total", target.name)] == received[target.name]
    assert scrape(snapshot_of(worker)) == alone


def test_a_histogram_counts_a_value_at_its_bound_and_above() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 3.0):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2), ("2.0", 3), ("+Inf", 4)]
    assert histogram.sum == 6.0


def test_the_mean_of_inter_token_latency_is_time_per_token() -> None:
    latencies = Latencies()
    latencies.first_token(0.2)
    latencies.next_tokens(0.3, 3)
    latencies.next_tokens(0.1, 1)
    latencies.end(0.6, "stop")
    samples = scrape(Snapshot(), latencies)
    assert samples[("inter_token_latency_seconds_count",)] == 4
    assert samples[("inter_token_latency_seconds_sum",)] == pytest.approx(0.4)
    assert samples[("time_to_first_token_seconds_count",)] == 1
    assert samples[("e2e_request_latency_seconds_sum",)] == pytest.approx(0.6)
    assert samples[("request_success_total", "stop")] == 1
    assert samples[("request_success_total", "error")] == 0


def test_buckets_grow() -> None:
    assert list(SECONDS) == sorted(set(SECONDS))
