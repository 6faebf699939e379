"""What is installed is whole: every data file of the package is matched by its package-data."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "tandemkv"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def data_files() -> list[Path]:
    files = [p for p in PACKAGE.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    return [p.relative_to(PACKAGE) for p in files if p.suffix not in (".py", ".pyc")]


def matched(patterns: list[str]) -> set[Path]:
    return {p.relative_to(PACKAGE) for pattern in patterns for p in PACKAGE.glob(pattern)}


def test_every_data_file_is_installed_with_the_package() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["tandemkv"]
    assert set(data_files()) <= matched(patterns)
    assert not set(data_files()) <= matched([p for p in patterns if "png" not in p])


def test_the_shipped_weights_stay_small_and_come_with_their_card() -> None:
    weights = PACKAGE / "weights" / "eagle3-smollm2-135m"
    assert sum(p.stat().st_size for p in weights.iterdir()) < 16 * 2**20
    assert "GSM8K" in (weights / "MODEL_CARD.md").read_text()


def test_the_notice_names_every_bundled_prompt_set() -> None:
    notice = (PACKAGE / "lab" / "data" / "NOTICE.md").read_text()
    for name in (PACKAGE / "lab" / "data").glob("*.jsonl"):
        assert name.name in notice
    assert "src/tandemkv/lab/data/NOTICE.md" in PROJECT["project"]["license-files"]
