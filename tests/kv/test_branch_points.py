"""Windowed drafters where requests branch off a common prefix, and what a live one holds.

S is a system prompt of four windows or more; S+a, S+b, .. end in tails of a few tokens, too short
to fill the drafter's window. Whoever branches first fills it, at most one window of target
positions; all later ones find it. Every row that is read is compared with the prefix it is a
function of.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from driving import D, Driver, Live, T, layout
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import group
from scheduling import Rig

from tandemkv.base.ids import NO_PAGE
from tandemkv.engine.sizing import Load, choose_page_size, pool_pages
from tandemkv.kv.coverage import HOLES, LOOKAHEAD
from tandemkv.kv.layout import Layout
from tandemkv.kv.manager import KVManager
from tandemkv.kv.publish import Publisher
from tandemkv.kv.sequence import Sequence

BLOCK = 16
PAGES = (1, 2, 4, 8, 16)
WINDOWS = (8, 16, 24, 64)
Patch = pytest.MonkeyPatch


def block_drafter(page: int, window: int, block: int = BLOCK) -> Layout:
    """Target pages of a block, a pointwise drafter with a window and pages of its own."""
    return layout(group("t", T, block), group("d", D, page, window, pointwise=True), block=block)


def system(length: int) -> list[int]:
    return [i * 7 % 61 + 2 for i in range(length)]


def tails(length: int = 3) -> Iterator[list[int]]:
    for i in itertools.count(100, length):
        yield list(range(i, i + length))


def with_room(chosen: Layout, tokens: int = 1200) -> Driver:
    driver = Driver(chosen, [tokens // g.page_size for g in chosen.groups])
    driver.max_span = 10**6
    return driver


def lose_draft_rows(driver: Driver) -> None:
    driver.evict(1, 10**9)
    assert not driver.manager.pools[1].cached


def ask(driver: Driver, prompt: list[int], outputs: int = 6) -> Live:
    """A request from claim to finish; what its claim planned and held is left in the Live."""
    live = driver.serve(prompt)
    for i in range(outputs):
        assert driver.decode(live, [], 0, i + 2)
    driver.check()
    driver.finish(live)
    driver.check()
    return live


# -- who pays at a branch point ---------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("beyond", [0, 5, 11])
@pytest.mark.parametrize("length", [3, 6])
def test_the_first_branch_pays_a_window_at_most_and_the_later_ones_nothing(
    page: int, window: int, beyond: int, length: int
) -> None:
    driver = with_room(block_drafter(page, window))
    prefix, ends = system(4 * window + beyond), tails(length)
    ask(driver, prefix + next(ends), outputs=40)
    lose_draft_rows(driver)
    lives = [ask(driver, prefix + next(ends), outputs=n) for n in (40, 0, 3, 20)]
    assert all(live.plan.end == len(prefix) and not live.plan.masked for live in lives)
    paid = [live.plan.recomputed[HOLES] for live in lives]
    assert 0 < paid[0] <= window - 1
    assert paid[1:] == [0, 0, 0]
    for live in lives[1:]:
        low = max(0, len(prefix) - window + 1)
        assert all(
            sum(min(b, len(prefix)) - max(a, low) for a, b in spans if b > low) == len(prefix) - low
            for spans in live.plan.reused
        )


@pytest.mark.parametrize("page", PAGES)
def test_a_short_tail_finds_what_a_longer_one_filled(page: int) -> None:
    """A tail of 12 needs 3 slots before the branch, a tail of one all 15."""
    driver = with_room(block_drafter(page, 16))
    prefix = system(64)
    ask(driver, [*prefix, 100])
    lose_draft_rows(driver)
    plans = [ask(driver, [*prefix, *tail]).plan for tail in (range(200, 212), [300], [301, 302])]
    assert [plan.recomputed[HOLES] for plan in plans] == [15, 0, 0]


@pytest.mark.parametrize("page", PAGES)
def test_a_cold_run_publishes_the_branch_point_itself(page: int) -> None:
    driver = with_room(block_drafter(page, 16))
    prefix, ends = system(69), tails()
    ask(driver, prefix + next(ends), outputs=40)
    assert ask(driver, prefix + next(ends)).plan.recomputed == {LOOKAHEAD: 0, HOLES: 0}


@pytest.mark.parametrize("page", PAGES)
def test_rows_that_were_never_written_are_filled_at_the_first_branch(page: int) -> None:
    """The first request ran without speculation: the context pass was off."""
    driver = with_room(block_drafter(page, 16))
    prefix, ends = system(69), tails()
    live = driver.claim(prefix + next(ends))
    assert live is not None
    while not live.decoding:
        driver.prefill(live, 10**6, 1, context=False)
    driver.finish(live)
    driver.check()
    paid = [ask(driver, prefix + next(ends)).plan.recomputed[HOLES] for _ in range(3)]
    assert paid == [15, 0, 0]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_tail_as_long_as_the_window_pays_nothing(page: int, window: int) -> None:
    driver = with_room(block_drafter(page, window))
    prefix = system(4 * window + 5)
    ask(driver, [*prefix, 100])
    lose_draft_rows(driver)
    plan = ask(driver, [*prefix, *range(200, 200 + window - 1)]).plan
    assert plan.recomputed == {LOOKAHEAD: 0, HOLES: 0}
    assert plan.end == len(prefix)


@pytest.mark.parametrize("beyond", [0, 5, 11])
def test_branches_in_flight_together_pay_for_the_unfinished_block_only(beyond: int) -> None:
    """Whole blocks of a filled window are seen at once, the rest when its block is whole."""
    driver = with_room(block_drafter(4, 24))
    prefix, ends = system(96 + beyond), tails()
    ask(driver, prefix + next(ends))
    lose_draft_rows(driver)
    lives = [driver.serve(prefix + next(ends)) for _ in range(4)]
    paid = [live.plan.recomputed[HOLES] for live in lives]
    assert paid == [23, beyond, beyond, beyond]
    for live in lives:
        driver.finish(live)
    assert ask(driver, prefix + next(ends)).plan.recomputed[HOLES] == 0


@pytest.mark.parametrize("page", [4, 8, 16])
def test_a_hit_that_ends_inside_a_page_loses_no_row_of_any_group(page: int) -> None:
    """A hit of 50 in a prompt of 60, W = 16: rounded to pages, 2, 6 or 10 rows would be lost."""
    driver = with_room(block_drafter(page, 16))
    ask(driver, [*system(50), 100], outputs=0)
    live = driver.serve([*system(50), *range(200, 210)])
    assert live.plan.end == 50
    assert live.plan.compute == ((50, 60),)
    assert live.seq.use.hits == 15
    assert not live.seq.use.gaps
    assert live.seq.coverage[1].covers(35, 60)


@pytest.mark.parametrize("page", [4, 16])
@pytest.mark.parametrize("window", [8, 24])
@pytest.mark.parametrize("beyond", range(BLOCK))
def test_a_resume_with_the_whole_hit_loses_no_row_at_any_alignment(
    page: int, window: int, beyond: int
) -> None:
    """Of a resume nothing is left to run, so the first row that drafting reads is a found one."""
    driver = with_room(block_drafter(page, window))
    length = 4 * BLOCK + beyond
    driver.pass_through([*system(length), 100])
    for _ in range(2):
        live = driver.serve([*system(length), 100], resume=True)
        needed = max(0, length - window + 1)
        assert live.plan.end == live.num_rows == length
        assert not live.plan.compute
        assert not live.seq.use.gaps
        assert live.seq.coverage[1].covers(needed, length)
        assert all(live.seq.pages[1][slot // page] != NO_PAGE for slot in range(needed, length))
        assert driver.decode(live, [5, 6], 1, 7)
        driver.check()
        driver.suspend(live)
        driver.check()


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(
    st.sampled_from([4, 8, 16]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 20),
    st.integers(0, 60),
    st.lists(
        st.tuples(st.integers(1, 6), st.integers(0, 24), st.booleans()), min_size=2, max_size=7
    ),
)
def test_whatever_is_evicted_a_branch_is_paid_for_once(
    block: int, ratio: int, window: int, length: int, requests: list[tuple[int, int, bool]]
) -> None:
    """Any lengths, pages, windows; some requests find the drafter's rows gone."""
    driver = with_room(block_drafter(max(1, block // ratio), window, block), 1600)
    prefix = system(length)
    kept = False
    for i, (tail, outputs, gone) in enumerate(requests):
        if gone:
            lose_draft_rows(driver)
        prompt = [*prefix, *range(100 * i + 100, 100 * i + 100 + tail)]
        plan = ask(driver, prompt, outputs).plan
        paid = plan.recomputed[HOLES]
        assert paid <= max(0, min(window - 1, len(prefix)))
        assert not paid or gone or not kept
        needed = len(prompt) - window + 1 < plan.end
        kept = (kept and not gone) or needed or i == 0


# -- in a pool of the size that is chosen for it ----------------------------------------------


def chosen_rig(window: int, page: int | None, running: int) -> Rig:
    """A scheduler over pools exactly as large as the load asks for."""
    drafter = group("d", D, 1, window, pointwise=True)
    chosen = block_drafter(page or choose_page_size(drafter, BLOCK)[0], window)
    load = Load(cached_tokens=4096, length=2048, running=running, batch=32, num_draft_tokens=3)
    return Rig(
        chosen,
        [pool_pages(g, chosen, load)[0] for g in chosen.groups],
        vocab=200,
        accept=256,
        max_batch_tokens=load.batch,
        max_running=running,
        max_model_len=load.length,
        num_draft_tokens=load.num_draft_tokens,
        trace=True,
    )


def branches_in_the_chosen_pool(window: int, page: int | None, running: int, outputs: int) -> None:
    """Six requests with one system prompt, the first alone, then as many at once as may run."""
    for beyond in (0, 5, 11):
        rig, ends = chosen_rig(window, page, running), tails()
        prefix = system(4 * window + beyond)
        for i in range(6):
            rig.add(prefix + next(ends), max_tokens=outputs)
            if i == 0 or (i + 1) % running == 0:
                rig.run()
        rig.run()
        assert rig.manager.stats.target_recomputed_tokens.get(HOLES, 0) <= window - 1
        assert not rig.manager.stats.draft_gap_tokens
        for request in rig.requests.values():
            rig.check_text(request)
            assert all(step.num_accepted == len(step.drafts) for step in request.steps)


@pytest.mark.parametrize("outputs", [5, 150])
@pytest.mark.parametrize("running", [1, 4])
@pytest.mark.parametrize(
    ("window", "page"), [(8, None), (8, 4), (16, 4), (24, None), (24, 1), (24, 16)]
)
def test_the_chosen_pool_has_room_for_branch_points(
    window: int, page: int | None, running: int, outputs: int
) -> None:
    branches_in_the_chosen_pool(window, page, running, outputs)


def filled_holes_are_not_published(patch: Patch) -> None:
    patch.setattr(Publisher, "_publish_dirty", lambda self, seq: seq.dirty.clear())


def rows_at_a_branch_go_first(patch: Patch) -> None:
    def give(original: object, self: Publisher, seq: Sequence, *args: int) -> None:
        reused, seq.reused = seq.reused, 0
        original(self, seq, *args)  # type: ignore[operator]
        seq.reused = reused

    original = Publisher._give_blocks
    patch.setattr(Publisher, "_give_blocks", lambda *args: give(original, *args))


FAULTS = [
    (filled_holes_are_not_published, (24, 16, 1, 150)),
    (rows_at_a_branch_go_first, (24, 16, 1, 60)),
]


@pytest.mark.parametrize(("fault", "case"), FAULTS, ids=[f.__name__ for f, _ in FAULTS])
def test_a_branch_point_that_is_not_kept_would_be_seen(fault, case, monkeypatch) -> None:
    branches_in_the_chosen_pool(*case)
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        branches_in_the_chosen_pool(*case)


# -- what a live sequence holds ---------------------------------------------------------------


class Walk:
    """One request by hand, without contents: what it holds of the drafter's pages at most."""

    def __init__(self, manager: KVManager, prompt: list[int], chunk: int, k: int) -> None:
        self.manager, self.chunk, self.k = manager, chunk, k
        available = manager.pools[1].available
        claim = manager.claim(prompt)
        assert claim is not None
        self.charged = available - manager.pools[1].available
        self.seq, self.plan = claim.seq, claim.plan
        manager.copied(self.seq)
        self.at_claim = self.peak = self.held()

    def held(self) -> int:
        return sum(page != NO_PAGE for page in self.seq.pages[1])

    def pass_over(self, start: int, stop: int, rows: int, ahead: int) -> None:
        """Positions [start, stop), of which those before `rows` stay."""
        manager, seq = self.manager, self.seq
        assert manager.reserve(seq, stop + ahead)
        manager.launch(seq, max(seq.computed, stop))
        writes = seq.writes(start, stop)
        self.peak = max(self.peak, self.held())
        manager.append(seq, [5] * max(0, rows + 1 - len(seq.tokens)))
        kept = [[(a, min(b, rows)) for a, b in spans if a < rows] for spans in writes]
        manager.commit(seq, max(seq.committed, rows), kept)
        manager.rewind(seq)
        manager.publish(seq)

    def run(self, outputs: int = 30) -> Walk:
        for start, stop in self.plan.compute:
            for at in range(start, stop, self.chunk):
                end = min(at + self.chunk, stop)
                self.pass_over(at, end, end, self.k)
        for i in range(outputs):
            n = self.seq.committed
            self.pass_over(n, n + 1 + self.k, n + 1 + i % (self.k + 1), self.k)
        self.manager.check()
        self.manager.finish(self.seq)
        return self


@pytest.mark.parametrize("context", [1024, 4096, 8192])
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("window", [8, 64, 512])
def test_a_live_sequence_holds_its_window_whatever_the_context(
    context: int, page: int, window: int
) -> None:
    chosen, chunk, k = block_drafter(page, window), 64, 7
    manager = KVManager(chosen, [3 * context // g.page_size for g in chosen.groups])
    at_claim = -(-(window + 2 * BLOCK) // page)
    at_most = -(-(window + k + chunk + 2 * BLOCK) // page)
    prompt = [i % 97 for i in range(context)]
    cold = Walk(manager, prompt, chunk, k).run()
    warm = Walk(manager, [*prompt, 98, 99], chunk, k).run()  # the tree has every draft row
    manager._make_room(1, manager.pools[1].total)
    filler = Walk(manager, [*prompt, 100, 101], chunk, k)
    assert filler.plan.recomputed[HOLES] == window - 1
    filler.run()
    hit = Walk(manager, [*prompt, 102, 103], chunk, k)
    assert hit.plan.recomputed[HOLES] == 0
    needed = chosen.groups[1].first_needed(context) // BLOCK * BLOCK
    assert all(page == NO_PAGE for page in hit.seq.pages[1][: needed // page])
    for walk in (cold, warm, filler, hit.run()):
        assert walk.at_claim <= at_claim
        assert walk.charged <= 2 * at_claim  # copies hold their sources until they are made
        assert walk.peak <= at_most


def test_what_a_live_sequence_holds_can_fail(monkeypatch) -> None:
    monkeypatch.setattr(Publisher, "slide", lambda self, seq, caching: None)
    with pytest.raises(AssertionError):
        test_a_live_sequence_holds_its_window_whatever_the_context(1024, 4, 64)


@pytest.mark.parametrize("page", PAGES)
def test_admission_charges_the_window_and_not_the_length(page: int) -> None:
    """A draft pool of three windows admits 8k tokens; a second request shares what it can."""
    chosen = block_drafter(page, 64)
    manager = KVManager(chosen, [1200, 3 * 64 // page])
    assert manager.fits(8192, 4) is None
    assert manager.can_admit(8192, 4)
    first = Walk(manager, list(range(8192)), 64, 4).run()
    second = Walk(manager, [*range(8192), 1], 64, 4)
    assert max(first.charged, second.charged) <= (64 + 2 * BLOCK) // page
