"""Generated rows: what counts in the loss, pools on disk, the order in which they are trained on.

Law: a batch file exists whole or not at all, and the batches of a run are a function of its seed;
words inside a repetition loop carry no loss, and held-out rows are never trained on. This module
does not run the target: `generate` is given a SelfPlay.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from tandemkv.base.errors import ConfigError
from tandemkv.train.options import PoolOptions, write_atomically
from tandemkv.train.prompts import Prompt
from tandemkv.train.selfplay import ANSWER, SelfPlay

NGRAM = 12
LOOP = 2
"""A token is inside a loop when the 12-gram that it ends has occurred twice before."""


def repeats(tokens: Tensor, counted: Tensor, n: int = NGRAM, chunk: int = 32) -> Tensor:
    """How often the n-gram ending at each token occurred before in its row, [B, T].

    counted [B, T] bool: occurrences that end elsewhere (prompt, template) do not count.
    """
    length = tokens.shape[1]
    before = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril(-1)
    out = torch.zeros_like(tokens)
    for i in range(0, len(tokens), chunk):
        part = tokens[i : i + chunk].long()
        key = torch.zeros_like(part)
        for back in range(n):
            key = key * 1000003 + F.pad(part, (back, 0))[:, :length] + 7
        same = (key[:, :, None] == key[:, None, :]) & before & counted[i : i + chunk][:, None, :]
        out[i : i + chunk] = same.sum(-1)
    return out


def loss_mask(tokens: Tensor, kinds: Tensor) -> Tensor:
    """bool [B, T]: the target's answers outside repetition loops."""
    answers = kinds == ANSWER
    return answers & (repeats(tokens, answers) < LOOP)


class Generated(msgspec.Struct, frozen=True):
    """How far generation is: rows and tokens of one pool, share (0 to 1) of all the pools.

    The batch in hand counts by the positions that it has played; rows are whole batches.
    """

    pool: str
    rows: int
    tokens: int
    share: float


class RowPlan:
    """Which prompts and temperatures a pool's batch number n is made of; a function of the seed."""

    def __init__(self, pool: PoolOptions, prompts: Sequence[Prompt], seed: int) -> None:
        self.pool, self.seed = pool, seed
        self.prompts = [p for p in prompts if p.pool == pool.name]
        self._orders: dict[int, list[int]] = {}

    def batch(self, number: int) -> tuple[list[Prompt | None], list[float]]:
        """Prompts (None: self-prompted) and answer temperatures of batch `number`."""
        pool = self.pool
        rng = random.Random(f"{self.seed}/{pool.name}/{number}")
        temperatures = rng.choices(pool.temperatures, pool.temperature_shares, k=pool.rows)
        invented = pool.rows if not self.prompts else round(pool.rows * pool.self_prompted)
        wanted = pool.rows - invented
        given = [self._prompt(number * wanted + i) for i in range(wanted)]
        rows: list[Prompt | None] = [*given, *([None] * invented)]
        rng.shuffle(rows)
        return rows, temperatures

    def _prompt(self, index: int) -> Prompt:
        """Prompt number `index` of an endless walk through shuffled passes over the prompts."""
        epoch, at = divmod(index, len(self.prompts))
        if epoch not in self._orders:
            order = list(range(len(self.prompts)))
            random.Random(f"{self.seed}/{self.pool.name}/epoch {epoch}").shuffle(order)
            self._orders[epoch] = order
        return self.prompts[self._orders[epoch][at]]


def generate(
    pools: Sequence[PoolOptions],
    prompts: Sequence[Prompt],
    directory: Path,
    make: Callable[[PoolOptions], SelfPlay],
    *,
    tokens: int | None,
    seconds: float | None,
    seed: int,
    report: Callable[[Generated], None] = lambda _: None,
) -> None:
    """Fill each pool's batch files until its share of tokens or seconds is used; at least one.

    Batches that exist are kept and count, so a stopped generation goes on where it was. report is
    called many times a batch and after each.
    """
    directory.mkdir(parents=True, exist_ok=True)
    total = sum(pool.share for pool in pools)
    before = 0.0
    for number, pool in enumerate(pools):
        share = pool.share / total
        _fill(
            pool,
            RowPlan(pool, prompts, seed),
            directory,
            make,
            tokens=tokens * share if tokens else None,
            seconds=seconds * share if seconds else None,
            seed=seed * 1000 + number,
            report=_over_all(report, before, share),
        )
        before += share


def _over_all(
    report: Callable[[Generated], None], before: float, share: float
) -> Callable[[Generated], None]:
    """Report one pool's progress as part of that of all pools."""
    return lambda at: report(msgspec.structs.replace(at, share=before + share * min(1.0, at.share)))


