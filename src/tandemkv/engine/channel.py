"""The control channel between workers: frames over ZeroMQ, one address each. The door to ZeroMQ.

Law: sending never blocks and never raises: a frame that cannot go is lost, as the sessions expect.
Who answers is learned from what it says: every frame carries its sender's address, and an address
belongs to one engine id at a time: where another one speaks, the earlier process is gone. So is one
whose address refuses connections. This module reads no message.
"""

from __future__ import annotations

import errno
import socket
from typing import Any

import zmq

from tandemkv.base.errors import ConfigError

MAX_QUEUED = 10_000
_GONE = (errno.ECONNREFUSED, errno.ENOENT)


class Channel:
    """Frames to and from other workers. address: ipc:// or tcp://, bound here; port 0 takes a
    free one. replaced: engine ids whose address another one has taken, until they are taken."""

    def __init__(self, address: str, engine_id: str) -> None:
        self.engine_id = engine_id
        self.replaced: list[str] = []
        self._context: Any = zmq.Context()
        self._inbox: Any = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, MAX_QUEUED)
        self._inbox.setsockopt(zmq.IPV6, "[" in address)
        try:
            self._inbox.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"control address {address}: {error}") from None
        self.address: str = self._inbox.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")
        self._out: dict[str, Any] = {}
        self._addresses: dict[str, str] = {}
        self._at: dict[str, str] = {}
        self._probes: dict[str, socket.socket] = {}

    def send(self, peer: str, frame: bytes) -> None:
        """To a worker that has spoken before, by its engine id; else the frame is lost."""
        address = self._addresses.get(peer)
        if address is not None:
            self.send_to(address, frame)

    def send_to(self, address: str, frame: bytes) -> None:
        """To whoever listens at an address. A malformed address loses the frame as well."""
        try:
            out = self._out.get(address)
            if out is None:
                out = self._context.socket(zmq.PUSH)
                out.setsockopt(zmq.LINGER, 0)
                out.setsockopt(zmq.SNDHWM, MAX_QUEUED)
                out.setsockopt(zmq.IPV6, "[" in address)
                self._out[address] = out
                out.connect(address)
            out.send_multipart([self.address.encode(), self.engine_id.encode(), frame], zmq.NOBLOCK)
        except zmq.ZMQError:
            return

    def receive(self, wait_s: float = 0.0) -> list[bytes]:
        """Frames that are here; waits so long for the first."""
        frames: list[bytes] = []
        if not self._inbox.poll(int(1000 * wait_s)):
            return frames
        while True:
            try:
                parts = self._inbox.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return frames
            if len(parts) != 3:
                continue
            try:
                self._note(parts[1].decode(), parts[0].decode())
            except UnicodeDecodeError:
                continue
            frames.append(parts[2])

    def wait(self, fd: int, wait_s: float) -> None:
        """Until a frame is here, or a file descriptor has something to read, or so long."""
        poller = zmq.Poller()
        poller.register(self._inbox, zmq.POLLIN)
        poller.register(fd, zmq.POLLIN)
        poller.poll(max(0, int(1000 * wait_s)))

    def engine_at(self, address: str) -> str | None:
        """Who spoke last from an address."""
        return self._at.get(address)

    def address_of(self, peer: str) -> str | None:
        """Where an engine id spoke from."""
        return self._addresses.get(peer)

    def forget(self, peer: str) -> None:
        """An engine id that is gone, and never comes back."""
        address = self._addresses.pop(peer, None)
        if address is not None and self._at.get(address) == peer:
            del self._at[address]
            out = self._out.pop(address, None)
            if out is not None:
                out.close()

    def refused(self, address: str) -> bool:
        """Whether nobody listens there. False while that is not known; ask again."""
        probe = self._probes.pop(address, None)
        try:
            if probe is None:
                family, to = _socket_address(address)
                probe = socket.socket(family, socket.SOCK_STREAM)
                probe.setblocking(False)
                code = probe.connect_ex(to)
            else:
                code = probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        except (OSError, ValueError):
            return False
        if code == errno.EINPROGRESS:
            self._probes[address] = probe
        else:
            probe.close()
        return code in _GONE

    def close(self) -> None:
        """Let go of the address; frames on their way may be lost."""
        for probe in self._probes.values():
            probe.close()
        self._context.destroy(linger=0)

    def _note(self, engine_id: str, address: str) -> None:
        before = self._at.get(address)
        if before is not None and before != engine_id:
            self.replaced.append(before)
        self._at[address] = engine_id
        self._addresses[engine_id] = address


def tcp(host: str, port: int) -> str:
    """The address of a host and port."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def host_and_port(address: str) -> tuple[str, int]:
    """Of a tcp:// address."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def _socket_address(address: str) -> tuple[int, Any]:
    if address.startswith("ipc://"):
        return socket.AF_UNIX, address.removeprefix("ipc://")
    host, port = host_and_port(address)
    return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host, port)
