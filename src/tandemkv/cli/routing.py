"""`router`: one address in front of prefill and decode workers.

Law: what is asked is refused by name before a socket is opened; no worker need be there for the
router to start. This module knows no worker.
"""

from __future__ import annotations

from types import SimpleNamespace
from urllib.parse import urlsplit

import typer

from tandemkv.base.errors import ConfigError
from tandemkv.cli.options import Opt, command
from tandemkv.cli.serving import port_and_grace

_ROUTER = (
    Opt("decode", str, "URLs of decode workers, comma-separated; they answer the requests."),
    Opt(
        "prefill",
        str,
        "URLs of prefill workers, comma-separated; they compute prompts for decode workers.",
        default="none: decode workers compute prompts themselves",
    ),
    Opt("host", str, "Address to listen on.", default="127.0.0.1"),
    Opt("port", int, "Port; 0 takes a free one.", default="8000"),
    Opt("grace", float, "Seconds that requests in flight have when it stops.", default="10"),
)


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    command(
        app,
        "router",
        *_ROUTER,
        examples=(
            "tandemkv router --prefill http://10.0.0.1:8100 --decode http://10.0.0.2:8200",
            "tandemkv router --decode http://127.0.0.1:8201,http://127.0.0.1:8202 --port 9000",
        ),
    )(router)


def router(given: SimpleNamespace) -> None:
    """Serve the OpenAI API from prefill and decode workers, chosen by the rows that they lack."""
    decode, prefill = urls(given.decode, "--decode"), urls(given.prefill, "--prefill")
    if not decode:
        raise ConfigError("--decode is missing: the URLs of one decode worker or more")
    for url in decode:
        if url in prefill:
            raise ConfigError(f"--prefill and --decode both name {url}: a worker has one role")
    port, grace_s = port_and_grace(given)
    from tandemkv.serve.address import bind

    sock = bind(given.host or "127.0.0.1", port)
    from tandemkv.serve.router import run_router

    run_router(prefill, decode, sock, grace_s=grace_s)


def urls(value: str | None, option: str) -> list[str]:
    """A comma-separated list of workers' URLs. Raises ConfigError naming the option."""
    found: list[str] = []
    for part in (value or "").split(","):
        if url := part.strip().rstrip("/"):
            found.append(_checked(url, option))
    for url in found:
        if found.count(url) > 1:
            raise ConfigError(f"{option} names {url} twice")
    return found


def _checked(url: str, option: str) -> str:
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port out of range, brackets that do not close
        whole = False
        parts = urlsplit("")
    if not whole or parts.path or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"{option}: a worker's URL looks like http://host:port, got {url!r:.80}")
    return url
