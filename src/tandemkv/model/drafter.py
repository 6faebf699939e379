"""The drafter contract: what a runner gives a drafter after a target pass, and what it gets back.

Law: a drafter sees rows, slots and pages, never how they got there. `run` first writes the draft
rows that the segments ask for (the context pass), from final tokens and target hidden states, then
proposes. Whatever proposing writes lands in slots that no coverage names. Greedy proposals are a
function of the readable rows, the anchor and the features alone. This module computes nothing.

    positions      n-2    n-1     n      n+1 ...        n target rows exist, the anchor x_n has none
    rows             i      i    (anchor) drafts ->     context rows: i < n; slot = i + lookahead
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from tandemkv.base.errors import ConfigError
from tandemkv.base.sampling import SamplingParams
from tandemkv.base.spans import Span
from tandemkv.kv.layout import LayerGroup
from tandemkv.model.attention import KVPool

if TYPE_CHECKING:
    from tandemkv.model.target import TargetSpec


class DrafterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The few numbers that make a drafter special.

    method: eagle3, draft_model, ngram, ... fingerprint: hash of weights and geometry. taps:
    target layers whose OUTPUT residual stream is captured ("output-of" ids; -1 is the embedding).
    exact_proposals: rows written while proposing are functions of tokens alone, so those of
    accepted drafts count as written (an independent draft model); else they are scratch.
    """

    method: str
    fingerprint: str
    num_draft_tokens: int
    taps: tuple[int, ...] = ()
    exact_proposals: bool = False


@dataclass(slots=True)
class DraftSegment:
    """One sequence's part of a drafter run.

    rows: [row_start, row_stop) of the run's packed rows, consecutive positions from `position`.
    pages: per draft group, the sequence's page table (index slot // page_size, -1 not held).
    readable: per draft group, covered slots before this run. writes: per draft group, slots to
    write in this run. tokens: all known tokens of the sequence; tokens[num_rows] is the anchor.
    num_rows: n, target rows that exist. num_drafts: K wanted now (0: context only).
    """

    row_start: int
    row_stop: int
    position: int
    pages: Sequence[Sequence[int]]
    readable: Sequence[Sequence[Span]]
    writes: Sequence[Sequence[Span]]
    tokens: Sequence[int]
    num_rows: int
    num_drafts: int
    params: SamplingParams
    seed: int = 0


@dataclass(slots=True)
class DraftInputs:
    """Packed rows of one drafter run; R rows, m tapped layers, d the target's hidden size.

    token_ids [R]: x_i; next_ids [R]: x_{i+1}; positions [R]: i; features [R, m, d], None if the
    drafter has no taps.
    """

    token_ids: Tensor
    next_ids: Tensor
    positions: Tensor
    features: Tensor | None
    segments: list[DraftSegment]


@dataclass(slots=True)
class Drafts:
    """What a run proposed, a list entry per segment.

    tokens: up to num_drafts target-vocabulary ids. probs: [len(tokens), V] float, the distribution
    each draft was really sampled from; None when they were argmaxes or looked up (one-hot).
    gaps: smallest difference between the best two draft logits over the proposal (inf if none).
    """

    tokens: list[list[int]] = field(default_factory=list)
    probs: list[Tensor | None] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


class Drafter(ABC):
    """A drafter bound to its target. Subclasses: Eagle3, DraftModel, Ngram."""

    spec: DrafterSpec

    @abstractmethod
    def layer_groups(self, page_size: int, dtype: str) -> tuple[LayerGroup, ...]:
        """The drafter's layer groups; empty when it holds no KV."""

    def bind(self, pools: Sequence[KVPool]) -> None:
        """Hand over the pools of its layer groups, in the order of layer_groups()."""
        if pools:
            raise ValueError(f"{self.spec.method} holds no KV but was given {len(pools)} pools")

    @abstractmethod
    @torch.inference_mode()
    def run(self, inputs: DraftInputs) -> Drafts:
        """Write the context rows the segments ask for, then propose num_drafts tokens for each."""


def check_made_for(
    spec: TargetSpec,
    origin: str,
    *,
    captured_size: int,
    vocab_size: int,
    num_layers: int | None = None,
) -> None:
    """Raise ConfigError where a trained drafter says that it is another target's.

    captured_size: of the target states that it reads; num_layers: None if it does not say.
    """
    for what, theirs, ours in (
        ("target of hidden size {}", captured_size, spec.hidden_size),
        ("vocabulary of {}", vocab_size, spec.vocab_size),
        ("target of {} layers", num_layers, spec.num_layers),
    ):
        if theirs not in (None, ours):
            made_for = what.format(theirs)
            raise ConfigError(f"{origin}: made for a {made_for}, this target has {ours}")
