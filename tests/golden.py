"""Independent references for drafters: dense, float64, no pages, no product code in the maths.

`eagle_rows` and `eagle_chain` are EAGLE-3 as published (arXiv 2503.01840), written from the
formulas; `captures` runs a transformers model with its own attention. They say what draft rows and
drafts must be for a whole, teacher-forced sequence, whatever path the engine took to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

MID = "midlayer."


def rms(x: Tensor, weight: Tensor | float, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Half rotation of x [T, heads, hd] at absolute positions [T]."""
    half = x.shape[-1] // 2
    freq = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(x[..., :half], x[..., half:])
    z = z * torch.polar(torch.ones(()).double(), positions.double()[:, None] * freq)[:, None]
    return torch.cat((z.real, z.imag), -1)


class GoldenEagle:
    """weights and config as the product takes them; embed [V, d] and head [V, d]: the target's."""

    def __init__(self, weights: Mapping[str, Tensor], config: Any, embed: Tensor, head: Tensor):
        self.w = {k: v if k == "d2t" else v.detach().double() for k, v in weights.items()}
        self.c, self.eps = config, config.rms_norm_eps
        self.theta = config.rope_parameters["rope_theta"]
        self.stretch = config.rope_parameters.get("factor", 1.0)  # linear scaling
        self.embed = self.w.get("embed_tokens.weight", embed.detach().double())
        d2t = self.w.get("d2t")
        self.ids = torch.arange(len(head)) if d2t is None else torch.arange(len(d2t)) + d2t
        self.head = self.w["lm_head.weight"] if "lm_head.weight" in self.w else head[self.ids]
        self.head = self.head.detach().double()

    def fuse(self, captures: Tensor) -> Tensor:
        """g [T, d] from captures [T, m, d]."""
        x = captures.double()
        if self.c.fc_norm:
            parts = [self.w[f"fc_norm.{i}.weight"] for i in range(x.shape[1])]
            x = torch.stack([rms(x[:, i], p, self.eps) for i, p in enumerate(parts)], 1)
        x = x.flatten(1)
        if self.c.norm_before_fc:
            x = rms(x, self.w["input_norm.weight"], self.eps)
        return x @ self.w["fc.weight"].T

    def _heads(self, state: Tensor, ids: Tensor, name: str, positions: Tensor | None) -> Tensor:
        e = rms(self.embed[ids], self.w[MID + "input_layernorm.weight"], self.eps)
        u = torch.cat((e, rms(state, self.w[MID + "hidden_norm.weight"], self.eps)), -1)
        x = (u @ self.w[f"{MID}self_attn.{name}_proj.weight"].T).unflatten(
            -1, (-1, self.c.head_dim)
        )
        norm = self.w.get(f"{MID}self_attn.{name}_norm.weight")
        x = x if norm is None else rms(x, norm, self.eps)
        return x if positions is None else rope(x, positions / self.stretch, self.theta)

    def rows(self, captures: Tensor, tokens: Sequence[int]) -> Tensor:
        """Draft rows of positions 0..T-1 [T, 2, heads, hd]; tokens x_0..x_T (T+1 of them)."""
        n = len(captures)
        ids, positions, g = torch.tensor(tokens[1 : n + 1]), torch.arange(n), self.fuse(captures)
        return torch.stack((self._heads(g, ids, "k", positions), self._heads(g, ids, "v", None)), 1)

    def chain(
        self,
        captures: Tensor,
        tokens: Sequence[int],
        num: int,
        *,
        hidden: Sequence[int] = (),
        pick: Callable[[Tensor, int], int] | None = None,
    ) -> tuple[list[int], Tensor]:
        """Draft num tokens at anchor tokens[n], n = len(captures). Returns (ids, logits [num, V']).

        hidden: positions whose rows are holes. pick(logits, step) -> draft-vocabulary row.
        """
        n = len(captures)
        rows = self.rows(captures, tokens)
        keep = torch.tensor([i not in hidden for i in range(n)])
        keys, values = rows[keep, 0], rows[keep, 1]
        state, token, drafts, logits = self.fuse(captures)[-1:], tokens[n], [], []
        for step in range(num):
            ids, at = torch.tensor([token]), torch.tensor([n - 1 + step])
            if step:
                keys = torch.cat((keys, self._heads(state, ids, "k", at)))
                values = torch.cat((values, self._heads(state, ids, "v", None)))
            state, out = self._layer(state, self._heads(state, ids, "q", at), keys, values)
            logits.append(out)
            row = int(out.argmax()) if pick is None else pick(out, step)
            token = int(self.ids[row])
            drafts.append(token)
        return drafts, torch.stack(logits) if logits else torch.empty(0, len(self.ids))

    def _layer(self, g: Tensor, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """(the state fed back [1, d], logits [V'])."""
        repeat = q.shape[1] // keys.shape[1]
        k, v = keys.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)
        p = (torch.einsum("qhd,khd->hqk", q, k) / self.c.head_dim**0.5).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", p, v).flatten(1)
        if self.c.norm_before_residual:
            g = rms(g, self.w[MID + "hidden_norm.weight"], self.eps)
        x = g + attended @ self.w[MID + "self_attn.o_proj.weight"].T
        y = rms(x, self.w[MID + "post_attention_layernorm.weight"], self.eps)
        gate = torch.nn.functional.silu(y @ self.w[MID + "mlp.gate_proj.weight"].T)
        up = y @ self.w[MID + "mlp.up_proj.weight"].T
        a = x + (gate * up) @ self.w[MID + "mlp.down_proj.weight"].T
        normed = rms(a, self.w["norm.weight"], self.eps)
        return (normed if self.c.norm_output else a), (normed @ self.head.T)[0]


def captures(model: Any, tokens: Sequence[int], taps: Sequence[int]) -> tuple[Tensor, Tensor]:
    """([T, m, d] outputs of layers `taps`, [T, V] logits) of a transformers model run whole.

    model: with transformers' own attention, so that no page is involved. A tap of -1 is the
    embedding; the last layer is not available here (transformers normalises it).
    """
    with torch.no_grad():
        out = model(torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False)
    return torch.stack([out.hidden_states[t + 1][0] for t in taps], 1), out.logits[0]
