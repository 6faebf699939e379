"""A decode worker with prefill workers in real processes: NIXL moves the rows, ZeroMQ the words.

The model is tiny and drafts for itself, so every draft is accepted if and only if the rows that
crossed, their positions and masks are right.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tandemkv.base.config import EngineConfig
from tandemkv.base.errors import ConfigError, RequestError
from tandemkv.base.sampling import SamplingParams
from tandemkv.engine.decode import DecodeWorker, PrefillProcess
from tandemkv.engine.engine import Engine
from tandemkv.sched.batch import Output
from tandemkv.transfer.session import Timing

pytest.importorskip("nixl_cu13", reason="NIXL is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("model")
    vocab = {f"t{i}": i for i in range(64)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    torch.manual_seed(2)
    shape = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
        initializer_range=0.3, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(path)
    return path


def config(model: Path, **changes: object) -> EngineConfig:
    values: dict[str, object] = {
        "model": str(model), "drafter": "draft_model", "drafter_path": str(model),
        "num_draft_tokens": 3, "device": "cpu", "dtype": "float32", "threads": 1,
        "kv_cache_tokens": 4096, "max_model_len": 400, "max_batch_tokens": 32, "debug": True,
    }  # fmt: skip
    return EngineConfig(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture
def worker(model: Path) -> Iterator[DecodeWorker]:
    yield from made(model)


@pytest.fixture
def alone(model: Path) -> Iterator[DecodeWorker]:
    """One whose prefill process, once gone, stays gone."""
    yield from made(model, restart=False)


def made(model: Path, **how: bool) -> Iterator[DecodeWorker]:
    made = DecodeWorker(Engine.from_config(config(model)), 1, **how)
    yield made
    pids = [process.pid for process in made.prefill]
    made.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 64, (length,), generator=generator).tolist()


def greedy(max_tokens: int = 16) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def finish(worker: DecodeWorker, names: set[str], limit_s: float = 60.0) -> dict[str, list[Output]]:
    """Turn until these requests have ended; every request has one end."""
    seen: dict[str, list[Output]] = {}
    until = time.monotonic() + limit_s
    while not names <= {n for n, outs in seen.items() if outs[-1].finished}:
        assert time.monotonic() < until, f"not ended: {names - set(seen)}"
        for output in worker.step():
            seen.setdefault(output.request_id, []).append(output)
    while worker.has_work and time.monotonic() < until:
        worker.step()
    worker.check()
    assert all(usage.held == 0 for usage in worker.kv.usage())
    return seen


def wait_for_another(worker: DecodeWorker, before: PrefillProcess) -> None:
    until = time.monotonic() + 120
    while worker.prefill[0] is before or not worker.num_prefill_workers:
        assert time.monotonic() < until
        worker.step()
    assert worker.prefill[0].pid != before.pid


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def plain(model: Path, tokens: list[int], max_tokens: int = 16) -> list[int]:
    engine = Engine.from_config(
        config(model, drafter="none", drafter_path=None, num_draft_tokens=None)
    )
    request = engine.add(tokens, greedy(max_tokens))
    while engine.has_work:
        engine.step()
    return request.output


def test_rows_cross_processes_and_the_drafter_notices_nothing(worker, model):
    wanted = {"a": prompt(90, seed=1), "b": prompt(7, seed=2), "c": prompt(200, seed=3)}
    for name, tokens in wanted.items():
        worker.add(tokens, greedy(), request_id=name)
    done = finish(worker, set(wanted))
    for name, tokens in wanted.items():
        assert tokens_of(done[name]) == plain(model, tokens)
        assert done[name][-1].num_accepted == done[name][-1].num_drafts > 0
    assert worker.exchange.fetching.fetched == 3
    assert worker.scheduler.stats.num_prefill_rows == 0
    turn = [*wanted["a"], *tokens_of(done["a"]), *prompt(20, seed=4)]
    worker.add(turn, greedy(), request_id="second turn")
    again = finish(worker, {"second turn"})["second turn"]
    assert tokens_of(again) == plain(model, turn)
    assert again[-1].num_accepted == again[-1].num_drafts > 0
    assert again[-1].cached_tokens == len(wanted["a"])


@pytest.mark.parametrize("turns", [0, 2, 6])
def test_a_prefill_process_that_is_killed_costs_no_request(alone, model, turns):
    worker = alone
    tokens = prompt(300, seed=5)
    worker.add(tokens, greedy(), request_id="r")
    for _ in range(turns):
        assert not any(output.finished for output in worker.step())
    os.kill(worker.prefill[0].pid, signal.SIGKILL)
    done = finish(worker, {"r"})
    assert tokens_of(done["r"]) == plain(model, tokens)
    worker.add(prompt(40, seed=6), greedy(), request_id="later")
    assert tokens_of(finish(worker, {"later"})["later"]) == plain(model, prompt(40, seed=6))
    assert worker.exchange.fetching.computed_here["no_prefill_worker"] == 1


def test_another_prefill_process_takes_the_place_of_one_that_is_killed(worker, model):
    first = worker.prefill[0]
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    wait_for_another(worker, first)
    worker.add(prompt(60, seed=9), greedy(), request_id="r")
    assert tokens_of(finish(worker, {"r"})["r"]) == plain(model, prompt(60, seed=9))
    assert worker.exchange.fetching.fetched == 1


def test_a_prefill_worker_whose_connection_was_closed_is_used_again(worker, model):
    worker.add(prompt(60, seed=9), greedy(), request_id="before")
    finish(worker, {"before"})
    (peer,) = worker.exchange.peers.known.values()
    worker.exchange._transport.fence(peer.name)
    while worker.num_prefill_workers:
        worker.step()
    until = time.monotonic() + 60
    while not worker.num_prefill_workers and time.monotonic() < until:
        worker.step()
    for name in ("first", "second"):  # the other side may learn of it by a write that fails
        worker.add(prompt(70, seed=len(name)), greedy(), request_id=name)
        done = finish(worker, {name})
        assert tokens_of(done[name]) == plain(model, prompt(70, seed=len(name)))
    assert worker.exchange.fetching.fetched >= 2


def test_one_that_keeps_ending_is_started_less_and_less_often(worker):
    os.kill(worker.prefill[0].pid, signal.SIGKILL)
    worker.prefill[0].wait()
    starts = 0
    for now in range(200):
        before = worker.prefill[0]
        worker._look(float(now) + worker._then)
        if worker.prefill[0] is not before:
            starts += 1
            os.kill(worker.prefill[0].pid, signal.SIGKILL)
            worker.prefill[0].wait()
    assert 5 <= starts <= 9


def test_a_prefill_process_that_hangs_is_killed_and_replaced(model):
    timing = Timing(patience_s=1.0)
    worker = DecodeWorker(Engine.from_config(config(model)), 1, timing=timing, hung_s=1.0)
    hung = worker.prefill[0]
    os.kill(hung.pid, signal.SIGSTOP)
    wanted = {f"r{i}": prompt(60 + i, seed=i) for i in range(3)}
    for name, tokens in wanted.items():
        worker.add(tokens, greedy(), request_id=name)
    done = finish(worker, set(wanted))  # which also sees that no page stays held
    for name, tokens in wanted.items():
        assert tokens_of(done[name]) == plain(model, tokens)
    assert not hung.alive
    wait_for_another(worker, hung)
    worker.add(prompt(50, seed=9), greedy(), request_id="later")
    finish(worker, {"later"})
    assert worker.handoffs.fetched == 1
    worker.close()


def test_an_abort_while_rows_are_on_their_way_leaks_nothing(worker):
    worker.add(prompt(300, seed=7), greedy(), request_id="gone")
    worker.step()
    output = worker.abort("gone")
    assert output is not None
    assert output.finish_reason == "abort"
    worker.add(prompt(20, seed=8), greedy(), request_id="stays")
    assert "stays" in finish(worker, {"stays"})


def test_what_can_never_run_is_refused_at_once(worker):
    with pytest.raises(RequestError, match="max_model_len"):
        worker.add(prompt(400), greedy(), request_id="long")
    with pytest.raises(RequestError, match="outside the vocabulary"):
        worker.add([70], greedy(), request_id="odd")


def test_a_prefill_process_that_cannot_start_is_said(model, capfd):
    engine = Engine.from_config(config(model))
    engine.config = config(model / "nowhere")
    with pytest.raises(ConfigError, match="ended before it was ready"):
        DecodeWorker(engine, 1)
    assert "nowhere" in capfd.readouterr().err.splitlines()[-1]
