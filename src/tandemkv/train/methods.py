"""What a method of drafting brings to a training run: one small protocol, and who keeps it.

Law: the run, the trainer, the evaluation and the report know a method by this protocol alone. A
method says what is built, what a batch's loss is, what a finished drafter is judged on and how it
is written; it orders no stages and holds no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import msgspec
import torch
from torch import Tensor, nn

from tandemkv.train import weights
from tandemkv.train.block_loss import block_loss, draw_blocks, drop_context
from tandemkv.train.dflash import BlockShape, BlockTrainee
from tandemkv.train.eagle3 import Eagle3Trainee, Shape
from tandemkv.train.evaluate import Variant
from tandemkv.train.loss import LossReport, Rows, countable_rows, expected_length, unrolled_loss
from tandemkv.train.options import DFlashOptions, DSparkOptions, Eagle3Options, TrainOptions
from tandemkv.train.teacher import Teacher

REDUCED_HEADS = (32768, 16384, 8192)


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """One step's rows. tokens [B, T] long; mask [B, T] bool: tokens with loss. head [v, d]: rows of
    the target's head, of the ids [v] (None: all). generator: for what a step draws. mix: shares of
    (CE, L1). held_out: whole contexts, nothing dropped."""

    tokens: Tensor
    mask: Tensor
    head: Tensor
    ids: Tensor | None
    generator: torch.Generator
    mix: tuple[float, float]
    held_out: bool = False


class Report(Protocol):
    """What a batch's loss tells. ce, l1: weighted means, 0-d tensors; count: what was compared."""

    @property
    def ce(self) -> Tensor: ...
    @property
    def l1(self) -> Tensor: ...
    @property
    def count(self) -> int: ...
    def tau(self) -> float:
        """1 + expected accepted drafts of a step, teacher forced."""
        ...


class Trainee(Protocol):
    """A trainable drafter, beside being an nn.Module."""

    @property
    def taps(self) -> tuple[int, ...]: ...
    def tables(self) -> list[nn.Parameter]:
        """Lookup tables: no matrices for Muon, and with a rate of their own."""
        ...

    def aside(self) -> list[nn.Parameter]:
        """Parameters whose gradient must not scale the others' when that is clipped."""
        ...


class Method(Protocol):
    """A method, by its options' `method`. mixes: (CE, L1) until mix_turn of the budget, and after.
    title: heading of the model card."""

    title: ClassVar[str]
    mixes: ClassVar[tuple[tuple[float, float], tuple[float, float]]]
    mix_turn: ClassVar[float]

    def build(self, options: Any, teacher: Teacher) -> Any:
        """The trainee at its start, on the teacher's device."""
        ...

    def loss(
        self, options: Any, teacher: Teacher, trainee: Any, batch: Batch
    ) -> tuple[Tensor, Report]:
        """The differentiable loss of one batch, teacher pass included."""
        ...

    def variants(self, options: Any, vocab_size: int) -> list[Variant]:
        """What a finished drafter is judged on."""
        ...

    def export(
        self,
        directory: Path,
        trainee: Any,
        teacher: Teacher,
        ranking: Tensor,
        num_ranked: int,
        record: dict[str, Any],
    ) -> None:
        """Write the drafter for the engine, with the first num_ranked ids of the ranking."""
        ...

    def load(self, directory: Path, teacher: Teacher) -> tuple[Any, Tensor]:
        """The drafter that was written, and its ranking of all ids."""
        ...


class UnrolledReport(msgspec.Struct, frozen=True):
    """The Report of an unrolled loss."""

    found: LossReport
    rows: Rows

    @property
    def ce(self) -> Tensor:
        return self.found.ce

    @property
    def l1(self) -> Tensor:
        return self.found.l1

    @property
    def count(self) -> int:
        return len(self.rows.label)

    def tau(self) -> float:
        return expected_length(self.found, self.rows)


