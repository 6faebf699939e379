"""Block keys: the one identity of a block on device, host, wire and router.

Law: a key is a function of the model, the namespace and the tokens 0..end alone, equal in every
process and on every machine. Every field of a root key is tagged and length-prefixed, so that an
adapter "x" and a salt "x" never meet. Tokens are packed once, as unsigned 32-bit little endian.
This module stores nothing; the tree compares tokens as well, so a collision costs time only.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator
from hashlib import sha256

import msgspec

from tandemkv.base.errors import RequestError

KEY_BYTES = 32
TOKEN_BYTES = 4
_TYPECODE = "I" if array("I").itemsize == TOKEN_BYTES else "L"


class Namespace(msgspec.Struct, frozen=True):
    """What separates requests that must not share KV although their tokens are equal."""

    adapter: str = ""
    salt: str = ""


def _field(tag: bytes, value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return tag + len(data).to_bytes(8, "little") + data


def root_key(model_fingerprint: str, namespace: Namespace) -> bytes:
    """Key of the empty prefix: 32 bytes."""
    parts = (
        b"tandemkv-root-1",
        _field(b"M", model_fingerprint),
        _field(b"A", namespace.adapter),
        _field(b"S", namespace.salt),
    )
    return sha256(b"".join(parts)).digest()


def block_key(parent: bytes, tokens: bytes) -> bytes:
    """Key of the block that holds `tokens` (packed) under the block whose key is `parent`."""
    return sha256(parent + tokens).digest()


def pack_tokens(tokens: Iterable[int]) -> array[int]:
    """Token ids as an array of u32. Raises RequestError for an id that does not fit."""
    try:
        return array(_TYPECODE, tokens)
    except (OverflowError, TypeError) as error:
        raise RequestError(f"token ids must be integers in [0, 2^32): {error}") from None


def token_bytes(packed: array[int]) -> bytes:
    """The packed tokens, little endian on every machine."""
    if sys.byteorder == "big":
        packed = packed[:]
        packed.byteswap()
    return packed.tobytes()


def block_keys(root: bytes, packed: bytes, block_size: int) -> Iterator[bytes]:
    """Keys of the whole blocks of a packed prompt, in order (what a router computes)."""
    key, step = root, block_size * TOKEN_BYTES
    for start in range(0, len(packed) - step + 1, step):
        key = sha256(key + packed[start : start + step]).digest()
        yield key
