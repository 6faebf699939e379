"""The frozen target as a teacher: dense passes with captures, and one-token steps for generation.

Law: both passes run the same transformers model through one attention function of ours, so what is
generated is what is taught. Attention is causal, over the whole row or the layer's window. This
module samples nothing and trains nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tandemkv.base.errors import ConfigError

ATTENTION = "tandemkv_teacher"
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


class StaticCache:
    """Keys and values of a batch of rows in lock step: every row is at the same position.

    keys, values: [layers, B, Hkv, S, hd]; step: [1] long on device, the slot being written.
    """

    def __init__(self, layers: int, rows: int, heads: int, length: int, dim: int, like: Tensor):
        shape = (layers, rows, heads, length, dim)
        self.keys = torch.zeros(shape, device=like.device, dtype=like.dtype)
        self.values = torch.zeros_like(self.keys)
        self.step = torch.zeros(1, device=like.device, dtype=torch.long)
        self._slots = torch.arange(length, device=like.device)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """keys, values [B, Hkv, 1, hd] go to the current slot."""
        self.keys[layer].index_copy_(2, self.step, keys)
        self.values[layer].index_copy_(2, self.step, values)

    def visible(self, window: int | None) -> Tensor:
        """bool [S]: slots the current step may read."""
        seen = self._slots <= self.step
        return seen & (self._slots > self.step - window) if window else seen


def static_attention(
    query: Tensor, cache: StaticCache, layer: int, scale: float, window: int | None
) -> Tensor:
    """query [B, H, hd] over the layer's written slots -> [B, H, hd]."""
    keys, values = cache.keys[layer], cache.values[layer]
    if query.is_cuda:
        from tandemkv.train.kernels import decode_attention

        return decode_attention(query, keys, values, cache.step, scale, window)
    rows, heads, dim = query.shape
    grouped = query.view(rows, keys.shape[1], -1, dim)
    mask = cache.visible(window).expand(rows, 1, grouped.shape[2], -1)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(rows, heads, dim)


def dense_attention(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
) -> Tensor:
    """Causal attention over whole rows: [B, H, T, hd] and [B, Hkv, T, hd] -> [B, H, T, hd]."""
    repeat = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)
    length = query.shape[2]
    if not window or window >= length:
        with sdpa_kernel(_KERNELS):  # cuDNN's plans anew for every shape
            return F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale)
    at = torch.arange(length, device=query.device)
    mask = (at[None] <= at[:, None]) & (at[None] > at[:, None] - window)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    static_cache: StaticCache | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    for name in _UNSUPPORTED:
        if options.get(name) is not None:
            raise ConfigError(f"target: attention option {name!r} is not supported in training")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if static_cache is None:
        return dense_attention(query, key, value, scale, sliding_window).transpose(1, 2), None
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    static_cache.write(layer, key, value)
    out = static_attention(query[:, :, 0], static_cache, layer, scale, sliding_window)
    return out[:, None], None


