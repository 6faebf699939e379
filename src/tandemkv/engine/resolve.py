"""From the asked configuration to what will run: sizes of pools, lengths, batch limits, reasons.

Law: every number of the running engine is decided here, once, before a pool is allocated, and
keeps its reason. One memory budget covers every group; it is split by their geometry, as `sizing`
says: windows first, and what is left holds cached tokens. This module allocates nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import msgspec
import torch

from tandemkv.base.config import EngineConfig, Resolved, Resolver
from tandemkv.base.errors import ConfigError
from tandemkv.engine.sizing import Load, choose_page_size, pool_pages, tokens_within
from tandemkv.kv.layout import Domain, LayerGroup, Layout
from tandemkv.model.drafter import Drafter
from tandemkv.model.target import Target

CPU_BUDGET_BYTES = 2 << 30
GPU_BUDGET_SHARE = 0.8
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
    groups = target.layer_groups(block)
    if drafter is not None:
        groups += drafter.layer_groups(block, dtype)
    groups = tuple(_paged(group, block, config, resolver) for group in groups)
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
    if batch < k + 1 + layout.lookahead:
        raise ConfigError(
            f"max_batch_tokens {batch} is below {k + 1 + layout.lookahead}, one verify step of"
            f" num_draft_tokens {k}"
        )
    limit = config.max_model_len or min(target.spec.max_model_len, DEFAULT_MAX_MODEL_LEN)
    load = Load(cached_tokens=0, length=limit, running=running, batch=batch, num_draft_tokens=k)
    tokens = _cache_tokens(config, resolver, layout, load, device)
    length = _max_model_len(config, resolver, target, tokens, k)
    load = msgspec.structs.replace(load, cached_tokens=tokens, length=length)
    pages = tuple(
        resolver.choose(f"num_pages[{group.name}]", None, *pool_pages(group, layout, load))
        for group in groups
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


def _paged(group: LayerGroup, block: int, config: EngineConfig, resolver: Resolver) -> LayerGroup:
    """The group with its page size: as asked for its domain, or as its window suggests."""
    drafts = group.domain is Domain.DRAFT
    asked = config.draft_page_size if drafts else config.target_page_size
    size, why = choose_page_size(group, block)
    size = resolver.choose(f"page_size[{group.name}]", asked, size, why)
    return msgspec.structs.replace(group, page_size=size)


def _cache_tokens(
    config: EngineConfig, resolver: Resolver, layout: Layout, load: Load, device: torch.device
) -> int:
    free = free_bytes(device) if device.type == "cuda" else None
    if free is not None:
        budget, source = int(free * GPU_BUDGET_SHARE), f"{GPU_BUDGET_SHARE:.0%} of free memory"
    else:
        budget, source = CPU_BUDGET_BYTES, f"{CPU_BUDGET_BYTES >> 30} GiB budget on CPU"
    tokens, why = tokens_within(budget, layout, load)
    return resolver.choose("kv_cache_tokens", config.kv_cache_tokens, tokens, f"{source} / {why}")


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
