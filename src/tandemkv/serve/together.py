"""Prefill workers, decode workers and their router, started by one command and looked after.

Law: the workers are children of the router's process and end with it; one that ends is started
again at its old address, less and less often if it keeps ending. The router learns of ends and
starts from the workers' answers, as it does of workers that somebody else started. This module
routes nothing.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence

from tandemkv.base.config import EngineConfig
from tandemkv.base.errors import ConfigError
from tandemkv.engine.processes import Child, Places
from tandemkv.serve.address import bind
from tandemkv.serve.http import HttpServer
from tandemkv.serve.router import Router, router_server
from tandemkv.serve.worker import LOCALHOST, ServingOptions
from tandemkv.transfer.offer import WorkerRole

log = logging.getLogger("tandemkv")

LOOK_S = 0.2
USEFUL_AFTER_S = 60.0
"""A worker that ran for so long came up: its end is no sign that the next one ends at once."""
START_S = 600.0


class Together:
    """num_prefill and num_decode workers of one configuration. Starts them when made."""

    def __init__(
        self,
        engine: EngineConfig,
        num_prefill: int,
        num_decode: int,
        *,
        draft_transfer: bool = True,
        grace_s: float,
    ) -> None:
        roles = [WorkerRole.PREFILL] * num_prefill + [WorkerRole.DECODE] * num_decode
        ports = _free_ports(len(roles))
        self.options = [
            ServingOptions(
                engine=engine,
                role=str(role),
                port=port,
                draft_transfer=draft_transfer,
                grace_s=grace_s,
            )
            for role, port in zip(roles, ports, strict=True)
        ]
        self._over = threading.Event()
        self.places = Places(len(roles), self._spawn)
        self._thread = threading.Thread(target=self._look, name="tandemkv-workers", daemon=True)

    def urls(self, role: WorkerRole) -> list[str]:
        """Where the workers of a role answer."""
        return [f"http://{o.host}:{o.port}" for o in self.options if o.role == role]

    @property
    def children(self) -> Sequence[Child]:
        """In the order of `options`."""
        return self.places.children

    def run(self, at: socket.socket, *, grace_s: float, about: str = "") -> None:
        """Route until a signal, then end the workers. Prints the URL once every worker answers.

        Raises ConfigError if one ends before that.
        """
        try:
            server = self.server(at, grace_s=grace_s)
            server.run_shown(lambda url: f"serving on {url}/v1 ({about})")
        finally:
            self.close()

    def server(self, at: socket.socket, *, grace_s: float) -> HttpServer:
        """Their router's server, once every worker answers; they are looked after from then on.

        Raises ConfigError if one ends before that.
        """
        router = Router(self.urls(WorkerRole.PREFILL), self.urls(WorkerRole.DECODE))
        self._await_workers()
        self._thread.start()
        return router_server(router, at, grace_s=grace_s)

    def close(self) -> None:
        """End the workers."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self.places.close()

    def _spawn(self, i: int) -> Child:
        return Child("tandemkv.serve.worker", self.options[i])

    def _await_workers(self) -> None:
        """Until each accepts connections and answers; its port is bound before it loads."""
        until = time.monotonic() + START_S
        for child, options in zip(self.children, self.options, strict=True):
            while not _answers(options):
                if not child.alive:
                    raise ConfigError(f"a {options.role} worker ended before it was ready")
                if time.monotonic() > until:
                    raise ConfigError(f"a {options.role} worker did not answer in {START_S:g} s")
                time.sleep(LOOK_S)
            child.useful = True

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            now = time.monotonic()
            for child, options in zip(self.children, self.options, strict=True):
                child.useful = child.useful or now - child.started > USEFUL_AFTER_S
                if not child.alive and not child.ended:
                    log.warning("the %s worker at port %d ended", options.role, options.port)
            self.places.look(now)


def _answers(options: ServingOptions) -> bool:
    """Whether a worker answers GET /health."""
    try:
        with socket.create_connection((options.host, options.port), 0.5) as asking:
            asking.settimeout(0.5)
            asking.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            return asking.recv(16).startswith(b"HTTP/1.")
    except OSError:
        return False


def _free_ports(count: int) -> list[int]:
    """Different free ports of this host; somebody may take one before its worker does."""
    bound = [bind(LOCALHOST, 0) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in bound]
    for sock in bound:
        sock.close()
    return ports
