"""`tandemkv train eagle3` as a user meets it: help, refusals before the load, Ctrl-C, resuming."""

from __future__ import annotations

import json
import os
import shlex
import signal
from pathlib import Path

import msgspec
import pytest
import torch

from tandemkv import cli
from tandemkv.base.errors import ConfigError
from tandemkv.cli import preparing
from tandemkv.train import Eagle3Options, resumed, run
from tandemkv.train.trainer import Trainer

POOLS = '[{"name": "chat", "rows": 8, "length": 96, "max_answer": 40, "max_question": 8}]'


def line(target: Path, out: Path, *more: str) -> list[str]:
    """A command line whose options are far from the defaults."""
    return [
        "train", "eagle3", "--out", str(out), "--target", str(target), "--pools", POOLS,
        "--data-tokens", "1500", "--batch-tokens", "400", "--held-out", "2", "--unroll", "2",
        "--head-rows", "100", "--head-random", "30", "--num-draft-tokens", "2",
        "--max-new-tokens", "8", "--evaluate-limit", "1", "--device", "cpu", *more,
    ]  # fmt: skip


def interrupting(function, *, when=lambda *_: True):
    """The function, with a Ctrl-C after it ran."""

    def wrapped(*args, **kwargs):
        done = function(*args, **kwargs)
        if when(*args):
            os.kill(os.getpid(), signal.SIGINT)
        return done

    return wrapped


def printed_command(said: str) -> list[str]:
    """The command that the last line with one tells to go on with, `tandemkv` taken off."""
    found = [text for text in said.splitlines() if "go on with: " in text][-1]
    words = shlex.split(found.partition("go on with: ")[2])
    assert words[0] == "tandemkv"
    return words[1:]


@pytest.fixture
def no_load(monkeypatch):
    """Loading the target is a failure."""

    def load(*_):
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(run, "load_teacher", load)


@pytest.fixture
def held(tmp_path) -> Path:
    """A directory with the options of a run of 10 steps."""
    out = tmp_path / "held"
    out.mkdir()
    options = Eagle3Options(out=str(out), steps=10, lr=0.01, pause_after=5.0)
    (out / "options.json").write_bytes(msgspec.json.encode(options))
    return out


@pytest.mark.parametrize("stage", ["generation", "training"])
def test_the_printed_command_goes_on_as_printed(target, tmp_path, monkeypatch, capsys, stage):
    whole, out = tmp_path / "whole", tmp_path / "it's [here]"
    assert cli.run(line(target, whole, "--steps", "5")) == 0
    with monkeypatch.context() as patch:
        if stage == "training":
            at_two = interrupting(Trainer._one_step, when=lambda trainer: trainer.step == 2)
            patch.setattr(Trainer, "_one_step", at_two)
        else:
            patch.setattr(run.data, "save_batch", interrupting(run.data.save_batch))
        stopped = cli.run(line(target, out, "--steps", "5"))
        assert stopped == (0 if stage == "training" else 130)
    said = capsys.readouterr()
    assert not (out / "weights").exists()
    assert cli.run(printed_command(said.out + said.err)) == 0
    ended = [torch.load(x / "checkpoint.pt", weights_only=True)["model"] for x in (whole, out)]
    assert all(torch.equal(ended[0][name], ended[1][name]) for name in ended[0])


def test_a_raised_budget_trains_on(target, tmp_path):
    out = tmp_path / "run"
    assert cli.run(line(target, out, "--steps", "2", "--quiet")) == 0
    assert cli.run(["train", "eagle3", "--out", str(out), "--resume", "--steps", "3"]) == 0
    assert torch.load(out / "checkpoint.pt", weights_only=True)["step"] == 3
    assert json.loads((out / "options.json").read_text())["steps"] == 3


def test_resume_takes_the_options_of_the_run_but_for_those_of_the_call(held):
    found = resumed(Eagle3Options(out=str(held), resume=True), ("out", "resume"))
    assert (found.steps, found.lr) == (10, 0.01)
    assert (found.resume, found.pause_after) == (True, None)


