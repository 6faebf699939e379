"""Random lives of many requests under a scheduler with too few pages.

Law under test: whatever arrives, ends, pauses or changes its K, and however small the pools: every
law of scheduler and cache holds after each step, every request ends, its text is that of plain
decoding, and nothing is held at the end.
"""

from __future__ import annotations

from contextlib import suppress

from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduling import (
    Rig,
    block_drafter_layout,
    draft_model_layout,
    eagle_layout,
    target_layout,
    two_drafts_layout,
    windowed_layout,
)

from tandemkv.base.errors import RequestError
from tandemkv.sched.request import Request, RequestState

LAYOUTS = st.one_of(
    st.sampled_from([eagle_layout(), windowed_layout(), draft_model_layout(), target_layout()]),
    st.builds(
        block_drafter_layout,
        st.sampled_from([1, 3, 5, 8, 12, None]),
        block=st.sampled_from([4, 8]),
        draft_page=st.sampled_from([1, 2, 4]),
    ),
    st.builds(two_drafts_layout, st.sampled_from([1, 5, 9]), draft_page=st.sampled_from([1, 4])),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Drives a Rig; the in-flight plan, if any, is held between rules."""

    rig: Rig

    @initialize(
        layout=LAYOUTS,
        slots=st.integers(24, 80),
        vocab=st.sampled_from([2, 3, 11]),
        accept=st.sampled_from([0, 128, 256]),
        k=st.integers(0, 3),
        budget=st.sampled_from([4, 7, 64]),
        running=st.integers(1, 5),
        chunk=st.sampled_from([1, 3, 64]),
        patience=st.sampled_from([1, 3, 64]),
    )
    def start(self, layout, slots, vocab, accept, k, budget, running, chunk, patience):
        groups = layout.groups
        windows = 64  # slots that a windowed group needs for one request, with room to spare
        pages = [max(slots, windows if g.window else 0) // g.page_size for g in groups]
        self.k = k if len(groups) > 1 else 0
        self.rig = Rig(
            layout,
            pages,
            vocab=vocab,
            accept=accept,
            eos=(0,) if vocab > 3 else (),
            max_batch_tokens=budget,
            max_running=running,
            num_draft_tokens=self.k,
            prefill_chunk=chunk,
            max_model_len=60,
            patience=patience,
            trace=True,
        )
        self.plan = None

    def live(self) -> list[Request]:
        return [r for name, r in self.rig.requests.items() if name not in self.rig.ends]

    @rule(data=st.data(), n=st.integers(1, 30), out=st.integers(1, 20))
    def arrive(self, data, n, out):
        vocab = self.rig.model.vocab
        prompt = data.draw(st.lists(st.integers(0, vocab - 1), min_size=n, max_size=n))
        if self.rig.requests and data.draw(st.booleans()):
            known = data.draw(st.sampled_from(list(self.rig.requests.values())))
            prompt = (known.tokens + prompt)[: max(n, 1)]
        with suppress(RequestError):  # too long for its pools
            self.rig.add(
                prompt,
                max_tokens=out,
                priority=data.draw(st.integers(0, 2)),
                draft_context=data.draw(st.booleans()),
                claim_policy=data.draw(st.sampled_from(["exact", "fast", "auto"])),
                num_draft_tokens=data.draw(st.sampled_from([None, 0, self.k])),
            )

    @rule(data=st.data())
    def abort(self, data):
        assume(self.live())
        request = data.draw(st.sampled_from(self.live()))
        output = self.rig.scheduler.abort(request.id)
        self.rig.take([output])
        text, _ = self.rig.expected(request)
        assert request.output == text[: len(request.output)]

    @rule(data=st.data())
    def suspend(self, data):
        running = [r for r in self.live() if r.state is RequestState.RUNNING]
        assume(running)
        self.rig.scheduler.suspend(data.draw(st.sampled_from(running)).id)

    @rule(data=st.data())
    def change_k(self, data):
        assume(self.live())
        request = data.draw(st.sampled_from(self.live()))
        k = data.draw(st.sampled_from([None, *range(self.k + 1)]))
        self.rig.scheduler.set_num_draft_tokens(request.id, k)

    @precondition(lambda self: self.plan is None)
    @rule(steps=st.integers(1, 4))
    def step(self, steps):
        for _ in range(steps):
            self.rig.step()

    @precondition(lambda self: self.plan is None)
    @rule()
    def dispatch(self):
        """A step is under way while other rules act."""
        self.plan = self.rig.plan()
        self.result = self.rig.model.run(self.plan)

    @precondition(lambda self: self.plan is not None)
    @rule()
    def land(self):
        plan, self.plan = self.plan, None
        self.rig.take(self.rig.scheduler.apply(plan, self.result))

    @precondition(lambda self: self.plan is not None)
    @rule()
    def crash(self):
        plan, self.plan = self.plan, None
        self.rig.take(self.rig.scheduler.fail(plan, "the step failed"))

    @precondition(lambda self: self.plan is None)
    @rule()
    def reset_cache(self):
        self.rig.manager.reset_cache()

    @invariant()
    def laws_hold(self):
        if hasattr(self, "rig") and self.plan is None:
            self.rig.settle()

    def teardown(self):
        if not hasattr(self, "rig"):
            return
        if self.plan is not None:
            self.land()
        self.rig.run()
        for request in self.rig.requests.values():
            if self.rig.ends[request.id].finish_reason not in ("abort", "error"):
                self.rig.check_text(request)
            elif request.finish_reason == "error":
                assert request.error == "the step failed"


SchedulerMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestSchedulerMachine = SchedulerMachine.TestCase
