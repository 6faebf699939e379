"""EAGLE-3 checkpoints: every layout reads as one drafter; what does not fit is refused by name."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import msgspec
import pytest
import torch
from drafting import VOCAB, eagle_config, eagle_weights, tiny_target
from safetensors.torch import load_file, save_file

from tandemkv.base.errors import ConfigError
from tandemkv.model import eagle3_checkpoint as checkpoint
from tandemkv.model.eagle3 import Eagle3
from tandemkv.model.eagle3_config import Eagle3Config, default_taps, parse_config

MID = "midlayer."
USED = list(range(1, 41, 2))


def flat(config: Eagle3Config, **changes) -> dict:
    """A published, flat config.json of this drafter, captured layers left to the default."""
    fields = msgspec.to_builtins(config)
    rope = fields.pop("rope_parameters")
    for name in ("taps", "target_hidden_size"):
        fields.pop(name)
    options = {k: fields.pop(k) for k in list(fields) if k.startswith(("fc_", "norm_"))}
    return {
        **fields,
        **{k: v for k, v in options.items() if v},
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rope_theta": rope["rope_theta"],
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        **changes,
    }


def reduced():
    """(config, weights) with a reduced vocabulary, its own head, and both maps."""
    config = eagle_config(draft_vocab_size=len(USED), taps=None)
    weights = eagle_weights(config, "lm_head.weight")
    weights["d2t"] = checkpoint.offsets(USED)
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[USED] = True
    return config, weights, t2d


def write(path, config: dict, tensors: dict, *, pickled: bool = False):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    tensors = {k: v.contiguous() for k, v in tensors.items()}
    if pickled:
        torch.save(tensors, path / "pytorch_model.bin")
    else:
        save_file(tensors, path / "model.safetensors")
    return path


def as_layers(weights: dict, prefix: str) -> dict:
    return {
        prefix + name.replace(MID, "layers.0.") if name not in ("d2t",) else name: tensor
        for name, tensor in weights.items()
    }


def layouts(path):
    """Every published layout of one drafter: name -> directory; captured layers are (1, 3, 4)."""
    config, weights, t2d = reduced()
    eagle = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}
    full = {**weights, "t2d": t2d}
    speculators = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0",
        "draft_vocab_size": len(USED),
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 1,
            "vocab_size": VOCAB,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
        },
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x"}},
    }
    old = flat(config)
    return {
        "SafeAILab": write(path / "a", old, full, pickled=True),
        "SpecForge": write(path / "b", {**old, "eagle_config": eagle}, full),
        "vLLM": write(
            path / "c",
            {**old, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]},
            as_layers(full, "model.") | {"d2t": weights["d2t"]},
        ),
        "speculators": write(path / "d", speculators, as_layers(full, "")),
        "ours": checkpoint.save(
            path / "e",
            weights,
            msgspec.structs.replace(config, taps=(1, 3, 4)),
            dtype=torch.float32,
        ),
    }


@pytest.fixture(scope="module")
def every_layout(tmp_path_factory):
    return layouts(tmp_path_factory.mktemp("layouts"))


@pytest.fixture(scope="module")
def target():
    return tiny_target(layers=8)


@pytest.mark.parametrize("name", ["SafeAILab", "SpecForge", "vLLM", "speculators", "ours"])
def test_every_layout_reads_as_the_same_drafter(every_layout, target, name):
    _, weights, _ = reduced()
    config, tensors = checkpoint.read(every_layout[name])
    assert set(tensors) == set(weights)
    assert all(torch.equal(tensors[k], weights[k]) for k in weights)
    drafter = Eagle3(target, config, tensors)
    assert drafter.spec.taps == (1, 3, 4)
    assert drafter.head.ids.tolist() == USED
    known = {"rope_parameters", "max_position_embeddings", "taps", "rms_norm_eps"}
    for field in msgspec.structs.fields(Eagle3Config):
        if field.name not in known:
            assert getattr(config, field.name) == getattr(reduced()[0], field.name), field.name
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert config.rms_norm_eps == 1e-5


def test_captured_layers_follow_each_layouts_convention():
    config = flat(eagle_config())
    output_of = {**config, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 14, 26]}}
    input_of = {**config, "eagle_aux_hidden_state_layer_ids": [2, 15, 27]}
    assert parse_config(output_of, "x").taps == (1, 14, 26)
    assert parse_config(input_of, "x").taps == (1, 14, 26)
    assert parse_config({**input_of, **output_of}, "x").taps == (1, 14, 26)
    assert parse_config(config, "x").taps is None
    assert default_taps(30, "x") == (1, 14, 26)
    assert default_taps(36, "x") == (1, 17, 32)
    assert parse_config({**config, "eagle_aux_hidden_state_layer_ids": [0]}, "x").taps == (-1,)
    with pytest.raises(ConfigError, match=r"outputs of layers \[1, 14, 26\].*inputs of"):
        parse_config({**output_of, "eagle_aux_hidden_state_layer_ids": [1, 14, 26]}, "x")


def test_a_speculators_config_keeps_its_model_types_defaults():
    layer = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64}
    layer["num_hidden_layers"] = 1
    config = parse_config(
        {
            "speculators_model_type": "eagle3",
            "norm_before_residual": True,
            "norm_before_fc": True,
            "draft_vocab_size": 16,
            "transformer_layer_config": layer,
        },
        "x",
    )
    assert (config.intermediate_size, config.rms_norm_eps) == (11008, 1e-6)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert (config.norm_before_residual, config.norm_before_fc) == (True, True)


def test_rope_is_read_whichever_version_wrote_it():
    config = flat(eagle_config())
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    }
    old = parse_config({**config, "rope_theta": 5e5, "rope_scaling": scaling}, "x")
    new = dict(config, rope_parameters={**scaling, "rope_theta": 5e5})
    new.pop("rope_theta")
    assert old.rope_parameters == parse_config(new, "x").rope_parameters
    assert old.rope_parameters["factor"] == 8.0


# ------------------------------------------------------------------ our own layout


@pytest.mark.parametrize(
    ("extra", "changes"),
    [
        ((), {}),
        ((), {"fc_norm": True, "norm_output": True}),
        ((), {"norm_before_fc": True, "norm_before_residual": True}),
        (("embed_tokens.weight", "lm_head.weight"), {}),
        (("midlayer.self_attn.q_norm.weight", "midlayer.self_attn.k_norm.weight"), {}),
    ],
)
def test_what_is_saved_is_read_back(tmp_path, extra, changes):
    config = eagle_config(rope_parameters={"rope_type": "default", "rope_theta": 77.0}, **changes)
    weights = eagle_weights(config, *extra)
    path = checkpoint.save(tmp_path / "x", weights, config, dtype=torch.float32, extra={"steps": 3})
    again, tensors = checkpoint.read(path)
    assert again == config
    assert set(tensors) == set(weights)
    assert all(torch.equal(tensors[k], weights[k]) for k in weights)
    assert json.loads((path / "config.json").read_text())["training"] == {"steps": 3}
    assert {p.name for p in path.iterdir()} == {"config.json", "model.safetensors"}


def test_a_quantised_checkpoint_is_small_and_close(tmp_path, target):
    config = eagle_config(fc_norm=True)
    weights = eagle_weights(config)
    weights["draft_vocab"] = torch.randperm(VOCAB)
    path = checkpoint.save(tmp_path / "x", weights, config, quantise=True)
    stored = load_file(path / "model.safetensors")
    assert stored["fc.weight.q8"].dtype == torch.int8
    assert stored["draft_vocab"].dtype == torch.int32
    _, tensors = checkpoint.read(path)
    assert torch.equal(tensors["draft_vocab"].long(), weights["draft_vocab"])
    for name, tensor in weights.items():
        if tensor.dim() == 2:
            bound = tensor.abs().amax(1, keepdim=True) / 127 / 2 * 1.001
            assert bool(((tensors[name] - tensor).abs() <= bound).all()), name
    Eagle3(target, config, tensors)


def test_a_checkpoint_is_not_written_with_open_captured_layers(tmp_path):
    config = eagle_config(taps=None)
    with pytest.raises(ConfigError, match="captured layers named"):
        checkpoint.save(tmp_path / "x", eagle_weights(config), config)


# ------------------------------------------------------------------ vocabulary maps


def test_d2t_holds_offsets(target):
    used = list(range(0, 32, 2))
    assert checkpoint.offsets(used).tolist() == list(range(16))
    assert checkpoint.draft_ids(torch.arange(16)).tolist() == used
    assert checkpoint.offsets(range(16)).tolist() == [0] * 16


def test_a_full_vocabulary_skips_the_map_and_a_reduced_one_does_not(target):
    config = eagle_config()
    weights = eagle_weights(config) | {"d2t": torch.zeros(VOCAB, dtype=torch.long)}
    assert Eagle3(target, config, weights).head.ids is None
    config = eagle_config(draft_vocab_size=16)
    weights = eagle_weights(config) | {"d2t": torch.zeros(16, dtype=torch.long)}
    assert Eagle3(target, config, weights).head.ids.tolist() == list(range(16))


def test_t2d_alone_gives_the_map(tmp_path):
    config, weights, t2d = reduced()
    tensors = {k: v for k, v in weights.items() if k != "d2t"} | {"t2d": t2d}
    _, again = checkpoint.read(write(tmp_path / "x", flat(config), tensors))
    assert torch.equal(again["d2t"], weights["d2t"])


def test_a_ranking_gives_the_first_k_rows_of_the_targets_head(target):
    config = eagle_config()
    ranking = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))
    weights = eagle_weights(config) | {"draft_vocab": ranking[:40]}
    chosen = Eagle3(target, config, weights, draft_vocab=10)
    assert chosen.head.ids.tolist() == sorted(ranking[:10].tolist())
    assert torch.equal(chosen.head.weight, target.head_weight[chosen.head.ids])
    assert len(Eagle3(target, config, weights).head.ids) == 40
    assert Eagle3(target, config, weights, draft_vocab=VOCAB).head.ids is None
    with pytest.raises(ConfigError, match="draft_vocab 41 was asked for, the checkpoint ranks 40"):
        Eagle3(target, config, weights, draft_vocab=41)
    with pytest.raises(ConfigError, match="does not rank"):
        Eagle3(target, config, eagle_weights(config), draft_vocab=10)


# ------------------------------------------------------------------ refusals


def _edit(drop=(), add=None, **config):
    def edit(base: dict, tensors: dict) -> None:
        base.update(config)
        for name in drop:
            del tensors[name]
        tensors.update(add or {})

    return edit


REFUSED = {
    "a reduced vocabulary without a map": (
        _edit(drop=("d2t", "t2d")),
        ["draft vocabulary 20", "target vocabulary 64", "without a map"],
    ),
    "an offset past the vocabulary": (
        _edit(drop=("t2d",), add={"d2t": torch.full((20,), 50)}),
        ["target id 64", "vocabulary of 64"],
    ),
    "an offset below zero": (
        _edit(drop=("t2d",), add={"d2t": torch.full((20,), -1)}),
        ["target id -1"],
    ),
    "a map onto one id twice": (
        _edit(drop=("t2d",), add={"d2t": torch.tensor([1, 0] + [5] * 18)}),
        ["same target id"],
    ),
    "maps that disagree": (
        _edit(add={"t2d": torch.ones(VOCAB, dtype=torch.bool)}),
        ["20 draft ids", "64 target ids"],
    ),
    "a ranking beside a map": (
        _edit(add={"draft_vocab": torch.arange(9)}),
        ["'draft_vocab'", "'d2t'"],
    ),
    "a missing tensor": (_edit(drop=(MID + "mlp.up_proj.weight",)), ["up_proj", "missing"]),
    "no fc": (_edit(drop=("fc.weight",)), ["fc.weight", "missing"]),
    "an unknown tensor": (_edit(add={"extra.weight": torch.ones(2)}), ["unknown", "extra.weight"]),
    "a misshapen tensor": (
        _edit(add={"norm.weight": torch.ones(31)}),
        ["norm.weight", "[31]", "[32]"],
    ),
    "half of the head norms": (
        _edit(add={MID + "self_attn.q_norm.weight": torch.ones(8)}),
        ["q_norm", "k_norm"],
    ),
    "fc of a broken width": (_edit(add={"fc.weight": torch.ones(32, 90)}), ["90", "32"]),
    "captures that fc does not read": (
        _edit(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3]}),
        ["2 captured layers [1, 3]", "reads 3"],
    ),
    "an unknown option": (_edit(residual_gate=0.5), ["residual_gate", "0.5"]),
    "a bias": (_edit(attention_bias=True), ["attention_bias"]),
    "two layers": (_edit(num_hidden_layers=2), ["num_hidden_layers", "2"]),
    "another activation": (_edit(hidden_act="gelu"), ["hidden_act", "gelu"]),
    "a window": (_edit(sliding_window=64), ["sliding_window"]),
    "parallel drafting": (_edit(parallel_drafting=True), ["parallel_drafting"]),
    "two norms before fc": (_edit(fc_norm=True, norm_before_fc=True), ["exclude"]),
    "no hidden size": (_edit(hidden_size=None), ["hidden_size"]),
    "no input norm": (
        _edit(eagle_config={"use_input_layernorm_in_first_layer": False}),
        ["use_input_layernorm_in_first_layer"],
    ),
    "features of the last layer only": (
        _edit(eagle_config={"use_aux_hidden_state": False}),
        ["use_aux_hidden_state"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_by_name(tmp_path, name):
    edit, words = REFUSED[name]
    config, weights, t2d = reduced()
    base, tensors = flat(config), {**weights, "t2d": t2d}
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
def test_one_value_that_is_not_finite_is_refused_in_every_tensor(tmp_path, value):
    config, weights, t2d = reduced()
    for seed, name in enumerate(name for name in weights if name != "d2t"):
        spoiled = {**_spoiled(weights, name, value, seed), "t2d": t2d}
        with pytest.raises(ConfigError, match=rf"'{re.escape(name)}' holds NaN or infinity"):
            checkpoint.read(write(tmp_path / "x", flat(config), spoiled))


@pytest.mark.parametrize(
    "kind", ["int8", "uint8", "int32", "int64", "bool", "complex64", "float8_e4m3fn"]
)
def test_a_tensor_of_another_type_is_refused_by_name_and_type(tmp_path, kind):
    config, weights, _ = reduced()
    for name in ("fc.weight", "norm.weight", "lm_head.weight"):
        tensors = {**weights, name: weights[name].to(getattr(torch, kind))}
        with pytest.raises(ConfigError, match=rf"tensor '{re.escape(name)}' is {kind}, not one of"):
            checkpoint.read(write(tmp_path / "x", flat(config), tensors))


@pytest.mark.parametrize("kind", ["float32", "complex64", "bool"])
def test_a_map_that_is_not_integers_is_refused(tmp_path, kind):
    config, weights, _ = reduced()
    for name in ("d2t", "draft_id_to_target_id"):
        tensors = {k: v for k, v in weights.items() if k != "d2t"}
        tensors[name] = weights["d2t"].to(getattr(torch, kind))
        with pytest.raises(ConfigError, match=rf"tensor '{name}' is {kind}, not one of int64"):
            checkpoint.read(write(tmp_path / "x", flat(config), tensors))


def test_maps_of_any_integer_type_mean_the_same(tmp_path):
    config, weights, t2d = reduced()
    for kind in (torch.int64, torch.int32, torch.int16):
        tensors = {**weights, "d2t": weights["d2t"].to(kind), "t2d": t2d.to(kind)}
        _, read = checkpoint.read(write(tmp_path / "x", flat(config), tensors))
        assert checkpoint.draft_ids(read["d2t"]).tolist() == USED
    with pytest.raises(ConfigError, match=r"tensor 't2d' is float32, not one of bool"):
        checkpoint.read(write(tmp_path / "x", flat(config), {**weights, "t2d": t2d.float()}))


@pytest.mark.parametrize(("said", "size"), [({"head_dim": 7}, 7), ({"hidden_size": 36}, 9)])
def test_heads_of_odd_size_are_refused_by_name(said, size):
    record = flat(eagle_config())
    record = {k: v for k, v in record.items() if k != "head_dim"} | said
    with pytest.raises(ConfigError, match=rf"head_dim must be even for RoPE, got {size}$"):
        parse_config(record, "x")


def test_what_is_shipped_is_read():
    shipped = Path(checkpoint.__file__).parents[1] / "weights" / "eagle3-smollm2-135m"
    _, weights = checkpoint.read(shipped)
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_an_unknown_option_that_is_off_is_let_through():
    assert parse_config(flat(eagle_config(), some_new_switch=False, other=None), "x")


def test_a_speculators_config_without_its_residual_convention_is_refused():
    config = {"speculators_model_type": "eagle3", "transformer_layer_config": {"hidden_size": 1}}
    with pytest.raises(ConfigError, match="norm_before_residual"):
        parse_config(config, "x")
    with pytest.raises(ConfigError, match="'dflash'"):
        parse_config({"speculators_model_type": "dflash"}, "x")


class _Payload:
    def __reduce__(self):
        return (print, ("unpickled",))


def test_a_checkpoint_that_pickles_more_than_tensors_is_refused(tmp_path, capsys):
    path = tmp_path / "x"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(flat(eagle_config())))
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
        ({"config.json": b"{"}, "not valid JSON"),
        ({"config.json": b"[]"}, "not a JSON object"),
        ({"config.json": b"GOOD"}, "neither"),
        ({"config.json": b"GOOD", "model.safetensors": b"short"}, "cannot be read"),
        ({"config.json": b"GOOD", "pytorch_model.bin": b"short"}, "pytorch_model.bin"),
        ({"config.json": b"\xff\xfe"}, "not valid JSON"),
    ],
)
def test_a_directory_that_is_no_checkpoint_is_refused_in_one_line(tmp_path, files, words):
    path = tmp_path / "x"
    if files is not None:
        path.mkdir()
        for name, data in files.items():
            good = json.dumps(flat(eagle_config())).encode()
            (path / name).write_bytes(good if data == b"GOOD" else data)
    with pytest.raises(ConfigError, match=words) as refusal:
        checkpoint.read(path)
    assert "\n" not in str(refusal.value)
