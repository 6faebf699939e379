"""The README's commands exist and do what it says, as they are written there."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = [line.strip() for line in re.findall(r"^    (\S.*)$", README, re.MULTILINE)]


@pytest.mark.parametrize("line", [c for c in COMMANDS if c.startswith("make ")])
def test_each_make_command_is_a_target_that_runs_something(line: str) -> None:
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", *shlex.split(line)[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "pip install" in done.stdout
    wanted = {"make demo": "acceptance", "make test": "pytest", "make bench": "benchmarks"}
    assert wanted[" ".join(shlex.split(line)[:2])] in done.stdout


def test_the_readme_shows_how_to_see_test_and_serve() -> None:
    assert "make demo" in COMMANDS
    assert "make test" in COMMANDS
    assert any(c.endswith("tandemkv serve") for c in COMMANDS)


def test_the_ci_script_calls_the_readmes_test_command() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`tandemkv ([a-z]+(?: eagle3)?)", README))))
def test_each_command_that_the_readme_names_answers_help(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from tandemkv.cli import run

    assert run([*name.split(), "--help"]) == 0
    assert f"tandemkv {name}" in capsys.readouterr().out


@pytest.mark.parametrize("line", [c for c in COMMANDS if "tandemkv " in c and "://" not in c])
def test_each_option_that_the_readme_writes_is_known(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from tandemkv.cli import run

    words = shlex.split(line.split("tandemkv ", 1)[1])
    options = [w for w in words if w.startswith("--")]
    command = words[:2] if words[0] == "train" else words[:1]
    assert run([*command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(option in shown for option in options)


def test_the_request_in_the_readme_is_one_the_server_accepts() -> None:
    from tandemkv.serve.openai import Limits, parse_chat

    body = re.search(r"-d '(\{.*?\})'", README, re.DOTALL)
    assert body
    limits = Limits(model="m", max_model_len=512, vocab_size=1000)
    ask = parse_chat(json.loads(body[1]), limits)
    assert ask.params.greedy


def test_every_file_that_the_readme_links_exists() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