def _fill(
    pool: PoolOptions,
    plan: RowPlan,
    directory: Path,
    make: Callable[[PoolOptions], SelfPlay],
    *,
    tokens: float | None,
    seconds: float | None,
    seed: int,
    report: Callable[[Generated], None],
) -> None:
    done = [json.loads(file.read_text()) for file in sorted(directory.glob(f"{pool.name}-*.json"))]
    spent = sum(d["seconds"] for d in done)
    player: SelfPlay | None = None
    number = len(done)
    start = time.monotonic()

    def played_to(position: int) -> None:
        batches = number + position / pool.length
        now = spent + time.monotonic() - start
        share = _share(batches, pool, now, tokens, seconds)
        size = pool.rows * pool.length
        report(Generated(pool.name, number * pool.rows, int(batches * size), share))

    while not number or _more(number, pool, spent, tokens, seconds):
        start = time.monotonic()
        player = player or make(pool)
        rows, temperatures = plan.batch(number)
        played, kinds = player.run(
            rows,
            temperatures,
            max_answer=pool.max_answer,
            max_question=pool.max_question,
            seed=seed + number * 7919,
            report=played_to,
        )
        record = save_batch(directory / f"{pool.name}-{number:04d}", played, kinds)
        record["seconds"] = time.monotonic() - start
        write_atomically(directory / f"{pool.name}-{number:04d}.json", json.dumps(record))
        spent += record["seconds"]
        number += 1
        start = time.monotonic()
        played_to(0)


def _more(
    number: int, pool: PoolOptions, spent: float, tokens: float | None, seconds: float | None
) -> bool:
    """Whether another batch fits: whole batches up to the tokens, or one more average batch."""
    if tokens is not None:
        return number * pool.rows * pool.length < tokens
    return spent + spent / number <= (seconds or 0.0)


def _share(
    batches: float, pool: PoolOptions, spent: float, tokens: float | None, seconds: float | None
) -> float:
    """Share of the pool's budget that is used, the last batch being a whole one."""
    if tokens is not None:
        return batches / max(1, math.ceil(tokens / (pool.rows * pool.length)))
    return spent / seconds if seconds else 1.0


def save_batch(stem: Path, tokens: Tensor, kinds: Tensor) -> dict[str, Any]:
    """Write tokens and loss mask as STEM.safetensors; returns the record for STEM.json."""
    from safetensors.torch import save_file

    mask = loss_mask(tokens, kinds)
    answers = int((kinds == ANSWER).sum())
    file = stem.with_suffix(".safetensors")
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    save_file(
        {"tokens": tokens.to(torch.int32).cpu(), "mask": mask.to(torch.uint8).cpu()}, temporary
    )
    os.replace(temporary, file)
    return {
        "rows": len(tokens),
        "length": tokens.shape[1],
        "answer_tokens": answers,
        "loss_tokens": int(mask.sum()),
    }


class Pool:
    """One pool in memory: tokens int32 [N, T], mask bool [N, T]; held-out rows lie apart."""

    def __init__(self, tokens: Tensor, mask: Tensor, held_out: int) -> None:
        keep = min(held_out, len(tokens) // 8)
        self.held_out = tokens[:keep], mask[:keep]
        self.tokens, self.mask = tokens[keep:], mask[keep:]

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.tokens.shape[1]


def load_pools(directory: Path, held_out: int, device: torch.device) -> dict[str, Pool]:
    """Every complete batch file of a data directory, by pool name."""
    from safetensors.torch import load_file

    found: dict[str, list[dict[str, Tensor]]] = {}
    for record in sorted(directory.glob("*-[0-9][0-9][0-9][0-9].json")):
        name = record.stem.rpartition("-")[0]
        found.setdefault(name, []).append(load_file(record.with_suffix(".safetensors")))
    if not found:
        raise ConfigError(f"{directory}: holds no generated rows")
    return {
        name: Pool(
            torch.cat([part["tokens"] for part in parts]).to(device),
            torch.cat([part["mask"] for part in parts]).bool().to(device),
            held_out,
        )
        for name, parts in found.items()
    }


def token_ranking(pools: dict[str, Pool], vocab_size: int) -> Tensor:
    """All ids, most often said first; unsaid ids follow in their own order. [V] long."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for pool in pools.values():
        said = pool.tokens[pool.mask].long().cpu()
        counts += torch.bincount(said, minlength=vocab_size)
    return torch.sort(counts, descending=True, stable=True).indices


class BatchOrder:
    """An endless sequence of batches over the pools, each batch from one pool, rows reshuffled.

    A pool is drawn by its share of all tokens. The state is small and goes into checkpoints.
    """

    def __init__(self, pools: dict[str, Pool], batch_tokens: int, seed: int) -> None:
        self._pools, self._batch_tokens = pools, batch_tokens
        self._names = sorted(pools)
        self._weights = torch.tensor([float(pools[n].tokens.numel()) for n in self._names])
        self._generator = torch.Generator().manual_seed(seed)
        self._left: dict[str, list[int]] = {name: [] for name in self._names}

    def next(self) -> tuple[Tensor, Tensor]:
        """tokens [B, T] long and mask [B, T] bool of the next batch."""
        pick = int(torch.multinomial(self._weights, 1, generator=self._generator))
        name = self._names[pick]
        pool = self._pools[name]
        rows = min(max(1, self._batch_tokens // pool.length), len(pool.tokens))
        if len(self._left[name]) < rows:
            self._left[name] = torch.randperm(len(pool.tokens), generator=self._generator).tolist()
        taken, self._left[name] = self._left[name][:rows], self._left[name][rows:]
        at = torch.tensor(taken, device=pool.tokens.device)
        return pool.tokens[at].long(), pool.mask[at]

    def state(self) -> dict[str, Any]:
        """What `restore` needs to go on with the very next batch."""
        return {"generator": self._generator.get_state(), "left": dict(self._left)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on as the order that gave this state would have."""
        self._generator.set_state(state["generator"])
        self._left = {name: list(state["left"][name]) for name in self._names}