class Eagle3Method:
    """EAGLE-3: one layer, unrolled over its own output."""

    title: ClassVar[str] = "EAGLE-3"
    mixes: ClassVar[Any] = ((0.8, 0.2), (0.3, 0.7))
    mix_turn: ClassVar[float] = 0.3

    def build(self, options: Eagle3Options, teacher: Teacher) -> Eagle3Trainee:
        trainee = Eagle3Trainee(Shape.of(teacher), teacher.embedding)
        trainee.start_from(teacher, copy_layer=options.init == "target")
        return trainee.to(teacher.device)

    def loss(
        self, options: Eagle3Options, teacher: Teacher, trainee: Eagle3Trainee, batch: Batch
    ) -> tuple[Tensor, UnrolledReport]:
        share = 0.0 if batch.held_out else options.context_dropout
        first_row = dropped_rows(batch.tokens, share, batch.generator)
        rows = countable_rows(batch.mask, options.unroll, first_row)
        captures, hidden = teacher.dense(batch.tokens, trainee.taps)
        outputs = trainee.unroll(captures, batch.tokens, options.unroll, first_row=first_row)
        loss, found = unrolled_loss(
            outputs, hidden, batch.head, rows, options.unroll_decay, batch.mix
        )
        return loss, UnrolledReport(found, rows)

    def variants(self, options: Eagle3Options, vocab_size: int) -> list[Variant]:
        k = options.num_draft_tokens
        longer = Variant(name=f"full, K {k + 3}", num_drafts=k + 3)
        return [*_common_variants(k), longer, *_reduced_heads(k, vocab_size)]

    def export(
        self,
        directory: Path,
        trainee: Eagle3Trainee,
        teacher: Teacher,
        ranking: Tensor,
        num_ranked: int,
        record: dict[str, Any],
    ) -> None:
        weights.export(directory, trainee, teacher, ranking, num_ranked, record)

    def load(self, directory: Path, teacher: Teacher) -> tuple[Eagle3Trainee, Tensor]:
        return weights.load_trainee(directory, teacher)


class BlockMethod:
    """DFlash: all drafts from one pass over a draft block."""

    title: ClassVar[str] = "DFlash"
    mixes: ClassVar[Any] = ((0.8, 0.2), (0.4, 0.6))
    mix_turn: ClassVar[float] = 0.5

    def build(self, options: DFlashOptions, teacher: Teacher) -> BlockTrainee:
        trainee = BlockTrainee(BlockShape.of(options, teacher), teacher.embedding)
        trainee.start_from(teacher, copy_layers=options.init == "target")
        return trainee.to(teacher.device)

    def loss(
        self, options: DFlashOptions, teacher: Teacher, trainee: BlockTrainee, batch: Batch
    ) -> tuple[Tensor, Report]:
        shape, share = trainee.shape, 0.0 if batch.held_out else options.context_dropout
        blocks = draw_blocks(batch.mask, shape.num_drafts, options.anchors, batch.generator)
        first_row = drop_context(blocks.anchors, share, shape.window, batch.generator)
        captures, hidden = teacher.dense(batch.tokens, trainee.taps)
        head = batch.head, batch.ids
        return block_loss(
            trainee, captures, hidden, batch.tokens, blocks, head, first_row, batch.mix
        )

    def variants(self, options: DFlashOptions, vocab_size: int) -> list[Variant]:
        k = options.num_draft_tokens
        found = _common_variants(k)
        if k > 4:
            found.append(Variant(name="K 4", num_drafts=4))
        return [*found, *_reduced_heads(k, vocab_size)]

    def export(
        self,
        directory: Path,
        trainee: BlockTrainee,
        teacher: Teacher,
        ranking: Tensor,
        num_ranked: int,
        record: dict[str, Any],
    ) -> None:
        weights.export_blocks(directory, trainee, teacher, ranking, num_ranked, record)

    def load(self, directory: Path, teacher: Teacher) -> tuple[BlockTrainee, Tensor]:
        return weights.load_blocks(directory, teacher)


class DSparkMethod(BlockMethod):
    """DSpark: DFlash whose drafts are biased by the draft before."""

    title: ClassVar[str] = "DSpark"

    def variants(self, options: DFlashOptions, vocab_size: int) -> list[Variant]:
        alone = Variant(name="no Markov head", num_drafts=options.num_draft_tokens, markov=False)
        return [*super().variants(options, vocab_size), alone]


METHODS: dict[str, Method] = {
    Eagle3Options.method: Eagle3Method(),
    DFlashOptions.method: BlockMethod(),
    DSparkOptions.method: DSparkMethod(),
}


def method_of(options: TrainOptions) -> Method:
    """The method that these options are for."""
    return METHODS[options.method]


def dropped_rows(tokens: Tensor, share: float, generator: torch.Generator) -> Tensor | None:
    """First visible context row [B] of each row; 0 where nothing is dropped."""
    if not share:
        return None
    drawn = torch.rand(2, len(tokens), generator=generator)
    first = (drawn[1] * 0.9 * tokens.shape[1]).long()
    return torch.where(drawn[0] < share, first, 0).to(tokens.device)


def _common_variants(k: int) -> list[Variant]:
    return [
        Variant(name="full", num_drafts=k),
        Variant(name="no prompt rows", num_drafts=k, keep=0),
        Variant(name="last 32 prompt rows", num_drafts=k, keep=32),
    ]


def _reduced_heads(k: int, vocab_size: int) -> Sequence[Variant]:
    rows = (rows for rows in REDUCED_HEADS if rows < vocab_size)
    return [Variant(name=f"head {n}", num_drafts=k, head_rows=n) for n in rows]
