"""How a benchmark script starts, ends and prints: its results file, its errors, its limits.

Law: a results file that cannot be written is refused before anything is measured; an error or an
interruption is one line on stderr. This module measures nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence

from tandemkv.base.errors import TandemError
from tandemkv.lab.provenance import check_writable

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with --json, described by the first line of the script's text."""
    found = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    found.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    return found


def count(text: str) -> int:
    """A number from 1 on, for argparse."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {text!r}")
    return value


def run(
    measure: Callable[[argparse.Namespace], None],
    options: argparse.ArgumentParser,
    argv: Sequence[str] | None = None,
) -> int:
    """Measure with the options given; the exit status."""
    args = options.parse_args(argv)
    try:
        if args.json is not None:
            check_writable(args.json)
        measure(args)
    except TandemError as error:
        print(f"{options.prog}: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print(f"{options.prog}: interrupted, nothing was written", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def lines(figures: Mapping[str, float], limits: Mapping[str, float] | None = None) -> list[str]:
    """A line for each figure; one that has a limit says on which side of it it is."""
    width = max(len(name) for name in figures)
    out: list[str] = []
    for name, value in figures.items():
        limit = (limits or {}).get(name)
        verdict = ""
        if limit is not None:
            verdict = f"  {'within' if value <= limit else 'over'} the limit of {limit:g}"
        out.append(f"{name:{width}} {value:12.3f}{verdict}")
    return out
