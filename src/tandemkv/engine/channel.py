"""The control channel between workers: frames over ZeroMQ, one address each. The door to ZeroMQ.

Law: sending never blocks and never raises: a frame that cannot go is lost, as the sessions expect.
Who answers is learned from what it says: every frame carries its sender's address. This module
reads no message.
"""

from __future__ import annotations

from typing import Any

import zmq

from tandemkv.base.errors import ConfigError

MAX_QUEUED = 10_000


class Channel:
    """Frames to and from other workers. address: ipc:// or tcp://, bound here."""

    def __init__(self, address: str, engine_id: str) -> None:
        self.address, self.engine_id = address, engine_id
        self._context: Any = zmq.Context()
        self._inbox: Any = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, MAX_QUEUED)
        try:
            self._inbox.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"control address {address}: {error}") from None
        self._out: dict[str, Any] = {}
        self._addresses: dict[str, str] = {}

    def send(self, peer: str, frame: bytes) -> None:
        """To a worker that has spoken before, by its engine id; else the frame is lost."""
        address = self._addresses.get(peer)
        if address is not None:
            self.send_to(address, frame)

    def send_to(self, address: str, frame: bytes) -> None:
        """To whoever listens at an address."""
        socket = self._out.get(address)
        if socket is None:
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
            socket.connect(address)
            self._out[address] = socket
        try:
            socket.send_multipart(
                [self.address.encode(), self.engine_id.encode(), frame], zmq.NOBLOCK
            )
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
                self._addresses[parts[1].decode()] = parts[0].decode()
            except UnicodeDecodeError:
                continue
            frames.append(parts[2])

    def close(self) -> None:
        """Let go of the address; frames on their way may be lost."""
        self._context.destroy(linger=0)
