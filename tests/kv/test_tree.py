"""The prefix tree: matching, partial blocks, pruning, its own check."""

import pytest
from driving import LAYOUTS, Driver

from tandemkv.base.errors import InvariantError
from tandemkv.kv.keys import Namespace, pack_tokens, token_bytes
from tandemkv.kv.tree import common_tokens


def packed(tokens) -> bytes:
    return token_bytes(pack_tokens(tokens))


def grown(*prompts, name: str = "eagle") -> Driver:
    driver = Driver(LAYOUTS[name], [40, 80])
    for prompt in prompts:
        driver.pass_through(list(prompt))
    return driver


def test_a_match_ends_at_the_first_token_that_differs():
    driver = grown([1, 1, 1, 1, 0, 0, 0, 0, 1, 1])
    for length in range(11):
        asked = [*[1, 1, 1, 1, 0, 0, 0, 0, 1, 1][:length], 5, 5]
        assert driver.manager.match(asked).end == length


def test_the_longest_common_prefix_wins_inside_a_block():
    driver = grown([1, 1, 1, 1, 2, 9, 9], [1, 1, 1, 1, 2, 3, 9], [1, 1, 1, 1, 2, 3, 4])
    assert driver.manager.match([1, 1, 1, 1, 2, 3, 4, 8]).end == 7
    assert driver.manager.match([1, 1, 1, 1, 2, 3, 8, 8]).end == 6
    assert driver.manager.match([1, 1, 1, 1, 2, 8, 8, 8]).end == 5


def test_of_equal_prefixes_the_better_covered_one_is_matched():
    driver = grown([1, 1, 1, 1, 2, 3, 4], [1, 1, 1, 1, 2, 3, 9])
    tree = driver.manager.tree
    (node,) = tree.match(packed([1, 1, 1, 1]), Namespace()).nodes
    poor = node.children()[0]
    driver.manager.pools[1].detach(poor.runs[1])
    driver.check()
    assert driver.manager.match([1, 1, 1, 1, 2, 3, 7]).coverage[1] == ((1, 6),)


def test_matching_changes_nothing():
    driver = grown([1, 2, 3, 4, 5])
    before = driver.manager.usage(), list(driver.manager.pools[0].lru)
    driver.manager.match([1, 2, 3, 4, 5, 6])
    driver.manager.match([7], Namespace(salt="unseen"))
    assert (driver.manager.usage(), list(driver.manager.pools[0].lru)) == before
    assert Namespace(salt="unseen") not in driver.manager.tree.roots


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [([1, 2, 3], [1, 2, 4], 2), ([1], [1, 2], 1), ([], [1], 0), ([256], [0], 0), ([257], [1], 0)],
)
def test_common_prefixes_are_counted_in_tokens(a, b, same):
    assert common_tokens(packed(a), packed(b)) == same


def test_an_emptied_cache_leaves_no_block_and_no_root():
    driver = grown([1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7, 8, 9, 1], [3])
    assert driver.manager.reset_cache() > 0
    assert driver.manager.tree.nodes() == []
    assert driver.manager.tree.roots == {}
    driver.check()


def test_children_survive_the_growth_and_shrinking_of_their_parent():
    driver = grown([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 7])
    tree = driver.manager.tree
    (node,) = tree.match(packed([1, 2, 3, 4]), Namespace()).nodes
    assert [child.tokens for child in node.children()] == [packed([5]), packed([6]), packed([7])]
    for expected in (2, 1, 0):
        driver.evict(0, len(driver.manager.pools[0].free) and 1)
        assert len(node.children()) == expected
        driver.check()


SPOILS = {
    "a foreign key": lambda node: setattr(node, "key", b"x" * 32),
    "a gap to the parent": lambda node: setattr(node, "start", 1),
    "a foreign parent": lambda node: setattr(node.only, "parent", node.parent),
    "spans outside the block": lambda node: setattr(node.runs[0], "low", 40),
    "a page without rows": lambda node: setattr(node.runs[1], "parts", ((1, 2),)),
    "a page count": lambda node: setattr(node.runs[0], "size", 3),
    "a misplaced run": lambda node: setattr(node.runs[0], "group", 1),
    "a short run called full": lambda node: setattr(node.only.runs[0], "parts", None),
}


@pytest.mark.parametrize("name", SPOILS)
def test_the_check_finds(name):
    driver = grown([1, 2, 3, 4, 5, 6])
    (node,) = driver.manager.tree.match(packed([1, 2, 3, 4]), Namespace()).nodes
    driver.manager.tree.check()
    SPOILS[name](node)
    with pytest.raises(InvariantError):
        driver.manager.tree.check()
