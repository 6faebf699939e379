"""How far an experiment is: live bars on a terminal, a line for each finished phase elsewhere.

Law: it goes to stderr and never into the report. This module times nothing that is reported.
"""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from tandemkv.lab.acceptance import Progress


class BarProgress(Progress):
    """A bar for each phase; where `on` is not a terminal, a line for each finished phase.

    verbose: say also elsewhere than on a terminal what is being loaded.
    """

    def __init__(self, on: Console, *, verbose: bool = False) -> None:
        self._console = on
        self._says_loading = on.is_terminal or verbose
        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[prompts]}/{task.fields[of]} prompts"),
            TextColumn("{task.completed:.0f}/{task.total:.0f} tokens"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=on,
            disable=not on.is_terminal,
        )
        self._task: Any = None
        self._started = 0.0

    def __enter__(self) -> BarProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def loading(self, drafter: str) -> None:
        if self._says_loading:
            with_ = "without a drafter" if drafter == "none" else f"with the drafter {drafter}"
            self._say(f"loading the model {with_} ...")

    def phase(self, name: str, index: int, of: int, prompts: int, tokens: int) -> None:
        title = f"[{index}/{of}] {name}"
        self._task = self._bar.add_task(title, total=tokens, prompts=0, of=prompts)
        self._started = time.perf_counter()

    def advance(self, tokens: int, prompts: int, spared: int) -> None:
        task = self._bar.tasks[self._task]
        self._bar.update(
            self._task,
            advance=tokens,
            total=(task.total or 0) - spared,
            prompts=task.fields["prompts"] + prompts,
        )

    def done(self) -> None:
        if self._console.is_terminal:
            return
        task = self._bar.tasks[self._task]
        seconds, prompts = time.perf_counter() - self._started, task.fields["prompts"]
        self._say(
            f"{task.description}: {prompts} prompt{'s' if prompts != 1 else ''},"
            f" {task.completed:.0f} tokens, {seconds:.1f} s"
        )

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
