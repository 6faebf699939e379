"""A deployment for tests: mortal workers and their router as processes, and a client of them.

The model is tiny and drafts for itself, so every draft is accepted if and only if the rows that
crossed, their positions and masks are right. Law: what a deployment asks has one answer, the plain
run's, and `settle` sees that nothing is left of it on any side.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
from mortal import Order, Orders, Spec

from tandemkv.base.config import EngineConfig
from tandemkv.serve.address import bind
from tandemkv.serve.worker import ServingOptions

LIMIT_S = 20.0
"""Anything that takes longer hangs."""
PATIENCE_S = 3.0
TIMING = {
    "lease_s": PATIENCE_S,
    "patience_s": PATIENCE_S,
    "resend_s": 0.3,
    "draft_wait_s": PATIENCE_S,  # a machine that is busy is no reason to miss a draft row
    "linger_s": PATIENCE_S,
}
LOST_S = 2.0
ROUTER_TIMING = {"poll": 0.1, "silent": 1.0, "lost": LOST_S, "coverage": 1.0, "rest": 0.1}
VOCAB = 64
HOUR_S = 3600.0
PATH = "/v1/completions"


def save_model(path: Path) -> Path:
    """A random model of 4 layers, as in tests/engine/test_worker.py."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocab = {f"t{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    torch.manual_seed(2)
    shape = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
        initializer_range=0.3, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(path)
    return path


def engine_config(model: Path, **changes: Any) -> EngineConfig:
    """Of a worker; every law is checked after every step."""
    values: dict[str, Any] = {
        "model": str(model), "drafter": "draft_model", "drafter_path": str(model),
        "num_draft_tokens": 3, "device": "cpu", "dtype": "float32", "threads": 1,
        "kv_cache_tokens": 4096, "max_model_len": 400, "max_batch_tokens": 32, "debug": True,
    }  # fmt: skip
    return EngineConfig(**(values | changes))


class Plain:
    """What is right: the model alone, in this process, without drafter and hand-off."""

    def __init__(self, model: Path) -> None:
        from tandemkv.engine.engine import Engine

        none = {"drafter": "none", "drafter_path": None, "num_draft_tokens": None}
        self._engine = Engine.from_config(engine_config(model, **none))

    def __call__(self, prompt: list[int], max_tokens: int) -> list[int]:
        from tandemkv.base.sampling import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        request = self._engine.add(prompt, params)
        while self._engine.has_work:
            self._engine.step()
        return request.output


class Nursery:
    """Forks children that have everything imported: one is there in a fraction of a second."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("mortal.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def fork(self, spec: Spec) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(spec) + b"\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End all children, and it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(LIMIT_S)


class Answer(msgspec.Struct):
    """status: of HTTP. tokens: of the one choice. error: what an error body or event says.

    metrics: drafts, as the answer says. seconds: until it had ended.
    """

    status: int = 0
    tokens: list[int] = []
    finish_reason: str | None = None
    error: str = ""
    drafts: dict[str, Any] = {}
    seconds: float = 0.0

    def take(self, body: dict[str, Any]) -> None:
        """A whole answer, or an event of a streamed one."""
        if "error" in body:
            self.error = body["error"]["message"]
        for choice in body.get("choices", ()):
            self.tokens = self.tokens + choice.get("token_ids", [])
            self.finish_reason = choice["finish_reason"] or self.finish_reason
        if body.get("metrics"):
            self.drafts = body["metrics"]["speculative_decoding"]


class Member:
    """A worker's or the router's place: one process after another at one address."""

    def __init__(self, deployment: Deployment, spec: Spec, port: int) -> None:
        self._deployment, self._spec = deployment, spec
        self.name, self.role = spec.name, spec.role
        self.url = f"http://127.0.0.1:{port}"
        self.pid = 0
        self.start()

    def start(self) -> None:
        self.pid = self._deployment.nursery.fork(self._spec)

    @property
    def alive(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    @property
    def log(self) -> str:
        path = Path(self._spec.place) / f"{self.name}.log"
        return path.read_text()[-3000:] if path.exists() else ""

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        until(lambda: not self.alive, f"{self.name} is gone")

    def get(self, path: str) -> str:
        """The body of an answer of its own; "" if there is none."""
        try:
            answer = self._deployment.http.get(self.url + path, timeout=2.0)
        except httpx.HTTPError:
            return ""
        assert answer.status_code == 200, f"{self.name}: {answer.text}\n{self.log}"
        return answer.text

    def metric(self, pattern: str) -> float:
        """The sum of the samples that match, of its /metrics."""
        found = re.findall(rf"^tandemkv:{pattern} (\S+)$", self.get("/metrics"), re.M)
        return sum(map(float, found))

    @property
    def idle(self) -> bool:
        """Whether it holds no page and nothing is under way. Its laws are checked."""
        text = self.get("/metrics")
        held = re.findall(r'^tandemkv:kv_pages\{.*state="held".*\} (\S+)$', text, re.M)
        return bool(held) and not any(map(float, held)) and "\ntest:busy 0" in text


class Deployment:
    """num_prefill and num_decode workers behind a router. prefill, decode: engine options."""

    def __init__(
        self,
        nursery: Nursery,
        place: Path,
        model: Path,
        num_prefill: int,
        num_decode: int,
        *,
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.nursery, self.place = nursery, place
        self._numbers = itertools.count(1)
        self._rng = random.Random(str(place))
        self.http = httpx.Client(timeout=LIMIT_S, trust_env=False)
        changes = {"prefill": prefill or {}, "decode": decode or {}}
        roles = ["prefill"] * num_prefill + ["decode"] * num_decode
        *ports, own = free_ports(len(roles) + 1)
        self.workers: list[Member] = []
        for i, (role, port) in enumerate(zip(roles, ports, strict=True)):
            engine = engine_config(model, **(options | changes[role]))
            serving = ServingOptions(engine=engine, role=role, port=port, grace_s=1.0)
            spec = Spec(
                name=f"{role}{i}",
                role=role,
                place=str(place),
                timing=TIMING,
                worker=msgspec.to_builtins(serving),
            )
            self.workers.append(Member(self, spec, port))
        urls: dict[str, Any] = {"prefill": [], "decode": []}
        for worker in self.workers:
            urls[worker.role].append(worker.url)
        spec = Spec(
            name="router",
            role="router",
            place=str(place),
            timing=ROUTER_TIMING,
            router={**urls, "port": own},
        )
        self.router = Member(self, spec, own)
        self.whole()

    def of(self, role: str) -> list[Member]:
        return [worker for worker in self.workers if worker.role == role]

    def __getitem__(self, name: str) -> Member:
        return next(worker for worker in self.workers if worker.name == name)

    # -- orders ------------------------------------------------------------------------------------

    def order(self, role: str, moment: str, deed: str, **how: Any) -> Order:
        """Have one worker of a role do it, when its moment comes."""
        order = Order(id=f"order{next(self._numbers)}", moment=moment, deed=deed, **how)
        Orders(self.place, role).give([order])
        return order

    def taken_by(self, role: str, order: Order) -> Member | None:
        """Who took an order, if it has been taken."""
        path = Orders(self.place, role).taken(order)
        return self[path.read_text()] if path.exists() and path.read_text() else None

    def taker(self, role: str, order: Order) -> Member:
        """Who took an order, which is waited for."""
        until(lambda: self.taken_by(role, order) is not None, f"somebody takes {order}")
        found = self.taken_by(role, order)
        assert found is not None
        return found

    def go_on(self, role: str, order: Order) -> None:
        """End a pause."""
        Orders(self.place, role).done(order).touch()

    def no_orders(self) -> None:
        """From here on nothing goes wrong, and who was stopped goes on."""
        for role in ("prefill", "decode"):
            Orders(self.place, role).give([])
        for worker in self.workers:
            if worker.alive:
                worker.signal(signal.SIGCONT)

    # -- requests ----------------------------------------------------------------------------------

    def prompt(self, length: int = 200) -> list[int]:
        """One that was never asked before."""
        return [self._rng.randrange(VOCAB) for _ in range(length)]

    def body(self, prompt: list[int], max_tokens: int, stream: bool) -> dict[str, Any]:
        return {
            "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": stream,
            "return_token_ids": True, "return_metrics": True,
        }  # fmt: skip

    def ask(self, prompt: list[int], max_tokens: int = 16, *, stream: bool = False) -> Answer:
        """Ask the router, and read the answer to its end, whatever that is."""
        answer, start = Answer(), time.monotonic()
        for event in self.events(prompt, max_tokens, stream=stream):
            answer.status = event.pop("status")
            answer.take(event)
        answer.seconds = time.monotonic() - start
        return answer

    def events(
        self, prompt: list[int], max_tokens: int = 16, *, stream: bool = True
    ) -> Iterator[dict[str, Any]]:
        """The answer's body or events as they come, each with its status."""
        body = self.body(prompt, max_tokens, stream)
        with self.http.stream("POST", self.router.url + PATH, json=body) as response:
            kind = response.headers["content-type"]
            if not kind.startswith("text/event-stream"):
                yield {**json.loads(response.read()), "status": response.status_code}
                return
            over = False
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    over = True
                elif line:
                    yield {**json.loads(line.removeprefix("data: ")), "status": 200}
            assert over, "a stream ends with [DONE]"

    def send(self, prompt: list[int], max_tokens: int = 16, *, stream: bool) -> socket.socket:
        """A connection on which a request was sent, and nothing read."""
        content = json.dumps(self.body(prompt, max_tokens, stream)).encode()
        host, port = self.router.url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)), LIMIT_S)
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        return connection

    # -- how it is ---------------------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """Whether nobody was killed since `whole`."""
        return all(member.alive for member in (*self.workers, self.router))

    def whole(self) -> None:
        """Start who is gone, at its address; wait until the router sees all workers."""
        for member in (*self.workers, self.router):
            if not member.alive:
                member.start()
        for worker in self.workers:
            until(lambda w=worker: w.get("/worker") != "", f"{worker.name} answers", worker)
        engines = {json.loads(w.get("/worker"))["engine_id"] for w in self.workers}

        def seen() -> bool:
            about = json.loads(self.router.get("/worker") or '{"workers": []}')
            return engines == {w["engine_id"] for w in about["workers"] if w["alive"]}

        until(seen, "the router sees all workers", self.router)

    def settle(self) -> None:
        """Wait until no survivor has anything to do; then no page is held, and every law holds."""
        for worker in self.workers:
            if worker.alive:
                until(lambda w=worker: w.idle, f"{worker.name} holds nothing", worker)

    def count(self, pattern: str) -> float:
        """A metric, over all workers that are alive."""
        return sum(worker.metric(pattern) for worker in self.workers if worker.alive)

    @property
    def fetched(self) -> float:
        """Prompts that came from a prefill worker."""
        return self.count(r'kv_handoffs_total\{.*outcome="fetched".*\}')

    def close(self) -> None:
        self.http.close()
        for member in (*self.workers, self.router):
            member.kill()


def assert_right(answer: Answer, tokens: list[int]) -> None:
    """The plain run's tokens, and every draft was accepted."""
    assert (answer.status, answer.error) == (200, "")
    assert answer.tokens == tokens
    assert answer.finish_reason == "length"
    drafts = answer.drafts
    assert drafts["num_accepted_draft_tokens"] == drafts["num_draft_tokens"] > 0


def until(done: Callable[[], bool], what: str, whose: Member | None = None) -> None:
    """Wait for it; anything that takes longer than LIMIT_S hangs."""
    end = time.monotonic() + LIMIT_S
    while not done():
        said = f"\n{whose.log}" if whose is not None else ""
        assert time.monotonic() < end, f"it takes too long until {what}{said}"
        time.sleep(0.02)


def free_ports(count: int) -> list[int]:
    """Different free ports of this host."""
    bound = [bind("127.0.0.1", 0) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in bound]
    for sock in bound:
        sock.close()
    return ports
