"""The KV manager: one prefix tree, a pool per layer group, and every operation on both.

Law: an operation touches all layer groups or none; free + held + cached = total in every group
after each of them; a page is written by one sequence only, and read only where coverage says so.
Running out of pages is not an error: claim returns None, reserve returns False, and nothing has
changed. This module moves no bytes: it says which pages to copy, and the runner copies them.

    open -> copied -> (rows arrive) -> accept -> finish, then claimed as a resumed request
    match -> claim -> copied -> [ reserve -> (pass) -> append -> commit -> publish ]*
          -> finish | suspend | release
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq

import msgspec

from tandemkv.base.errors import ConfigError, InvariantError, RequestError
from tandemkv.base.ids import NO_PAGE, GroupId, PageId, SeqId
from tandemkv.base.spans import Span, SpanSet
from tandemkv.kv.audit import check_manager
from tandemkv.kv.coverage import ClaimCost, ClaimPlan, plan_claim, read_from
from tandemkv.kv.explain import Interval, explain_sequence
from tandemkv.kv.intent import GroupIntent, Intent, PageCopy, intend
from tandemkv.kv.keys import TOKEN_BYTES, Namespace, pack_tokens, token_bytes
from tandemkv.kv.layout import Domain, LayerGroup, Layout
from tandemkv.kv.pool import PagePool, Usage
from tandemkv.kv.publish import Publisher
from tandemkv.kv.records import (
    FAULTS,
    NOT_WRITTEN,
    WITHHOLD_DRAFT_ROWS,
    Claim,
    DraftUse,
    Match,
    Stats,
    tally,
)
from tandemkv.kv.sequence import Sequence
from tandemkv.kv.tree import Found, Tree


class _Ask(msgspec.Struct, frozen=True):
    """The terms of one claim."""

    packed: array[int]
    namespace: Namespace
    num_rows: int
    rows: int
    resume: bool
    policy: str
    expected_tokens: int
    dummy: bool
    use: DraftUse
    arrives: bool = False


class KVManager:
    """All KV state of one engine. num_pages: pages per layer group, in layout order."""

    def __init__(
        self,
        layout: Layout,
        num_pages: Seq[int],
        *,
        model_fingerprint: str = "",
        drafter_fingerprint: str = "",
        prefix_caching: bool = True,
        debug: bool = False,
        faults: frozenset[str] = frozenset(),
        cost: ClaimCost | None = None,
    ) -> None:
        if len(num_pages) != len(layout.groups):
            raise ConfigError(f"{len(num_pages)} pool sizes for {len(layout.groups)} layer groups")
        if min(num_pages) < 1:
            raise ConfigError("every layer group needs at least one page")
        unknown = sorted(faults - FAULTS)
        if unknown:
            raise ConfigError(f"unknown fault {unknown[0]!r}; known: {', '.join(sorted(FAULTS))}")
        self.layout = layout
        self.drafter_fingerprint = drafter_fingerprint
        self.prefix_caching = prefix_caching
        self.faults = faults
        self.cost = cost or ClaimCost()
        self.stats = Stats()
        self.tree = Tree(layout, model_fingerprint)
        self.pools = [
            PagePool(g.name, n, debug=debug) for g, n in zip(layout.groups, num_pages, strict=True)
        ]
        self.sequences: dict[SeqId, Sequence] = {}
        self._publisher = Publisher(layout, self.tree, self.pools)
        self._next_id = 0

    # -- match and claim ------------------------------------------------------------------

    def match(self, tokens: Seq[int], namespace: Namespace = Namespace()) -> Match:
        """What the tree holds of `tokens`; takes nothing and changes nothing."""
        found = self.tree.match(token_bytes(pack_tokens(tokens)), namespace)
        spans = tuple(tuple(found.coverage(g)) for g in self._group_ids())
        return Match(len(tokens), found.end, spans)

    def claim(
        self,
        tokens: list[int],
        *,
        namespace: Namespace = Namespace(),
        policy: str = "exact",
        resume: bool = False,
        expected_tokens: int = 0,
        reserve: int | None = None,
        dummy: bool = False,
        headroom: Seq[int] | None = None,
        use: DraftUse | None = None,
    ) -> Claim | None:
        """Turn the longest match of `tokens` into a sequence with held pages, or return None.

        tokens: a prompt of n tokens; with `resume`, x_0..x_n, the last the anchor that is known
        already (n rows wanted, all of which may be found). reserve: rows to make room for
        (default n + 1); a windowed group gets room for its window only and grows by reserve().
        dummy: an ordinary reservation, outside publishing and statistics. headroom: pages of each
        group that must still be available afterwards, or the claim is refused and not counted.
        use: counters of the request, which outlive the sequence.
        Copy sources stay held until copied(seq). RequestError if the claim can never fit.
        """
        num_rows = len(tokens) - 1 if resume else len(tokens)
        if not tokens:
            raise RequestError("a claim needs at least one token", param="prompt")
        rows = num_rows + 1 if reserve is None else max(0, reserve)
        why = self.fits(max(rows, num_rows), 0)
        if why:
            raise RequestError(why, param="prompt")
        packed = pack_tokens(tokens)
        use = DraftUse() if use is None else use
        ask = _Ask(packed, namespace, num_rows, rows, resume, policy, expected_tokens, dummy, use)
        return self._claim(ask, tokens, headroom)

    def open(
        self,
        tokens: list[int],
        *,
        namespace: Namespace = Namespace(),
        headroom: Seq[int] | None = None,
    ) -> Claim | None:
        """Pages for the rows of all `tokens`, which another worker computes and writes here.

        What the tree holds is taken as in a claim; a windowed group opens at its last window. The
        rest stays uncovered until accept(). Not counted as a query. headroom: as in claim(). None:
        no room now.
        RequestError if it can never fit.
        """
        num = len(tokens)
        why = self.fits(num, 0) if tokens else "a hand-off needs at least one token"
        if why:
            raise RequestError(why, param="prompt")
        ask = _Ask(
            pack_tokens(tokens), namespace, num, num, True, "exact", 0, False, DraftUse(), True
        )
        claim = self._claim(ask, tokens, headroom)
        if claim is not None:
            for g in self.layout.draft_groups:
                claim.seq.pending[g].remove(0, self.layout.groups[g].first_needed(num))
        return claim

    def accept(self, seq: Sequence, rows: int, received: Seq[Seq[Span]]) -> None:
        """Target rows below `rows` and the slots `received` names per group have arrived: final.

        A windowed group needs its last window alone. Raises InvariantError, nothing changed, for
        slots that the sequence does not own, and where a target group lacks what a pass at the
        end would read.
        """
        if not seq.committed <= rows <= seq.reserved:
            raise InvariantError(f"sequence {seq.id}: {rows} rows arrived, {seq.reserved} reserved")
        for g, spans in enumerate(received):
            for start, stop in spans:
                self._check_write(seq, g, start, stop, rows)
        for g in self.layout.target_groups:
            low = read_from(self.layout.groups[g], max(0, rows - self.layout.lookahead))
            if SpanSet([*seq.coverage[g], *received[g]]).missing(low, rows):
                raise InvariantError(
                    f"sequence {seq.id}: rows [{low}, {rows}) of {self.layout.groups[g].name} did"
                    " not all arrive"
                )
        for g, spans in enumerate(received):
            for start, stop in spans:
                self._cover(seq, g, start, stop)
                seq.written[g].remove(start, stop)
                seq.received[g].add(start, stop)
        seq.committed = rows
        seq.computed = max(seq.computed, rows)

    def _claim(self, ask: _Ask, tokens: list[int], headroom: Seq[int] | None) -> Claim | None:
        for intent in self._intents(ask):
            needs = [group.need() for group in intent.groups]
            if headroom is not None:
                needs = [need + more for need, more in zip(needs, headroom, strict=True)]
            if all(need <= pool.available for need, pool in zip(needs, self.pools, strict=True)):
                return self._take(intent, tokens, ask)
        return None

    def _intents(self, ask: _Ask) -> Iterator[Intent]:
        """Ways to serve a claim, best first: all that matches; what can be shared uncopied; none.

        Copies hold their sources too, so the later ways need less room beside the request's own
        pages: a lone request that fits an empty cache is always served.
        """
        found = Found(None, [], None, 0)
        if self.prefix_caching and not ask.dummy:
            wanted = token_bytes(ask.packed)[: TOKEN_BYTES * ask.num_rows]
            found = self.tree.match(wanted, ask.namespace)
            intent = self._intent(ask, found, full_only=False)
            yield intent
            if intent.copies:
                yield self._intent(ask, found, full_only=True)
        if found.end or not self.prefix_caching or ask.dummy:
            yield self._intent(ask, Found(None, [], None, 0), full_only=False)

    def _intent(self, ask: _Ask, found: Found, *, full_only: bool) -> Intent:
        withheld = WITHHOLD_DRAFT_ROWS in self.faults
        draft = self.layout.draft_groups
        coverage = [
            SpanSet() if withheld and g in draft else found.coverage(g, full_only=full_only)
            for g in self._group_ids()
        ]
        plan = plan_claim(
            self.layout,
            coverage,
            ask.num_rows,
            matched=len(found.nodes) * self.layout.block_size if full_only else found.end,
            resume=ask.resume,
            policy=ask.policy,
            expected_tokens=ask.expected_tokens,
            cost=self.cost,
            withheld="fault" if withheld else None,
        )
        return intend(
            self.layout,
            found,
            coverage,
            plan,
            ask.rows,
            full_only=full_only,
            opens_at=ask.num_rows if ask.arrives else None,
        )

    def _take(self, intent: Intent, tokens: list[int], ask: _Ask) -> Claim:
        """Hold, evict, allocate: cannot fail, for room was counted."""
        root = self.tree.root(ask.namespace)
        tip = intent.tip(root, self.layout.block_size)
        tip.pins += 1
        seq = Sequence(
            SeqId(self._next_id), self.layout, ask.namespace, tokens, ask.packed, tip, ask.use
        )
        self._next_id += 1
        for group, pool in zip(intent.groups, self.pools, strict=True):
            pool.hold_all(group.shares)
            for run in group.sources:
                pool.hold(run)
                seq.sources.append(run)
        for g, group in enumerate(intent.groups):
            self._make_room(g, group.new_pages)
        copies: list[PageCopy] = []
        for group in intent.groups:
            self._fill_table(seq, group, intent, copies)
        plan = intent.plan
        block = self.layout.block_size
        seq.committed = seq.computed = seq.reused = plan.end
        seq.published = plan.end // block * block if self._publishes(ask.dummy) else 0
        seq.reserved = min(
            len(t) * g.page_size - g.lookahead
            for t, g in zip(seq.pages, self.layout.groups, strict=True)
        )
        seq.reserved = max(plan.end, min(seq.reserved, intent.rows))
        seq.dummy = ask.dummy
        for gap in () if ask.arrives else plan.masked:
            seq.masks[gap.group].append((gap.start, gap.stop, gap.reason))
        owned = {own.block for group in intent.groups for own in group.own}
        seq.dirty = sorted(b for b in owned if (b + 1) * block <= plan.end)
        self.sequences[seq.id] = seq
        self._count_claim(seq, plan, ask, len(copies))
        reused = tuple(tuple(spans) for spans in seq.coverage)
        return Claim(seq, msgspec.structs.replace(plan, reused=reused), tuple(copies))

    def _fill_table(
        self, seq: Sequence, intent: GroupIntent, whole: Intent, copies: list[PageCopy]
    ) -> None:
        """Build one group's page table and coverage from what was held and allocated."""
        g, size = intent.group, self.layout.groups[intent.group].page_size
        block = self.layout.block_size
        per = block // size
        empty = [NO_PAGE] * per
        new = self.pools[g].take(intent.new_pages)
        table: list[PageId] = [NO_PAGE] * (intent.first_block * per)
        for run in intent.shares:
            table.extend(run.pages if run is not None else empty)
        del table[intent.base :]
        at = 0
        for own in intent.own:
            pages = new[at : at + own.count]
            at += own.count
            table[own.block * per : own.block * per + own.count] = pages
            start = own.block * block
            for j, page in enumerate(pages):
                lo = start + j * size
                if own.source is not None and intent.covered.within(lo, lo + size):
                    copies.append(PageCopy(g, own.source.pages[j], page))
        table.extend(new[at:])
        seq.pages[g] = table
        if any(intent.shares):
            seq.runs[g] = [None] * intent.first_block + intent.shares
        seq.first_block[g] = intent.first_block
        stop = min(intent.base * size, whole.found.end)
        seq.coverage[g] = SpanSet(intent.covered.within(intent.first_block * block, stop))
        seq.taken[g] = seq.coverage[g].copy()
        for own in intent.own:
            for a, b in seq.taken[g].within(own.block * block, (own.block + 1) * block):
                seq.copied[g].add(a, b)
        self.pools[g].note_peak()
        seq.pending[g] = intent.planned

    def _count_claim(self, seq: Sequence, plan: ClaimPlan, ask: _Ask, copied: int) -> None:
        if ask.dummy or ask.arrives:
            return
        stats = self.stats
        stats.claims += 1
        stats.resumptions += ask.resume
        stats.prefix_queries_tokens += ask.num_rows
        stats.prefix_hit_tokens += plan.end
        stats.draft_recomputed_tokens += plan.filled
        stats.copied_pages += copied
        for why, count in plan.recomputed.items() if self.layout.draft_groups else ():
            tally(stats.target_recomputed_tokens, why, count)
            tally(seq.use.recomputed, why, count)
        for g in self.layout.draft_groups:
            group = self.layout.groups[g]
            needed = seq.coverage[g].within(group.first_needed(plan.end), plan.end)
            hits = sum(b - a for a, b in needed)
            tally(stats.draft_hit_tokens, group.name, hits)
            seq.use.hits += hits
        for gap in plan.masked:
            self._count_gap(seq, gap.reason, gap.stop - gap.start)

    def _count_gap(self, seq: Sequence, reason: str, count: int) -> None:
        tally(self.stats.draft_gap_tokens, reason, count)
        tally(seq.use.gaps, reason, count)

    def copied(self, seq: Sequence) -> None:
        """The claim's copies have been made: their sources are no longer held for it."""
        self._publisher.unpin(seq)

    # -- grow -----------------------------------------------------------------------------

    def reserve(self, seq: Sequence, num_slots: int) -> bool:
        """Make room in every group for target rows [.., num_slots), a draft group's rows of the
        same positions included (its slots end D later). False: no room, nothing changed."""
        if num_slots <= seq.reserved:
            return True
        needs: list[int] = []
        for table, group, pool in zip(seq.pages, self.layout.groups, self.pools, strict=True):
            need = -(-(num_slots + group.lookahead) // group.page_size) - len(table)
            if need > pool.available:
                return False
            needs.append(max(0, need))
        for g, need in enumerate(needs):
            if need:
                self._make_room(g, need)
                seq.pages[g].extend(self.pools[g].take(need))
        seq.reserved = num_slots
        return True

    def append(self, seq: Sequence, tokens: Seq[int]) -> None:
        """Tokens that became known (sampled or accepted), after those known already."""
        seq.packed.extend(pack_tokens(tokens))
        seq.tokens.extend(tokens)

    def launch(self, seq: Sequence, rows: int) -> None:
        """A pass over target rows up to `rows` is under way: they are computed, not final."""
        if rows > seq.reserved:
            raise InvariantError(
                f"sequence {seq.id}: {rows} rows launched, {seq.reserved} reserved"
            )
        seq.computed = max(seq.computed, rows)

    def commit(self, seq: Sequence, rows: int, written: Seq[Seq[Span]]) -> None:
        """Target rows [0, rows) are final; `written` names, per group, the slots now canonical.

            |---- committed ----|---- accepted ----|.... rejected ....|.... reserved
            0                 before              rows             computed

        Append the tokens first: a slot is canonical only if its token is known. written: what
        seq.writes(...) asked of the pass, clipped to accepted rows. Filling a hole leaves rows
        where they are.
        """
        if not seq.committed <= rows <= min(len(seq.tokens), seq.reserved):
            raise InvariantError(
                f"sequence {seq.id}: commit to {rows} from {seq.committed} with"
                f" {len(seq.tokens)} tokens and {seq.reserved} rows reserved"
            )
        for g, spans in enumerate(written):
            for start, stop in spans:
                if start < stop:
                    self._check_write(seq, g, start, stop, rows)
        for g in self.layout.target_groups:
            if SpanSet([*seq.coverage[g].within(seq.committed, rows), *written[g]]).missing(
                seq.committed, rows
            ):
                raise InvariantError(
                    f"sequence {seq.id}: rows [{seq.committed}, {rows}) were not all written in"
                    f" {self.layout.groups[g].name}"
                )
        for g, spans in enumerate(written):
            for start, stop in spans:
                if start < stop:
                    self._cover(seq, g, start, stop)
        seq.committed = rows
        seq.computed = max(seq.computed, rows)
        if rows > seq.reused:  # the tail is under way: a hole not filled by now stays one
            self._give_up_holes(seq)
        self._publisher.slide(seq, self._publishes(seq.dummy))

    def _give_up_holes(self, seq: Sequence) -> None:
        for g in self.layout.draft_groups:
            for start, stop in list(seq.pending[g]):
                self.mask(seq, g, start, stop, NOT_WRITTEN)

    def _check_write(self, seq: Sequence, g: int, start: int, stop: int, rows: int) -> None:
        group = self.layout.groups[g]
        if start < group.lookahead or stop > min(rows + group.lookahead, len(seq.tokens)):
            raise InvariantError(
                f"sequence {seq.id}: slots [{start}, {stop}) of {group.name} cannot be canonical"
                f" with {rows} rows and {len(seq.tokens)} tokens"
            )
        if not seq.owns_all(g, start, stop):
            raise InvariantError(
                f"sequence {seq.id}: slots [{start}, {stop}) of {group.name} lie in pages that"
                " are not its own"
            )

    def _cover(self, seq: Sequence, g: int, start: int, stop: int) -> None:
        """Rows [start, stop) can be read; they are canonical unless a gap lies before them."""
        group = self.layout.groups[g]
        if not group.required and not group.pointwise:
            low = group.first_needed(start)
            if seq.tainted[g].within(low, start) or not seq.coverage[g].covers(low, start):
                seq.tainted[g].add(start, stop)
        seq.coverage[g].add(start, stop)
        seq.written[g].add(start, stop)
        seq.pending[g].remove(start, stop)

    def rewind(self, seq: Sequence) -> None:
        """Rows that were computed but not committed are forgotten; their room stays.

        |---- committed ----|.... computed ....|.... reserved
                            ^ computed falls back to here
        """
        seq.computed = seq.committed

    def mask(self, seq: Sequence, group: GroupId, start: int, stop: int, reason: str) -> None:
        """Draft slots [start, stop) stay a gap: counted, and shown by explain."""
        seq.pending[group].remove(start, stop)
        gaps = seq.coverage[group].missing(start, stop)
        seq.masks[group].extend((a, b, reason) for a, b in gaps)
        if not seq.dummy:
            self._count_gap(seq, reason, sum(b - a for a, b in gaps))

    def publish(self, seq: Sequence) -> int:
        """Whole blocks of committed rows enter the tree; windows slide. Returns blocks published.

        |---- published ----|-- whole blocks --|- rest -|.... computed
        0                 before             after   committed
        """
        if not self._publishes(seq.dummy):
            return 0
        count = self._publisher.publish(seq)
        self.stats.published_blocks += count
        self._publisher.slide(seq, caching=True)
        return count

    # -- end ------------------------------------------------------------------------------

    def finish(self, seq: Sequence) -> None:
        """Publish all committed rows, the last partial block included, and give up the pages.

        A sequence whose copies were never made has nothing new to publish.
        """
        self.publish_all(seq)
        self.release(seq)

    def publish_all(self, seq: Sequence) -> None:
        """As finish, but the pages stay held, and nothing is written to them any more."""
        if self._publishes(seq.dummy) and not seq.sources:
            self._publisher.settle(seq)
            self.stats.published_blocks += self._publisher.publish(seq)
            self._publisher.publish_partial(seq)

    def suspend(self, seq: Sequence) -> None:
        """As finish, but the request lives on: it will claim its tokens again with resume."""
        if not seq.dummy:
            self.stats.suspensions += 1
        self.finish(seq)

    def release(self, seq: Sequence) -> None:
        """Give up every page without publishing more."""
        if self.sequences.pop(seq.id, None) is not seq:
            raise InvariantError(f"sequence {seq.id} is released twice")
        self._publisher.release(seq)

    def reset_cache(self, domain: Domain | None = None) -> int:
        """Drop every cached page, or those of one domain; returns how many. Held pages stay."""
        before = sum(pool.cached for pool in self.pools)
        for pool, group in zip(self.pools, self.layout.groups, strict=True):
            while domain in (None, group.domain) and (run := pool.oldest) is not None:
                self._publisher.evict(run)
        return before - sum(pool.cached for pool in self.pools)

    # -- room -----------------------------------------------------------------------------

    def fits(self, num_tokens: int, num_draft_tokens: int, chunk: int = 0) -> str | None:
        """Why a request of num_tokens rows can never run, even alone; None if it can.

        chunk: rows that one step must be able to hold at once in a windowed group (default: a
        block or the drafts, whichever is more).
        """
        for group, pool in zip(self.layout.groups, self.pools, strict=True):
            need = self._pages_for(group, num_tokens, num_draft_tokens, chunk)
            if need > pool.total:
                return (
                    f"the request needs {need} KV pages of {group.name} for {num_tokens} tokens"
                    f" but the pool has {pool.total}"
                )
        return None

    def can_admit(self, num_tokens: int, num_draft_tokens: int = 0, chunk: int = 0) -> bool:
        """Whether a request of num_tokens rows, matching nothing, has room in every group now."""
        return all(
            self._pages_for(group, num_tokens, num_draft_tokens, chunk) <= pool.available
            for group, pool in zip(self.layout.groups, self.pools, strict=True)
        )

    def _pages_for(self, group: LayerGroup, rows: int, drafts: int, chunk: int) -> int:
        slots = rows + drafts + group.lookahead
        if group.window is not None:
            step = max(chunk, self.layout.block_size, drafts + 1)
            ahead = self.layout.lookahead + group.lookahead
            slots = min(slots, group.window + ahead + step + 2 * self.layout.block_size)
        return -(-slots // group.page_size)

    def _make_room(self, g: int, count: int) -> None:
        if len(self.pools[g].free) < count:
            evicted = self._publisher.make_room(g, count)
            tally(self.stats.evicted_pages, self.pools[g].name, evicted)

    # -- look -----------------------------------------------------------------------------

    def usage(self) -> list[Usage]:
        """Pages by state, per group."""
        return [pool.usage() for pool in self.pools]

    def drain_freed(self) -> list[list[PageId]]:
        """Per group, pages that became free since the last call (only with debug)."""
        return [pool.drain_freed() for pool in self.pools]

    def explain(self, seq: Sequence) -> list[list[Interval]]:
        """Per group, where every interval of the sequence's KV came from."""
        return explain_sequence(seq)

    def check(self) -> None:
        """Recompute every law from scratch; InvariantError names the first that is broken."""
        check_manager(self)

    def _group_ids(self) -> list[GroupId]:
        return [GroupId(g) for g in range(len(self.layout.groups))]

    def _publishes(self, dummy: bool) -> bool:
        return self.prefix_caching and not dummy
