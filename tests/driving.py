"""Drives a KVManager the way a scheduler and a runner do, against ByteKV.

Each operation is a method with explicit arguments, so that a hypothesis machine and a plain random
walk share them. After every operation all laws are recomputed and every published row is read.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from oracle import ByteKV, group

from tandemkv.base.spans import Span
from tandemkv.kv.coverage import ClaimPlan
from tandemkv.kv.intent import PageCopy
from tandemkv.kv.keys import Namespace
from tandemkv.kv.layout import Domain, LayerGroup, Layout, RebuildFrom
from tandemkv.kv.manager import KVManager
from tandemkv.kv.pool import Usage
from tandemkv.kv.sequence import Sequence

T, D = Domain.TARGET, Domain.DRAFT
BLOCK = 4
MAX_TOKENS = 30
NAMESPACES = (Namespace(), Namespace(salt="s"))


def layout(*groups, block: int = BLOCK) -> Layout:
    return Layout(block_size=block, groups=groups)


TOKENS, HIDDEN = RebuildFrom.TOKENS, RebuildFrom.HIDDEN
LAYOUTS = {
    "eagle": layout(group("t", T, 4), group("d", D, 2, lookahead=1, pointwise=True)),
    "eagle_small_pages": layout(group("t", T, 2), group("d", D, 1, lookahead=1, pointwise=True)),
    "mtp": layout(group("t", T, 4), group("d", D, 4, lookahead=2)),
    "mtp_window": layout(group("t", T, 4), group("d", D, 1, 5, lookahead=2)),
    "block_drafter": layout(group("t", T, 4), group("d", D, 2, 6, pointwise=True)),
    "block_drafter_wide": layout(group("t", T, 8), group("d", D, 2, 9, pointwise=True), block=8),
    "block_drafters": layout(
        group("t", T, 8),
        group("a", D, 8, pointwise=True),
        group("b", D, 1, 3, pointwise=True),
        block=8,
    ),
    "eagle_window": layout(group("t", T, 2), group("d", D, 4, 3, lookahead=1, pointwise=True)),
    "draft_model": layout(group("t", T, 4), group("d", D, 4, rebuild_from=TOKENS)),
    "draft_model_window": layout(group("t", T, 4), group("d", D, 2, 5, rebuild_from=TOKENS)),
    "sliding_target": layout(
        group("t", T, 4), group("w", T, 2, 5), group("d", D, 1, lookahead=1, pointwise=True)
    ),
    "only_sliding": layout(group("w", T, 2, 3), group("d", D, 2, 6, lookahead=1, pointwise=True)),
    "only_sliding_mtp": layout(group("w", T, 1, 5), group("d", D, 2, 3, lookahead=2)),
    "two_drafters": layout(
        group("t", T, 4),
        group("w", T, 4, 6),
        group("a", D, 2, lookahead=1, pointwise=True),
        group("b", D, 1, 5, pointwise=True),
    ),
    "target_only": layout(group("t", T, 4)),
}


Spans = Iterable[Iterable[Span]]


@dataclass
class Live:
    """A sequence under way: spans still to run, and the rows it must reach before decoding."""

    seq: Sequence
    plan: ClaimPlan
    num_rows: int
    todo: list[Span]
    draft_todo: list[tuple[int, Span]]
    gaps: list[set[int]] = field(default_factory=list)
    carried: int = 0
    copies: tuple[PageCopy, ...] = ()

    @property
    def decoding(self) -> bool:
        return not self.todo and not self.draft_todo and not self.copies


@dataclass
class Driver:
    layout: Layout
    num_pages: list[int]
    prefix_caching: bool = True
    manager: KVManager = field(init=False)
    bytes: ByteKV = field(init=False)
    live: list[Live] = field(default_factory=list)
    suspended: list[tuple[Namespace, list[int]]] = field(default_factory=list)
    history: list[list[int]] = field(default_factory=list)
    max_span: int = 6

    def __post_init__(self) -> None:
        self.manager = KVManager(
            self.layout, self.num_pages, debug=True, prefix_caching=self.prefix_caching
        )
        self.bytes = ByteKV(self.layout, self.num_pages)

    # -- operations -----------------------------------------------------------------------

    def claim(
        self,
        tokens: list[int],
        namespace: Namespace = NAMESPACES[0],
        policy: str = "exact",
        resume: bool = False,
        whole: bool = True,
        expected: int = 0,
        dummy: bool = False,
    ) -> Live | None:
        manager = self.manager
        before = manager.usage()
        num_rows = len(tokens) - resume
        match = manager.match(tokens[:num_rows], namespace)
        claim = manager.claim(
            tokens,
            namespace=namespace,
            policy=policy,
            resume=resume,
            reserve=None if whole else 0,
            expected_tokens=expected,
            dummy=dummy,
        )
        if claim is None:
            assert manager.usage() == before, "a refused claim changed something"
            assert self.live, "a lone request that fits an empty cache is refused"
            return None
        seq, plan = claim.seq, claim.plan
        gaps = [set() for _ in self.layout.groups]
        for gap in plan.masked:
            gaps[gap.group].update(range(gap.start, gap.stop))
        todo = [part for span in plan.compute for part in self._pieces(span)]
        alone = [(g, span) for g, spans in enumerate(plan.draft_compute) for span in spans]
        live = Live(seq, plan, num_rows, todo, alone, gaps, copies=claim.copies)
        if self.prefix_caching and not dummy:
            limit = num_rows if resume else num_rows - 1
            best = best_end(self.layout, match.coverage, min(limit, match.end))
            assert plan.end == best or (plan.end < best and not self._roomy(before, num_rows))
        check_claim(plan, num_rows, self.layout.lookahead, policy)
        self.live.append(live)
        if tokens not in self.history:
            self.history.append(tokens)
        return live

    def _roomy(self, usage: list[Usage], num_rows: int) -> bool:
        """Whether the copies of a whole match fitted beside all it needed."""
        slots = num_rows + 1 + self.layout.lookahead + 2 * self.layout.block_size
        copied = max(num_rows, 1)  # at worst every block had a hole
        return all(
            (u.free + u.cached) * g.page_size >= slots + copied
            for u, g in zip(usage, self.layout.groups, strict=True)
        )

    def _pieces(self, span: Span) -> list[Span]:
        size = self.max_span
        return [(a, min(a + size, span[1])) for a in range(span[0], span[1], size)]

    def copy(self, live: Live) -> None:
        """Make the claim's copies; freed pages are poisoned first."""
        self.settle()
        self.bytes.copy(live.copies)
        live.copies = ()
        self.manager.copied(live.seq)

    def prefill(
        self, live: Live, size: int, next_token: int, *, late: bool = False, context: bool = True
    ) -> bool:
        """Run up to `size` positions of the next planned span; copies are made before the first."""
        if live.copies:
            self.copy(live)
            return True
        if live.draft_todo:
            return self._draft_alone(live)
        manager, seq = self.manager, live.seq
        start, stop = live.todo[0]
        cut = min(stop, start + size)
        if not manager.reserve(seq, cut):
            return False
        self.settle()
        manager.launch(seq, max(seq.computed, min(cut, seq.reserved)))
        writes = seq.writes(start, cut)
        last = cut == live.num_rows and len(live.todo) == 1
        tokens = list(seq.tokens)
        if last and len(tokens) == live.num_rows:
            tokens.append(next_token)  # sampled from this very pass
        writes = self._known(writes, len(tokens), start, live)
        if not context:
            for g in self.layout.draft_groups:
                live.gaps[g].update(s for a, b in writes[g] for s in range(a, b))
                writes[g] = ()
        self.bytes.run_pass(manager, seq, tokens, start, cut, writes)
        manager.append(seq, tokens[len(seq.tokens) :])
        self._expect_gaps(live, start, cut, writes)
        manager.commit(seq, max(seq.committed, cut), writes)
        live.carried = self._carry(start, cut) if context else 0
        live.todo[0] = (cut, stop)
        if cut == stop:
            live.todo.pop(0)
        self._publish(live, late)
        if live.decoding:
            self._check_ready(live)
        return True

    def _carry(self, start: int, stop: int) -> int:
        return min(stop - start, max(0, self.layout.lookahead - 1))

    def _known(self, writes, num_tokens: int, start: int, live: Live) -> list[tuple[Span, ...]]:
        """Clip to known tokens; rows whose hidden states were carried are written now."""
        out = []
        for g, spans in enumerate(writes):
            ahead = self.layout.groups[g].lookahead
            if ahead > 1 and start == live.seq.committed and live.carried:
                low = max(start + ahead - live.carried, ahead)
                missing = live.seq.coverage[g].missing(low, start + ahead)
                spans = (*missing, *spans)
            out.append(tuple((a, min(b, num_tokens)) for a, b in spans if a < num_tokens))
        return out

    def _draft_alone(self, live: Live) -> bool:
        g, (start, stop) = live.draft_todo.pop(0)
        spans = live.seq.writes(start, stop)[g]
        todo = {s for a, b in spans for s in range(a, b)}
        self.bytes.run_draft(self.manager, live.seq, live.seq.tokens, g, todo)
        written = [spans if i == g else () for i in range(len(self.layout.groups))]
        self.manager.commit(live.seq, live.seq.committed, written)
        self._publish(live, False)
        return True

    def decode(
        self,
        live: Live,
        drafts: list[int],
        accepted: int,
        token: int,
        *,
        context: bool = True,
        late: bool = False,
    ) -> bool:
        """One verify step: anchor and drafts run, `accepted` of them stay, one token is new."""
        self._check_ready(live)
        manager, seq = self.manager, live.seq
        start, stop = seq.committed, seq.committed + 1 + len(drafts)
        if not manager.reserve(seq, stop + 1):
            return False
        self.settle()
        self.bytes.draft(manager, seq, len(drafts))
        manager.launch(seq, stop)
        tokens = [*seq.tokens, *drafts, token][: stop + 1]
        writes = list(seq.writes(start, stop))
        if not context:
            for g in self.layout.draft_groups:
                writes[g] = ()
        in_pass = self._known(writes, len(tokens), start, live) if context else writes
        self.bytes.run_pass(manager, seq, tokens, start, stop, in_pass)
        rows = start + accepted + 1
        manager.append(seq, [*drafts[:accepted], token])
        written = self._accepted(in_pass, rows, len(seq.tokens))
        # rows of accepted drafts were made with the accepted tokens; the last with the new one
        for g in self.layout.draft_groups:
            todo = {s for a, b in written[g] for s in range(a, b)}
            self.bytes.run_draft(manager, seq, seq.tokens, g, todo)
        self._expect_gaps(live, start, rows, written)
        manager.commit(seq, rows, written)
        manager.rewind(seq)
        live.num_rows = rows
        live.carried = self._carry(start, rows) if context else 0
        self._publish(live, late)
        return True

    def _accepted(self, writes, rows: int, num_tokens: int) -> list[tuple[Span, ...]]:
        out = []
        for g, spans in enumerate(writes):
            limit = min(rows + self.layout.groups[g].lookahead, num_tokens)
            out.append(tuple((a, min(b, limit)) for a, b in spans if a < limit))
        return out

    def _expect_gaps(self, live: Live, start: int, rows: int, written) -> None:
        """Slots that this pass could have covered and did not: known gaps, masked and counted."""
        seq = live.seq
        for g in self.layout.draft_groups:
            ahead = self.layout.groups[g].lookahead
            low = max(seq.committed, ahead, seq.first_block[g] * self.layout.block_size)
            for s in range(low, rows + (ahead if ahead < 2 else 0)):
                done = s in seq.coverage[g] or any(a <= s < b for a, b in written[g])
                if not done:
                    live.gaps[g].add(s)

    def _publish(self, live: Live, late: bool) -> None:
        if not late:
            self.manager.publish(live.seq)

    def finish(self, live: Live) -> None:
        self.live.remove(live)
        self.history.append(list(live.seq.tokens))
        self.manager.finish(live.seq)

    def suspend(self, live: Live) -> None:
        self.live.remove(live)
        seq = live.seq
        if live.decoding and not seq.dummy:
            self.suspended.append((seq.namespace, list(seq.tokens)))
        self.manager.suspend(seq)

    def resume(self, index: int, policy: str = "exact") -> bool:
        namespace, tokens = self.suspended.pop(index)
        if self.claim(tokens, namespace, policy, resume=True) is None:
            self.suspended.append((namespace, tokens))
            return False
        return True

    def abort(self, live: Live) -> None:
        self.live.remove(live)
        self.manager.release(live.seq)

    def evict(self, g: int, count: int) -> None:
        """Memory pressure in one group."""
        pool = self.manager.pools[g]
        count = min(pool.available, len(pool.free) + count)
        self.manager._make_room(g, count)

    def complete(self, live: Live, next_token: int = 1) -> Live:
        """Run all that the claim planned, in the largest pieces."""
        while not live.decoding:
            assert self.prefill(live, 10**6, next_token), "no room"
            self.check()
        self._check_ready(live)
        return live

    def serve(self, tokens: list[int], next_token: int = 1, **how: Any) -> Live:
        """Claim and run a prompt; the sequence stays, ready to decode."""
        live = self.claim(tokens, **how)
        assert live is not None, "no room"
        self.check()
        return self.complete(live, next_token)

    def pass_through(self, tokens: list[int], next_token: int = 1, **how: Any) -> ClaimPlan:
        """Serve a prompt and finish it at once; returns the plan."""
        live = self.serve(tokens, next_token, **how)
        self.finish(live)
        self.check()
        return live.plan

    # -- what must hold -------------------------------------------------------------------

    def settle(self) -> None:
        self.bytes.poison(self.manager.drain_freed())

    def check(self) -> None:
        self.settle()
        self.manager.check()
        self.bytes.audit(self.manager)

    def _check_ready(self, live: Live) -> None:
        """All that drafting at n reads is there, or was named as a gap."""
        seq, n = live.seq, live.num_rows
        assert seq.committed == n
        for g in self.layout.draft_groups:
            group = self.layout.groups[g]
            for s in range(first_needed(group, n), min(n + group.lookahead, len(seq.tokens))):
                if group.lookahead > 1 and s >= n:
                    continue  # needs hidden states carried over the step
                assert s in seq.coverage[g] or s in live.gaps[g], (
                    f"draft slot {s} of {group.name} is missing without a reason"
                )

    # -- a random walk --------------------------------------------------------------------

    def walk(self, rng: random.Random, steps: int) -> None:
        for _ in range(steps):
            self.random_operation(rng)
            self.check()

    def random_prompt(self, rng: random.Random) -> list[int]:
        base = rng.choice(self.history) if self.history and rng.random() < 0.8 else []
        keep = base[: rng.randint(0, len(base))] if rng.random() < 0.8 else base
        extra = [rng.randint(0, 1) for _ in range(rng.randint(0, 9))]
        return [*keep, *extra][:MAX_TOKENS] or [0]

    def random_operation(self, rng: random.Random) -> None:
        choices: list[Callable[[], object]] = [lambda: self._random_claim(rng)]
        choices.append(lambda: self.evict(rng.randrange(len(self.num_pages)), rng.randint(1, 3)))
        if rng.random() < 0.03:
            choices.append(self.manager.reset_cache)
        if self.suspended:
            index = rng.randrange(len(self.suspended))
            policy = rng.choice(["exact", "exact", "fast", "auto"])
            choices += [lambda: self.resume(index, policy)] * 2
        if self.live:
            live = rng.choice(self.live)
            choices += [lambda: self._advance(live, rng)] * 6
            choices += [lambda: self.finish(live), lambda: self.suspend(live)]
            if rng.random() < 0.3:
                choices.append(lambda: self.abort(live))
        rng.choice(choices)()

    def _random_claim(self, rng: random.Random) -> None:
        if len(self.live) < 3:
            self.claim(
                self.random_prompt(rng),
                rng.choice([*NAMESPACES, NAMESPACES[0]]),
                rng.choice(["exact", "exact", "exact", "fast", "auto"]),
                whole=rng.random() < 0.7,
                expected=rng.choice([0, 8, 1000]),
                dummy=rng.random() < 0.03,
            )

    def _advance(self, live: Live, rng: random.Random) -> None:
        late = rng.random() < 0.15
        if not live.decoding:
            ok = self.prefill(
                live, rng.randint(1, 6), rng.randint(0, 1), late=late, context=rng.random() < 0.95
            )
        elif len(live.seq.tokens) >= MAX_TOKENS:
            self.finish(live)
            return
        else:
            drafts = [rng.randint(0, 1) for _ in range(rng.randint(0, 3))]
            ok = self.decode(
                live,
                drafts,
                rng.randint(0, len(drafts)),
                rng.randint(0, 1),
                context=rng.random() < 0.9,
                late=late,
            )
        if not ok:
            self.suspend(rng.choice(self.live))


