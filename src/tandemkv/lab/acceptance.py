"""The acceptance experiment: the same conversations on every path, and what each path loses.

    cold         every prompt in an empty cache            the reference of warm and resumed
    warm         the same prompts again
    second_turn  turn 1, its output, the next message      against a cold run of that whole prompt
    resumed      suspended on the way, several times, and resumed
    branches     prompts that share a long system prompt, in turn     against cold runs of the same
    branches_evicted     the same, every draft page evicted before the first branch
    disaggregated, ...   handed over by prefill workers, see lab/disaggregated.py
    warm_rows_withheld   warm, the draft rows of reused blocks taken away (a seeded fault)

Law: a path is compared with a cold run of the same token ids, and outputs with the target run
without a drafter, all in one process and one command; sampled, every phase draws with seeds of its
own and no output is compared. Faults act in the cache, never here. This module renders nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import msgspec

from tandemkv.base.config import EngineConfig
from tandemkv.base.errors import ConfigError
from tandemkv.lab import branches, disaggregated, prompts
from tandemkv.lab.experiments import Job, Run, run, run_in_turn
from tandemkv.lab.options import (
    BRANCHES,
    CONVERSATIONS,
    EVICTED,
    HANDED_OVER,
    WITHHELD,
    WITHOUT_DRAFT,
    LabOptions,
    has_rows,
)
from tandemkv.lab.rows import Row, make_row

if TYPE_CHECKING:
    from tandemkv.engine.engine import Engine
    from tandemkv.lab.prompts import PromptTokens

ROW_FAULT = "withhold_draft_rows"
BRANCH_PHASES = {"branches": "branches", EVICTED: "branches, evicted"}


class Progress:
    """Where the experiment stands; the base class keeps silent."""

    def loading(self, drafter: str) -> None:
        """An engine with this drafter is being loaded."""

    def phase(self, name: str, index: int, of: int, prompts: int, tokens: int) -> None:
        """Phase `index`, from 1, begins: prompts that emit at most `tokens` together."""

    def advance(self, tokens: int, prompts: int, spared: int) -> None:
        """So many tokens more, so many prompts ended, and these left `spared` tokens unused."""

    def done(self) -> None:
        """The phase is over, to its end."""


class Experiment:
    """Runs the phases in order; `rows` holds what is finished, also after an interruption."""

    def __init__(
        self,
        options: LabOptions,
        progress: Progress | None = None,
        make_engine: Callable[[EngineConfig], Engine] | None = None,
        workers: Callable[[Engine, int], AbstractContextManager[disaggregated.Decode]] = (
            disaggregated.workers
        ),
    ) -> None:
        self.options = options
        self.progress = progress or Progress()
        self._make_engine = make_engine or _from_config
        self._workers = workers
        self.rows: list[Row] = []
        self.resolved: dict[str, Any] = {}
        self._conversations = prompts.load(options.prompts, options.limit)
        self._paths = self._possible(options.paths)
        self._plain: dict[str, Run] = {}
        self._jobs: dict[str, list[Job]] = {}
        self._num_begun = 0

    @property
    def num_phases(self) -> int:
        """How many phases `run()` has."""
        options, paths = self.options, set(self._paths)
        cold, second = self._runs_cold, "second_turn" in paths
        branched = len(paths & {*BRANCHES})
        plain = cold + ("warm" in paths) + second + 2 * bool(branched)
        drafter = cold + len(paths & {"warm", "resumed"}) + 2 * second
        drafter += bool(branched) + 2 * branched
        handed_over = (2 + second) * bool(options.num_prefill)
        lossy = sum(has_rows(name) for name in options.drafters)
        return (
            options.plain * plain
            + len(options.drafters) * (drafter + handed_over)
            + lossy * (2 * options.show_loss + handed_over)
        )

    @property
    def _runs_cold(self) -> bool:
        """Whether the conversations are run cold: all of their paths are compared with that."""
        asked = self.options.show_loss or self.options.num_prefill
        return bool(asked or {*CONVERSATIONS} & {*self._paths})

    def _possible(self, asked: tuple[str, ...] | None) -> tuple[str, ...]:
        if any(conversation.follow_ups for conversation in self._conversations):
            return asked or CONVERSATIONS
        if asked is not None and "second_turn" in asked:
            name = self.options.prompts
            raise ConfigError(f"--paths second_turn: no second turns in --prompts {name}")
        return asked or tuple(path for path in CONVERSATIONS if path != "second_turn")

    def run(self) -> list[Row]:
        """Every drafter on every path. KeyboardInterrupt passes through, `rows` stay."""
        options = self.options
        if options.plain:
            self._run_plain(self._engine("none"))
        for drafter in options.drafters:
            cold = self._run_drafter(self._engine(drafter), drafter)
            if cold is not None and options.show_loss and has_rows(drafter):
                self._run_withheld(self._engine(drafter, ROW_FAULT), drafter, cold)
        return self.rows

    def _engine(self, drafter: str, *faults: str) -> Engine:
        """An engine with this drafter, tracing; it has answered once before it is timed."""
        options = self.options
        self.progress.loading(drafter)
        engine = self._make_engine(options.engine_of(drafter, *faults))
        if {*BRANCHES} & {*self._paths}:
            branches.check_room(engine, options.shared_tokens, options.max_tokens)
            self._branch_jobs(engine)
        run(engine, [Job("warm-up", self._first_turns(engine)[0].prompt[:16], 4)])
        return engine

    @property
    def judged(self) -> bool:
        """Whether every engine ran in float32, where parity is exact but for ties."""
        return all(values["dtype"] == "float32" for values in self.resolved.values())

    def _run_plain(self, engine: Engine) -> None:
        """Plain decoding of the same prompts, with the hits that each path has."""
        wanted = self._paths
        if self._runs_cold:
            first = self._first_turns(engine)
            cold = self._cold(engine, "cold", first)
            self._plain = {"cold": cold, "resumed": cold, "warm": cold, WITHHELD: cold}
            if "warm" in wanted:
                self._plain["warm"] = self._plain[WITHHELD] = self._phase(engine, "warm", first)
            if "second_turn" in wanted:
                second = self._second_turns(engine, cold)
                self._plain["second_turn"] = self._phase(engine, "second turn", second)
            for path, like in zip(HANDED_OVER, ("cold", "cold", "second_turn"), strict=True):
                for name in (path, path + WITHOUT_DRAFT) if like in self._plain else ():
                    self._plain[name] = self._plain[like]
        if {*BRANCHES} & {*wanted}:
            done = self._branches(engine, "branches")
            self._plain |= dict.fromkeys(BRANCHES, done)

    def _run_drafter(self, engine: Engine, drafter: str) -> Run | None:
        """The paths asked for; the cold run of the conversations, if there was one."""
        choices = engine.resolved.choices
        self.resolved[drafter] = {name: choice.value for name, choice in choices.items()}
        cold = self._run_conversations(engine, drafter) if self._runs_cold else None
        self._run_branches(engine, drafter)
        return cold

    def _run_conversations(self, engine: Engine, drafter: str) -> Run:
        """Their paths in the order in which each finds what it needs in the cache."""
        wanted = self._paths
        first = self._first_turns(engine)
        cold = self._cold(engine, "cold", first)
        if "cold" in wanted:
            self._report(engine, drafter, "cold", cold, cold)
        if "warm" in wanted:
            self._report(engine, drafter, "warm", self._phase(engine, "warm", first), cold)
        reference = None
        if "second_turn" in wanted:
            second = self._second_turns(engine, cold)
            turn = self._phase(engine, "second turn", second)
            reference = self._cold(engine, "second turn, cold", second)
            self._report(engine, drafter, "second_turn", turn, reference)
        if "resumed" in wanted:
            engine.reset_cache()
            resumed = self._phase(engine, "resumed", first, suspend=True)
            self._report(engine, drafter, "resumed", resumed, cold)
        if not self.options.num_prefill:
            return cold
        self.progress.loading(f"{drafter}, {self.options.num_prefill} prefill worker(s)")
        with self._workers(engine, self.options.num_prefill) as decode:
            for transfer in (True, False) if has_rows(drafter) else (True,):
                self._run_handed_over(engine, drafter, cold, reference, transfer, decode)
        return cold

    def _run_handed_over(
        self,
        engine: Engine,
        drafter: str,
        cold: Run,
        second: Run | None,
        transfer: bool,
        decode: disaggregated.Decode,
    ) -> None:
        """The conversations with prompts from prefill workers; second: their second turns, cold."""
        ending = "" if transfer else WITHOUT_DRAFT
        first = disaggregated.apart(self._first_turns(engine), draft_transfer=transfer)
        path, hit, turn = (path + ending for path in HANDED_OVER)
        fault = None if transfer else disaggregated.FAULT
        engine.reset_cache()
        with decode(draft_transfer=transfer) as worker:
            run(worker, [Job("warm-up", first[0].prompt[:16], 4)])
            done = self._phase(worker, path, first)
            self._report(engine, drafter, path, done, cold, fault=fault)
            engine.reset_cache()
            before = self._phase(worker, hit, first)
            self._report(engine, drafter, hit, before, cold, fault=fault)
            if second is None:
                return
            jobs = disaggregated.apart(self._second_turns(engine, cold), draft_transfer=transfer)
            new = disaggregated.suffix_bytes(engine, jobs, before.traces, draft_transfer=transfer)
            done = self._phase(worker, turn, jobs)
            self._report(engine, drafter, turn, done, second, fault=fault, suffix_bytes=new)

    def _run_branches(self, engine: Engine, drafter: str) -> None:
        """Prompts that branch off a shared one, beside each of them cold."""
        wanted = [path for path in BRANCHES if path in self._paths]
        if not wanted:
            return
        alone = [msgspec.structs.replace(j, namespace=None) for j in self._branch_jobs(engine)[1:]]
        cold = self._cold(engine, "branches, cold", alone)
        for path in wanted:
            self._report(engine, drafter, path, self._branches(engine, path), cold)

    def _branches(self, engine: Engine, path: str) -> Run:
        """The shared prompt's first request, and then the branches, one after the other."""
        first, *rest = self._branch_jobs(engine)
        name = BRANCH_PHASES[path]
        engine.reset_cache()
        self._phase(engine, f"{name}, first request", [first])
        if path == EVICTED:
            branches.evict_draft_pages(engine)
        return self._phase(engine, name, rest, in_turn=True)

    def _run_withheld(self, engine: Engine, drafter: str, cold: Run) -> None:
        first = self._first_turns(engine)
        fill = [msgspec.structs.replace(job, max_tokens=1) for job in first]
        engine.reset_cache()
        self._phase(engine, "filling the cache", fill)
        withheld = self._phase(engine, "warm, rows withheld", first)
        self._report(engine, drafter, WITHHELD, withheld, cold)

    def _cold(self, engine: Engine, name: str, jobs: list[Job]) -> Run:
        engine.reset_cache()
        return self._phase(engine, name, jobs)

    def _phase(
        self,
        engine: Engine,
        name: str,
        jobs: Sequence[Job],
        *,
        suspend: bool = False,
        in_turn: bool = False,
    ) -> Run:
        drafter = engine.drafter.spec.method if engine.drafter else "no drafter"
        self._num_begun += 1
        self.progress.phase(
            f"{drafter}: {name}",
            self._num_begun,
            self.num_phases,
            len(jobs),
            sum(job.max_tokens for job in jobs),
        )
        sampling = self.options.sampling
        if sampling is not None:
            jobs = [
                msgspec.structs.replace(job, sampling=sampling.of(name, job.id)) for job in jobs
            ]
        done = (run_in_turn if in_turn else run)(
            engine,
            jobs,
            suspend=suspend,
            keep_rows=self._paths != ("cold",) or self.options.num_prefill > 0,
            on_step=self.progress.advance,
        )
        self.progress.done()
        return done

    def _first_turns(self, engine: Engine) -> list[Job]:
        if "first" not in self._jobs:
            encode = _encoder(engine).first
            self._jobs["first"] = [
                Job(c.id, tuple(encode(c)), self.options.max_tokens) for c in self._conversations
            ]
        return self._jobs["first"]

    def _second_turns(self, engine: Engine, first: Run) -> list[Job]:
        """Second prompts from the first turn's outputs; kept, so that all drafters get the same."""
        if "second" not in self._jobs:
            encode = _encoder(engine).second
            jobs: list[Job] = []
            for conversation, trace in zip(self._conversations, first.traces, strict=True):
                prompt = encode(conversation, trace.prompt, trace.output)
                if prompt is not None:
                    jobs.append(Job(conversation.id, tuple(prompt), self.options.max_tokens))
            self._jobs["second"] = jobs
        return self._jobs["second"]

    def _branch_jobs(self, engine: Engine) -> list[Job]:
        if "branches" not in self._jobs:
            self._jobs["branches"] = branches.make_jobs(
                _encoder(engine),
                self._conversations,
                branches=self.options.branches,
                shared_tokens=self.options.shared_tokens,
                max_tokens=self.options.max_tokens,
            )
        return self._jobs["branches"]

    def _report(
        self,
        engine: Engine,
        drafter: str,
        path: str,
        done: Run,
        cold: Run,
        *,
        fault: str | None = None,
        suffix_bytes: int | None = None,
    ) -> None:
        branched = path in BRANCHES
        self.rows.append(
            make_row(
                drafter,
                path,
                done,
                cold,
                self._plain.get(path),
                num_draft_tokens=engine.plan.num_draft_tokens,
                cut_loops=self.options.cut_loops,
                sampled=self.options.sampling is not None,
                fault=", ".join(engine.config.faults) or fault,
                suffix_bytes=suffix_bytes,
                branches=branches.describe(engine.layout, done.traces, cold.traces)
                if branched
                else [],
            )
        )


def _from_config(config: EngineConfig) -> Engine:
    """Torch is imported here and not before."""
    from tandemkv.engine.engine import Engine

    return Engine.from_config(config)


def _encoder(engine: Engine) -> PromptTokens:
    return prompts.PromptTokens(engine.tokenizer, engine.target.spec.eos_token_ids)
