"""The soak over HTTP in small: workers as a user starts them, one killed and started again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nixl_cu13", reason="NIXL is not installed")

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


def soak(*options: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(SOAK), *options]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def test_a_short_soak_of_a_deployment_ends_well(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    how = ("--requests", "60", "--kills", "1", "--aborts", "0.2", "--json", str(out))
    done = soak("--deployment", "1p1d", *how)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("all within limits")
    figures = json.loads(out.read_text())["figures"]
    assert (figures["requests"], figures["killed_prefill"]) == (60, 1)
    assert (figures["failed"], figures["pages_leaked"], figures["workers_missing"]) == (0, 0, 0)
    assert figures["aborted_waiting"] + figures["aborted_decoding"] > 0
    assert figures["fetched"] > 20


def test_a_deployment_that_cannot_be_is_refused_by_name() -> None:
    for asked, why in (("2p1d", "two decode workers"), ("many", "must look like 1p1d")):
        done = soak("--deployment", asked)
        assert done.returncode == 2
        assert why in done.stderr
