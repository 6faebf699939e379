"""What a run says while it works: live bars on a terminal, a line every few seconds elsewhere.

Law: everything goes to stdout, nothing when quiet, and a line meant for copying is never broken.
This module measures nothing but the time that is left.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from tandemkv.train.data import Generated
    from tandemkv.train.trainer import Point


class Progress:
    """One run's notes and bars. console: where to, by default stdout; every_s: between lines."""

    def __init__(
        self, quiet: bool, every_s: float = 10.0, *, console: Console | None = None
    ) -> None:
        self._quiet, self._every_s = quiet, every_s
        self._console = console or Console()
        self._live: Any = None
        self._task: Any = None
        self._stage, self._last = "", 0.0
        self._first = (0.0, 0.0)

    def note(self, text: str) -> None:
        """One line that is always worth showing."""
        if not self._quiet:
            self._console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def generated(self, at: Generated) -> None:
        """Generation got so far."""
        text = f"generated {at.pool}: {at.rows} rows, {at.tokens / 1e3:.1f} k tokens"
        self._advance("generate", text, at.share)

    def trained(self, point: Point, progress: float) -> None:
        """A point of the curve."""
        text = (
            f"step {point.step}  {point.tokens / 1e6:.1f} M tok  ce {point.ce:.3f}"
            f"  l1 {point.l1:.3f}  tau {point.tau:.3f}"
        )
        if point.seconds:
            text += f"  {point.tokens / point.seconds / 1e3:.1f} k tok/s"
        self._advance("train", text, progress)

    def stopping(self) -> None:
        """Answer Ctrl-C; it may come in the middle of a print, so this writes past the buffers."""
        if not self._quiet:
            os.write(2, b"\nstopping after this step; Ctrl-C again stops at once\n")

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._live:
            self._live.stop()
            self._live = None

    def _advance(self, stage: str, text: str, share: float) -> None:
        """Show that a stage is so far (0 to 1), with the time it still takes at this pace."""
        if self._quiet:
            return
        now, share = time.monotonic(), min(1.0, share)
        if stage != self._stage:
            self.close()
            self._stage, self._first, self._last = stage, (now, share), -self._every_s
        done = share - self._first[1]
        if done > 0 and share < 1:
            text += f"  eta {(now - self._first[0]) / done * (1 - share):.0f} s"
        if self._console.is_terminal:
            self._show(text, share)
        elif now - self._last >= self._every_s or share >= 1:
            self._last = now
            self.note(f"{100 * share:3.0f} %  {text}")

    def _show(self, text: str, share: float) -> None:
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bars

        if self._live is None:
            text_column = TextColumn("{task.percentage:3.0f}%  {task.description}", markup=False)
            self._live = Bars(BarColumn(20), text_column, console=self._console)
            self._live.start()
            self._task = self._live.add_task(text, total=1.0)
        self._live.update(self._task, completed=share, description=text)
