"""A world of prefill and decode workers without threads, sockets or models: desks, a network that
loses, repeats and reorders, a data plane that fails at any byte, and memory that remembers.

Laws, checked as things happen: a write never lands in pages that were released, never carries rows
of pages that were released, and what is covered holds the right rows. `finish` makes everything
fair again and checks that every session ends.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tandemkv.base.sampling import SamplingParams
from tandemkv.transfer import session as s
from tandemkv.transfer import wire
from tandemkv.transfer.desk import Receivers, Senders, Step
from tandemkv.transfer.receiver import Receiver
from tandemkv.transfer.sender import Sender
from tandemkv.transfer.slots import lacking, slots_of
from tandemkv.transfer.wire import GroupAsk, GroupSpans

TARGET, DRAFT = 0, 1
GOOD, GARBAGE = "good", "garbage"
SECRET = b"a secret of the deployment"
TIMING = s.Timing(lease_s=8, resend_s=1, patience_s=6, draft_wait_s=1, linger_s=4)


class Violation(AssertionError):
    """A law of the hand-off is broken."""


@dataclass(eq=False)
class Job:
    """A prompt being computed on a prefill worker: what is left to report, in order."""

    node: Prefill
    sender: Sender
    events: list[s.Event]
    stopped: bool = False


@dataclass(eq=False)
class Write:
    """A part of a chunk on its way. stray: nobody's any more, but it can still land."""

    source: str
    target: str
    sender: Sender
    epoch: int
    index: int
    part: int
    num_parts: int
    groups: tuple[GroupSpans, ...]
    slots: list[tuple[int, int]]
    failed: bool = False
    stray: bool = False

    @property
    def num_left(self) -> int:
        return len(self.slots)


@dataclass(eq=False)
class Prefill:
    name: str
    desk: Senders
    alive: bool = True


@dataclass(eq=False)
class Decode:
    name: str
    desk: Receivers
    alive: bool = True
    fences: list[str] = field(default_factory=list)
    closed: set[str] = field(default_factory=set)  # data planes that were closed
    released: set[int] = field(default_factory=set)
    memory: dict[tuple[int, int, int, int], str] = field(default_factory=dict)
    covered: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    outcome: dict[int, str] = field(default_factory=dict)


