"""Tiny models with random weights, saved as users' models are: a directory with a tokenizer.

Law: a kind, a seed and a size name one model, bit for bit. Weights are drawn wide enough that
logits differ by whole units: ties and flat distributions do not hide faults. The tokenizer is
byte-level, so any text has tokens and any tokens have bytes. This module caches nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

WINDOW = 11
"""The sliding window of the kinds that have one: shorter than any prompt that means to test it."""

KINDS = ("llama", "qwen2", "qwen3", "mistral", "gemma3")

VOCAB_SIZE = 272
"""256 bytes, then the special tokens, then ids that only the model knows."""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 258

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n'"
    " + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def config_of(kind: str, **changes: Any) -> Any:
    """The transformers config of a tiny model: d 32, 4 query heads, 2 KV heads of 8."""
    import transformers

    size = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": kind in ("qwen2", "gemma3"),
        "bos_token_id": 257,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": 256,
    }
    if kind == "gemma3":
        size |= {
            "num_hidden_layers": 3,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 8,
        }
    if kind == "mistral":
        size["sliding_window"] = WINDOW
    if kind == "qwen2":
        size.pop("head_dim")
    name = {
        "llama": "LlamaConfig",
        "qwen2": "Qwen2Config",
        "qwen3": "Qwen3Config",
        "mistral": "MistralConfig",
        "gemma3": "Gemma3TextConfig",
    }[kind]
    return getattr(transformers, name)(**{**size, **changes})


def model_of(kind: str, *, seed: int = 0, attention: str = "sdpa", **changes: Any) -> Any:
    """A tiny model in memory, float32, in eval mode."""
    from transformers import AutoModelForCausalLM

    config = config_of(kind, **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    draw_weights(model, seed)
    return model.eval()


def draw_weights(model: Any, seed: int) -> None:
    """Fill every parameter: matrices of unit gain, norms near their neutral value, small biases."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() >= 2:
                gain = 1.0 if "embed" in name else 1.4
                weight.copy_(noise * gain * weight.shape[-1] ** -0.5)
            elif "norm" in name:
                neutral = 0.0 if "Gemma" in type(model).__name__ else 1.0
                weight.copy_(neutral + 0.1 * noise)
            else:
                weight.copy_(0.1 * noise)


def save_model(kind: str, path: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Save a tiny model and its tokenizer to directory `path`; returns it."""
    model_of(kind, seed=seed, **changes).save_pretrained(path)
    save_tokenizer(path)
    return path


def save_tokenizer(path: Path) -> None:
    """A byte-level tokenizer: ids 0..255 are bytes (in GPT-2's order), then the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)