def test_options_that_agree_are_taken_and_data_budgets_replace_each_other(held):
    asked = Eagle3Options(out=str(held), resume=True, steps=10, lr=0.01, data_seconds=3.0)
    found = resumed(asked, ("out", "resume", "steps", "lr", "data_seconds"))
    assert (found.steps, found.lr, found.data_seconds) == (10, 0.01, 3.0)
    had = msgspec.structs.replace(found, data_seconds=None, data_tokens=5000)
    (held / "options.json").write_bytes(msgspec.json.encode(had))
    found = resumed(asked, ("data_seconds",))
    assert (found.data_tokens, found.data_seconds) == (None, 3.0)


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (["--lr", "0.004"], ["lr 0.01, not 0.004"]),
        (["--optimizer", "adamw", "--seed", "7"], ['optimizer "muon", not "adamw"', "seed 0, not"]),
        (["--target", "some/where"], ['target left open, not "some/where"']),
        (["--steps", "9"], ["steps 10, not 9", "may only be raised"]),
        (["--seconds", "60"], ["steps 10 as its budget, not seconds 60"]),
        (["--steps", "20", "--tokens", "5"], ["exactly one of steps, tokens and seconds"]),
    ],
)
def test_a_contradiction_names_the_option_and_both_values(held, no_load, capsys, given, parts):
    assert cli.run(["train", "eagle3", "--out", str(held), "--resume", *given]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert all(part in said for part in parts)


@pytest.mark.parametrize(
    ("given", "part"),
    [
        (["--out", "{held}", "--steps", "10"], "already holds a run: go on with `tandemkv train"),
        (["--out", "{held}/none", "--resume"], "holds no run to go on with"),
        (["--out", "{held}/none"], "exactly one of steps, tokens and seconds"),
        (["--out", "{held}/options.json", "--steps", "1"], "is not a directory"),
        (["--out", "{held}/options.json/x", "--steps", "1"], "is not a directory"),
        (
            ["--out", "{held}/x", "--steps", "1", "--evaluate", "{held}/bad"],
            "bad, line 2: not",
        ),
        (["--out", "{held}/x", "--steps", "1", "--prompts", "{held}/odd"], "odd, line 1: needs"),
        (["--out", "{held}/x", "--steps", "1", "--device", "cuda:77"], "cuda:77"),
    ],
)
def test_what_can_be_checked_is_refused_before_the_target_loads(held, no_load, capsys, given, part):
    (held / "bad").write_text('{"prompt": "a"}\n{"prompt"')
    (held / "odd").write_text('{"question": "a"}\n')
    argv = [word.replace("{held}", str(held)) for word in given]
    assert cli.run(["train", "eagle3", *argv]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert part in said
    assert not (held / "x").exists()


def test_a_record_that_is_no_record_is_one_line(held):
    (held / "options.json").write_text("{")
    with pytest.raises(ConfigError, match=r"options\.json cannot be read"):
        resumed(Eagle3Options(out=str(held), resume=True))


def test_ctrl_c_while_the_target_loads_ends_with_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "load_teacher", interrupting(lambda *_: None))
    out = tmp_path / "new"
    assert cli.run(["train", "eagle3", "--out", str(out), "--steps", "1"]) == 130
    said = capsys.readouterr()
    assert said.err == "tandemkv: interrupted\n"
    assert said.out == "loading the target, the embedded default, on cpu\n"
    assert not out.exists()


def test_ctrl_c_while_a_resumed_run_loads_says_how_to_go_on(held, monkeypatch, capsys):
    monkeypatch.setattr(run, "load_teacher", interrupting(lambda *_: None))
    argv = ["train", "eagle3", "--out", str(held), "--resume"]
    assert cli.run([*argv, "--quiet"]) == 130
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert printed_command(said.err) == argv


def test_a_run_says_what_it_is_doing_before_its_first_step(target, tmp_path, capsys):
    assert cli.run(line(target, tmp_path / "run", "--steps", "1")) == 0
    said = capsys.readouterr()
    wanted = ("loading the target", "generating training rows: 1500 tokens", "0 rows", "16 rows",
              "training on batches", "step 1 ", "measuring acceptance")  # fmt: skip
    places = [said.out.find(part) for part in wanted]
    assert -1 not in places
    assert places == sorted(places)
    assert said.err == ""


METHODS = tuple(preparing.OPTIONS)


def help_text(capsys, method: str = "eagle3") -> str:
    assert cli.run(["train", method, "--help"]) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("options", METHODS, ids=lambda kind: kind.method)
def test_help_shows_the_default_of_every_option(capsys, options):
    said = help_text(capsys, options.method)
    fields = msgspec.structs.asdict(options(out=""))
    assert fields.keys() == {option.name for option in preparing.OPTIONS[options]}
    for option in preparing.OPTIONS[options]:
        flag = option.flags[0] if option.flags else "--" + option.name.replace("_", "-")
        shown = said.partition(f" {flag.partition('/')[0]} ")[2].partition(" --")[0]
        value = fields[option.name]
        if option.name in ("out", "resume", "tokens", "seconds"):
            continue
        if option.name == "steps":
            assert "Give one of" in shown
        elif option.name == "confidence":
            assert "[default: on]" in said
        elif value in (None, ()) or isinstance(value, bool):
            assert "[default: " in shown, option.name
        else:
            value = f"{value:g}" if isinstance(value, float) else value
            assert f"[default: {value}]" in shown, option.name


def test_the_example_of_pools_in_the_help_is_one_that_works(capsys):
    example = help_text(capsys).partition("Example: '")[2].partition("'")[0]
    values = {"out": "x", "steps": 1, "pools": json.loads(example)}
    assert preparing._converted(values, Eagle3Options).problems() == []
