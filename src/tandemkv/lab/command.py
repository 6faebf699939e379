"""`tandemkv acceptance`: run the experiment with progress, print the report, write the JSON file.

Law: what was measured is shown and written, also when it is interrupted or parity is broken; the
exit status says which. This module decides nothing about acceptance.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console

from tandemkv.base.config import EngineConfig
from tandemkv.lab.acceptance import Experiment, LabOptions
from tandemkv.lab.progress import BarProgress
from tandemkv.lab.provenance import write_json
from tandemkv.lab.report import console, document, sentences, tables, verdict

if TYPE_CHECKING:
    from tandemkv.engine.engine import Engine

EXIT_PARITY = 1
EXIT_INTERRUPTED = 130


def acceptance(
    options: LabOptions,
    json_path: str | None = None,
    *,
    verbose: bool = False,
    make_engine: Callable[[EngineConfig], Engine] | None = None,
) -> int:
    """Run, report, and return the exit status: 0, 1 if parity is broken, 130 if interrupted."""
    experiment = Experiment(options, make_engine=make_engine)
    interrupted = False
    with BarProgress(Console(stderr=True), verbose=verbose) as progress:
        experiment.progress = progress
        try:
            experiment.run()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            if json_path is not None and experiment.rows:
                _write(experiment, json_path, interrupted)
    return _report(experiment, interrupted)


def _write(experiment: Experiment, path: str, interrupted: bool) -> None:
    content = document(
        experiment.rows,
        options=experiment.options,
        resolved=experiment.resolved,
        interrupted=interrupted,
    )
    write_json(path, content)


def _report(experiment: Experiment, interrupted: bool) -> int:
    out, rows = console(), experiment.rows
    for table in tables(rows):
        out.print(table)
    for sentence in sentences(rows):
        out.print(sentence, highlight=False)
    if interrupted:
        print(f"tandemkv: {interruption(len(rows))}", file=sys.stderr)
        return EXIT_INTERRUPTED
    held, line = verdict(rows, judged=experiment.judged)
    (out if held else console(stderr=True)).print(line, highlight=False)
    return 0 if held else EXIT_PARITY


def interruption(num_rows: int) -> str:
    """What an interruption left of the report."""
    if not num_rows:
        return "interrupted"
    rows = "the row above is" if num_rows == 1 else f"the {num_rows} rows above are"
    return f"interrupted: {rows} complete, the rest is missing"
