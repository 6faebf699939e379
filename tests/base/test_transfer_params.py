"""kv_transfer_params: what proxies send is taken, everything else is refused by name."""

from __future__ import annotations

import pytest

from tandemkv.base.errors import RequestError
from tandemkv.base.transfer_params import parse_transfer

FETCH = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "prefill-1",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
}


def test_absent_is_none():
    assert parse_transfer(None) is None


def test_what_a_proxy_sends_first_is_taken():
    asked = parse_transfer(
        {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
    )
    assert asked is not None
    assert asked.do_remote_decode


def test_what_it_passes_on_is_taken():
    asked = parse_transfer({**FETCH, "remote_request_id": "cmpl-1-0", "tp_size": 1})
    assert asked is not None
    assert (asked.remote_request_id, asked.remote_port) == ("cmpl-1-0", 5600)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ([], "object"),
        ({}, "exactly one"),
        ({**FETCH, "do_remote_decode": True}, "exactly one"),
        ({**FETCH, "remote_ports": 1}, "remote_ports"),
        ({**FETCH, "remote_port": None}, "remote_port"),
        ({**FETCH, "remote_port": 0}, "remote_port"),
        ({**FETCH, "remote_port": "5600"}, "remote_port"),
        ({**FETCH, "remote_host": ""}, "remote_host"),
        ({**FETCH, "remote_engine_id": None}, "remote_engine_id"),
        ({**FETCH, "remote_engine_id": "x" * 513}, "remote_engine_id"),
        ({**FETCH, "do_remote_prefill": 1}, "do_remote_prefill"),
    ],
)
def test_everything_else_is_refused_by_name(value, named):
    with pytest.raises(RequestError, match=named) as raised:
        parse_transfer(value)
    assert raised.value.param == "kv_transfer_params"
    assert raised.value.status == 400
