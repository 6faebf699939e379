"""The soak in small: real processes, one of them killed; nothing hangs, leaks or says else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nixl_cu13", reason="NIXL is not installed")

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


def test_a_short_soak_with_a_kill_ends_well(tmp_path):
    out = tmp_path / "soak.json"
    argv = [sys.executable, str(SOAK), "--requests", "60", "--kills", "1", "--json", str(out)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())["figures"]
    assert (figures["requests"], figures["kills"]) == (60, 1)
    assert (figures["hung"], figures["pages_leaked"]) == (0, 0)
    assert figures["fetched"] > 30
    assert 1.2 < figures["al_first_tenth"] < 3.8
