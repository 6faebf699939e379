"""`tandemkv acceptance`: run the experiment with progress, print the report, write the JSON file.

Law: what was measured is shown and written, also when it is interrupted or parity is broken; the
exit status says which. This module decides nothing about acceptance.
"""

from __future__ import annotations

from tandemkv.lab.acceptance import Experiment, LabOptions
from tandemkv.lab.provenance import write_json
from tandemkv.lab.report import (
    BarProgress,
    console,
    document,
    sentences,
    tables,
    verdict,
)

EXIT_PARITY = 1
EXIT_INTERRUPTED = 130


def acceptance(options: LabOptions, json_path: str | None = None) -> int:
    """Run, report, and return the exit status: 0, 1 if parity is broken, 130 if interrupted."""
    experiment = Experiment(options)
    interrupted = False
    with BarProgress(console(stderr=True)) as progress:
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
    judged = experiment.judged
    held, line = verdict(rows, judged=judged)
    if interrupted:
        console(stderr=True).print("interrupted: the rows above are complete, the rest is missing")
        return EXIT_INTERRUPTED
    (out if held else console(stderr=True)).print(line, highlight=False)
    return 0 if held else EXIT_PARITY
