"""Each law of the manager, broken by hand: the check names it."""

import pytest
from driving import LAYOUTS, Driver

from tandemkv.base.errors import InvariantError

PROMPT = [1, 0, 1, 1, 0, 0, 1, 0, 1, 1]


def busy() -> Driver:
    driver = Driver(LAYOUTS["eagle"], [20, 40])
    driver.pass_through([0, 0, 0, 0, 1, 1, 1, 1, 1])
    driver.pass_through(PROMPT)
    driver.serve([*PROMPT, 1, 1, 0])
    driver.manager.check()
    return driver


def swap_order(driver: Driver) -> None:
    lru = driver.manager.pools[0].lru
    lru.move_to_end(next(run for run in lru if run.node.children()), last=False)


def lose_target(driver: Driver) -> None:
    run = next(iter(driver.manager.pools[0].lru))
    driver.manager.pools[0].detach(run)


def alias(driver: Driver) -> None:
    seq = driver.live[0].seq
    seq.pages[0][-1] = seq.pages[0][-2]


BROKEN = {
    "a leaked page": lambda d: d.manager.pools[0].free.pop(),
    "a page in two places": alias,
    "a lost holder": lambda d: setattr(d.live[0].seq.runs[0][0], "refs", 2),
    "a lost pin": lambda d: setattr(d.live[0].seq.tip, "pins", 0),
    "a parent before its leaf": swap_order,
    "a block without its target": lose_target,
    "published beyond committed": lambda d: setattr(d.live[0].seq, "committed", 3),
    "computed below committed": lambda d: setattr(d.live[0].seq, "computed", 3),
    "reserved below computed": lambda d: setattr(d.live[0].seq, "reserved", 3),
    "reused beyond committed": lambda d: setattr(d.live[0].seq, "reused", 14),
    "a path that is not published": lambda d: setattr(d.live[0].seq, "published", 4),
    "coverage on no page": lambda d: d.live[0].seq.coverage[1].add(14, 400),
    "coverage past the known tokens": lambda d: d.live[0].seq.coverage[1].add(14, 16),
    "coverage of no row": lambda d: d.live[0].seq.coverage[1].add(0, 1),
    "committed rows not covered": lambda d: d.live[0].seq.coverage[0].remove(10, 11),
    "tainted rows not covered": lambda d: d.live[0].seq.tainted[1].add(15, 16),
    "a planned write that is covered": lambda d: d.live[0].seq.pending[1].add(10, 11),
    "tokens out of step": lambda d: d.live[0].seq.tokens.append(1),
    "less room than reserved": lambda d: setattr(d.live[0].seq, "reserved", 99),
    "a window that was left but kept": lambda d: d.live[0].seq.first_block.__setitem__(1, 2),
    "an evictable run that is held": lambda d: d.manager.pools[0].lru.update(
        {d.live[0].seq.runs[0][0]: None}
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_check_finds(name):
    driver = busy()
    BROKEN[name](driver)
    with pytest.raises(InvariantError):
        driver.manager.check()
