"""From the asked configuration to what will run: sizes of pools, lengths, batch limits, reasons.

Law: every number of the running engine is decided here, once, before a pool is allocated, and
keeps its reason. One memory budget covers every group; it is split by the groups' geometry: an
unwindowed group gets a page for every cached token, a windowed one its window for each running
request plus room for branch points. This module allocates nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from tandemkv.base.config import EngineConfig, Resolved, Resolver
from tandemkv.base.errors import ConfigError
from tandemkv.kv.layout import LayerGroup, Layout
from tandemkv.model.drafter import Drafter
from tandemkv.model.target import Target

CPU_BUDGET_BYTES = 2 << 30
GPU_BUDGET_SHARE = 0.8
BRANCHES_PER_REQUEST = 2
DEFAULT_MAX_MODEL_LEN = 8192


@dataclass(frozen=True, slots=True)
class Plan:
    """The resolved numbers of an engine."""

    layout: Layout
    num_pages: tuple[int, ...]
    num_draft_tokens: int
    max_model_len: int
    max_batch_tokens: int
    max_running: int
    resolved: Resolved


def pick_device(config: EngineConfig, resolver: Resolver) -> torch.device:
    """The device: as asked, or CUDA when there is one."""
    asked = None if config.device == "auto" else config.device
    found = "cuda" if torch.cuda.is_available() else "cpu"
    why = "a CUDA device was found" if found == "cuda" else "no CUDA device was found"
    name = resolver.choose("device", asked, found, why)
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r} is not a torch device; use cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was asked for, but torch finds no CUDA device")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported; use cpu or cuda")
    return device


def pick_dtype(config: EngineConfig, device: torch.device, resolver: Resolver) -> str:
    asked = None if config.dtype == "auto" else config.dtype
    chosen = "float32" if device.type == "cpu" else "bfloat16"
    why = "exact on CPU" if device.type == "cpu" else "native on the GPU"
    return resolver.choose("dtype", asked, chosen, why)


def pick_threads(config: EngineConfig, resolver: Resolver) -> int:
    cores = len(os.sched_getaffinity(0))
    return resolver.choose("threads", config.threads, cores, f"{cores} cores are available")


def resolve(
    config: EngineConfig,
    resolver: Resolver,
    target: Target,
    drafter: Drafter | None,
    device: torch.device,
    dtype: str,
) -> Plan:
    """Decide layout, pools and limits. Raises ConfigError naming the option that cannot be met."""
    on_gpu = device.type == "cuda"
    block = resolver.choose("block_size", None, config.block_size, "tokens per tree node")
    target_page = resolver.choose(
        "target_page_size", config.target_page_size, block, "one page per block and group"
    )
    draft_page = resolver.choose(
        "draft_page_size", config.draft_page_size, block, "one page per block and group"
    )
    groups = target.layer_groups(target_page)
    if drafter is not None:
        groups += drafter.layer_groups(draft_page, dtype)
    layout = Layout(block_size=block, groups=groups)
    default_k = drafter.spec.num_draft_tokens if drafter is not None else 0
    if drafter is None:
        k = resolver.choose("num_draft_tokens", None, 0, "there is no drafter")
    else:
        k = resolver.choose(
            "num_draft_tokens", config.num_draft_tokens, default_k, "the drafter's default"
        )
    running = resolver.choose(
        "max_running", config.max_running, 128 if on_gpu else 32, f"default on {device.type}"
    )
    batch = resolver.choose(
        "max_batch_tokens",
        config.max_batch_tokens,
        4096 if on_gpu else 512,
        f"default on {device.type}",
    )
    tokens = _cache_tokens(config, resolver, groups, device)
    length = _max_model_len(config, resolver, target, tokens, k)
    if batch < k + 1 + layout.lookahead:
        raise ConfigError(
            f"max_batch_tokens {batch} is below {k + 1 + layout.lookahead}, one verify step of"
            f" num_draft_tokens {k}"
        )
    pages = tuple(
        _group_pages(group, layout, tokens, length, running, batch, k, resolver) for group in groups
    )
    _check_memory(groups, pages, device)
    return Plan(layout, pages, k, length, batch, running, resolver.done())


def _check_memory(
    groups: tuple[LayerGroup, ...], pages: tuple[int, ...], device: torch.device
) -> None:
    """Refuse pools that the device has no memory for, before any of it is touched."""
    wanted = sum(g.page_bytes * n for g, n in zip(groups, pages, strict=True))
    free = free_bytes(device)
    if free is not None and wanted > free:
        raise ConfigError(
            f"the KV pools need {wanted / 2**30:,.1f} GiB and {device.type} has"
            f" {free / 2**30:,.1f} GiB free; lower kv_cache_tokens or max_running"
        )


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can be allocated on a device; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            found = [line for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        return None
    return int(found[0].split()[1]) * 1024 if found else None


def _cache_tokens(
    config: EngineConfig, resolver: Resolver, groups: tuple[LayerGroup, ...], device: torch.device
) -> int:
    per_token = sum(g.slot_bytes for g in groups if g.window is None)
    per_token = per_token or sum(g.slot_bytes for g in groups)
    free = free_bytes(device) if device.type == "cuda" else None
    if free is not None:
        budget, source = int(free * GPU_BUDGET_SHARE), f"{GPU_BUDGET_SHARE:.0%} of free memory"
    else:
        budget, source = CPU_BUDGET_BYTES, f"{CPU_BUDGET_BYTES >> 30} GiB budget on CPU"
    chosen = max(config.block_size, budget // per_token)
    return resolver.choose(
        "kv_cache_tokens",
        config.kv_cache_tokens,
        chosen,
        f"{source} / {per_token} bytes per token over all unwindowed groups",
    )


def _max_model_len(
    config: EngineConfig, resolver: Resolver, target: Target, tokens: int, k: int
) -> int:
    limit = target.spec.max_model_len
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len {config.max_model_len} exceeds the model's {limit} positions"
        )
    room = tokens - k - 2 - config.block_size
    if room < 1:
        raise ConfigError(
            f"kv_cache_tokens {tokens} is too small for one request; at least"
            f" {k + 3 + config.block_size} are needed"
        )
    chosen, why = min(limit, DEFAULT_MAX_MODEL_LEN), "the model's positions, at most 8192"
    if room < chosen:
        chosen, why = room, f"what kv_cache_tokens {tokens} can hold of one request"
    length = resolver.choose("max_model_len", config.max_model_len, chosen, why)
    if length > room:
        raise ConfigError(
            f"max_model_len {length} does not fit kv_cache_tokens {tokens}; at most {room} does"
        )
    return length


def _group_pages(
    group: LayerGroup,
    layout: Layout,
    tokens: int,
    length: int,
    running: int,
    batch: int,
    k: int,
    resolver: Resolver,
) -> int:
    block = layout.block_size
    pages = -(-tokens // group.page_size)
    reason = f"{tokens} cached tokens / {group.page_size} slots per page"
    if group.window is not None:
        live = min(length, group.window + batch + layout.lookahead + k) + 2 * block
        slots = running * (live + BRANCHES_PER_REQUEST * (group.window + block))
        needed = -(-slots // group.page_size)
        if needed < pages:
            pages = needed
            reason = (
                f"window {group.window}: {running} requests x ({live} live slots +"
                f" {BRANCHES_PER_REQUEST} branch points)"
            )
    return resolver.choose(f"num_pages[{group.name}]", None, pages, reason)
