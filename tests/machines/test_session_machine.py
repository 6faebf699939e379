"""Hand-offs under every fault at once: two prefill workers, a decode worker, all of which may die.

Laws under test (see handoffs.py): no page is released while a write may be in flight, on either
side; what is covered holds the right rows of this attempt; when faults stop, every session ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from handoffs import Decode, Violation, World, walk, walks
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tandemkv.base.errors import InvariantError
from tandemkv.transfer import session as s
from tandemkv.transfer import wire
from tandemkv.transfer.chunks import IN_FLIGHT, Chunk, ChunkEvent, ChunkState
from tandemkv.transfer.desk import Receivers, Senders
from tandemkv.transfer.receiver import Receiver, ReceiverState
from tandemkv.transfer.sender import Sender, SenderState

index = st.integers(0, 31)


class SessionMachine(RuleBasedStateMachine):
    """Hypothesis chooses what happens next; the world checks its laws as it does."""

    world: World

    @initialize(
        seed=st.integers(0, 9), parts=st.sampled_from([1, 1, 2]), room=st.sampled_from([None, 1, 2])
    )
    def start(self, seed: int, parts: int, room: int | None) -> None:
        self.world = World(seed, num_parts=parts, max_in_flight=room)

    @rule(i=index, n=st.integers(1, 9), held=st.integers(0, 3), draft=st.booleans())
    def request(self, i: int, n: int, held: int, draft: bool) -> None:
        self.world.request(i, n, held, draft=draft)

    @rule(i=index, n=st.integers(1, 6), ask=st.booleans())
    def park(self, i: int, n: int, ask: bool) -> None:
        self.world.park(i, "ahead", n)
        if ask:
            self.world.request(i, n, 0, draft=True, parked="ahead")

    @rule(i=index)
    def deliver(self, i: int) -> None:
        self.world.deliver(i)

    @rule()
    def deliver_in_order(self) -> None:
        for _ in range(3):
            self.world.deliver(0)

    @rule(i=index)
    def drop(self, i: int) -> None:
        self.world.drop(i)

    @rule(i=index)
    def repeat(self, i: int) -> None:
        self.world.repeat(i)

    @rule(i=index)
    def work(self, i: int) -> None:
        self.world.work(i)

    @rule(i=index, count=st.integers(1, 9))
    def land(self, i: int, count: int) -> None:
        self.world.land(i, count)

    @rule(i=index)
    def fail(self, i: int) -> None:
        self.world.fail(i)

    @rule(i=index, clean=st.booleans())
    def end(self, i: int, clean: bool) -> None:
        self.world.end(i, clean=clean)

    @rule(elapsed=st.sampled_from([0.3, 1.0, 3.0]))
    def tick(self, elapsed: float) -> None:
        self.world.tick(elapsed)

    @rule(i=index)
    def cancel(self, i: int) -> None:
        self.world.cancel(i)

    @rule(i=index)
    def abort(self, i: int) -> None:
        self.world.abort(i, i // 2)

    @rule(i=index)
    def kill(self, i: int) -> None:
        live = [node for node in self.world.nodes.values() if node.alive]
        if self.world.spawned < 6:
            self.world.kill(live[i % len(live)])

    @rule(i=index)
    def notice(self, i: int) -> None:
        if self.world.deaths:
            self.world.notice(i % len(self.world.deaths))

    @rule(i=index, j=index)
    def lose(self, i: int, j: int) -> None:
        nodes = list(self.world.nodes.values())
        self.world.lose(nodes[i % len(nodes)], nodes[j % len(nodes)].name)

    @rule()
    def fence(self) -> None:
        self.world.fence()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


SessionMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestHandOffsUnderEveryFault = SessionMachine.TestCase


@pytest.mark.parametrize("part", range(4))
def test_random_histories_end_with_every_page_given_back(part: int) -> None:
    for seed in range(part * 30, part * 30 + 30):
        walk(seed)


def test_the_random_histories_meet_every_kind_of_end() -> None:
    proofs: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    end = Receivers.handle

    def handle(self: Receivers, session: Receiver, event: s.SessionEvent) -> list[s.Action]:
        actions = end(self, session, event)
        if session.state is ReceiverState.ENDED:
            proofs[session.proof] += 1
        return actions

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Receivers, "handle", handle)
        for seed in range(40):
            for node in walk(seed).nodes.values():
                dropped.update(reason for reason, _ in node.desk.dropped.counts)
                if isinstance(node, Decode):
                    proofs.update(node.outcome.values())
    assert set(proofs) == {
        "fenced",
        "gave up",
        "ready",
        "all that was asked for has landed",
        "the prefill worker's last word",
    }
    assert min(proofs.values()) >= 10, proofs
    assert dropped["late"]


# -- each law has a fault that its check catches ---------------------------------------------------

Patch = pytest.MonkeyPatch
FAULTS: list[Callable[[Patch], None]] = []


def fault(patch: Callable[[Patch], None]) -> Callable[[Patch], None]:
    FAULTS.append(patch)
    return patch


@fault
def a_sender_releases_while_its_writes_are_in_flight(patch: Patch) -> None:
    def close_at_once(self: Sender) -> list[s.Action]:
        for chunk in self.chunks:
            if chunk.state in IN_FLIGHT:
                chunk.state = ChunkState.ABORTED
        return self._end()

    patch.setattr(Sender, "_end_if_drained", close_at_once)


@fault
def an_error_counts_as_the_end_of_a_write(patch: Patch) -> None:
    def failed(self: Chunk, part: int, why: str) -> None:
        self.part_over(part, clean=True)

    patch.setattr(Chunk, "part_failed", failed)


@fault
def a_receiver_takes_a_failure_for_the_last_word(patch: Patch) -> None:
    hear = Receiver._hear

    def trusting(self: Receiver, message: wire.SessionMessage) -> list[s.Action]:
        if isinstance(message, wire.Failed):
            message = wire.Cancelled(epoch=message.epoch, clean=True, reason=message.reason)
        return hear(self, message)

    patch.setattr(Receiver, "_hear", trusting)


@fault
def a_receiver_takes_silence_for_proof(patch: Patch) -> None:
    tick = Receiver._tick

    def impatient(self: Receiver, elapsed_s: float) -> list[s.Action]:
        if self.state is ReceiverState.CANCELLING and self._quiet_s > 2:
            return self._end("nobody answers")
        return tick(self, elapsed_s)

    patch.setattr(Receiver, "_tick", impatient)


@fault
def a_receiver_does_not_fence_a_dead_worker(patch: Patch) -> None:
    patch.setattr(Receiver, "_fence", lambda self: self._end("dead"))


@fault
def what_was_left_in_flight_is_called_clean(patch: Patch) -> None:
    patch.setattr(Sender, "clean", True)


@fault
def a_repeated_ask_opens_its_epoch_again(patch: Patch) -> None:
    patch.setattr(Senders, "_file", lambda self, peer, word: None)


@fault
def the_oldest_open_epoch_is_ignored(patch: Patch) -> None:
    def forget(self: Senders, peer: str, oldest: int) -> None:
        self.closed[peer] = {}

    patch.setattr(Senders, "_forget", forget)


@fault
def a_chunk_is_delivered_when_one_rank_is(patch: Patch) -> None:
    def settle(self: Chunk) -> None:
        self.done = set(range(self.num_parts))
        self.handle(ChunkEvent.DELIVER)

    patch.setattr(Chunk, "_settle", settle)


@fault
def leases_are_not_polled(patch: Patch) -> None:
    patch.setattr(Sender, "_tick", lambda self, event: [])


@fault
def a_cancellation_is_said_once(patch: Patch) -> None:
    tick = Receiver._tick

    def quiet(self: Receiver, elapsed_s: float) -> list[s.Action]:
        return [] if self.state is ReceiverState.CANCELLING else tick(self, elapsed_s)

    patch.setattr(Receiver, "_tick", quiet)


@fault
def a_settled_sender_does_not_wait_for_writes(patch: Patch) -> None:
    advance = Sender._advance

    def hasty(self: Sender) -> list[s.Action]:
        actions = advance(self)
        if self.last and self.first and self.state is SenderState.SHIPPING and not self.released:
            self.released = True
            actions.append(s.Release())
        return actions

    patch.setattr(Sender, "_advance", hasty)
    patch.setattr(Sender, "check", lambda self: None)


@fault
def a_late_word_of_another_epoch_is_believed(patch: Patch) -> None:
    receive = Receivers.receive

    def confused(self: Receivers, envelope: wire.Envelope):
        message = envelope.message
        same = [e for e, r in self.open.items() if r.peer == envelope.source]
        if isinstance(message, wire.SessionMessage) and message.epoch not in self.open and same:
            message = type(message)(
                **{f: getattr(message, f) for f in message.__struct_fields__ if f != "epoch"},
                epoch=same[0],
            )
            envelope = wire.Envelope(envelope.source, envelope.target, message)
        return receive(self, envelope)

    patch.setattr(Receivers, "receive", confused)


@pytest.mark.parametrize("patch", FAULTS, ids=lambda f: f.__name__)
def test_a_random_history_catches(patch: Callable[[Patch], None]) -> None:
    with pytest.MonkeyPatch.context() as context:
        patch(context)
        with pytest.raises((Violation, InvariantError)):
            walks(80)
