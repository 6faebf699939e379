"""Where a sequence's rows came from."""

from driving import LAYOUTS, Driver

PROMPT = [1, 0, 1, 1, 0, 0, 1, 0, 1, 1]


def told(driver: Driver, seq, g: int) -> list[tuple[int, int, str, str]]:
    return [(i.start, i.stop, str(i.provenance), i.reason) for i in driver.manager.explain(seq)[g]]


def test_computed_reused_and_copied_rows_are_told_apart():
    driver = Driver(LAYOUTS["eagle"], [20, 40])
    driver.pass_through(PROMPT)
    live = driver.serve([*PROMPT, 1, 1, 0])
    assert told(driver, live.seq, 0) == [
        (0, 8, "reused", ""),
        (8, 10, "copied", ""),
        (10, 13, "computed", ""),
    ]
    assert told(driver, live.seq, 1)[0] == (1, 8, "reused", "")


def test_a_gap_is_shown_with_its_reason():
    driver = Driver(LAYOUTS["eagle"], [20, 40])
    driver.pass_through(PROMPT)
    driver.evict(1, 40)
    live = driver.serve([*PROMPT, 1, 1, 0], policy="fast")
    assert told(driver, live.seq, 1) == [
        (1, 10, "masked", "policy"),
        (10, 13, "computed", ""),
    ]


def test_a_hole_that_was_filled_is_computed():
    driver = Driver(LAYOUTS["eagle"], [20, 40])
    driver.pass_through(PROMPT)
    driver.evict(1, 40)
    live = driver.serve([*PROMPT, 1])
    assert told(driver, live.seq, 1) == [(1, 11, "computed", "")]


def test_a_hole_that_no_pass_filled_says_so():
    driver = Driver(LAYOUTS["eagle"], [20, 40])
    driver.pass_through(PROMPT)
    driver.evict(1, 40)
    live = driver.claim([*PROMPT, 1])
    while not live.decoding:
        driver.prefill(live, 99, 1, context=False)
    assert (1, 10, "masked", "not_written") in told(driver, live.seq, 1)
    assert driver.manager.stats.draft_gap_tokens == {"not_written": 9}


def test_the_intervals_tile_the_committed_rows_and_name_what_left_the_window():
    driver = Driver(LAYOUTS["block_drafter"], [20, 40])
    live = driver.serve(PROMPT * 2)
    rows = told(driver, live.seq, 1)
    assert rows[0] == (0, 12, "computed", "left the window")
    assert [row[0] for row in rows[1:]] == [row[1] for row in rows[:-1]]
    assert rows[-1][1] == 20