class Teacher:
    """A frozen causal LM with tied or untied head, and the numbers a drafter takes from it."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, _attend)
        model.set_attn_implementation(ATTENTION)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = config = model.config.get_text_config()
        self.backbone = model.get_decoder()
        self.layers = self.backbone.layers
        self.embedding: Tensor = model.get_input_embeddings().weight.detach()
        self.head: Tensor = model.get_output_embeddings().weight.detach()
        self.final_norm: Tensor = self.backbone.norm.weight.detach()
        self.device, self.dtype = self.head.device, self.head.dtype
        self.hidden_size, self.vocab_size = int(config.hidden_size), int(self.head.shape[0])
        self.num_layers = int(config.num_hidden_layers)
        self.num_heads = int(config.num_attention_heads)
        self.num_kv_heads = int(config.num_key_value_heads or self.num_heads)
        self.head_dim = int(getattr(config, "head_dim", None) or self.hidden_size // self.num_heads)
        rope = getattr(config, "rope_parameters", None) or {}
        self.rope_theta = float(rope.get("rope_theta") or getattr(config, "rope_theta", 1e4))
        self.max_length = int(config.max_position_embeddings)
        eos = model.generation_config.eos_token_id if model.generation_config else None
        eos = eos if eos is not None else config.eos_token_id
        self.eos_token_ids = [int(x) for x in (eos if isinstance(eos, list) else [eos])]
        if self.device.type == "cuda":
            _fuse_norms(self.backbone)

    @torch.no_grad()
    def dense(self, tokens: Tensor, taps: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """tokens [B, T] -> the outputs of layers `taps` [B, T, d] each, the final hidden [B, T, d].

        The final hidden state is past the final norm: logits are hidden @ head.T.
        """
        captured: dict[int, Tensor] = {}

        def capture(layer: int) -> Any:
            def hook(_module: nn.Module, _args: Any, output: Any) -> None:
                captured[layer] = output[0] if isinstance(output, tuple) else output

            return hook

        hooks = [self.layers[i].register_forward_hook(capture(i)) for i in taps]
        try:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
            hidden = self.backbone(
                input_ids=tokens, position_ids=positions, use_cache=False
            ).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        return [captured[i] for i in taps], hidden

    def new_cache(self, rows: int, length: int) -> StaticCache:
        """An empty static cache for rows of at most length tokens."""
        return StaticCache(
            self.num_layers, rows, self.num_kv_heads, length, self.head_dim, self.head
        )

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: StaticCache) -> Tensor:
        """tokens [B] at the cache's current step -> logits [B, V]. The step is not advanced."""
        hidden = self.backbone(
            input_ids=tokens[:, None],
            position_ids=cache.step[None].expand(len(tokens), 1),
            use_cache=False,
            static_cache=cache,
        ).last_hidden_state
        return hidden[:, 0] @ self.head.T


def _fuse_norms(module: nn.Module) -> None:
    """Let plain RMSNorm modules run torch's fused kernel: same function, a sixth of the traffic."""
    for norm in module.modules():
        if not type(norm).__name__.endswith("RMSNorm") or not hasattr(norm, "variance_epsilon"):
            continue
        sample = torch.randn(4, len(norm.weight), device=norm.weight.device, dtype=torch.float32)
        fused = F.rms_norm(sample, sample.shape[-1:], norm.weight.float(), norm.variance_epsilon)
        if torch.allclose(norm(sample).float(), fused, rtol=1e-4, atol=1e-4):
            norm.forward = _fused(norm)  # type: ignore[method-assign]


def _fused(norm: Any) -> Any:
    def forward(hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, hidden.shape[-1:], norm.weight, norm.variance_epsilon)

    return forward


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The captures EAGLE-3 takes by default, as output-of ids (low, middle, high)."""
    taps = (1, num_layers // 2 - 1, num_layers - 4)
    if not 0 <= taps[0] < taps[1] < taps[2]:
        raise ConfigError(f"target: {num_layers} layers are too few for three captures")
    return taps


def spread_taps(num_layers: int, count: int) -> tuple[int, ...]:
    """The captures block drafters take by default: output-of ids, even from 1 to num_layers - 3."""
    taps = tuple(round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))
    if len(set(taps)) < count or taps[0] < 0:
        raise ConfigError(f"target: {num_layers} layers are too few for {count} captures")
    return taps


def choose_device(asked: str) -> torch.device:
    """`auto` is the first CUDA device where there is one. Raises ConfigError for an absent one."""
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(asked)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {asked!r}: {str(error).splitlines()[0]}") from None
    return device


def load_teacher(target: str | None, device: torch.device) -> Teacher:
    """Load the target: bf16 on CUDA, float32 on CPU. Raises ConfigError naming what is wrong."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = _directory(target)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        with _no_bars():
            model = AutoModelForCausalLM.from_pretrained(
                directory, dtype=dtype, local_files_only=True
            )
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"target {target}: {str(error).splitlines()[0]}") from None
    return Teacher(model.to(device), tokenizer)


@contextmanager
def _no_bars() -> Iterator[None]:
    """Keep transformers' own bars off the terminal: what is loading was said."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _directory(target: str | None) -> str:
    if target is not None and (Path(target) / "config.json").is_file():
        return target
    from tandemkv.model.checkpoint import resolve

    return str(resolve(target))
