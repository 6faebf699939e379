"""The acceptance experiment: the same conversations on every path, and what each path loses.

    cold         every prompt in an empty cache            the reference of warm and resumed
    warm         the same prompts again
    second_turn  turn 1, its output, the next message      against a cold run of that whole prompt
    resumed      suspended on the way, several times, and resumed
    warm_rows_withheld   warm, the draft rows of reused blocks taken away (a seeded fault)

Law: a path is compared with a cold run of the same token ids, and outputs with the target run
without a drafter, all in one process and one command. Faults act in the cache, never here. This
module renders nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from tandemkv.base.config import EngineConfig
from tandemkv.base.errors import ConfigError
from tandemkv.lab import prompts
from tandemkv.lab.experiments import Job, Run, run
from tandemkv.lab.rows import Counters, Row, make_row

if TYPE_CHECKING:
    from tandemkv.engine.engine import Engine
    from tandemkv.lab.prompts import PromptTokens

PATHS = ("cold", "warm", "second_turn", "resumed")
WITHHELD = "warm_rows_withheld"
ROW_FAULT = "withhold_draft_rows"
DRAFTERS = ("eagle3", "draft_model", "ngram")


class LabOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. engine: its options; drafters: methods; cut_loops: the presets' protocol.

    paths: None takes all, second turns where the prompts have any. plain: also run without a
    drafter (output equality and speed). show_loss: add the row with the draft rows of reused blocks
    withheld.
    """

    engine: EngineConfig
    drafters: tuple[str, ...]
    paths: tuple[str, ...] | None = None
    prompts: str = "bundled"
    limit: int | None = None
    max_tokens: int = 64
    cut_loops: bool = False
    plain: bool = True
    show_loss: bool = False


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
    ) -> None:
        self.options = options
        self.progress = progress or Progress()
        self._make_engine = make_engine or _from_config
        self.rows: list[Row] = []
        self.resolved: dict[str, Any] = {}
        self._conversations = prompts.load(options.prompts, options.limit)
        self._paths = self._possible(options.paths)
        self._plain: dict[str, Run] = {}
        self._turns: dict[str, list[Job]] = {}
        self._num_begun = 0

    @property
    def num_phases(self) -> int:
        """How many phases `run()` has."""
        options, paths = self.options, set(self._paths)
        cold_second = "second_turn" in paths
        plain = 1 + len(paths & {"warm", "second_turn"})
        drafter = 1 + len(paths - {"cold"}) + cold_second
        losing = sum(_has_rows(name) for name in options.drafters) if options.show_loss else 0
        return options.plain * plain + len(options.drafters) * drafter + 2 * losing

    def _possible(self, asked: tuple[str, ...] | None) -> tuple[str, ...]:
        if any(conversation.follow_ups for conversation in self._conversations):
            return asked or PATHS
        if asked is not None and "second_turn" in asked:
            name = self.options.prompts
            raise ConfigError(f"--paths second_turn: no second turns in --prompts {name}")
        return asked or tuple(path for path in PATHS if path != "second_turn")

    def run(self) -> list[Row]:
        """Every drafter on every path. KeyboardInterrupt passes through, `rows` stay."""
        options = self.options
        if options.plain:
            self._run_plain(self._engine("none"))
        for drafter in options.drafters:
            cold = self._run_paths(self._engine(drafter), drafter)
            if options.show_loss and _has_rows(drafter):
                self._run_withheld(self._engine(drafter, ROW_FAULT), drafter, cold)
        return self.rows

    def _engine(self, drafter: str, *faults: str) -> Engine:
        """An engine with this drafter, tracing; it has answered once before it is timed."""
        config = msgspec.structs.replace(self.options.engine, drafter=drafter, trace=True)
        if drafter == "none":
            config = msgspec.structs.replace(config, drafter_path=None, num_draft_tokens=None)
        if faults:
            config = msgspec.structs.replace(config, faults=faults)
        self.progress.loading(drafter)
        engine = self._make_engine(config)
        run(engine, [Job("warm-up", self._first_turns(engine)[0].prompt[:16], 4)])
        return engine

    @property
    def judged(self) -> bool:
        """Whether every engine ran in float32, where parity is exact but for ties."""
        return all(values["dtype"] == "float32" for values in self.resolved.values())

    def _run_plain(self, engine: Engine) -> None:
        """Plain decoding of the same prompts, with the hits that each path has."""
        wanted = self._paths
        first = self._first_turns(engine)
        cold = self._cold(engine, "cold", first)
        self._plain = {"cold": cold, "resumed": cold, "warm": cold, WITHHELD: cold}
        if "warm" in wanted:
            self._plain["warm"] = self._plain[WITHHELD] = self._phase(engine, "warm", first)
        if "second_turn" in wanted:
            second = self._second_turns(engine, cold)
            self._plain["second_turn"] = self._phase(engine, "second turn", second)

    def _run_paths(self, engine: Engine, drafter: str) -> Run:
        """The paths asked for, in the order in which each finds what it needs in the cache."""
        wanted = self._paths
        choices = engine.resolved.choices
        self.resolved[drafter] = {name: choice.value for name, choice in choices.items()}
        first = self._first_turns(engine)
        before = counters(engine)
        cold = self._cold(engine, "cold", first)
        if "cold" in wanted:
            self._report(engine, drafter, "cold", cold, cold, before)
        if "warm" in wanted:
            before = counters(engine)
            warm = self._phase(engine, "warm", first)
            self._report(engine, drafter, "warm", warm, cold, before)
        if "second_turn" in wanted:
            second = self._second_turns(engine, cold)
            before = counters(engine)
            turn = self._phase(engine, "second turn", second)
            after = counters(engine)
            reference = self._cold(engine, "second turn, cold", second)
            self._report(engine, drafter, "second_turn", turn, reference, before, after)
        if "resumed" in wanted:
            engine.reset_cache()
            before = counters(engine)
            resumed = self._phase(engine, "resumed", first, suspend=True)
            self._report(engine, drafter, "resumed", resumed, cold, before)
        return cold

    def _run_withheld(self, engine: Engine, drafter: str, cold: Run) -> None:
        first = self._first_turns(engine)
        fill = [Job(job.id, job.prompt, 1) for job in first]
        engine.reset_cache()
        self._phase(engine, "filling the cache", fill)
        before = counters(engine)
        withheld = self._phase(engine, "warm, rows withheld", first)
        self._report(engine, drafter, WITHHELD, withheld, cold, before)

    def _cold(self, engine: Engine, name: str, jobs: list[Job]) -> Run:
        engine.reset_cache()
        return self._phase(engine, name, jobs)

    def _phase(self, engine: Engine, name: str, jobs: list[Job], *, suspend: bool = False) -> Run:
        drafter = engine.drafter.spec.method if engine.drafter else "no drafter"
        self._num_begun += 1
        self.progress.phase(
            f"{drafter}: {name}",
            self._num_begun,
            self.num_phases,
            len(jobs),
            sum(job.max_tokens for job in jobs),
        )
        done = run(
            engine,
            jobs,
            suspend=suspend,
            keep_rows=self._paths != ("cold",),
            on_step=self.progress.advance,
        )
        self.progress.done()
        return done

    def _first_turns(self, engine: Engine) -> list[Job]:
        if "first" not in self._turns:
            encode = _encoder(engine).first
            jobs = [
                Job(c.id, tuple(encode(c)), self.options.max_tokens) for c in self._conversations
            ]
            self._turns["first"] = jobs
        return self._turns["first"]

    def _second_turns(self, engine: Engine, first: Run) -> list[Job]:
        """Second prompts from the first turn's outputs; kept, so that all drafters get the same."""
        if "second" not in self._turns:
            encode = _encoder(engine).second
            jobs: list[Job] = []
            for conversation, trace in zip(self._conversations, first.traces, strict=True):
                prompt = encode(conversation, trace.prompt, trace.output)
                if prompt is not None:
                    jobs.append(Job(conversation.id, tuple(prompt), self.options.max_tokens))
            self._turns["second"] = jobs
        return self._turns["second"]

    def _report(
        self,
        engine: Engine,
        drafter: str,
        path: str,
        done: Run,
        cold: Run,
        before: Counters,
        after: Counters | None = None,
    ) -> None:
        self.rows.append(
            make_row(
                drafter,
                path,
                done,
                cold,
                self._plain.get(path),
                (after or counters(engine)) - before,
                cut_loops=self.options.cut_loops,
                fault=", ".join(engine.config.faults) or None,
            )
        )


def _has_rows(drafter: str) -> bool:
    return drafter != "ngram"


def _from_config(config: EngineConfig) -> Engine:
    """Torch is imported here and not before."""
    from tandemkv.engine.engine import Engine

    return Engine.from_config(config)


def _encoder(engine: Engine) -> PromptTokens:
    return prompts.PromptTokens(engine.tokenizer, engine.target.spec.eos_token_ids)


def counters(engine: Engine) -> Counters:
    """The counters now. Recomputed: prompt rows of the target beyond those that no hit covered."""
    cache, steps = engine.kv.stats, engine.scheduler.stats
    missing = cache.prefix_queries_tokens - cache.prefix_hit_tokens
    return Counters(
        draft_hit_tokens=sum(cache.draft_hit_tokens.values()),
        draft_gap_tokens=sum(cache.draft_gap_tokens.values()),
        recomputed_target_tokens=steps.num_prefill_rows - missing,
    )
