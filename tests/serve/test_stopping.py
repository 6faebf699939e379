"""A server stops within its grace and a bounded time, whatever its clients and its clock do."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
from collections.abc import Callable

import httpx
import pytest
from serving import LONG, TEXT, Running

STOPS_WITHIN_S = 12.0  # grace, time to flush, time to cancel: 5.2 s; what is left is for a slow box


@pytest.fixture
def stopping(start: Callable[..., Running]) -> Running:
    return start(drafter="none", grace_s=0.2)


def connected(server: Running, *, receive_buffer: int | None = None) -> socket.socket:
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.connect(("127.0.0.1", httpx.URL(server.url).port))
    return client


def request(method: str, path: str, body: bytes = b"") -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        + body
    )


def says_nothing(server: Running) -> socket.socket:
    return connected(server)


def keeps_an_idle_connection(server: Running) -> socket.socket:
    client = connected(server)
    client.sendall(request("GET", "/health"))
    assert client.recv(1000).startswith(b"HTTP/1.1 200")
    return client


def sends_half_a_head(server: Running) -> socket.socket:
    client = connected(server)
    client.sendall(request("GET", "/health")[:-4])
    return client


def sends_half_a_body(server: Running) -> socket.socket:
    client = connected(server)
    client.sendall(request("POST", TEXT, json.dumps(LONG).encode())[:-4])
    return client


def streams(server: Running) -> socket.socket:
    client = connected(server)
    sent = {**LONG, "stream": True, "n": 16}
    client.sendall(request("POST", TEXT, json.dumps(sent).encode()))
    assert client.recv(1000).startswith(b"HTTP/1.1 200")
    return client


def never_reads(server: Running) -> socket.socket:
    """More answers than the sockets' buffers take: the server waits in its write."""
    client = connected(server, receive_buffer=2048)
    client.setblocking(False)
    tries = 0
    while tries < 20:  # it writes no more, so it reads no more: nothing can be sent either
        try:
            client.send(request("GET", "/metrics") * 50)
            tries = 0
        except BlockingIOError:
            tries += 1
            time.sleep(0.01)
    return client


CLIENTS = [
    says_nothing,
    keeps_an_idle_connection,
    sends_half_a_head,
    sends_half_a_body,
    streams,
    never_reads,
]


@pytest.mark.parametrize("client", CLIENTS)
def test_no_client_holds_up_a_stop(
    stopping: Running, client: Callable[[Running], socket.socket]
) -> None:
    with client(stopping):
        stopping.stop(STOPS_WITHIN_S)
    assert not stopping.engine.alive


@pytest.mark.parametrize("client", CLIENTS)
def test_a_second_interrupt_waits_for_no_client(
    start: Callable[..., Running], client: Callable[[Running], socket.socket]
) -> None:
    server = start(drafter="none", grace_s=1000.0)
    with client(server):
        for _ in range(2):
            server.server._server.handle_exit(signal.SIGINT, None)
        server.stop(STOPS_WITHIN_S)
    assert not server.engine.alive


def test_clients_that_connect_while_it_stops_do_not_hold_it_up(stopping: Running) -> None:
    with contextlib.ExitStack() as clients:
        stopping.server.stop()
        for _ in range(50):
            with contextlib.suppress(ConnectionError):
                clients.enter_context(connected(stopping))
        stopping.stop(STOPS_WITHIN_S)


def set_the_clock_back() -> None:
    """The clock says 0 for a while: long enough that an idle loop reads it, and waits by it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: 0.0)
        time.sleep(0.3)


def test_a_stop_wakes_a_loop_that_sleeps_past_its_time(stopping: Running) -> None:
    """Its timer was set by one clock and its wait by another: it would look again in a day."""
    set_the_clock_back()
    stopping.stop(STOPS_WITHIN_S)


def test_a_stop_that_wakes_nobody_is_seen_with_what_holds_it_up(
    stopping: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping.server._server, "wake", lambda: None)
    set_the_clock_back()
    with pytest.raises(AssertionError, match=r"(?s)did not stop.*timer.*Server.serve"):
        stopping.stop(1)
    monkeypatch.undo()
    stopping.stop(STOPS_WITHIN_S)
