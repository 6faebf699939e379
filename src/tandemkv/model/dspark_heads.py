"""DSpark's two small heads: a bias from the token before, and the chance that a draft survives.

Law: draft k is drawn from the trunk's logits plus a bias that depends on the drafts before it and
on no later one; so does its confidence, and a draft block that is cut where confidence falls stays
lossless. Neither head keeps state between draft blocks. This module draws nothing.

    bias_k       = W2 . f(W1[prev_k], hidden_k)        prev_1 = the anchor, prev_k = draft k - 1
    confidence_k = sigmoid(w . [hidden_k ; W1[prev_k]] + b)

Source: DSpark, arXiv 2607.05147, section on the sequential and confidence heads.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from tandemkv.model.dflash_config import DFlashConfig
from tandemkv.model.packed import pack_linear


class MarkovHead:
    """Bias of the logits [P, V_draft] from the previous token; vanilla, gated or rnn.

    ids [V_draft]: target ids of the logits, None for the whole vocabulary.
    """

    def __init__(
        self,
        config: DFlashConfig,
        weights: Mapping[str, Tensor],
        ids: Tensor | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        def get(name: str) -> Tensor | None:
            found = weights.get(f"markov_head.{name}")
            return None if found is None else found.to(device, dtype)

        self._kind = config.markov_head_type
        before, after = get("markov_w1.weight"), get("markov_w2.weight")
        assert before is not None
        assert after is not None
        self._before = before
        after = after if ids is None else after[ids.to(device)]
        self._after = pack_linear(after.contiguous())
        name = {"gated": "gate_proj", "rnn": "joint_proj"}.get(self._kind, "")
        self._mix, self._mix_bias = get(f"{name}.weight"), get(f"{name}.bias")

    def embed(self, tokens: Tensor) -> Tensor:
        """W1 rows [P, r] of target ids [P]."""
        return F.embedding(tokens, self._before)

    def bias(
        self, embedded: Tensor, hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Bias [P, V_draft] float32, and the state of the next position (rnn alone keeps one).

        embedded [P, r]: of the previous tokens; hidden [P, d]: the trunk's normalised rows.
        """
        if self._kind == "gated":
            joined = torch.cat((hidden, embedded), -1)
            embedded = F.linear(joined, self._mixing, self._mix_bias).sigmoid() * embedded
        elif self._kind == "rnn":
            state = torch.zeros_like(embedded) if state is None else state
            joined = torch.cat((state, embedded, hidden), -1)
            gate, new, out = F.linear(joined, self._mixing, self._mix_bias).chunk(3, -1)
            keep = gate.sigmoid()
            state = keep * state + (1 - keep) * new.tanh()
            embedded = out.tanh()
        return self._after(embedded).float(), state

    @property
    def _mixing(self) -> Tensor:
        assert self._mix is not None
        return self._mix


class ConfidenceHead:
    """Chance [P] that the target accepts a draft, given that it accepted those before."""

    def __init__(
        self,
        config: DFlashConfig,
        weights: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        self._weight = weights["confidence_head.proj.weight"].to(device).float()
        bias = weights.get("confidence_head.proj.bias")
        self._bias = None if bias is None else bias.to(device).float()
        self._with_markov = config.confidence_with_markov

    def chance(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """hidden [P, d], embedded [P, r] (ignored unless the head was trained with it) -> [P]."""
        x = hidden.float()
        if self._with_markov and embedded is not None:
            x = torch.cat((x, embedded.float()), -1)
        return F.linear(x, self._weight, self._bias)[:, 0].sigmoid()
