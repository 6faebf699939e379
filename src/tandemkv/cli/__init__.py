"""The command line: `tandemkv COMMAND`.

Law: an error is one line on stderr that names its cause; exit status 2 for what the operator must
change, 1 for what went wrong on the way, 130 when interrupted. `--help` imports no torch: each
command imports what it needs when it runs.
"""

from __future__ import annotations

import _thread
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any

import typer

from tandemkv.base.errors import ConfigError, RequestError, TandemError
from tandemkv.cli import measuring, preparing, routing, serving, working
from tandemkv.cli.options import near, suggestion

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="tandemkv",
    help="Speculative decoding with the drafter's KV cache as a first-class citizen.",
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    """Speculative decoding with the drafter's KV cache as a first-class citizen."""
    if version:
        import tandemkv

        print(f"tandemkv {tandemkv.__version__}")
        raise typer.Exit()


for group in (serving, working, routing, measuring, preparing):
    group.register(app)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit with its status."""
    sys.exit(run(list(sys.argv[1:] if argv is None else argv)))


def run(argv: list[str]) -> int:
    """Run a command; the exit status. Errors are printed, one line, and never raised."""
    hook, sys.unraisablehook = sys.unraisablehook, _repeat_interrupt
    try:
        root = typer.main.get_command(app)
        status = root.main(argv or ["--help"], prog_name="tandemkv", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        print("tandemkv: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stdout = None  # type: ignore[assignment]  # nobody reads it: no second complaint at exit
        return EXIT_ERROR
    except Exception as error:
        return _explain(error, argv)
    finally:
        sys.unraisablehook = hook


def _repeat_interrupt(lost: Any) -> None:
    """Interrupt again if that was lost in a place that cannot raise, as an import's callbacks."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        threading.Timer(0.02, _thread.interrupt_main).start()
    else:
        sys.__unraisablehook__(lost)


def _explain(error: Exception, argv: list[str]) -> int:
    if "--verbose" in argv:
        traceback.print_exc()
    if isinstance(error, TandemError):
        status = EXIT_USAGE if isinstance(error, ConfigError | RequestError) else EXIT_ERROR
        message = str(error)
    elif hasattr(error, "format_message"):  # the option parser's own
        status, message = EXIT_USAGE, _usage(error)
    else:
        status = EXIT_ERROR
        message = f"{type(error).__name__}: {error}"
        if "--verbose" not in argv:
            message += " (--verbose shows where)"
    print(f"tandemkv: {' '.join(message.split())}", file=sys.stderr)
    return status


def _usage(error: Any) -> str:
    """What the option parser says, in our form, with a suggestion where there is a near name."""
    message: str = error.format_message().rstrip(".")
    command = getattr(getattr(error, "ctx", None), "command", None)
    if hasattr(error, "possibilities"):
        flags = [
            flag for p in getattr(command, "params", ()) for flag in (*p.opts, *p.secondary_opts)
        ]
        return f"no such option: {error.option_name}{_near_flag(error.option_name, flags)}"
    if message.startswith("No such command"):
        name = message.split("'")[1]
        known = list(getattr(command, "commands", ()))
        return f"no such command {name!r}{suggestion(name, known)}"
    if "valid boolean" in message:
        return f"{error.param.opts[0]} must be true or false"
    return message[:1].lower() + message[1:]


def _near_flag(asked: str, flags: Sequence[str]) -> str:
    """The suggestion of a flag; the dashes, which all have, count for no likeness."""
    by_name = {flag.lstrip("-"): flag for flag in flags}
    found = near(asked.lstrip("-"), list(by_name))
    return f"; did you mean {by_name[found]}?" if found else ""
