"""Conversations of a soak, what they may cost, and the tiny model that answers them.

A conversation is a function of its part's seed, so that the first and the last tenth can be the
same ones. This module runs nothing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LIMIT_S = 60.0
"""What takes longer hangs."""
DRIFT = 0.01
"""By which AL may move between the first and the last tenth, relative."""
VOCAB = 64
NOISE = 0.05
"""Of the drafter's weights, relative to their own spread."""
LENGTHS, TURN_LENGTHS, OUTPUTS = (16, 160), (4, 32), (8, 24)
REPORT_EVERY_S = 10.0


@dataclass(slots=True)
class Talk:
    """A conversation: its turns' own tokens, how much each answers, and what it has answered."""

    name: str
    turns: list[list[int]]
    max_tokens: list[int]
    answers: list[list[int]] = field(default_factory=list[list[int]])

    def prompt(self) -> list[int]:
        """All that was said, and the next turn."""
        said: list[int] = []
        for turn, answer in zip(self.turns, self.answers, strict=False):
            said += [*turn, *answer]
        return said + self.turns[len(self.answers)]

    @property
    def over(self) -> bool:
        return len(self.answers) == len(self.turns)


@dataclass(slots=True)
class Tally:
    """Accepted tokens and verify steps."""

    accepted: int = 0
    steps: int = 0

    @property
    def al(self) -> float:
        return 1 + self.accepted / max(1, self.steps)


def talks(part: str, num_requests: int, rng: random.Random) -> list[Talk]:
    """Conversations of two turns, the last of one if the number is odd."""

    def words(bounds: tuple[int, int]) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(rng.randint(*bounds))]

    out: list[Talk] = []
    for start in range(0, num_requests, 2):
        turns = [words(LENGTHS), words(TURN_LENGTHS)][: num_requests - start]
        outputs = [rng.randint(*OUTPUTS) for _ in turns]
        out.append(Talk(f"{part}/{len(out)}", turns, outputs))
    return out


def compared(first: list[Talk], last: list[Talk], al: float, al_last: float) -> dict[str, float]:
    """Figures of the first tenth beside the last."""
    pairs = zip(first, last, strict=True)
    return {
        "conversations_compared": len(first),
        "conversations_that_differ": sum(a.answers != b.answers for a, b in pairs),
        "al_first_tenth": al,
        "al_last_tenth": al_last,
        "al_moved": abs(al_last / al - 1),
    }


def make_model(place: Path, noise: float, seed: int) -> Path:
    """A random model of 4 layers; with noise, the same one with weights that are a little off."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    vocab = {f"t{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(place)
    torch.manual_seed(seed)
    shape = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
        initializer_range=0.3, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(shape)
    with torch.no_grad():
        for weight in model.parameters():
            if noise and weight.dim() > 1:
                weight += noise * weight.std() * torch.randn_like(weight)
    model.save_pretrained(place)
    return place


def engine_config(place: Path, seed: int) -> Any:
    """Of every worker of a soak; its models are made in `place`."""
    from tandemkv.base.config import EngineConfig

    target = make_model(place / "target", 0.0, seed)
    draft = make_model(place / "draft", NOISE, seed)
    return EngineConfig(
        model=str(target),
        drafter="draft_model",
        drafter_path=str(draft),
        num_draft_tokens=3,
        device="cpu",
        dtype="float32",
        threads=1,
        kv_cache_tokens=4096,
        max_model_len=400,
        max_batch_tokens=64,
    )