class World:
    """Two prefill workers and a decode worker; each may die, and comes back as another one."""

    def __init__(self, seed: int = 0, *, num_parts: int = 1, max_in_flight: int | None = None):
        self.rng = random.Random(seed)
        self.num_parts = num_parts
        self.max_in_flight = max_in_flight
        self.nodes: dict[str, Prefill | Decode] = {}
        self.network: list[tuple[str, bytes]] = []
        self.jobs: list[Job] = []
        self.writes: list[Write] = []
        self.released: set[int] = set()  # ids of senders that gave their pages back
        self.deaths: list[tuple[str, str]] = []  # (who is dead, who does not know it)
        self.keep: list[object] = []
        self.retries = 0
        self.spawned = 0
        self.prefills = [self.spawn_prefill(), self.spawn_prefill()]
        self.decode = self.spawn_decode()

    # -- workers -----------------------------------------------------------------------------------

    def spawn_prefill(self) -> Prefill:
        self.spawned += 1
        name = f"p{self.spawned}"
        desk = Senders(
            name,
            optional=frozenset({DRAFT}),
            timing=TIMING,
            max_in_flight=self.max_in_flight,
        )
        node = self.nodes[name] = Prefill(name, desk)
        return node

    def spawn_decode(self) -> Decode:
        self.spawned += 1
        name = f"d{self.spawned}"
        node = self.nodes[name] = Decode(name, Receivers(name, timing=TIMING))
        return node

    def kill(self, node: Prefill | Decode) -> None:
        """The process is gone at once; others learn of it later; another takes its place."""
        node.alive = False
        others = [n.name for n in self.nodes.values() if n.alive and type(n) is not type(node)]
        self.deaths += [(node.name, other) for other in others]
        self.jobs = [job for job in self.jobs if job.node is not node]
        if isinstance(node, Prefill):
            for write in self.writes:
                write.stray = write.stray or write.source == node.name
            self.prefills[self.prefills.index(node)] = self.spawn_prefill()
        else:
            self.decode = self.spawn_decode()

    def notice(self, i: int) -> None:
        dead, who = self.deaths.pop(i)
        node = self.nodes[who]
        if node.alive:
            self.run(node, node.desk.peer_dead(dead, "process gone"))

    def lose(self, node: Prefill | Decode, peer: str) -> None:
        """A connection breaks, or seems to."""
        if node.alive:
            self.run(node, node.desk.peer_lost(peer, "unreachable"))

    # -- requests ----------------------------------------------------------------------------------

    def request(self, which: int, n: int, held: int, *, draft: bool, parked: str = "") -> None:
        """Ask a prefill worker for slots [held, n)."""
        node, peer = self.decode, self.prefills[which % len(self.prefills)]
        node.closed.discard(peer.name)
        groups = [TARGET, DRAFT] if draft else [TARGET]
        asks = [GroupAsk(g, ((held, n),) if held < n else (), 0, tuple(range(n))) for g in groups]
        step = node.desk.ask(
            peer.name,
            request_id="r",
            tokens=range(n),
            params=SamplingParams(),
            seed=1,
            groups=asks,
            required=frozenset({TARGET}),
            parked=parked,
        )
        self.run(node, [step])

    def park(self, which: int, name: str, n: int) -> None:
        node = self.prefills[which % len(self.prefills)]
        if name not in node.desk.parked:
            sender = node.desk.park(name)
            self.jobs.append(Job(node, sender, self.work_for(n)))

    def cancel(self, i: int) -> None:
        sessions = list(self.decode.desk.open.values())
        if sessions:
            session = sessions[i % len(sessions)]
            actions = self.decode.desk.handle(session, s.Abort("client went"))
            self.run(self.decode, [Step(session.peer, session, actions)])

    def work_for(self, n: int) -> list[s.Event]:
        """Chunks of a prompt of n tokens, the first token somewhere near the end."""
        events: list[s.Event] = []
        at = 0
        while at < n:
            stop = min(n, at + self.rng.randint(1, 4))
            spans = tuple(GroupSpans(g, ((at, stop),)) for g in (TARGET, DRAFT))
            kind = self.rng.random()
            if kind < 0.15:
                events.append(s.Withheld(spans[1:], "masked"))
                spans = spans[:1]
            events.append(s.Computed(spans))
            at = stop
        if self.rng.random() < 0.5 and events:
            last = events.pop()
            assert isinstance(last, s.Computed)
            events.append(s.Computed(last.groups, last=True))
        else:
            events.append(s.Computed((), last=True))
        sampled = s.Sampled(token=7, num_rows=n, seed=1)
        events.insert(len(events) - self.rng.randint(0, 1), sampled)
        return events

    def work(self, i: int) -> None:
        """A prefill worker reports the next thing, or too late what it was stopped at."""
        if not self.jobs:
            return
        job = self.jobs[i % len(self.jobs)]
        event = job.events.pop(0)
        if not job.events or job.stopped:
            self.jobs.remove(job)
        actions = job.node.desk.handle(job.sender, event)
        self.run(job.node, [Step(job.sender.peer, job.sender, actions)])

    def abort(self, which: int, i: int) -> None:
        node = self.prefills[which % len(self.prefills)]
        sessions = node.desk.all()
        if sessions:
            session = sessions[i % len(sessions)]
            for job in self.jobs:
                job.stopped = job.stopped or job.sender is session
            actions = node.desk.handle(session, s.Abort("prefill failed"))
            self.run(node, [Step(session.peer, session, actions)])

    def tick(self, elapsed_s: float) -> None:
        for node in list(self.nodes.values()):
            if node.alive:
                self.run(node, node.desk.tick(elapsed_s))

    # -- the network -------------------------------------------------------------------------------

    def send(self, source: str, target: str, message: wire.AnyMessage) -> None:
        frame = wire.encode(message, source=source, target=target, secret=SECRET)
        self.network.append((target, frame))

    def deliver(self, i: int) -> None:
        if not self.network:
            return
        target, frame = self.network.pop(i % len(self.network))
        node = self.nodes[target]
        if not node.alive:
            return
        envelope = wire.decode(frame, SECRET)
        assert isinstance(envelope, wire.Envelope), envelope
        self.run(node, [node.desk.receive(envelope)])

    def drop(self, i: int) -> None:
        if self.network:
            self.network.pop(i % len(self.network))

    def repeat(self, i: int) -> None:
        if self.network and len(self.network) < 60:
            self.network.append(self.network[i % len(self.network)])

    # -- the data plane ----------------------------------------------------------------------------

    def land(self, i: int, count: int = 1) -> None:
        """Some slots of a write arrive; after the last one, so does the news."""
        if not self.writes:
            return
        write = self.writes[i % len(self.writes)]
        node = self.nodes[write.target]
        assert isinstance(node, Decode)
        for _ in range(min(count, write.num_left)):
            group, slot = write.slots.pop()
            if not node.alive:
                continue
            if write.epoch in node.released:
                raise Violation(f"{write.source} wrote to pages of epoch {write.epoch}: released")
            value = GARBAGE if id(write.sender) in self.released and not write.stray else GOOD
            node.memory[write.epoch, group, slot, write.part] = value
        if not write.num_left:
            self.writes.remove(write)
            chunk = wire.Chunk(
                epoch=write.epoch,
                index=write.index,
                groups=write.groups,
                part=write.part,
                num_parts=write.num_parts,
            )
            self.send(write.source, write.target, chunk)
            if not write.stray:
                self.report(write, s.WriteDone(write.index, write.part))

    def fail(self, i: int) -> None:
        """An error is reported, and the write goes on."""
        flying = [w for w in self.writes if not w.stray and not w.failed]
        if flying:
            write = flying[i % len(flying)]
            write.failed = True
            self.report(write, s.WriteFailed(write.index, "error", write.part))

    def end(self, i: int, *, clean: bool) -> None:
        """A failed or recalled write ends; unclean: what has left may still land."""
        flying = [w for w in self.writes if not w.stray]
        if flying:
            write = flying[i % len(flying)]
            if clean:
                self.writes.remove(write)
            write.stray = True
            self.report(write, s.WriteOver(write.index, write.part, clean=clean))

    def report(self, write: Write, event: s.Event) -> None:
        node = self.nodes[write.source]
        if node.alive:
            assert isinstance(node, Prefill)
            actions = node.desk.handle(write.sender, event)
            self.run(node, [Step(write.sender.peer, write.sender, actions)])

    def fence(self) -> None:
        """The decode worker closes a data plane: nothing of it lands after this."""
        for node in self.nodes.values():
            if isinstance(node, Decode) and node.alive and node.fences:
                peer = node.fences.pop(0)
                node.closed.add(peer)
                cut = [w for w in self.writes if (w.source, w.target) == (peer, node.name)]
                self.writes = [w for w in self.writes if w not in cut]
                self.run(node, node.desk.fenced(peer))
                for write in cut:
                    if not write.stray:
                        self.report(write, s.WriteFailed(write.index, "closed", write.part))
                        self.report(write, s.WriteOver(write.index, write.part))
                return

    # -- actions -----------------------------------------------------------------------------------

    def run(self, node: Prefill | Decode, steps: list) -> None:
        for peer, session, actions in steps:
            for action in actions:
                match action:
                    case s.Send(message):
                        if peer in self.nodes:
                            self.send(node.name, peer, message)
                    case _ if isinstance(node, Prefill):
                        self.prefill_action(node, session, action)
                    case _:
                        assert isinstance(node, Decode)
                        self.decode_action(node, session, action)
        node.desk.check()

    def prefill_action(self, node: Prefill, session: Sender, action: s.Action) -> None:
        match action:
            case s.Start(ask):
                known = [job for job in self.jobs if job.sender is session]
                admit = s.Admit(num_parts=self.num_parts)
                if known:  # parked, still computing
                    known[0].events.insert(0, admit)
                elif session.last and session.first:
                    self.jobs.append(Job(node, session, [admit]))
                else:
                    events = [admit, *self.work_for(len(ask.tokens))]
                    self.jobs.append(Job(node, session, events))
            case s.Post(index, groups, num_parts):
                assert session.ask is not None
                for part in range(num_parts):
                    slots = [(g.group, x) for g in groups for a, b in g.spans for x in range(a, b)]
                    write = Write(
                        node.name,
                        session.peer,
                        session,
                        session.epoch,
                        index,
                        part,
                        num_parts,
                        groups,
                        slots,
                    )
                    target = self.nodes[session.peer]
                    if isinstance(target, Decode) and node.name in target.closed:
                        self.report(write, s.WriteFailed(index, "closed", part))
                        self.report(write, s.WriteOver(index, part))
                    else:
                        self.writes.append(write)
            case s.Stop():
                for job in self.jobs:
                    job.stopped = job.stopped or job.sender is session
            case s.Release():
                if any(w.sender is session and not w.stray for w in self.writes):
                    raise Violation(f"{session.story.name} released pages that are being read")
                if id(session) in self.released:
                    raise Violation(f"{session.story.name} released its pages twice")
                self.released.add(id(session))
                self.keep.append(session)
            case s.Recall():
                pass
            case _:
                raise AssertionError(action)

    def decode_action(self, node: Decode, session: Receiver, action: s.Action) -> None:
        epoch = session.epoch
        match action:
            case s.Cover(groups):
                covered = node.covered.setdefault(epoch, set())
                for g in groups:
                    for slot in (x for a, b in g.spans for x in range(a, b)):
                        parts = session.chunks and self.num_parts
                        for part in range(parts):
                            if node.memory.get((epoch, g.group, slot, part)) != GOOD:
                                raise Violation(f"slot {slot} of {epoch} covered without its rows")
                        if (g.group, slot) in covered:
                            raise Violation(f"slot {slot} of {epoch} covered twice")
                        covered.add((g.group, slot))
            case s.Ready(first, missing, _):
                assert first.token == 7
                have = lacking(slots_of(session.ask.wanted), slots_of(missing))
                slots = {(g, x) for g, spans in have.items() for a, b in spans for x in range(a, b)}
                if slots != node.covered.get(epoch, set()):
                    raise Violation(f"epoch {epoch} is ready with other rows than it says")
                self.decided(node, epoch, "ready")
            case s.GiveUp():
                self.decided(node, epoch, "gave up")
                if self.retries < 3:
                    self.retries += 1
                    self.request(self.rng.randint(0, 1), len(session.ask.tokens), 0, draft=True)
            case s.Fence():
                node.fences.append(session.peer)
            case s.Release():
                if any(w.target == node.name and w.epoch == epoch for w in self.writes):
                    raise Violation(f"pages of epoch {epoch} released while a write is in flight")
                if epoch in node.released:
                    raise Violation(f"pages of epoch {epoch} released twice")
                node.released.add(epoch)
            case _:
                raise AssertionError(action)

    def decided(self, node: Decode, epoch: int, outcome: str) -> None:
        if epoch in node.outcome:
            raise Violation(f"epoch {epoch}: {outcome} after {node.outcome[epoch]}")
        node.outcome[epoch] = outcome

    # -- the end -----------------------------------------------------------------------------------

    def finish(self) -> None:
        """No more faults: everything under way arrives, decode workers learn who died (a prefill
        worker has its leases), time passes."""
        self.deaths = [(dead, who) for dead, who in self.deaths if dead.startswith("p")]
        for _ in range(200):
            while self.deaths:
                self.notice(0)
            while self.network:
                self.deliver(0)
            while self.jobs:
                self.work(0)
            while any(not write.stray for write in self.writes):
                flying = next(i for i, w in enumerate(self.writes) if not w.stray)
                self.land(flying, 100)
            self.fence()
            self.tick(1.0)
            if self.quiet():
                break
        self.check_the_end()

    def quiet(self) -> bool:
        live = [node for node in self.nodes.values() if node.alive]
        return not self.network and not any(
            node.desk.open or getattr(node.desk, "parked", None) for node in live
        )

    def check_the_end(self) -> None:
        for node in self.nodes.values():
            if not node.alive:
                continue
            if node.desk.open or getattr(node.desk, "parked", None):
                raise Violation(f"{node.name} has sessions that never end: {node.desk.open}")
            pages = getattr(node, "released", None)
            if pages is not None and pages != set(range(1, node.desk.last_epoch + 1)):
                raise Violation(f"{node.name} never released some pages")


