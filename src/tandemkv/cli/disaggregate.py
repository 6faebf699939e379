"""`--disaggregate`: how many prefill workers, and the cores that each process has.

Law: what is asked is refused by name before anything is loaded. This module starts nothing.
"""

from __future__ import annotations

import os
import re

import msgspec

from tandemkv.base.config import EngineConfig
from tandemkv.base.errors import ConfigError


def num_prefill(asked: str | None) -> int:
    """Prefill workers of "NpMd"; 0 for None. Raises ConfigError for what is not served."""
    if asked is None:
        return 0
    found = re.fullmatch(r"([1-9]\d?)p([1-9]\d?)d", asked)
    if found is None:
        raise ConfigError(f"--disaggregate must look like 1p1d, got {asked!r}")
    if found[2] != "1":
        raise ConfigError(f"--disaggregate {asked}: one decode worker is supported")
    return int(found[1])


def share_cores(config: EngineConfig, num_prefill: int) -> EngineConfig:
    """Threads for each process, so that together they have the cores there are; as said if said."""
    if not num_prefill or config.threads is not None or config.device.startswith("cuda"):
        return config
    share = max(1, len(os.sched_getaffinity(0)) // (1 + num_prefill))
    return msgspec.structs.replace(config, threads=share)
