"""Benchmark scripts: help that explains, results files refused early, one line at every end."""

import subprocess
import sys
from pathlib import Path

import pytest

from tandemkv.base.errors import ConfigError
from tandemkv.lab import script

SCRIPTS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))


def called(measure, *argv, capsys):
    status = script.run(measure, script.parser("What it does.\n\nMore."), argv)
    return status, capsys.readouterr().err


def test_a_results_file_that_cannot_be_written_is_refused_before_anything_is_measured(capsys):
    measured = []
    status, err = called(measured.append, "--json", "/nowhere/x.json", capsys=capsys)
    assert (status, measured) == (2, [])
    assert "--json /nowhere/x.json: there is no directory /nowhere" in err


@pytest.mark.parametrize(
    ("raised", "status", "told"),
    [
        (ConfigError("the model\nis not there"), 2, ": the model is not there\n"),
        (KeyboardInterrupt(), 130, ": interrupted, nothing was written\n"),
    ],
)
def test_an_error_and_an_interrupt_are_one_line(raised, status, told, capsys):
    def fail(_):
        raise raised

    found, err = called(fail, capsys=capsys)
    assert found == status
    assert err.endswith(told)
    assert err.count("\n") == 1


def test_a_figure_says_on_which_side_of_its_limit_it_is():
    limits = {"good": 5.0, "bad": 5.0}
    good, bad, free = script.lines({"good": 5.0, "bad": 5.001, "free": 9.0}, limits)
    assert good.endswith("5.000  within the limit of 5")
    assert bad.endswith("5.001  over the limit of 5")
    assert free.endswith("9.000")


def test_a_count_is_a_whole_number_from_one_on(capsys):
    options = script.parser("x")
    options.add_argument("--repeat", type=script.count)
    assert options.parse_args(["--repeat", "3"]).repeat == 3
    for bad in ("0", "-1", "many"):
        with pytest.raises(SystemExit):
            options.parse_args(["--repeat", bad])
        assert f"must be a whole number from 1 on, got {bad!r}" in capsys.readouterr().err


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_each_option_of_a_benchmark_is_explained(path):
    """Loaded as a module: nothing is measured."""
    import runpy

    options = runpy.run_path(str(path))["options"]()
    actions = [action for action in options._actions if action.dest != "help"]
    assert all(action.help for action in actions)
    for action in actions:
        if action.default not in (None, False):
            several = isinstance(action.default, list)
            shown = " ".join(map(str, action.default)) if several else "%(default)s"
            assert f"(default: {shown})" in action.help


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_refuses_its_results_file_in_one_line(path):
    argv = [sys.executable, str(path), "--json", "/nowhere/x.json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"{path.name}: --json /nowhere/x.json: there is no directory /nowhere\n"
