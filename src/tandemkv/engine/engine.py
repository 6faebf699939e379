"""The aggregated engine: one process that computes prompts and generates, drafter and target.

    life of a request:  add -> claim -> prefill chunks -> first token + first proposal
                        -> (verify, commit, propose)* -> finish: pages published and released

Law: a step is plan, run, apply, in that order, on one thread; nothing between them changes the
cache. After every step free + held + cached = total in every group. A step that raises ends its
own requests with an error and no others. This module holds no rule of its own: the cache, the
scheduler, the runner do.
"""

from __future__ import annotations

import logging
import select
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from tandemkv.base.config import EngineConfig, Resolved, Resolver
from tandemkv.base.errors import InvariantError, RequestError
from tandemkv.base.ids import GroupId
from tandemkv.base.logprobs import TokenLogprobs
from tandemkv.base.sampling import SamplingParams
from tandemkv.base.spans import SpanSet
from tandemkv.base.transfer_params import FIELD as TRANSFER
from tandemkv.base.transfer_params import KVTransferParams
from tandemkv.engine.resolve import Plan, pick_device, pick_dtype, pick_threads, resolve
from tandemkv.kv.keys import Namespace
from tandemkv.kv.layout import Domain
from tandemkv.kv.manager import KVManager
from tandemkv.kv.sequence import Sequence as KVSequence
from tandemkv.model.checkpoint import load_target, load_tokenizer
from tandemkv.model.drafter import Drafter
from tandemkv.model.drafters import Bind, find_drafter, method_of
from tandemkv.model.target import Target
from tandemkv.runner.forward import Runner
from tandemkv.runner.storage import Storage
from tandemkv.sched.batch import Output, StepRecord
from tandemkv.sched.request import Request
from tandemkv.sched.scheduler import Scheduler
from tandemkv.sched.stats import Load
from tandemkv.transfer.plan import wanted

if TYPE_CHECKING:
    from tandemkv.engine.exchange import HandoffStats

log = logging.getLogger("tandemkv")

EMBEDDED = "SmolLM2-135M-Instruct"


class GenerateRequest(msgspec.Struct, kw_only=True):
    """A prompt for Engine.generate."""

    prompt: list[int]
    params: SamplingParams
    namespace: Namespace = Namespace()
    priority: int = 0
    watch: Callable[[Sequence[int]], int | None] | None = None


class Completion(msgspec.Struct, kw_only=True):
    """What came of one GenerateRequest; `error` is None unless finish_reason is "error"."""

    tokens: list[int]
    finish_reason: str
    error: str | None
    cached_tokens: int
    steps: list[StepRecord]
    request: Request


