"""GGUF files, converted once into a safetensors directory that transformers loads.

Law: the dequantised weights, rounded once to bfloat16, are the model; float32 and bfloat16 runs
share them. Every tensor of the model is written exactly once, under the name and shape its class
expects, or the file is refused. This module caches nothing and picks no directory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tandemkv.base.errors import ConfigError

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
FORMAT = 1
"""Raised when the same file converts to something else, so that old conversions are not reused."""

_SHARD_BYTES = 2 * 2**30
_PERMUTED = ("llama",)  # rows of q and k pair (i, i + d/2) as neighbours
_ONE_PLUS_NORM = ("gemma2", "gemma3")  # norms are stored as 1 + weight
_SAME_TENSOR = 0.1  # relative distance under which output and embedding are one tensor, twice

_OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_GEMMA_BLOCK_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

Report = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


def convert(path: Path, out: Path, report: Report) -> None:
    """Write config, tokenizer, chat template and bfloat16 weights of a GGUF file to directory out.

    Raises ConfigError if the file is corrupt, truncated, or of an architecture not in
    ARCHITECTURES.
    """
    reader = _open(path)
    architecture = _architecture(reader, path)
    report("reading the tokenizer", 0, 1)
    _save_tokenizer(path, out, _text(reader, "tokenizer.ggml.pre"))
    config = _config(path, reader, architecture)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    tied = _tie(tensors, config)
    shapes = _expected_shapes(config, path)
    writer = _ShardWriter(out)
    for index, tensor in enumerate(tensors.values()):
        report("dequantising", index, len(tensors))
        name = _name(tensor.name, architecture)
        if name is None:
            raise ConfigError(f"{path}: tensor {tensor.name} is not part of a {architecture} model")
        if shapes.pop(name, None) != tuple(int(n) for n in reversed(tensor.shape)):
            raise ConfigError(f"{path}: tensor {tensor.name} does not fit the model's config")
        writer.add(name, _weights(tensor, name, architecture, config))
    if tied:
        shapes.pop("lm_head.weight", None)
    if shapes:
        raise ConfigError(f"{path}: no tensor for {min(shapes)} ({len(shapes)} missing)")
    report("writing", 0, 1)
    writer.close()
    config.save_pretrained(out)


def is_gguf(path: Path) -> bool:
    """Whether the file starts as a GGUF file does."""
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _open(path: Path) -> Any:
    import gguf

    if not is_gguf(path):
        raise ConfigError(f"{path} is not a GGUF file")
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
        raise ConfigError(f"{path} is truncated or corrupt: {_first_line(error)}") from error
    ends = [int(t.data_offset) + int(t.n_bytes) for t in reader.tensors]
    if not ends or max(ends) > path.stat().st_size:
        raise ConfigError(f"{path} is truncated: it ends before its last tensor")
    return reader


def _architecture(reader: Any, path: Path) -> str:
    name = _text(reader, "general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"{path}: GGUF architecture {name!r} is not supported ({known} are)")
    scaling = _text(reader, f"{name}.rope.scaling.type") or "none"
    if scaling != "none" or any(t.name == "rope_freqs.weight" for t in reader.tensors):
        raise ConfigError(
            f"{path}: scaled RoPE in GGUF is not supported; use the model's safetensors"
        )
    return name


def _text(reader: Any, key: str) -> str | None:
    field = reader.get_field(key)
    return None if field is None else str(field.contents())


def _config(path: Path, reader: Any, architecture: str) -> Any:
    """The file's config as transformers reads it, with the head size it states."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: its config cannot be read: {_first_line(error)}") from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    head_dim = reader.get_field(f"{architecture}.attention.key_length")
    if head_dim is not None:
        config.head_dim = int(head_dim.contents())
    config.dtype = torch.bfloat16
    return config


def _save_tokenizer(path: Path, out: Path, pre: str | None) -> None:
    """The tokenizer and chat template that the file carries."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, local_files_only=True
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: its tokenizer cannot be read: {_first_line(error)}") from error
    if pre == "smollm":  # transformers keeps digits together here, the model was trained apart
        from tokenizers import pre_tokenizers

        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    tokenizer.save_pretrained(out)


def _tie(tensors: dict[str, Any], config: Any) -> bool:
    """Whether head and embedding are one tensor; a second copy of it is dropped, the worse one."""
    head, embedding = tensors.get("output.weight"), tensors["token_embd.weight"]
    tied = head is None
    if head is not None and tuple(head.shape) == tuple(embedding.shape):
        a, b = _dequantise(head), _dequantise(embedding)
        tied = bool((a - b).norm() <= _SAME_TENSOR * b.norm())
        if tied:
            del tensors["output.weight"]
            if head.n_bytes > embedding.n_bytes:
                tensors["token_embd.weight"] = head._replace(name="token_embd.weight")
    config.tie_word_embeddings = tied
    return tied


def _expected_shapes(config: Any, path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model's tensors; also names its class in the config."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, RuntimeError, TypeError, ZeroDivisionError) as error:
        raise ConfigError(f"{path}: its config makes no model: {_first_line(error)}") from error
    config.architectures = [type(model).__name__]
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def _name(name: str, architecture: str) -> str | None:
    """A GGUF tensor's name in the model, None if it has no place there."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("blk."):
        _, number, inner = stem.split(".", 2)
        gemma = _GEMMA_BLOCK_NAMES if architecture in _ONE_PLUS_NORM else {}
        found = gemma.get(inner) or _BLOCK_NAMES.get(inner)
        return found and f"model.layers.{number}.{found}.{kind}"
    found = _OUTER_NAMES.get(stem)
    return found and f"{found}.{kind}"


def _weights(tensor: Any, name: str, architecture: str, config: Any) -> Tensor:
    weights = _dequantise(tensor)
    if architecture in _PERMUTED and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        weights = _split_pairs(weights, heads)
    if architecture in _ONE_PLUS_NORM and name.endswith("norm.weight"):
        weights = weights - 1
    return weights.to(torch.bfloat16)


def _dequantise(tensor: Any) -> Tensor:
    import gguf

    return torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=torch.float32)


def _split_pairs(weights: Tensor, heads: int) -> Tensor:
    """Undo the interleaving of a head's rotary pairs: rows 0, d/2, 1, d/2 + 1, .. -> 0, 1, .."""
    paired = weights.unflatten(0, (heads, -1, 2))
    return paired.transpose(1, 2).reshape(weights.shape).contiguous()


class _ShardWriter:
    """Safetensors files of at most about 2 GiB, and their index if there are several."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._shard: dict[str, Tensor] = {}
        self._size = 0
        self._files: list[list[str]] = []

    def add(self, name: str, weights: Tensor) -> None:
        if self._shard and self._size + weights.nbytes > _SHARD_BYTES:
            self._flush()
        self._shard[name] = weights
        self._size += weights.nbytes

    def close(self) -> None:
        self._flush()
        if len(self._files) == 1:
            (self._out / _shard_name(0)).rename(self._out / "model.safetensors")
            return
        weight_map = dict(self._placed())
        index = {"metadata": {}, "weight_map": weight_map}
        (self._out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))

    def _flush(self) -> None:
        path = self._out / _shard_name(len(self._files))
        save_file(self._shard, path, {"format": "pt"})
        path.chmod(0o644)
        self._files.append(list(self._shard))
        self._shard, self._size = {}, 0

    def _placed(self) -> Iterator[tuple[str, str]]:
        for number, names in enumerate(self._files):
            for name in names:
                yield name, _shard_name(number)


def _shard_name(number: int) -> str:
    return f"model-{number + 1:05d}.safetensors"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
