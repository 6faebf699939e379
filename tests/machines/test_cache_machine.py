"""A rule-based machine over the KV manager, against ByteKV: vocabulary of two, tiny pools.

After every rule all laws are recomputed, every published row is read, and every read of every
pass has been compared with the token prefix it must be a function of.
"""

from __future__ import annotations

import random

import pytest
from driving import (
    LAYOUTS,
    MAX_TOKENS,
    NAMESPACES,
    Driver,
    pools_for,
    random_layout,
    random_walk,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

token = st.integers(0, 1)
policies = st.sampled_from(["exact", "fast", "auto"])


class CacheMachine(RuleBasedStateMachine):
    driver: Driver

    @initialize(
        name=st.sampled_from(sorted(LAYOUTS)),
        room=st.sampled_from([40, 48, 64, 160]),
        caching=st.sampled_from([True, True, True, False]),
    )
    def start(self, name: str, room: int, caching: bool) -> None:
        layout = LAYOUTS[name]
        self.driver = Driver(layout, pools_for(layout, room), prefix_caching=caching)

    @invariant()
    def every_law_holds(self) -> None:
        if hasattr(self, "driver"):
            self.driver.check()

    def pick(self, data: st.DataObject):
        return data.draw(st.sampled_from(self.driver.live), label="sequence")

    @precondition(lambda self: len(self.driver.live) < 3)
    @rule(
        data=st.data(),
        extra=st.lists(token, min_size=1, max_size=9),
        namespace=st.sampled_from(NAMESPACES),
        policy=policies,
        whole=st.booleans(),
        expected=st.sampled_from([0, 8, 1000]),
    )
    def claim(self, data, extra, namespace, policy, whole, expected) -> None:
        base = data.draw(st.sampled_from([[], *self.driver.history]), label="base")
        keep = data.draw(st.integers(0, len(base)), label="keep")
        prompt = [*base[:keep], *extra][:MAX_TOKENS]
        self.driver.claim(prompt, namespace, policy, whole=whole, expected=expected)

    @precondition(lambda self: any(not live.decoding for live in self.driver.live))
    @rule(data=st.data(), size=st.integers(1, 6), next_token=token, late=st.booleans())
    def prefill(self, data, size, next_token, late) -> None:
        waiting = [live for live in self.driver.live if not live.decoding]
        live = data.draw(st.sampled_from(waiting), label="sequence")
        self.driver.prefill(live, size, next_token, late=late)

    @precondition(lambda self: any(live.decoding for live in self.driver.live))
    @rule(
        data=st.data(),
        drafts=st.lists(token, max_size=3),
        accepted=st.integers(0, 3),
        next_token=token,
        context=st.sampled_from([True, True, True, False]),
    )
    def decode(self, data, drafts, accepted, next_token, context) -> None:
        ready = [live for live in self.driver.live if live.decoding]
        live = data.draw(st.sampled_from(ready), label="sequence")
        if len(live.seq.tokens) < MAX_TOKENS:
            accepted = min(accepted, len(drafts))
            self.driver.decode(live, drafts, accepted, next_token, context=context)

    @precondition(lambda self: self.driver.live)
    @rule(data=st.data())
    def finish(self, data) -> None:
        self.driver.finish(self.pick(data))

    @precondition(lambda self: self.driver.live)
    @rule(data=st.data())
    def suspend(self, data) -> None:
        self.driver.suspend(self.pick(data))

    @precondition(lambda self: self.driver.suspended)
    @rule(data=st.data(), policy=policies)
    def resume(self, data, policy) -> None:
        last = len(self.driver.suspended) - 1
        self.driver.resume(data.draw(st.integers(0, last), label="request"), policy)

    @precondition(lambda self: self.driver.live)
    @rule(data=st.data())
    def abort(self, data) -> None:
        self.driver.abort(self.pick(data))

    @rule(data=st.data(), count=st.integers(1, 3))
    def evict(self, data, count) -> None:
        group = data.draw(st.integers(0, len(self.driver.num_pages) - 1), label="group")
        self.driver.evict(group, count)

    @rule()
    def reset(self) -> None:
        self.driver.manager.reset_cache()


CacheMachine.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestTheCacheAgainstTheByteStore = CacheMachine.TestCase


@pytest.mark.parametrize("part", range(4))
def test_any_layout_keeps_every_law(part):
    for seed in range(part * 40, part * 40 + 40):
        rng = random.Random(seed)
        chosen = random_layout(rng)
        driver = Driver(chosen, pools_for(chosen, rng.choice([44, 60, 160])))
        driver.max_span = rng.choice([2, 6, 30])
        driver.walk(rng, 80)


@pytest.mark.parametrize("name", LAYOUTS)
def test_random_histories_read_only_the_rows_they_should(name):
    for seed in range(25):
        driver = random_walk(name, seed)
        for live in list(driver.live):
            driver.abort(live)
        driver.manager.reset_cache()
        driver.check()
        for usage in driver.manager.usage():
            assert usage.free == usage.total