def walk(seed: int, steps: int = 120) -> World:
    """A random history of faults, then a fair end."""
    rng = random.Random(seed)
    world = World(seed, num_parts=rng.choice([1, 1, 2]), max_in_flight=rng.choice([None, 1, 2]))
    for _ in range(steps):
        random_step(world, rng)
    world.finish()
    return world


def random_step(world: World, rng: random.Random) -> None:
    """One thing happens. Deliveries and landings are the most likely."""
    i = rng.randrange(1000)
    live = [n for n in world.nodes.values() if n.alive]
    choices = [
        (6, lambda: world.request(i, rng.randint(1, 9), rng.randint(0, 3), draft=i % 3 > 0)),
        (2, lambda: world.park(i, f"park{i % 3}", rng.randint(1, 6))),
        (2, lambda: world.request(i, rng.randint(1, 6), 0, draft=True, parked=f"park{i % 3}")),
        (30, lambda: world.deliver(i if i % 2 else 0)),
        (4, lambda: world.drop(i)),
        (4, lambda: world.repeat(i)),
        (24, lambda: world.work(i)),
        (24, lambda: world.land(i, rng.randint(1, 9))),
        (2, lambda: world.fail(i)),
        (3, lambda: world.end(i, clean=i % 2 == 0)),
        (8, lambda: world.tick(rng.choice([0.3, 1.0, 3.0]))),
        (2, lambda: world.cancel(i)),
        (1, lambda: world.abort(i, i // 2)),
        (1, lambda: world.kill(rng.choice(live)) if world.spawned < 7 else None),
        (4, lambda: world.notice(i % len(world.deaths)) if world.deaths else None),
        (1, lambda: world.lose(rng.choice(live), rng.choice(list(world.nodes)))),
        (6, world.fence),
    ]
    rng.choices([act for _, act in choices], [weight for weight, _ in choices])[0]()


def walks(num: int) -> None:
    for seed in range(num):
        walk(seed)