def first_needed(group: LayerGroup, n: int) -> int:
    """Where drafting at n reads from: said again here, for the product is not its own judge."""
    return max(group.lookahead, 0 if group.window is None else n - group.window + 1)


def check_claim(plan: ClaimPlan, num_rows: int, ahead: int, policy: str) -> None:
    """No position is run for nothing: the lookahead, the tail and the holes, each once."""
    assert not num_rows or plan.end == num_rows or plan.compute[-1][1] == num_rows
    total = sum(b - a for a, b in plan.compute)
    holes = sum(b - a for a, b in plan.holes)
    assert total <= ahead + (num_rows - plan.end) + holes
    if policy == "fast":
        assert not holes
        assert not any(plan.draft_compute)
    for a, b in zip(plan.holes, plan.holes[1:], strict=False):
        assert a[1] < b[0]


def best_end(layout: Layout, coverage: Spans, limit: int) -> int:
    """Where a match can end at the latest, by brute force."""
    held = [{s for a, b in spans for s in range(a, b)} for spans in coverage]
    return max(m for m in range(limit + 1) if _holds(layout, held, m))


def _holds(layout: Layout, held: list[set[int]], m: int) -> bool:
    for g in layout.target_groups:
        window = layout.groups[g].window
        low = 0 if window is None else max(0, m - layout.lookahead - window + 1)
        if any(s not in held[g] for s in range(low, m)):
            return False
    return True


