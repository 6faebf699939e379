"""Block keys: one identity, everywhere."""

import os
import subprocess
import sys

import pytest
from driving import LAYOUTS, Driver

from tandemkv.base.errors import RequestError
from tandemkv.kv.keys import Namespace, block_key, block_keys, pack_tokens, root_key, token_bytes

SHOW = (
    "from tandemkv.kv.keys import *;"
    "r = root_key('m', Namespace('a', 's'));"
    "print(r.hex(), block_key(r, token_bytes(pack_tokens([1, 2, 70000]))).hex())"
)


def test_an_adapter_and_a_salt_of_the_same_name_have_different_keys():
    keys = {
        root_key("m", Namespace(adapter="x")),
        root_key("m", Namespace(salt="x")),
        root_key("m", Namespace()),
        root_key("mx", Namespace()),
        root_key("m", Namespace(adapter="x", salt="x")),
        root_key("m", Namespace(adapter="xx")),
    }
    assert len(keys) == 6


def test_keys_are_equal_in_every_process():
    shown = set()
    for seed in ("0", "1", "4242"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        shown.add(subprocess.check_output([sys.executable, "-c", SHOW], env=env))
    assert len(shown) == 1


def test_a_key_depends_on_every_token_before_it():
    root = root_key("m", Namespace())
    first = list(block_keys(root, token_bytes(pack_tokens([1, 2, 3, 4, 5, 6])), 2))
    other = list(block_keys(root, token_bytes(pack_tokens([1, 9, 3, 4, 5, 6])), 2))
    assert len(first) == 3
    assert not set(first) & set(other)


def test_the_tree_and_a_router_compute_the_same_keys():
    driver = Driver(LAYOUTS["eagle"], [20, 40])
    prompt = [1, 0, 0, 1, 1, 1, 0, 1, 0]
    driver.pass_through(prompt)
    tree = driver.manager.tree
    found = tree.match(token_bytes(pack_tokens(prompt)), Namespace())
    root = root_key("", Namespace())
    keys = list(block_keys(root, token_bytes(pack_tokens(prompt)), 4))
    assert [node.key for node in found.nodes] == keys
    assert found.partial.key == block_key(keys[-1], token_bytes(pack_tokens(prompt[8:])))


def test_tokens_are_packed_as_four_bytes_little_endian():
    assert token_bytes(pack_tokens([1, 258])) == b"\x01\0\0\0\x02\x01\0\0"


@pytest.mark.parametrize("bad", [[-1], [2**32], ["a"], [1.5], [None]])
def test_a_token_that_is_no_token_is_refused(bad):
    with pytest.raises(RequestError, match="token ids"):
        pack_tokens(bad)
