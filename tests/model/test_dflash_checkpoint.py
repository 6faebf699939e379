"""DFlash and DSpark checkpoints: every layout reads as one drafter; a misfit is refused by name."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import msgspec
import pytest
import torch
from block_layouts import (
    BIAS,
    deepspec,
    dflash,
    dspark,
    heads,
    old_dflash,
    specforge,
    without,
    write,
)
from drafting import VOCAB, block_config, block_weights, tiny_target
from safetensors.torch import load_file, save_file

from tandemkv.base.errors import ConfigError
from tandemkv.model import dflash_checkpoint as checkpoint
from tandemkv.model.dflash import DFlash
from tandemkv.model.draft_checkpoint import fingerprint

SHIPPED = Path(checkpoint.__file__).parents[1] / "weights"


def dflash_layouts() -> dict[str, tuple[dict, dict]]:
    _, weights = dflash()
    old = old_dflash()
    nested = without(old, "block_size", "rope_theta", "rope_scaling", "auto_map")
    nested["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    nested["dflash_config"] = {**old["dflash_config"], "block_size": 5}
    default = {**old, "mask_token_id": 9, "dflash_config": None}
    default |= {"target_layer_ids": [0, 2, 4], "is_causal": None}
    server = {**old, "eagle_aux_hidden_state_layer_ids": [1, 3, 5], "draft_vocab_size": VOCAB}
    server["dflash_config"] = {**old["dflash_config"], "use_aux_hidden_state": True}
    projected = {**old, "dflash_config": {**old["dflash_config"], "projector_type": "dflash"}}
    return {
        "z-lab": (old, weights),
        "z-lab, all in dflash_config": (nested, weights),
        "SpecForge": (projected, {f"draft_model.{k}": v for k, v in weights.items()}),
        "nothing in dflash_config": (default, weights),
        "vLLM": (server, {f"model.{k}": v for k, v in weights.items()}),
    }


def dspark_layouts() -> dict[str, tuple[dict, dict]]:
    config, weights = dspark()
    copies = block_weights(config, "embed_tokens.weight", "lm_head.weight")
    copies = {k: v for k, v in copies.items() if k in ("embed_tokens.weight", "lm_head.weight")}
    inner = specforge()["dflash_config"]
    split = {**specforge(), "dspark_config": heads(config)}
    split["dflash_config"] = without(inner, *heads(config))
    modelopt = {
        **without(inner, *heads(config), "confidence_head_alpha"),
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "use_confidence_head": True,
        "shift_label": True,
        "causal": False,
    }
    return {
        "SpecForge": (specforge(), weights),
        "SpecForge, said twice": ({**specforge(), **heads(config)}, weights),
        "SpecForge, dspark_config": (split, weights),
        "SpecForge, early": (
            specforge(),
            {
                f"logit_head.{k}" if k.startswith(("markov", "confidence")) else k: v
                for k, v in weights.items()
            },
        ),
        "SpecForge, head by its weight": (
            specforge(enable_confidence_head=None, confidence_head_with_markov=None),
            weights,
        ),
        "DeepSpec": (deepspec(), weights | copies),
        "ModelOpt": (
            {**specforge(), "architectures": ["DFlashDraftModel"], "dflash_config": modelopt},
            {_modelopt_name(k): v for k, v in weights.items()},
        ),
        "vLLM": (deepspec(sample_from_anchor=True, model_type="qwen3"), weights),
    }


def _modelopt_name(name: str) -> str:
    return (
        name.removeprefix("markov_head.")
        if name.startswith("markov_head.")
        else name.replace("confidence_head.proj", "confidence_proj")
    )


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.mark.parametrize("name", dflash_layouts())
def test_every_dflash_layout_reads_as_the_same_drafter(tmp_path, target, name):
    wanted, weights = dflash()
    record, tensors = dflash_layouts()[name]
    config, read = checkpoint.read(write(tmp_path / "x", record, tensors, pickled=name == "z-lab"))
    assert config == wanted
    assert set(read) == set(weights)
    assert all(torch.equal(read[k], weights[k]) for k in weights)
    assert DFlash(target, config, read).spec.taps == (0, 2, 4)


@pytest.mark.parametrize("name", dspark_layouts())
def test_every_dspark_layout_reads_as_the_same_drafter(tmp_path, target, name):
    wanted, weights = dspark()
    record, tensors = dspark_layouts()[name]
    config, read = checkpoint.read(write(tmp_path / "x", record, tensors))
    assert config == wanted
    copies = {"embed_tokens.weight", "lm_head.weight"} if name == "DeepSpec" else set()
    assert set(read) == set(weights) | copies
    assert all(torch.equal(read[k], weights[k]) for k in weights)
    assert DFlash(target, config, read).spec.method == "dspark"


def test_our_own_layout_reads_as_the_same_drafter_too(tmp_path):
    for config, weights in (dflash(), dspark()):
        path = checkpoint.save(tmp_path / config.method, weights, config, dtype=torch.float32)
        again, read = checkpoint.read(path)
        assert again == config
        assert all(torch.equal(read[k], weights[k]) for k in weights)


def test_the_heads_width_says_what_confidence_reads_where_the_config_does_not(tmp_path):
    """The defaults of trainers and servers contradict each other; the tensor does not."""
    wide, weights = dspark()
    narrow = msgspec.structs.replace(wide, confidence_with_markov=False)
    silent = specforge(confidence_head_with_markov=None)
    for config in (wide, narrow):
        tensors = block_weights(config, BIAS)
        assert checkpoint.read(write(tmp_path / "x", silent, tensors))[0] == config
    said = specforge(confidence_head_with_markov=False)
    assert checkpoint.read(write(tmp_path / "x", said, block_weights(narrow, BIAS)))[0] == narrow
    with pytest.raises(ConfigError, match=r"confidence_head.proj.weight.*\[1, 40\].*\[1, 32\]"):
        checkpoint.read(write(tmp_path / "x", said, weights))


def test_the_bias_of_the_confidence_head_is_optional(tmp_path):
    config, weights = dspark()
    assert checkpoint.read(write(tmp_path / "x", deepspec(), without(weights, BIAS)))[0] == config


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_the_other_markov_heads_are_read_with_and_without_bias(tmp_path, kind):
    config = msgspec.structs.replace(dspark()[0], markov_head_type=kind)
    name = {"gated": "gate_proj", "rnn": "joint_proj"}[kind]
    for extra in ((BIAS,), (BIAS, f"markov_head.{name}.bias")):
        weights = block_weights(config, *extra)
        record = deepspec(markov_head_type=kind.upper())
        again, read = checkpoint.read(write(tmp_path / "x", record, weights))
        assert again == config
        assert set(read) == set(weights)


# ------------------------------------------------------------------ our own layout


SAVED = {
    "two windows, causal in one layer": {"windows": (3, 5), "causal": (False, True)},
    "a norm per capture": {"fc_norm": True, "windows": (None, None)},
    "a token as mask": {"mask_token_id": 9},
    "a target of known depth": {"num_target_layers": 6},
}


@pytest.mark.parametrize("method", ["dflash", "dspark"])
@pytest.mark.parametrize("name", SAVED)
def test_what_is_saved_is_read_back(tmp_path, method, name):
    config = block_config(method, **SAVED[name])
    weights = block_weights(config, *((BIAS,) if method == "dspark" else ()))
    weights["draft_vocab"] = torch.randperm(VOCAB)[:40].int()
    path = checkpoint.save(tmp_path / "x", weights, config, dtype=torch.float32, extra={"steps": 3})
    again, tensors = checkpoint.read(path)
    assert again == config
    assert fingerprint(again, tensors) == fingerprint(config, weights)
    assert json.loads((path / "config.json").read_text())["training"] == {"steps": 3}
    assert {p.name for p in path.iterdir()} == {"config.json", "model.safetensors"}
    checkpoint.save(tmp_path / "x", weights, config)
    half = checkpoint.read(path)[1]
    for tensor, given in ((half[k], weights[k]) for k in weights if k != "draft_vocab"):
        assert torch.equal(tensor, given.bfloat16())


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_a_quantised_checkpoint_is_small_and_close(tmp_path, target, method):
    config = block_config(method, fc_norm=True)
    weights = block_weights(config)
    weights["draft_vocab"] = torch.randperm(VOCAB)
    path = checkpoint.save(tmp_path / "x", weights, config, quantise=True)
    stored = load_file(path / "model.safetensors")
    matrices = {name for name, tensor in weights.items() if tensor.dim() == 2}
    assert {name for name in stored if stored[name].dtype == torch.int8} == {
        f"{name}.q8" for name in matrices
    }
    assert stored["draft_vocab"].dtype == torch.int32
    assert stored["mask_embedding.weight"].dtype == torch.bfloat16
    again, tensors = checkpoint.read(path)
    assert again == config
    assert torch.equal(tensors["draft_vocab"].long(), weights["draft_vocab"])
    for name in matrices:
        bound = weights[name].abs().amax(1, keepdim=True) / 127 / 2 * 1.001
        assert bool(((tensors[name] - weights[name]).abs() <= bound).all()), name
    DFlash(target, again, tensors)


def test_what_could_not_be_read_back_is_not_written(tmp_path):
    config, weights = dspark()
    with pytest.raises(ConfigError, match=r"fc.weight.*missing"):
        checkpoint.save(tmp_path / "x", without(weights, "fc.weight"), config)
    with pytest.raises(ConfigError, match=r"'norm.weight' has shape \[31\]"):
        checkpoint.save(tmp_path / "x", {**weights, "norm.weight": torch.ones(31)}, config)
    for changes in ({"num_draft_tokens": 65}, {"rms_norm_eps": float("nan")}, {"head_dim": 7}):
        broken = msgspec.structs.replace(config, **changes)
        tensors = block_weights(broken)
        with pytest.raises(ConfigError, match=r"block_size 65|rms_norm_eps.*nan|head_dim.*7"):
            checkpoint.save(tmp_path / "x", tensors, broken)
    assert not (tmp_path / "x").exists()


# ------------------------------------------------------------------ refusals


def _edit(drop=(), add=None, inner=None, **config):
    def edit(base: dict, tensors: dict) -> None:
        base.update(config)
        base["dflash_config"] = {**base["dflash_config"], **(inner or {})}
        for name in drop:
            del tensors[name]
        tensors.update(add or {})

    return edit


CONFIDENCE = ("confidence_head.proj.weight", BIAS)
REFUSED = {
    "a missing tensor": (_edit(drop=("layers.1.mlp.up_proj.weight",)), ["layers.1.mlp.up_proj"]),
    "no fc": (_edit(drop=("fc.weight",)), ["fc.weight", "missing"]),
    "no Markov weights": (_edit(drop=("markov_head.markov_w2.weight",)), ["markov_w2", "missing"]),
    "no confidence weights": (
        _edit(drop=("confidence_head.proj.weight",)),
        ["confidence_head.proj.weight", "missing"],
    ),
    "a head that the config does not have": (
        _edit(inner={"enable_confidence_head": False}),
        ["unknown", "confidence_head.proj"],
    ),
    "Markov weights that the config does not have": (
        _edit(drop=CONFIDENCE, inner={"markov_rank": 0, "enable_confidence_head": False}),
        ["unknown", "markov_head"],
    ),
    "a gate on a vanilla Markov head": (
        _edit(add={"markov_head.gate_proj.weight": torch.ones(8, 40)}),
        ["unknown", "gate_proj"],
    ),
    "an unknown tensor": (_edit(add={"extra.weight": torch.ones(2)}), ["unknown", "extra.weight"]),
    "a third layer": (
        _edit(add={"layers.2.input_layernorm.weight": torch.ones(32)}),
        ["unknown", "layers.2"],
    ),
    "a misshapen tensor": (
        _edit(add={"norm.weight": torch.ones(31)}),
        ["norm.weight", "[31]", "[32]"],
    ),
    "captures that fc does not read": (
        _edit(inner={"target_layer_ids": [0, 2]}),
        ["fc.weight", "[32, 96]", "[32, 64]"],
    ),
    "another rank": (
        _edit(drop=CONFIDENCE, inner={"markov_rank": 4, "enable_confidence_head": False}),
        ["markov_w1", "[64, 8]", "[64, 4]"],
    ),
    "a tensor by two names": (
        _edit(add={"markov_w1.weight": torch.ones(64, 8)}),
        ["markov_head.markov_w1.weight", "twice"],
    ),
    "a mask of its own beside the mask token": (
        _edit(add={"mask_embedding": torch.ones(32)}),
        ["unknown", "mask_embedding"],
    ),
    "no mask at all": (_edit(inner={"mask_token_id": None}), ["mask_embedding", "missing"]),
    "a map onto part of the vocabulary": (
        _edit(add={"d2t": torch.zeros(64, dtype=torch.long)}),
        ["unknown", "d2t"],
    ),
    "attention sinks": (
        _edit(add={"layers.0.self_attn.attention_sink_bias": torch.ones(4)}),
        ["unknown", "attention_sink_bias"],
    ),
    "a ranking with an id twice": (
        _edit(add={"draft_vocab": torch.tensor([1, 1])}),
        ["draft_vocab", "twice"],
    ),
    "a ranking past the vocabulary": (
        _edit(add={"draft_vocab": torch.tensor([64])}),
        ["draft_vocab", "0..63"],
    ),
    "a ranking beside a head": (
        _edit(add={"draft_vocab": torch.arange(9), "lm_head.weight": torch.ones(64, 32)}),
        ["draft_vocab", "lm_head.weight"],
    ),
    "8-bit rows without their scales": (
        _edit(drop=("fc.weight",), add={"fc.weight.q8": torch.ones(32, 96, dtype=torch.int8)}),
        ["fc.weight.q8", "fc.weight.scale"],
    ),
    "8-bit rows with scales of others": (
        _edit(
            drop=("fc.weight",),
            add={
                "fc.weight.q8": torch.ones(32, 96, dtype=torch.int8),
                "fc.weight.scale": torch.ones(31),
            },
        ),
        ["fc.weight.q8", "[32, 96]", "[31]"],
    ),
    "a matrix in 8 bits and plain": (
        _edit(
            add={
                "fc.weight.q8": torch.ones(32, 96, dtype=torch.int8),
                "fc.weight.scale": torch.ones(32),
            },
        ),
        ["fc.weight", "twice"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_by_name(tmp_path, name):
    edit, words = REFUSED[name]
    base, tensors = specforge(), dict(dspark()[1])
    edit(base, tensors)
    with pytest.raises(ConfigError) as refusal:
        checkpoint.read(write(tmp_path / "x", base, tensors))
    message = str(refusal.value)
    assert "\n" not in message
    for word in [str(tmp_path), *words]:
        assert word in message


# ------------------------------------------------------------------ values and types


def _spoiled(weights: dict, name: str, value: float, seed: int) -> dict:
    """A copy of the weights with one value, at a random place of one tensor, replaced."""
    tensor = weights[name].clone()
    place = torch.randint(tensor.numel(), (1,), generator=torch.Generator().manual_seed(seed))
    tensor.view(-1)[place] = value
    return {**weights, name: tensor}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_one_value_that_is_not_finite_is_refused_in_every_tensor(tmp_path, method, value):
    config, weights = dflash() if method == "dflash" else dspark()
    record = old_dflash() if method == "dflash" else specforge()
    for seed, name in enumerate(weights):
        spoiled = _spoiled(weights, name, value, seed)
        wanted = rf"tensor '{re.escape(name)}' holds NaN or infinity"
        with pytest.raises(ConfigError, match=wanted):
            checkpoint.read(write(tmp_path / "x", record, spoiled))
        with pytest.raises(ConfigError, match=wanted):
            checkpoint.save(tmp_path / "y", spoiled, config, quantise=seed % 2 == 0)
    assert not (tmp_path / "y").exists()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_value_that_is_not_finite_is_refused_in_every_float_type(tmp_path, dtype):
    _, weights = dspark()
    spoiled = _spoiled(weights, "fc.weight", float("nan"), 0)
    for pickled in (False, True):
        path = tmp_path / str(pickled)
        tensors = {name: tensor.to(dtype) for name, tensor in weights.items()}
        read = checkpoint.read(write(path, specforge(), tensors, pickled=pickled))[1]
        assert all(torch.equal(read[name], tensors[name]) for name in weights)
        tensors["fc.weight"] = spoiled["fc.weight"].to(dtype)
        with pytest.raises(ConfigError, match=r"'fc.weight' holds NaN"):
            checkpoint.read(write(path, specforge(), tensors, pickled=pickled))


def test_values_beyond_float32_are_refused_in_double_precision_and_in_8_bits(tmp_path):
    config, weights = dspark()
    double = {**weights, "fc.weight": weights["fc.weight"].double() * 1e300}
    with pytest.raises(ConfigError, match=r"'fc.weight' holds NaN or infinity"):
        checkpoint.read(write(tmp_path / "x", specforge(), double))
    path = checkpoint.save(tmp_path / "y", weights, config, quantise=True)
    stored = load_file(path / "model.safetensors")
    for value, name in ((3e38, "fc.weight"), (float("nan"), "fc.weight.scale")):
        scale = stored["fc.weight.scale"].clone()
        scale[5] = value
        save_file({**stored, "fc.weight.scale": scale}, path / "model.safetensors")
        with pytest.raises(ConfigError, match=rf"'{name}' holds NaN or infinity"):
            checkpoint.read(path)


def test_values_beyond_the_type_they_are_written_in_are_not_written(tmp_path):
    config, weights = dspark()
    large = {**weights, "fc.weight": weights["fc.weight"] * 1e6}
    with pytest.raises(ConfigError, match=r"written in float16: tensor 'fc.weight' holds"):
        checkpoint.save(tmp_path / "x", large, config, dtype=torch.float16)
    assert not (tmp_path / "x").exists()
    checkpoint.read(checkpoint.save(tmp_path / "x", large, config))


TYPES = ["int8", "uint8", "int32", "int64", "bool", "complex64", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("name", ["fc.weight", "norm.weight", BIAS])
@pytest.mark.parametrize("kind", TYPES)
def test_a_tensor_of_another_type_is_refused_by_name_and_type(tmp_path, name, kind):
    _, weights = dspark()
    tensors = {**weights, name: weights[name].to(getattr(torch, kind))}
    with pytest.raises(ConfigError, match=rf"tensor '{re.escape(name)}' is {kind}, not one of"):
        checkpoint.read(write(tmp_path / "x", specforge(), tensors))


@pytest.mark.parametrize("kind", ["uint8", "int32", "float32"])
def test_8_bit_rows_of_another_type_are_refused(tmp_path, kind):
    config, weights = dspark()
    path = checkpoint.save(tmp_path / "x", weights, config, quantise=True)
    stored = load_file(path / "model.safetensors")
    stored["fc.weight.q8"] = stored["fc.weight.q8"].to(getattr(torch, kind))
    save_file(stored, path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"'fc.weight.q8' is {kind}, not one of int8"):
        checkpoint.read(path)


@pytest.mark.parametrize("kind", ["float32", "bool", "complex64"])
def test_a_ranking_that_is_not_integers_is_refused(tmp_path, kind):
    ranking = torch.arange(9).to(getattr(torch, kind))
    tensors = {**dspark()[1], "draft_vocab": ranking}
    with pytest.raises(ConfigError, match=rf"'draft_vocab' is {kind}, not one of int64"):
        checkpoint.read(write(tmp_path / "x", specforge(), tensors))


def test_a_pickle_of_anything_but_plain_named_tensors_is_refused(tmp_path):
    _, weights = dspark()
    sparse = {**weights, "fc.weight": weights["fc.weight"].to_sparse()}
    path = write(tmp_path / "x", specforge(), weights, pickled=True)
    torch.save(sparse, path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"'fc.weight' is sparse"):
        checkpoint.read(path)
    torch.save({**weights, 3: torch.ones(2)}, path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="more than tensors"):
        checkpoint.read(path)


def test_the_depth_of_the_target_is_read_where_it_is_said_and_none_is_made_up(tmp_path, target):
    _, weights = dspark()
    for said in (6, None):
        record = {**specforge(), "num_target_layers": said}
        config, read = checkpoint.read(write(tmp_path / "x", record, weights))
        assert config.num_target_layers == said
        DFlash(target, config, read)
    record = {**specforge(), "num_target_layers": 30}
    config, read = checkpoint.read(write(tmp_path / "x", record, weights))
    with pytest.raises(ConfigError, match=r"30 layers, this target has 6"):
        DFlash(target, config, read)


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_what_is_shipped_is_read(method):
    config, weights = checkpoint.read(SHIPPED / f"{method}-smollm2-135m")
    assert config.method == method
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_a_mask_vector_in_a_file_of_its_own_is_not_overlooked(tmp_path):
    path = write(tmp_path / "x", specforge(), dspark()[1])
    torch.save(torch.ones(32), path / "mask_embedding.pt")
    with pytest.raises(ConfigError, match=r"mask_embedding.pt: a mask vector.*not supported"):
        checkpoint.read(path)


class _Payload:
    def __reduce__(self):
        return (print, ("unpickled",))


def test_a_checkpoint_that_pickles_more_than_tensors_is_refused(tmp_path, capsys):
    path = tmp_path / "x"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(specforge()))
    torch.save({"fc.weight": _Payload()}, path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="more than tensors"):
        checkpoint.read(path)
    (path / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": _Payload()}, protocol=2))
    with pytest.raises(ConfigError):
        checkpoint.read(path)
    assert "unpickled" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (None, "no such directory"),
        ({}, "no config.json"),
        ({"config.json": b""}, "not valid JSON"),
        ({"config.json": b"[]"}, "not a JSON object"),
        ({"config.json": b"GOOD"}, "neither"),
        ({"config.json": b"GOOD", "model.safetensors": b""}, "cannot be read"),
        ({"config.json": b"GOOD", "model.safetensors": b"\x02" + b"\0" * 7 + b"{}"}, "missing"),
        ({"config.json": b"GOOD", "model.safetensors": b"garbage, and more of it"}, "cannot be"),
        ({"config.json": b"GOOD", "pytorch_model.bin": b""}, "pytorch_model.bin"),
        ({"config.json": b"GOOD", "pytorch_model.bin": b"garbage"}, "pytorch_model.bin"),
    ],
)
def test_a_directory_that_is_no_checkpoint_is_refused_in_one_line(tmp_path, files, words):
    path = tmp_path / "x"
    if files is not None:
        path.mkdir()
        for name, data in files.items():
            good = json.dumps(specforge()).encode()
            (path / name).write_bytes(good if data == b"GOOD" else data)
    with pytest.raises(ConfigError, match=words) as refusal:
        checkpoint.read(path)
    assert "\n" not in str(refusal.value)