def random_walk(name: str, seed: int, steps: int = 80) -> Driver:
    """A driver for the named layout, after a walk that the seed decides. Raises what it finds."""
    rng = random.Random(f"{name}/{seed}")
    chosen = LAYOUTS[name]
    pools = pools_for(chosen, rng.choice([40, 48, 60, 80, 160]))
    driver = Driver(chosen, pools, prefix_caching=rng.random() < 0.95)
    driver.walk(rng, steps)
    return driver


def random_layout(rng: random.Random) -> Layout:
    """Any block and page sizes, windows down to one token, several groups of both domains."""
    block = rng.choice([1, 2, 4, 8])
    pages = [page for page in (1, 2, 4, 8) if page <= block]
    windows = [None, None, 1, 2, 3, 5, 9]
    groups = [
        group(f"t{i}", T, rng.choice(pages), rng.choice(windows)) for i in range(rng.choice([1, 2]))
    ]
    for i in range(rng.choice([0, 1, 1, 2])):
        hidden = rng.random() < 0.7
        groups.append(
            group(
                f"d{i}",
                D,
                rng.choice(pages),
                rng.choice(windows),
                lookahead=rng.choice([0, 1, 1, 2]) if hidden else 0,
                pointwise=hidden and rng.random() < 0.6,
                rebuild_from=HIDDEN if hidden else TOKENS,
            )
        )
    return layout(*groups, block=block)


def pools_for(layout: Layout, tokens: int) -> list[int]:
    """Pages for about `tokens` tokens in every group."""
    return [-(-tokens // g.page_size) for g in layout.groups]
