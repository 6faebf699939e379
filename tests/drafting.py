"""Drafters served by hand in tests: a tiny target, random EAGLE-3 weights, sequences over pages.

`Served` keeps what a scheduler keeps of one sequence (tokens, page table, coverage, rows done) and
`serve` packs several into one drafter run. Pools start full of NaN; nothing here knows the maths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tandemkv.base.sampling import SamplingParams
from tandemkv.base.spans import Span, SpanSet
from tandemkv.model.attention import KVPool
from tandemkv.model.dflash_checkpoint import expected_shapes as block_shapes
from tandemkv.model.dflash_checkpoint import optional_shapes as optional_block_shapes
from tandemkv.model.dflash_config import DFlashConfig
from tandemkv.model.drafter import Drafter, DraftInputs, Drafts, DraftSegment
from tandemkv.model.eagle3 import Eagle3
from tandemkv.model.eagle3_checkpoint import expected_shapes, optional_shapes
from tandemkv.model.eagle3_config import Eagle3Config
from tandemkv.model.target import ATTENTION, Target

GREEDY = SamplingParams(temperature=0.0)
VOCAB = 64
PAGE = 4


def tiny_model(
    seed: int = 0,
    *,
    vocab: int = VOCAB,
    hidden: int = 32,
    layers: int = 6,
    attention: str = "eager",
) -> LlamaForCausalLM:
    """A random Llama with untied head, the same for the same arguments; maximum length 256."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        attn_implementation=attention,
        eos_token_id=None,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def tiny_target(seed: int = 0, **shape: int) -> Target:
    """`tiny_model` as a target."""
    model = tiny_model(seed, attention=ATTENTION, **shape)  # type: ignore[arg-type]
    return Target(model, fingerprint=f"tiny {seed} {shape}")


def eagle_config(**changes: object) -> Eagle3Config:
    """A drafter for `tiny_target`: hidden 32, taps 0, 2, 4, the target's head."""
    base: dict[str, object] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "taps": (0, 2, 4),
    }
    return Eagle3Config(**(base | changes))  # type: ignore[arg-type]


def eagle_weights(config: Eagle3Config, *extra: str, seed: int = 1) -> dict[str, Tensor]:
    """Random float32 weights; extra: optional tensors to bring (names of `optional_shapes`)."""
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_shapes(config, len(config.taps or (1, 2, 3)))
    shapes |= {name: optional_shapes(config)[name] for name in extra}
    return {
        name: 1 + 0.3 * torch.randn(shape, generator=generator)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * 1.5 * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }


def eagle(target: Target | None = None, num_pages: int = 64, **changes: object) -> Eagle3:
    """An Eagle3 with random weights, bound to a pool full of NaN."""
    config = eagle_config(**changes)
    drafter = Eagle3(target or tiny_target(), config, eagle_weights(config))
    bind(drafter, num_pages)
    return drafter


def block_config(method: str = "dspark", **changes: object) -> DFlashConfig:
    """A block drafter for `tiny_target`: two layers, taps 0, 2, 4, K 4, window 6, own mask."""
    base: dict[str, object] = {
        "method": method,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "num_draft_tokens": 4,
        "taps": (0, 2, 4),
        "windows": (6, 6),
    }
    if method == "dspark":
        base |= {"markov_rank": 8, "confidence": True}
    return DFlashConfig(**(base | changes))  # type: ignore[arg-type]


def block_weights(config: DFlashConfig, *extra: str, seed: int = 1) -> dict[str, Tensor]:
    """Random float32 weights; extra: optional tensors to bring."""
    generator = torch.Generator().manual_seed(seed)
    shapes = block_shapes(config)
    shapes |= {name: optional_block_shapes(config)[name] for name in extra}
    return {
        name: 1 + 0.3 * torch.randn(shape, generator=generator)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * 1.5 * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }


def bind(drafter: Drafter, num_pages: int = 64, page_size: int = PAGE) -> list[KVPool]:
    groups = drafter.layer_groups(page_size, "float32")
    pools = [KVPool(group, num_pages, poison=True) for group in groups]
    drafter.bind(pools)
    return pools


@dataclass
class Served:
    """One sequence: tokens x_0.. (all known ones), captures of its positions, pages, coverage."""

    tokens: list[int]
    captures: Tensor | None
    pages: list[int]
    done: int = 0  # positions whose draft rows have been asked for
    coverage: SpanSet = field(default_factory=SpanSet)
    lookahead: int = 1
    num_groups: int = 1
    seed: int = 7
    params: SamplingParams = GREEDY

    def segment(self, row: int, stop: int, num_drafts: int, writes: Sequence[Span]) -> DraftSegment:
        return DraftSegment(
            row_start=row,
            row_stop=row + stop - self.done,
            position=self.done,
            pages=[self.pages] * self.num_groups,
            readable=[list(self.coverage)] * self.num_groups,
            writes=[list(writes)] * self.num_groups,
            tokens=self.tokens,
            num_rows=stop,
            num_drafts=num_drafts,
            params=self.params,
            seed=self.seed,
        )


def serve(
    drafter: Drafter,
    stops: Sequence[tuple[Served, int]],
    num_drafts: int | Sequence[int] = 0,
    *,
    successors: dict[int, int] | None = None,
) -> Drafts:
    """One run: each sequence's rows from where it stands to its stop, then K proposals for each.

    num_drafts: K, or one for each sequence. successors: position -> a wrong next token to feed
    there (a seeded fault).
    """
    ids, following, positions, features, segments = [], [], [], [], []
    wanted = [num_drafts] * len(stops) if isinstance(num_drafts, int) else num_drafts
    for (s, stop), k in zip(stops, wanted, strict=True):
        missing = s.coverage.missing(s.done + s.lookahead, stop + s.lookahead)
        segments.append(s.segment(len(ids), stop, k, missing))
        span = range(s.done, stop)
        ids += [s.tokens[i] for i in span]
        following += [(successors or {}).get(i, s.tokens[i + 1]) for i in span]
        positions += span
        if s.captures is not None:
            features.append(s.captures[s.done : stop])
    inputs = DraftInputs(
        token_ids=torch.tensor(ids, dtype=torch.long),
        next_ids=torch.tensor(following, dtype=torch.long),
        positions=torch.tensor(positions, dtype=torch.long),
        features=torch.cat(features) if features else None,
        segments=segments,
    )
    drafts = drafter.run(inputs)
    for s, stop in stops:
        s.coverage.add(s.done + s.lookahead, stop + s.lookahead)
        s.done = stop
    return drafts


def prefill(drafter: Drafter, s: Served, stop: int, chunk: int, num_drafts: int = 0) -> Drafts:
    """Rows up to `stop` in chunks; the last chunk proposes."""
    for start in range(s.done, stop, chunk):
        end = min(start + chunk, stop)
        drafts = serve(drafter, [(s, end)], num_drafts if end == stop else 0)
    return drafts


def rows_of(pool: KVPool, s: Served, start: int, stop: int) -> Tensor:
    """Stored draft rows of positions [start, stop): [num, 2, heads, hd], of the first layer."""
    slots = range(start + s.lookahead, stop + s.lookahead)
    return pool.read(s.pages, list(slots))[:, 0]
