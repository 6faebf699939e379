"""What a run says while it works: on a terminal, in a pipe, and when it is to be quiet."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from tandemkv.train.data import Generated
from tandemkv.train.progress import Progress
from tandemkv.train.teacher import load_teacher
from tandemkv.train.trainer import Point

POINT = Point(20, 4000, 2.0, 3.0, 1.0, 1.5, 0.1, 1e-3)


@pytest.fixture
def clock(monkeypatch):
    """A list whose one item is the time."""
    now = [100.0]
    monkeypatch.setattr("tandemkv.train.progress.time.monotonic", lambda: now[0])
    return now


def said(progress: Progress) -> str:
    return progress._console.file.getvalue()


def of(*, terminal: bool, quiet: bool = False, width: int = 100) -> Progress:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width)
    return Progress(quiet, console=console)


def test_a_pipe_gets_a_line_at_once_then_every_few_seconds_with_the_time_left(clock):
    progress = of(terminal=False)
    for share, at in ((0.0, 100), (0.1, 105), (0.25, 115), (0.3, 117), (1.0, 120)):
        clock[0] = at
        progress.generated(Generated("chat", 8, 3072, share))
    assert said(progress).splitlines() == [
        "  0 %  generated chat: 8 rows, 3.1 k tokens",
        " 25 %  generated chat: 8 rows, 3.1 k tokens  eta 45 s",
        "100 %  generated chat: 8 rows, 3.1 k tokens",
    ]


def test_the_time_left_starts_anew_with_training(clock):
    progress = of(terminal=False)
    progress.generated(Generated("chat", 8, 3072, 1.0))
    clock[0] = 500.0
    progress.trained(POINT, 0.1)
    clock[0] = 520.0
    progress.trained(POINT, 0.3)
    lines = said(progress).splitlines()
    assert lines[1].startswith(" 10 %  step 20")
    assert "eta" not in lines[1]
    assert lines[2].endswith("eta 70 s")


def test_a_first_step_that_was_not_timed_has_no_speed(clock):
    progress = of(terminal=False)
    progress.trained(Point(1, 400, 0.0, 3.0, 1.0, 1.5, 0.1, 1e-3), 0.1)
    progress.trained(POINT, 1.0)
    assert ["tok/s" in line for line in said(progress).splitlines()] == [False, True]


def test_a_terminal_gets_a_bar(clock):
    progress = of(terminal=True)
    progress.generated(Generated("chat", 8, 3072, 0.25))
    progress.close()
    assert "25%" in said(progress)
    assert "8 rows, 3.1 k tokens" in said(progress)
    assert "━" in said(progress)


def test_a_line_to_copy_is_neither_broken_nor_read_as_markup():
    line = f"go on with: tandemkv train eagle3 --out '/{'a' * 60}[bold]:car:/b c' --resume"
    progress = of(terminal=False, width=40)
    progress.note(line)
    assert said(progress) == line + "\n"


def test_quiet_says_nothing():
    progress = of(terminal=True, quiet=True)
    progress.note("x")
    progress.generated(Generated("chat", 8, 3072, 0.25))
    progress.trained(POINT, 0.1)
    progress.stopping()
    assert said(progress) == ""


def test_loading_shows_no_bar_of_transformers(target, capfd):
    load_teacher(str(target), torch.device("cpu"))
    assert capfd.readouterr().err == ""
