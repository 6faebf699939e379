"""What is said between workers: every message survives the wire, and no bytes can hurt."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandemkv.base.errors import ConfigError, InvariantError
from tandemkv.base.ids import NO_PAGE
from tandemkv.base.logprobs import TokenLogprobs
from tandemkv.base.sampling import SamplingParams
from tandemkv.kv.keys import Namespace
from tandemkv.kv.layout import Domain, LayerGroup, Layout
from tandemkv.transfer import wire
from tandemkv.transfer.offer import Offer, WorkerRole, group_offers
from tandemkv.transfer.wire import (
    Accept,
    Ask,
    Bye,
    Cancel,
    Cancelled,
    Chunk,
    ChunkNote,
    Delivered,
    Envelope,
    Failed,
    FirstToken,
    GroupAsk,
    GroupSpans,
    Hello,
    Lost,
    Refused,
    Renew,
    Undecodable,
    Welcome,
    decode,
    encode,
)

SECRET = b"0123456789abcdef"
GROUPS = (GroupSpans(0, ((0, 4), (8, 12))), GroupSpans(1, ((3, 12),)))
LAYOUT = Layout(
    block_size=16,
    groups=(
        LayerGroup(name="target", domain=Domain.TARGET, layers=(0, 1), num_kv_heads=2, head_dim=8),
    ),
)
OFFER = Offer(
    engine_id="p1",
    role=WorkerRole.PREFILL,
    model_fingerprint="m",
    drafter_fingerprint="",
    num_draft_tokens=3,
    block_size=16,
    groups=group_offers(LAYOUT, [7]),
    transport="nixl",
    transport_blob=bytes(range(256)),
)
ASK = Ask(
    epoch=3,
    request_id="chatcmpl-1",
    oldest=2,
    tokens=tuple(range(12)),
    params=SamplingParams(temperature=0.5, logit_bias={7: -1.5}, stop_token_ids=(2,)),
    seed=-(2**63),
    groups=(GroupAsk(0, ((0, 4), (8, 12)), 0, (5, NO_PAGE, 9)), GroupAsk(1, (), 0, ())),
    namespace=Namespace(adapter="a", salt="s"),
    num_output=2,
    priority=-1,
    parked="cmpl-7",
)
MESSAGES = [
    Hello(offer=OFFER),
    Welcome(offer=OFFER),
    Refused(field="target.head_dim", mine="64", theirs="128"),
    ASK,
    Renew(epoch=3),
    Cancel(epoch=3, reason="client went"),
    Bye(epoch=3),
    Accept(epoch=3, lease_s=30.0),
    Chunk(epoch=3, index=2, groups=GROUPS, part=1, num_parts=4),
    FirstToken(
        epoch=3,
        token=11,
        num_rows=12,
        seed=2**64 - 1,
        cached_tokens=4,
        logprobs=TokenLogprobs(11, -0.25, ((11, -0.25), (3, -2.0))),
    ),
    Delivered(
        epoch=3,
        chunks=(ChunkNote(0, GROUPS),),
        lost=(Lost(GROUPS[1:], "masked"),),
        final=True,
        clean=True,
    ),
    Failed(epoch=3, reason="prompt is too long"),
    Cancelled(epoch=3, clean=False, reason="lease", chunks=(ChunkNote(1, GROUPS[:1]),)),
]


def test_every_kind_of_message_is_tried_below():
    kinds = {type(message) for message in MESSAGES}
    assert kinds == set(wire.AnyMessage.__args__)


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "signed"])
@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_arrives_as_it_was_sent_with_who_sent_it_to_whom(message, secret):
    frame = encode(message, source="d1", target="p1", secret=secret)
    assert decode(frame, secret) == Envelope("d1", "p1", message)


def test_the_first_bytes_of_a_frame_are_part_of_the_protocol():
    frame = encode(Bye(epoch=1), source="a", target="b")
    assert frame == b"TK\x01\x00" + msgspec.msgpack.encode(["a", "b", {"type": "Bye", "epoch": 1}])


# -- bytes that are no message ---------------------------------------------------------------------


def reason(frame: bytes, secret: bytes | None = None) -> str:
    answer = decode(frame, secret)
    assert isinstance(answer, Undecodable), answer
    return answer.reason


def test_why_a_frame_is_dropped_is_one_of_a_few_words():
    frame = encode(ASK, source="d1", target="p1")
    signed = encode(ASK, source="d1", target="p1", secret=SECRET)
    assert reason(b"") == reason(b"GET / HTTP/1.1") == "not a frame"
    assert reason(b"TK\x02\x00" + frame[4:]) == "other version"
    assert reason(frame[:-1]) == reason(frame + b"\0") == "malformed"
    assert reason(frame, SECRET) == "not authentic"
    assert reason(signed, b"another secret of 16") == "not authentic"
    assert reason(signed) == "signed, but no secret is configured here"
    assert reason(bytes(wire.MAX_BYTES + 1)) == "too long"


def test_any_flipped_bit_of_a_signed_frame_is_noticed():
    frame = encode(Chunk(epoch=3, index=0, groups=GROUPS), source="p", target="d", secret=SECRET)
    for i in range(len(frame) * 8):
        data = bytearray(frame)
        data[i // 8] ^= 1 << i % 8
        assert isinstance(decode(bytes(data), SECRET), Undecodable)


@given(st.binary(max_size=200))
@settings(max_examples=150, deadline=None)
def test_no_bytes_raise(data):
    for secret in (None, SECRET):
        decode(data, secret)
        decode(b"TK\x01\x00" + data, secret)
        decode(b"TK\x01\x01" + data, secret)


@given(st.sampled_from(MESSAGES), st.data())
@settings(max_examples=200, deadline=None)
def test_no_damaged_message_raises(message, data):
    frame = bytearray(encode(message, source="d1", target="p1"))
    for _ in range(data.draw(st.integers(1, 4))):
        i = data.draw(st.integers(0, len(frame) - 1))
        frame[i] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)))
    assert isinstance(decode(bytes(frame)), Envelope | Undecodable)
    assert isinstance(decode(bytes(frame[:cut])), Envelope | Undecodable)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.sampled_from(MESSAGES), st.data(), json_like)
@settings(max_examples=200, deadline=None)
def test_no_field_with_another_value_raises(message, data, value):
    body = msgspec.to_builtins(message, builtin_types=(bytes,))
    field = data.draw(st.sampled_from(sorted(body)))
    body[field] = value
    frame = b"TK\x01\x00" + msgspec.msgpack.encode(["d1", "p1", body])
    assert isinstance(decode(frame), Envelope | Undecodable)


def test_deep_nesting_is_malformed():
    assert reason(b"TK\x01\x00" + b"\x91" * 100_000) == "malformed"


# -- values that no session could work with --------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": 0},
        {"epoch": -1},
        {"oldest": 4},
        {"tokens": ()},
        {"tokens": (-1,)},
        {"tokens": (2**32,)},
        {"num_output": 13},
        {"groups": ((0, ((0, 2),), 0, (1,)), (0, ((2, 4),), 0, (1,)))},
        {"groups": ((0, ((0, 13),), 0, (1,)),)},
        {"groups": ((0, ((2, 2),), 0, (1,)),)},
        {"groups": ((0, ((3, 2),), 0, (1,)),)},
        {"groups": ((0, ((-1, 2),), 0, (1,)),)},
        {"groups": ((0, ((0, 2), (2, 4)), 0, (1,)),)},
        {"groups": ((0, ((4, 6), (0, 2)), 0, (1,)),)},
        {"groups": ((0, ((0, 2),), 2**40, (1,)),)},
        {"groups": ((0, ((0, 2),), 0, (-2,)),)},
        {"groups": ((0, ((0, 2),), 0, tuple(range(40))),)},
        {"params": {"temperature": -1.0}},
        {"params": {"top_k": -1}},
        {"params": {"logit_bias": {"3": 1e9}}},
        {"request_id": "x" * 1000},
    ],
    ids=str,
)
def test_an_ask_that_makes_no_sense_is_malformed(change):
    body = msgspec.to_builtins(ASK) | change
    assert reason(b"TK\x01\x00" + msgspec.msgpack.encode(["d1", "p1", body])) == "malformed"


def test_an_asks_pages_are_a_page_table():
    assert ASK.groups[0].table == [5, NO_PAGE, 9]
    assert GroupAsk(0, ((8, 12),), 2, (9,)).table == [NO_PAGE, NO_PAGE, 9]
    assert ASK.wanted == (GroupSpans(0, ((0, 4), (8, 12))), GroupSpans(1, ()))


def test_our_own_mistakes_are_told_to_us():
    with pytest.raises(InvariantError, match=r"a Failed of \d+ bytes"):
        encode(Failed(epoch=1, reason="x" * wire.MAX_BYTES), source="a", target="b")
    with pytest.raises(ConfigError, match="transfer secret has 5 bytes; give at least 16"):
        wire.check_secret(b"short")
    wire.check_secret(SECRET)
