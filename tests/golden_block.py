"""An independent reference for DFlash and DSpark: dense, float64, no pages, one block at a time.

Written from the formulas (arXiv 2602.06036 and 2607.05147): it says what context rows and drafts
must be at an anchor, whatever path the engine took to it. No product code in the maths.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from golden import rms, rope
from torch import Tensor

Pick = Callable[[Tensor, int], int]
Holes = Collection[int] | Mapping[int, Collection[int]]
"""Context slots that no row sees, in every layer or by layer."""


class GoldenBlock:
    """weights and config as the product takes them; embed [V, d] and head [V, d]: the target's."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        config: Any,
        embed: Tensor,
        head: Tensor,
        ids: Sequence[int] | None = None,
    ) -> None:
        self.w = {k.removesuffix(".weight"): v.detach().double() for k, v in weights.items()}
        self.c, self.eps = config, config.rms_norm_eps
        self.theta = config.rope_parameters["rope_theta"]
        self.embed = self.w.get("embed_tokens", embed.detach().double())
        self.ids = list(range(len(head))) if ids is None else list(ids)
        self.head = self.w.get("lm_head", head.detach().double())[self.ids]

    def _layer(self, i: int, name: str) -> Tensor:
        return self.w[f"layers.{i}.{name}"]

    def _heads(self, i: int, x: Tensor, name: str, positions: Tensor | None) -> Tensor:
        y = (x @ self._layer(i, f"self_attn.{name}_proj").T).unflatten(-1, (-1, self.c.head_dim))
        if positions is None:
            return y
        return rope(
            rms(y, self._layer(i, f"self_attn.{name}_norm"), self.eps), positions, self.theta
        )

    def context(self, captures: Tensor) -> Tensor:
        """c [T, d] from captures [T, m, d_t]."""
        x = captures.double()
        if self.c.fc_norm:
            x = torch.stack(
                [rms(x[:, j], self.w[f"fc_norm.{j}"], self.eps) for j in range(x.shape[1])], 1
            )
        return rms(x.flatten(1) @ self.w["fc"].T, self.w["hidden_norm"], self.eps)

    def rows(self, captures: Tensor) -> Tensor:
        """Context rows of positions 0..T-1: [T, layers, 2, heads, hd]."""
        c, at = self.context(captures), torch.arange(len(captures))
        return torch.stack(
            [
                torch.stack((self._heads(i, c, "k", at), self._heads(i, c, "v", None)), 1)
                for i in range(self.c.num_layers)
            ],
            1,
        )

    def hidden(self, captures: Tensor, anchor: int, holes: Holes = ()) -> Tensor:
        """Normalised rows [K, d] that predict drafts 1..K; anchor: the token at len(captures)."""
        n, c = len(captures), self.c
        size = c.num_draft_tokens + (1 if c.method == "dflash" else 0)
        mask = self.w.get("mask_embedding")
        if mask is None:
            mask = self.embed[c.mask_token_id] * c.embedding_scale
        h = torch.stack([self.embed[anchor] * c.embedding_scale] + [mask] * (size - 1))
        at = torch.arange(n, n + size)
        rows = self.rows(captures)
        for i in range(c.num_layers):
            unseen = holes.get(i, ()) if isinstance(holes, Mapping) else holes
            u = rms(h, self._layer(i, "input_layernorm"), self.eps)
            q = self._heads(i, u, "q", at)
            k = torch.cat((rows[:, i, 0], self._heads(i, u, "k", at)))
            v = torch.cat((rows[:, i, 1], self._heads(i, u, "v", None)))
            seen = torch.zeros(size, n + size, dtype=torch.bool)
            for a in range(size):
                for key in range(n + size):
                    near = c.windows[i] is None or abs(n + a - key) < c.windows[i]
                    after = key > n + a and c.causal and c.causal[i]
                    seen[a, key] = near and not after and key not in unseen
            repeat = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
            scores = torch.einsum("qhd,khd->hqk", q, k) / c.head_dim**0.5
            p = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            h = (
                h
                + torch.einsum("hqk,khd->qhd", p, v).flatten(1)
                @ self._layer(i, "self_attn.o_proj").T
            )
            y = rms(h, self._layer(i, "post_attention_layernorm"), self.eps)
            gate = torch.nn.functional.silu(y @ self._layer(i, "mlp.gate_proj").T)
            h = (
                h
                + (gate * (y @ self._layer(i, "mlp.up_proj").T)) @ self._layer(i, "mlp.down_proj").T
            )
        return rms(h, self.w["norm"], self.eps)[size - c.num_draft_tokens :]

    def draft(
        self,
        captures: Tensor,
        anchor: int,
        num: int,
        *,
        holes: Holes = (),
        pick: Pick | None = None,
    ) -> tuple[list[int], Tensor, list[float]]:
        """Draft num tokens: (ids, logits [num, V'], chance of each to be accepted)."""
        hidden = self.hidden(captures, anchor, holes)
        token, tokens, logits, chances = anchor, [], [], []
        state = torch.zeros(self.c.markov_rank).double()
        for step in range(num):
            out = self.head @ hidden[step] * self.c.logit_scale
            if self.c.logit_softcap:
                out = self.c.logit_softcap * torch.tanh(out / self.c.logit_softcap)
            before = self.w["markov_head.markov_w1"][token] if self.c.markov_rank else None
            chances.append(self._chance(hidden[step], before))
            if before is not None:
                bias, state = self._bias(hidden[step], before, state)
                out = out + self.w["markov_head.markov_w2"][self.ids] @ bias
            logits.append(out)
            row = int(out.argmax()) if pick is None else pick(out, step)
            token = self.ids[row]
            tokens.append(token)
        return tokens, torch.stack(logits), chances

    def _bias(self, hidden: Tensor, before: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        kind = self.c.markov_head_type
        if kind == "vanilla":
            return before, state
        if kind == "gated":
            gate = self._affine("markov_head.gate_proj", torch.cat((hidden, before)))
            return gate.sigmoid() * before, state
        z = self._affine("markov_head.joint_proj", torch.cat((state, before, hidden)))
        keep, new, out = z.chunk(3)
        state = keep.sigmoid() * state + (1 - keep.sigmoid()) * new.tanh()
        return out.tanh(), state

    def _chance(self, hidden: Tensor, before: Tensor | None) -> float:
        if not self.c.confidence:
            return 1.0
        x = hidden if not self.c.confidence_with_markov else torch.cat((hidden, before))  # type: ignore[arg-type]
        return float(self._affine("confidence_head.proj", x).sigmoid())

    def _affine(self, name: str, x: Tensor) -> Tensor:
        y = self.w[name] @ x
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y
