"""`worker`: one process of a disaggregated deployment, for a router to find.

Law: what is asked is refused by name before anything is loaded. This module starts no other worker.
"""

from __future__ import annotations

from types import SimpleNamespace

import typer

from tandemkv.base.errors import ConfigError
from tandemkv.cli.loading import description, load
from tandemkv.cli.options import ENGINE, MODEL_ARGUMENT, Opt, command, engine_config
from tandemkv.cli.serving import port_and_grace

ROLES = ("prefill", "decode")
_WORKER = (
    Opt("role", str, "What it does: prefill or decode."),
    Opt("host", str, "Address to answer HTTP on.", default="127.0.0.1"),
    Opt("port", int, "Port of HTTP; 0 takes a free one.", default="8000"),
    Opt(
        "control",
        str,
        "Where other workers reach it, HOST:PORT; port 0 takes a free one.",
        default="127.0.0.1:0",
    ),
    Opt(
        "secret_file",
        str,
        "What workers sign their messages with, the same for all; needed beyond this host.",
        default="none",
    ),
    Opt(
        "draft_transfer",
        bool,
        "Whether the drafter's rows are exchanged too.",
        ("--draft-transfer/--no-draft-transfer",),
        default="on",
    ),
    Opt("grace", float, "Seconds that requests in flight have when it stops.", default="10"),
)


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    command(
        app,
        "worker",
        *(MODEL_ARGUMENT, *_WORKER, *ENGINE),
        examples=(
            "tandemkv worker --role prefill --port 8101",
            "tandemkv worker --role decode --port 8201",
        ),
    )(worker)


def worker(given: SimpleNamespace) -> None:
    """Compute prompts for others, or generate over their rows."""
    if given.role not in ROLES:
        asked = "nothing" if given.role is None else repr(given.role)
        raise ConfigError(f"--role must be prefill or decode, got {asked}")
    config = engine_config(given)
    port, grace_s = port_and_grace(given)
    host, control_port = _control(given.control)
    from tandemkv.serve.worker import ServingOptions, worker_server

    options = ServingOptions(
        engine=config,
        role=given.role,
        host=given.host or "127.0.0.1",
        port=port,
        control_host=host,
        control_port=control_port,
        draft_transfer=given.draft_transfer is not False,
        secret_file=given.secret_file,
        grace_s=grace_s,
    )
    server, made = worker_server(options, lambda config: load(config, shown=True))
    about = description(made.resolved)
    server.run_shown(lambda url: f"{given.role} worker on {url} ({about}, {made.address})")


def _control(asked: str | None) -> tuple[str, int]:
    if asked is None:
        return "127.0.0.1", 0
    host, colon, port = asked.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--control must look like 10.0.0.1:5600, got {asked!r}")
    return host.strip("[]"), int(port)