class Engine:
    """Drives scheduler, cache and runner. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        plan: Plan,
        config: EngineConfig,
        *,
        tokenizer: Any = None,
    ) -> None:
        self.config = config
        self.plan = plan
        self.target = target
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.layout = plan.layout
        device = torch.device(plan.resolved["device"])
        self.kv = KVManager(
            plan.layout,
            plan.num_pages,
            model_fingerprint=target.spec.fingerprint,
            drafter_fingerprint=drafter.spec.fingerprint if drafter else "",
            prefix_caching=config.prefix_caching,
            debug=config.debug,
            faults=frozenset(config.faults),
        )
        self.storage = Storage(plan.layout, plan.num_pages, device, debug=config.debug)
        self.scheduler = Scheduler(
            self.kv,
            max_batch_tokens=plan.max_batch_tokens,
            max_running=plan.max_running,
            max_model_len=plan.max_model_len,
            num_draft_tokens=plan.num_draft_tokens,
            exact_proposals=drafter.spec.exact_proposals if drafter else False,
            eos_token_ids=target.spec.eos_token_ids,
            prefill_chunk=plan.max_batch_tokens,
            trace=config.trace,
        )
        self.runner = Runner(plan.layout, self.storage, target, drafter, trace=config.trace)
        self.engine_id = f"engine-{uuid.uuid4().hex[:12]}"
        """New with each incarnation."""
        self._next_id = 0

    @classmethod
    def from_config(cls, config: EngineConfig) -> Engine:
        """Load models and allocate pools. Raises ConfigError, before memory is touched."""
        config.validate()
        resolver = Resolver()
        device = pick_device(config, resolver)
        dtype = pick_dtype(config, device, resolver)
        threads = pick_threads(config, resolver)
        if device.type == "cpu":
            torch.set_num_threads(threads)
        bind = _find_drafter(config, resolver)  # refused before the target takes its time to load
        target = load_target(
            config.model, dtype=dtype, device=str(device), cache_dir=config.cache_dir
        )
        drafter = bind(target, getattr(torch, dtype), device) if bind else None
        plan = resolve(config, resolver, target, drafter, device, dtype)
        tokenizer = load_tokenizer(config.model, cache_dir=config.cache_dir)
        return cls(target, drafter, plan, config, tokenizer=tokenizer)

    @property
    def resolved(self) -> Resolved:
        return self.plan.resolved

    @property
    def model_name(self) -> str:
        """What clients call the model: the last part of its path or hub id."""
        return self.config.model.rstrip("/").rsplit("/", 1)[-1] if self.config.model else EMBEDDED

    @property
    def max_model_len(self) -> int:
        return self.plan.max_model_len

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        namespace: Namespace = Namespace(),
        request_id: str | None = None,
        priority: int = 0,
        watch: Callable[[Sequence[int]], int | None] | None = None,
        keep: bool = False,
        transfer: KVTransferParams | None = None,
    ) -> Request:
        """Queue a request. Raises RequestError if it can never run as asked.

        keep: its pages are taken over when it ends, see `engine/handoff.py`. transfer: for a
        worker that stands in for an engine; an engine by itself refuses it.
        """
        if transfer is not None:
            raise RequestError(
                f"{TRANSFER}: this server exchanges no KV; start one with `tandemkv worker`",
                param=TRANSFER,
            )
        request = self.request_of(
            prompt,
            params,
            namespace=namespace,
            request_id=request_id,
            priority=priority,
            watch=watch,
            keep=keep,
        )
        self.submit(request)
        return request

    def submit(
        self,
        request: Request,
        *,
        first_tokens: Sequence[int] = (),
        cached_tokens: int = 0,
        logprobs: Sequence[TokenLogprobs] | None = None,
        hold: KVSequence | None = None,
    ) -> None:
        """Queue a request of `request_of`. Raises RequestError if it can never run.

        first_tokens: it comes from another worker, see `Scheduler.add_handed_over`.
        """
        if first_tokens:
            self.scheduler.add_handed_over(
                request,
                list(first_tokens),
                cached_tokens=cached_tokens,
                logprobs=logprobs,
                hold=hold,
            )
        else:
            self.scheduler.add(request)

    def request_of(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        namespace: Namespace = Namespace(),
        request_id: str | None = None,
        priority: int = 0,
        watch: Callable[[Sequence[int]], int | None] | None = None,
        keep: bool = False,
    ) -> Request:
        """The request that `add` would queue. Raises RequestError if it can never run as asked."""
        vocab = self.target.spec.vocab_size
        bad = next((t for t in prompt if not 0 <= t < vocab), None)
        if bad is not None:
            raise RequestError(
                f"prompt token {bad} is outside the vocabulary of {vocab}", param="prompt"
            )
        _check_tokens("logit_bias", params.logit_bias, vocab)
        _check_tokens("stop_token_ids", params.stop_token_ids, vocab)
        stops = {*params.stop_token_ids, *self.target.spec.eos_token_ids}
        if params.min_tokens and len(stops) >= vocab:
            raise RequestError(
                "min_tokens cannot be met: every token of the vocabulary stops the request",
                param="min_tokens",
            )
        if params.claim_policy is None:
            params = msgspec.structs.replace(params, claim_policy=self.config.claim_policy)
        if request_id is None:
            request_id = f"req-{self._next_id}"
        self._next_id += 1
        request = Request(
            id=request_id,
            prompt=list(prompt),
            params=params,
            namespace=namespace,
            priority=priority,
            watch=watch,
            keep=keep,
        )
        self.scheduler.check_request(request)
        return request

    def missing_rows(
        self, tokens: Sequence[int], namespace: Namespace = Namespace()
    ) -> dict[str, int]:
        """Rows that a prompt needs and the cache lacks, by domain, "target" and "draft"."""
        match = self.kv.match(tokens, namespace)
        rows = {str(domain): 0 for domain in Domain}
        for group, spans in zip(self.layout.groups, match.coverage, strict=True):
            lacking = wanted(group, len(tokens), SpanSet(spans), ahead=self.layout.lookahead)
            rows[str(group.domain)] += sum(stop - start for start, stop in lacking)
        return rows

    @property
    def load(self) -> Load:
        """How busy it is."""
        return self.scheduler.load

    @property
    def worker_info(self) -> dict[str, Any]:
        """Who it is to a router: role, engine_id, and its control channel; none by itself."""
        return {"role": "aggregated", "engine_id": self.engine_id, "control": None}

    def wait(self, fd: int, wait_s: float) -> None:
        """When idle: until the file descriptor has something to read, or so long."""
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        poller.poll(1000 * wait_s)

    @property
    def num_prefill_workers(self) -> int:
        """Other processes that compute prompts for it."""
        return 0

    @property
    def handoffs(self) -> HandoffStats | None:
        """An engine computes all prompts itself; a worker that stands in for one says otherwise."""
        return None

    def settle(self) -> None:
        """After pages changed hands between two steps: what became free is free for all."""
        self.storage.freed(self.kv.drain_freed())
        if self.config.debug:
            self.scheduler.check()

    def sync(self) -> None:
        """Until all that was queued on the device is in memory: before others read or write it."""
        self.storage.sync()

    def abort(self, request_id: str) -> Output | None:
        """End a request in any state; None if it is unknown or already over."""
        return self.scheduler.abort(request_id)

    def suspend(self, request_id: str) -> None:
        """Suspend a running request by hand; it resumes when the scheduler admits it again."""
        self.scheduler.suspend(request_id)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[Output]:
        """One step; the outputs of every request that moved or ended."""
        plan = self.scheduler.plan()
        self.storage.freed(self.kv.drain_freed())  # before a page given out again is written
        try:
            result = self.runner.run(plan)
        except InvariantError:
            raise
        except Exception as error:
            log.exception("step %d failed", plan.step)
            outputs = self.scheduler.fail(plan, f"the step failed: {error}")
        else:
            outputs = self.scheduler.apply(plan, result)
        self.storage.freed(self.kv.drain_freed())
        self.runner.forget(r.seq.id for r in self.scheduler.running if r.seq is not None)
        if self.config.debug:
            self.scheduler.check()
        return outputs

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        *,
        on_output: Callable[[Output], None] | None = None,
    ) -> list[Completion]:
        """Run requests to their end, batched; results in the order given."""
        added = [
            self.add(r.prompt, r.params, namespace=r.namespace, priority=r.priority, watch=r.watch)
            for r in requests
        ]
        wanted = {r.id for r in added}
        while wanted and self.has_work:
            for output in self.step():
                if on_output is not None:
                    on_output(output)
                if output.finished:
                    wanted.discard(output.request_id)
        if wanted:
            raise InvariantError(f"requests never ended: {', '.join(sorted(wanted))}")
        return [completion_of(request) for request in added]

    def read_rows(self, request: Request, group: GroupId, slots: Sequence[int]) -> Tensor:
        """KV rows of a running request, [slots, layers, 2, heads, head_dim]; for tests and labs."""
        if request.seq is None:
            raise InvariantError(f"request {request.id} holds no pages")
        return self.storage.read(group, request.seq.pages[group], slots)

    def reset_cache(self, domain: Domain | None = None) -> int:
        """Drop every page that no request holds, or those of one domain; how many became free."""
        freed = self.kv.reset_cache(domain)
        self.storage.freed(self.kv.drain_freed())
        return freed

    def check(self) -> None:
        """Every law of scheduler and cache; raises InvariantError."""
        self.scheduler.check()


def completion_of(request: Request) -> Completion:
    """A finished request as a Completion."""
    return Completion(
        tokens=list(request.output),
        finish_reason=request.finish_reason or "error",
        error=request.error,
        cached_tokens=request.cached_tokens,
        steps=request.steps,
        request=request,
    )


def _check_tokens(name: str, tokens: Any, vocab: int) -> None:
    for token in tokens:
        if token >= vocab:
            raise RequestError(
                f"{name} names token {token}, outside the vocabulary of {vocab}", param=name
            )


def _find_drafter(config: EngineConfig, resolver: Resolver) -> Bind | None:
    asked = None if config.drafter == "auto" else config.drafter
    if config.drafter_path is not None and asked is None:
        asked = method_of(config.drafter_path, config.cache_dir)
    embedded = config.model is None
    chosen = "eagle3" if embedded else "none"
    why = "shipped for the embedded model" if embedded else "no drafter is known for this model"
    method = resolver.choose("drafter", asked, chosen, why)
    if method == "none":
        return None
    return find_drafter(
        method,
        config.drafter_path,
        num_draft_tokens=config.num_draft_tokens or None,
        draft_vocab=config.draft_vocab,
        options=config.drafter_options,
        cache_dir=config.cache_dir,
    )
