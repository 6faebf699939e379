"""`kv_transfer_params`: how a request says that its prompt is computed by another worker.

The names are those that existing prefill/decode proxies pass between an OpenAI-compatible prefill
server and a decode server, so that a pair of workers can stand behind one of them:

    proxy -> prefill   {"do_remote_decode": true}, max_tokens 1
    proxy <- prefill   {"do_remote_prefill": true, "remote_engine_id": ..., "remote_host": ...,
                        "remote_port": ..., "remote_request_id": ...}: held for whoever asks
    proxy -> decode    the same, unchanged: the rows are fetched from there

Without a remote_request_id the named worker computes the prompt when it is asked, and ships rows
as they are computed. Law: exactly one of the two is asked, and an unknown name is refused. This
module knows no worker.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tandemkv.base.errors import RequestError

FIELD = "kv_transfer_params"
MAX_NAME = 512


class KVTransferParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """do_remote_decode: compute the prompt, keep its rows, another worker generates.
    do_remote_prefill: fetch the prompt's rows from the worker named.

    remote_host, remote_port: its control channel. remote_engine_id: which incarnation of it.
    remote_request_id: a prompt that it holds already. remote_block_ids, tp_size: taken, as proxies
    send them, and not used: pages and ranks are settled between the workers.
    """

    do_remote_prefill: bool = False
    do_remote_decode: bool = False
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_block_ids: list[Any] | None = None
    tp_size: int | None = None

    def validate(self) -> None:
        """RequestError of one line, with the field at fault."""
        if self.do_remote_prefill == self.do_remote_decode:
            raise RequestError(
                f"{FIELD}: exactly one of do_remote_prefill and do_remote_decode must be true",
                param=FIELD,
            )
        for name in ("remote_engine_id", "remote_request_id", "remote_host"):
            value = getattr(self, name)
            if value is not None and not 0 < len(value) <= MAX_NAME:
                raise RequestError(
                    f"{FIELD}: {name} must have 1 to {MAX_NAME} characters", param=FIELD
                )
        if self.do_remote_decode:
            return
        for name in ("remote_engine_id", "remote_host", "remote_port"):
            if getattr(self, name) is None:
                raise RequestError(f"{FIELD}: do_remote_prefill needs {name}", param=FIELD)
        if not 1 <= (self.remote_port or 0) <= 65535:
            raise RequestError(f"{FIELD}: remote_port must be 1 to 65535", param=FIELD)


def parse_transfer(value: Any) -> KVTransferParams | None:
    """Of a JSON value; None is absent. RequestError names what is wrong."""
    if value is None:
        return None
    try:
        params = msgspec.convert(value, KVTransferParams)
    except msgspec.ValidationError as error:
        raise RequestError(f"{FIELD}: {error}", param=FIELD) from None
    params.validate()
    return params
