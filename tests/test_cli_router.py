"""`tandemkv router`: what is refused by name, and that it starts, says where, and stops."""

from __future__ import annotations

import signal
import subprocess
import sys

import httpx
import pytest

from tandemkv.base.errors import ConfigError
from tandemkv.cli import run
from tandemkv.cli.routing import urls


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "--decode is missing"),
        (["--prefill", "http://a:1"], "--decode is missing"),
        (["--decode", "a:8000"], "--decode: a worker's URL looks like http://host:port"),
        (["--decode", "http://a:1/v1"], "--decode: a worker's URL"),
        (["--decode", "http://a:99999"], "--decode: a worker's URL"),
        (["--decode", "http://user:pw@a:1"], "--decode: a worker's URL"),
        (["--decode", "http://a:1,http://a:1/"], "--decode names http://a:1 twice"),
        (["--decode", "http://a:1", "--prefill", "http://a:1"], "--prefill and --decode both"),
        (["--decode", "http://a:1", "--port", "70000"], "--port must be in"),
        (["--decode", "http://a:1", "--grace", "-1"], "--grace must be in"),
        (["--decode", "http://a:1", "--decod", "x"], "did you mean --decode?"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["router", *argv]) == 2
    said = capsys.readouterr().err
    assert named in said
    assert said.count("\n") == 1


def test_urls_are_taken_apart() -> None:
    assert urls(" http://a:1/, https://[::1]:2 ,", "--decode") == ["http://a:1", "https://[::1]:2"]
    assert urls(None, "--prefill") == []
    with pytest.raises(ConfigError, match="--prefill"):
        urls("ftp://a", "--prefill")


def test_a_router_starts_without_workers_says_where_and_stops() -> None:
    argv = ["router", "--decode", "http://127.0.0.1:1", "--port", "0"]
    command = [sys.executable, "-c", "from tandemkv.cli import main; main()", *argv]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        assert line.startswith("routing to 0 prefill and 1 decode worker(s) on http://127.0.0.1:")
        assert "is not there yet" in process.stderr.readline()
        url = line.split()[-1].removesuffix("/v1")
        assert httpx.get(url + "/health").status_code == 503
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stderr.read() == ""


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from tandemkv.serve.address import bind

    with bind("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        assert run(["router", "--decode", "http://127.0.0.1:1", "--port", port]) == 2
    assert "--port" in capsys.readouterr().err
