"""A worker as a server: an engine that exchanges KV with others, answering HTTP to a router.

    tandemkv worker            by hand, on any host
    python -m ...serve.worker  as a child of whoever starts a deployment; ends with it

Law: a control channel that others than this host reach has a secret; a worker that stops lets its
answers end first, as any server. This module decides nothing about requests.
"""

from __future__ import annotations

import ipaddress
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from tandemkv.base.config import EngineConfig
from tandemkv.base.errors import ConfigError, TandemError
from tandemkv.engine.background import AsyncEngine
from tandemkv.engine.channel import tcp
from tandemkv.engine.engine import Engine
from tandemkv.engine.processes import options_of
from tandemkv.engine.worker import Worker
from tandemkv.serve.address import bind
from tandemkv.serve.http import DEFAULT_GRACE_S, HttpServer
from tandemkv.serve.service import engine_server
from tandemkv.transfer.offer import WorkerRole
from tandemkv.transfer.wire import check_secret

LOCALHOST = "127.0.0.1"
LOOK_S = 0.1


class ServingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """host, port: of HTTP. control_host, control_port: of the control channel, as other workers
    reach it; port 0 takes a free one. secret_file: what frames are signed with."""

    engine: EngineConfig
    role: str
    host: str = LOCALHOST
    port: int = 0
    control_host: str = LOCALHOST
    control_port: int = 0
    draft_transfer: bool = True
    secret_file: str | None = None
    grace_s: float = DEFAULT_GRACE_S

    def secret(self) -> bytes | None:
        """What the file says. ConfigError if it cannot be read, is too short, or is needed."""
        if self.secret_file is None:
            if not _is_local(self.control_host):
                raise ConfigError(
                    f"a control channel at {self.control_host} can be reached from elsewhere: give"
                    " its workers a secret (--secret-file)"
                )
            return None
        try:
            secret = Path(self.secret_file).read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"--secret-file {self.secret_file}: {error.strerror}") from None
        check_secret(secret)
        return secret


def worker_server(
    options: ServingOptions, load: Callable[[EngineConfig], Engine] = Engine.from_config
) -> tuple[HttpServer, Worker]:
    """A server, bound, over a worker, loaded. ConfigError says what is wrong before it loads."""
    if options.control_host in ("0.0.0.0", "::"):
        raise ConfigError(
            f"--control {options.control_host}: give the address that other workers reach it at"
        )
    secret = options.secret()
    sock = bind(options.host, options.port)
    worker = Worker(
        load(options.engine),
        WorkerRole(options.role),
        tcp(options.control_host, options.control_port),
        draft_transfer=options.draft_transfer,
        secret=secret,
    )
    return engine_server(AsyncEngine(worker), sock, grace_s=options.grace_s), worker  # type: ignore[arg-type]


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _stop_when(ended: Callable[[], bool], server: HttpServer) -> None:
    waiting = threading.Event()
    while not ended():
        waiting.wait(LOOK_S)
    server.stop()


def main() -> None:
    """Entry of a child: its options are a line on stdin, and it stops when that closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    told = options_of(ServingOptions)
    if told is None:
        return
    options, ended = told
    try:
        server, _ = worker_server(options)
    except TandemError as error:
        print(f"tandemkv: {options.role} worker: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    threading.Thread(target=_stop_when, args=(ended, server), daemon=True).start()
    server.run()


if __name__ == "__main__":
    main()
