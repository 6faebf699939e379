"""Engines on tiny random models, for tests: real scheduler, cache, runner, attention and drafters.

Debug mode is on: free pages hold NaN and every law is checked after every step. Drafters: eagle3
and dflash (random weights, dflash with window 8), dspark (random weights, one layer unwindowed and
one with window 7: two draft groups), self (an independent draft model with the target's own
weights: every greedy draft is accepted if and only if its KV, positions and masks are right),
ngram, none.
"""

from __future__ import annotations

import drafting
import torch

from tandemkv.base.config import EngineConfig, Resolver
from tandemkv.base.sampling import SamplingParams
from tandemkv.engine.engine import Completion, Engine, GenerateRequest
from tandemkv.engine.resolve import pick_device, pick_dtype, resolve
from tandemkv.kv.keys import Namespace
from tandemkv.model.dflash import DFlash
from tandemkv.model.drafter import Drafter
from tandemkv.model.eagle3 import Eagle3
from tandemkv.model.target import Target

VOCAB = drafting.VOCAB
TARGET_SEED = 3
BLOCK_WINDOWS = {"dflash": (8, 8), "dspark": (None, 7)}


def greedy(max_tokens: int = 24, **changes: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **changes)  # type: ignore[arg-type]


def drafter_of(name: str, target: Target, k: int) -> Drafter | None:
    if name == "none":
        return None
    if name == "eagle3":
        config = drafting.eagle_config()
        return Eagle3(target, config, drafting.eagle_weights(config), num_draft_tokens=k)
    if name in ("dflash", "dspark"):
        shape = drafting.block_config(name, windows=BLOCK_WINDOWS[name])
        return DFlash(target, shape, drafting.block_weights(shape), num_draft_tokens=k)
    if name == "self":
        from tandemkv.model.draft_lm import DraftModel

        weights = next(target.model.parameters())
        model = drafting.tiny_target(TARGET_SEED).model.to(weights.device, weights.dtype)
        twin = Target(model, fingerprint="the target's twin")  # packed for the device it is on
        return DraftModel(target, twin, num_draft_tokens=k)
    if name == "ngram":
        from tandemkv.model.ngram import Ngram

        return Ngram(num_draft_tokens=k)
    raise ValueError(name)


def tiny_engine(
    drafter: str | Drafter = "eagle3",
    *,
    k: int = 3,
    target: Target | None = None,
    **options: object,
) -> Engine:
    """An engine on a tiny Llama; options are EngineConfig's. drafter: a name, or one made."""
    values = {
        "device": "cpu",
        "dtype": "float32",
        "block_size": 4,
        "kv_cache_tokens": 512,
        "max_model_len": 200,
        "max_batch_tokens": 64,
        "trace": True,
        "debug": True,
    } | options
    config = EngineConfig(**values)  # type: ignore[arg-type]
    config.validate()
    resolver = Resolver()
    device = pick_device(config, resolver)
    dtype = pick_dtype(config, device, resolver)
    target = target or drafting.tiny_target(TARGET_SEED)
    bound = drafter_of(drafter, target, k) if isinstance(drafter, str) else drafter
    plan = resolve(config, resolver, target, bound, device, dtype)
    return Engine(target, bound, plan, config)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


def run(
    engine: Engine,
    prompts: list[list[int]],
    params: SamplingParams | None = None,
    *,
    salts: list[str] | None = None,
) -> list[Completion]:
    params = params or greedy()
    salts = salts or [""] * len(prompts)
    requests = [
        GenerateRequest(prompt=p, params=params, namespace=Namespace(salt=s))
        for p, s in zip(prompts, salts, strict=True)
    ]
    done = engine.generate(requests)
    engine.check()
    return done


def drafts_by_anchor(completion: Completion) -> dict[int, tuple[int, ...]]:
    return {step.anchor: step.drafts for step in completion.steps}


def used_pages(engine: Engine) -> list[int]:
    """Held pages per group; all zero when nothing runs."""
    return [usage.held for usage in engine.kv.usage()]
