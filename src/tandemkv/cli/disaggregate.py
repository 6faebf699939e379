"""`--disaggregate`: how many workers of each role, and the cores that each process has.

Law: what is asked is refused by name before anything is loaded. This module starts nothing.
"""

from __future__ import annotations

import os
import re

import msgspec

from tandemkv.base.config import EngineConfig
from tandemkv.base.errors import ConfigError


def num_workers(asked: str | None) -> tuple[int, int]:
    """(prefill, decode) workers of "NpMd"; (0, 1) for None. Raises ConfigError."""
    if asked is None:
        return 0, 1
    found = re.fullmatch(r"([1-9]\d?)p([1-9]\d?)d", asked)
    if found is None:
        raise ConfigError(f"--disaggregate must look like 1p1d or 2p3d, got {asked!r}")
    return int(found[1]), int(found[2])


def num_prefill(asked: str | None) -> int:
    """Prefill workers of "Np1d"; 0 for None. Raises ConfigError for more decode workers."""
    prefill, decode = num_workers(asked)
    if decode > 1:
        raise ConfigError(f"--disaggregate {asked}: one decode worker here, as 2p1d")
    return prefill


def share_cores(config: EngineConfig, num_prefill: int, num_decode: int = 1) -> EngineConfig:
    """Threads for each process, so that together they have the cores there are; as said if said."""
    if not num_prefill or config.threads is not None or config.device.startswith("cuda"):
        return config
    share = max(1, len(os.sched_getaffinity(0)) // (num_decode + num_prefill))
    return msgspec.structs.replace(config, threads=share)
