"""DFlash and DSpark configs: what is published is accepted and means what its authors meant."""

from __future__ import annotations

import json

import msgspec
import pytest
from block_layouts import FULL, SLIDING, old_dflash, specforge, trunk, without
from drafting import block_config

from tandemkv.base.errors import ConfigError
from tandemkv.model import dflash_options as options
from tandemkv.model.dflash_config import DFlashConfig, default_taps, parse_config, to_dict


def published(layers: int, targets: int, **changes) -> dict:
    """A published drafter for Qwen3-8B but for what is changed; DFlash, full attention."""
    config = block_config(
        "dflash",
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        windows=(None,) * layers,
    )
    base = {"architectures": ["DFlashDraftModel"], "num_target_layers": targets}
    return trunk(config, **{**base, **changes})


MIXED = {"layer_types": [SLIDING] * 4 + [FULL], "use_sliding_window": True}
PUBLISHED = {
    "z-lab/Qwen3-8B-DFlash-b16": (
        published(
            5,
            36,
            block_size=16,
            dflash_config={"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
        ),
        ("dflash", 15, (1, 9, 17, 25, 33), (None,) * 5, ()),
    ),
    "z-lab/Qwen3.6-27B-DFlash": (
        published(
            5,
            64,
            block_size=16,
            sliding_window=2048,
            dflash_config={"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
            **MIXED,
        ),
        ("dflash", 15, (1, 16, 31, 46, 61), (2048,) * 4 + (None,), (True,) * 4 + (False,)),
    ),
    "deepseek-ai/dspark_qwen3_8b_block7": (
        published(
            5,
            36,
            architectures=["Qwen3DSparkModel"],
            block_size=7,
            mask_token_id=151669,
            target_layer_ids=[1, 9, 17, 25, 33],
            num_anchors=512,
            markov_rank=256,
            markov_head_type="vanilla",
            enable_confidence_head=True,
            confidence_head_with_markov=True,
        ),
        ("dspark", 7, (1, 9, 17, 25, 33), (None,) * 5, ()),
    ),
    "deepseek-ai/dflash_qwen3_8b_block7, which predicts as DSpark does": (
        published(
            5,
            36,
            architectures=["Qwen3DSparkModel"],
            block_size=7,
            mask_token_id=151669,
            target_layer_ids=[1, 9, 17, 25, 33],
            num_anchors=512,
            markov_rank=0,
            enable_confidence_head=False,
            target_hidden_size=4096,
        ),
        ("dspark", 7, (1, 9, 17, 25, 33), (None,) * 5, ()),
    ),
    "RadixArk/Qwen3.8-27B-DSpark": (
        published(
            5,
            64,
            architectures=["DSparkDraftModel"],
            auto_map={"AutoModel": "dspark.DSparkDraftModel"},
            block_size=7,
            rope_theta=None,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000000,
                "factor": 32.0,
                "original_max_position_embeddings": 8192,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
            markov_rank=256,
            dflash_config={
                "projector_type": "dspark",
                "attention_mode": "gqa",
                "mask_token_id": 248077,
                "target_layer_ids": [4, 16, 28, 40, 52],
                "markov_rank": 256,
                "confidence_head_alpha": 1.0,
                "enable_confidence_head": True,
                "confidence_head_with_markov": True,
            },
        ),
        ("dspark", 7, (4, 16, 28, 40, 52), (None,) * 5, ()),
    ),
    "ModelOpt, a window on all layers that layer_types does not name": (
        published(
            6,
            61,
            block_size=8,
            sliding_window=1024,
            use_sliding_window=None,
            dflash_config={
                "mask_token_id": 1,
                "target_layer_ids": [1, 12, 24, 35, 47, 58],
                "use_swa": True,
                "swa_window_size": 1024,
                "causal": False,
            },
        ),
        ("dflash", 7, (1, 12, 24, 35, 47, 58), (1024,) * 6, ()),
    ),
    "no layers named, the published default": (
        published(5, 28, block_size=16, mask_token_id=3),
        ("dflash", 15, (1, 7, 13, 19, 25), (None,) * 5, ()),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_published_is_accepted(name):
    record, wanted = PUBLISHED[name]
    config = parse_config(record, "x")
    assert (
        config.method,
        config.num_draft_tokens,
        config.taps,
        config.windows,
        config.causal,
    ) == wanted


# ------------------------------------------------------------------ what an option means


@pytest.mark.parametrize(
    ("classes", "said", "method"),
    [
        (["DFlashDraftModel"], {}, "dflash"),
        (["DSparkDraftModel"], {}, "dspark"),
        (["Qwen3DSparkModel"], {"markov_rank": 0}, "dspark"),
        (["DFlashDraftModel"], {"projector_type": "dspark", "markov_rank": 8}, "dspark"),
        ([], {"projector_type": "dflash"}, "dflash"),
        (["DFlashDraftModel"], {"markov_rank": 8, "shift_label": True}, "dspark"),
        (["DFlashDraftModel"], {"markov_rank": 8, "shift_label": False}, "dflash"),
        (["DSparkDraftModel"], {"sample_from_anchor": False}, "dflash"),
        (["DSparkDraftModel"], {"sample_from_anchor": True}, "dspark"),
    ],
)
def test_the_method_is_what_a_row_predicts_and_settles_k(classes, said, method):
    record = {**without(old_dflash(), "dflash_config"), "target_layer_ids": [0, 2, 4]}
    config = parse_config({**record, "architectures": classes, "block_size": 8, **said}, "x")
    assert config.method == method
    assert config.num_draft_tokens == (8 if method == "dspark" else 7)
    assert config.num_rows == 8


UNSAID = {"layer_types": None, "sliding_window": None, "use_sliding_window": None}
NAMED = {"layer_types": [SLIDING, FULL], "use_sliding_window": True}


@pytest.mark.parametrize(
    ("said", "windows", "causal"),
    [
        ({}, (None, None), ()),
        ({"sliding_window": 7, "layer_types": [FULL, FULL]}, (None, None), ()),
        ({**NAMED, "sliding_window": 7}, (7, None), (True, False)),
        ({"layer_types": [SLIDING, FULL], "sliding_window": 7}, (7, None), (True, False)),
        ({**NAMED, "swa_window_size": 7}, (7, None), (True, False)),
        ({**NAMED, "sliding_window": [7, None]}, (7, None), (True, False)),
        ({"layer_types": [SLIDING] * 2, "sliding_window": [7, 9]}, (7, 9), (True, True)),
        # use_swa: all layers, unless layer_types names some
        ({"use_swa": True, "swa_window_size": 7}, (7, 7), ()),
        ({"use_swa": True, "sliding_window": 7, "layer_types": [FULL, FULL]}, (7, 7), ()),
        ({**NAMED, "use_swa": True, "swa_window_size": 7}, (7, None), (True, False)),
        ({"use_swa": False, "swa_window_size": 7}, (None, None), ()),
        # the rule that layer_types replaced
        ({"use_sliding_window": False, "sliding_window": 7}, (None, None), ()),
        (
            {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
            (None, 7),
            (False, True),
        ),
        (
            {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 28},
            (None, None),
            (),
        ),
        # is_causal, or causal, outranks the default
        ({**NAMED, "sliding_window": 7, "is_causal": False}, (7, None), ()),
        ({**NAMED, "sliding_window": 7, "dflash_config": {"causal": False}}, (7, None), ()),
        ({"is_causal": True}, (None, None), (True, True)),
        ({"is_causal": [False, True]}, (None, None), (False, True)),
    ],
)
@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_windows_and_causality_are_as_trainers_and_servers_read_them(method, said, windows, causal):
    """Sliding layers that are named are causal by default, in DSpark too; use_swa alone is not."""
    record = without(old_dflash(), "dflash_config") | UNSAID | {"target_layer_ids": [0, 2, 4]}
    config = parse_config({**record, "shift_label": method == "dspark", **said}, "x")
    assert config.windows == windows
    assert config.causal == causal


def test_the_default_captures_are_the_published_ones():
    assert default_taps(36, 5) == (1, 9, 17, 25, 33)
    assert default_taps(64, 5) == (1, 16, 31, 46, 61)
    assert default_taps(30, 3) == (1, 14, 27)
    assert default_taps(30, 5) == (1, 8, 14, 20, 27)
    assert default_taps(30, 1) == (15,)
    record = {**without(old_dflash(), "dflash_config"), "num_target_layers": 30, "mask_token_id": 9}
    assert parse_config(record, "x").taps == (1, 27)


def test_inputs_of_layers_are_outputs_of_those_before():
    record = {**without(old_dflash(), "dflash_config"), "mask_token_id": 9}
    record["eagle_aux_hidden_state_layer_ids"] = [0, 3, 5]
    assert parse_config(record, "x").taps == (-1, 2, 4)
    with pytest.raises(ConfigError, match=r"outputs of layers \[0, 2, 4\].*inputs of \[0, 3, 5\]"):
        parse_config({**record, "target_layer_ids": [0, 2, 4]}, "x")


# ------------------------------------------------------------------ our own layout


ROUND = {
    "a window": {},
    "full attention": {"windows": (None, None)},
    "one layer full": {"windows": (None, 5)},
    "two windows": {"windows": (3, 5)},
    "two windows and none": {"num_layers": 3, "windows": (3, None, 5)},
    "causal": {"causal": (True, True)},
    "causal in one layer": {"causal": (False, True)},
    "a token as mask": {"mask_token_id": 9},
    "token 0 as mask": {"mask_token_id": 0},
    "a norm per capture": {"fc_norm": True},
    "the embedding captured": {"taps": (-1, 3)},
    "captures of another width": {"target_hidden_size": 24},
    "a target of known depth": {"num_target_layers": 6},
    "scales and softcap": {"embedding_scale": 1.7, "logit_scale": 0.5, "logit_softcap": 3.0},
    "RoPE of its own": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5e4,
            "factor": 4.0,
            "original_max_position_embeddings": 512,
        },
        "max_position_embeddings": 2048,
    },
    "another epsilon": {"rms_norm_eps": 1e-5},
    "one draft": {"num_draft_tokens": 1},
    "as many drafts as can be": {"num_draft_tokens": 64},
    "a Markov head": {"markov_rank": 8},
    "a gated Markov head": {"markov_rank": 8, "markov_head_type": "gated"},
    "no heads": {"markov_rank": 0, "confidence": False},
    "confidence alone": {"markov_rank": 0, "confidence": True, "confidence_with_markov": False},
    "confidence without Markov": {
        "markov_rank": 8,
        "confidence": True,
        "confidence_with_markov": False,
    },
    "confidence with Markov": {"markov_rank": 8, "confidence": True},
}


@pytest.mark.parametrize("method", ["dflash", "dspark"])
@pytest.mark.parametrize("name", ROUND)
def test_every_option_survives_our_own_config(method, name):
    config = block_config(method, **ROUND[name])
    record = json.loads(json.dumps(to_dict(config)))
    assert parse_config(record, "x") == config


def test_no_option_is_left_out_of_the_round_trip():
    """Each field takes a second value in ROUND, or is among those that every record must say."""
    tried = {field for changes in ROUND.values() for field in changes}
    fixed = {"method", "hidden_size", "intermediate_size", "vocab_size", "head_dim"}
    fixed |= {"num_attention_heads", "num_key_value_heads"}
    assert {field.name for field in msgspec.structs.fields(DFlashConfig)} == tried | fixed


# ------------------------------------------------------------------ refusals


def _edit(inner=None, **config):
    def edit(base: dict) -> None:
        base.update(config)
        base["dflash_config"] = {**base["dflash_config"], **(inner or {})}

    return edit


REFUSED = {
    # another architecture
    "the method's successor": (_edit(architectures=["DFlash2DraftModel"]), ["DFlash2DraftModel"]),
    "the layers of another model": (
        _edit(architectures=["Gemma4DSparkModel"]),
        ["Gemma4DSparkModel"],
    ),
    "two classes": (
        _edit(architectures=["DFlashDraftModel", "DSparkDraftModel"]),
        ["architectures", "DSparkDraftModel"],
    ),
    "another head": (_edit(inner={"projector_type": "domino"}), ["projector_type", "domino"]),
    "another head that also shifts": (
        _edit(inner={"projector_type": "domino", "shift_label": True}),
        ["projector_type", "domino"],
    ),
    "a class and a head that differ": (
        _edit(inner={"projector_type": "dflash"}),
        ["projector_type", "dflash", "DSparkDraftModel"],
    ),
    "a Markov head on what may be DFlash": (
        _edit(architectures=["DFlashDraftModel"], inner={"projector_type": None}),
        ["DFlashDraftModel", "Markov", "shift_label"],
    ),
    "neither class nor head": (
        _edit(architectures=None, inner={"projector_type": None}),
        ["architectures"],
    ),
    "the speculators layout": (
        _edit(speculators_model_type="dspark"),
        ["speculators", "'dspark'", "convert"],
    ),
    # options that change the maths
    "a convolution": (_edit(inner={"conv_kernel_size": 2}), ["conv_kernel_size", "2"]),
    "a convolution in the backbone": (
        _edit(inner={"dspark_backbone_conv_enabled": True}),
        ["dspark_backbone_conv_enabled"],
    ),
    "a selector": (_edit(inner={"selector_rank": 256}), ["selector_rank", "256"]),
    "latent attention": (_edit(inner={"attention_mode": "mla"}), ["attention_mode", "mla"]),
    "one recurrent layer": (
        _edit(inner={"attention_modes": ["gqa", "kda"]}),
        ["attention_modes", "kda"],
    ),
    "a bias": (_edit(attention_bias=True), ["attention_bias", "True"]),
    "another activation": (_edit(hidden_act="gelu"), ["hidden_act", "gelu"]),
    "foreign quantisation": (
        _edit(quantization_config={"quant_method": "fp8"}),
        ["quantization_config", "fp8"],
    ),
    "a gate on attention": (_edit(attn_output_gate=True), ["attn_output_gate"]),
    "sinks": (_edit(inner={"attention_sink_bias": True}), ["attention_sink_bias"]),
    "scaled values": (_edit(inner={"attention_value_scale": 0.6}), ["attention_value_scale"]),
    "interleaved RoPE": (_edit(rope_is_neox_style=False), ["rope_is_neox_style", "False"]),
    "RoPE on part of a head": (_edit(partial_rotary_factor=0.5), ["partial_rotary_factor", "0.5"]),
    "RoPE on part of a head, said within": (
        _edit(rope_parameters={"rope_theta": 1e6, "partial_rotary_factor": 0.25}),
        ["rope_parameters.partial_rotary_factor", "0.25"],
    ),
    "RoPE that is no object": (_edit(rope_parameters=[1]), ["RoPE"]),
    "RoPE without a base": (
        _edit(rope_theta=None, rope_parameters={"rope_theta": None, "rope_type": "default"}),
        ["rope_theta"],
    ),
    "the last layer's states only": (
        _edit(inner={"use_aux_hidden_state": False}),
        ["use_aux_hidden_state", "False"],
    ),
    "scaled logits": (_edit(logit_scale=0.5), ["logit_scale", "0.5"]),
    "calibrated confidence": (
        _edit(confidence_temperatures=[1.5, 0.9]),
        ["confidence_temperatures"],
    ),
    "a head over part of the vocabulary": (_edit(draft_vocab_size=20), ["draft_vocab_size", "20"]),
    "an unknown Markov head": (
        _edit(inner={"markov_head_type": "attention"}),
        ["markov_head_type", "attention", "vanilla"],
    ),
    "an unknown option": (_edit(residual_gate=0.5), ["residual_gate", "0.5"]),
    "a layout of the future": (_edit(tandemkv_format=2), ["tandemkv_format", "2"]),
    # one thing said twice
    "two block sizes": (
        _edit(inner={"block_size": 7}),
        ["block_size is 4", "dflash_config.block_size is 7"],
    ),
    "two Markov ranks": (
        _edit(dspark_config={"markov_rank": 4}),
        ["dflash_config.markov_rank is 8", "dspark_config.markov_rank is 4"],
    ),
    "two words on causality": (
        _edit(is_causal=True, inner={"causal": False}),
        ["is_causal is True", "dflash_config.causal is False"],
    ),
    "two words on a head": (
        _edit(inner={"use_confidence_head": False}),
        ["enable_confidence_head is True", "use_confidence_head is False"],
    ),
    "a draft block other than the trained one": (
        _edit(training_block_size=16),
        ["block_size is 4", "training_block_size is 16"],
    ),
    "two windows for one layer": (
        _edit(
            layer_types=[SLIDING] * 2,
            use_sliding_window=True,
            sliding_window=6,
            inner={"swa_window_size": 7},
        ),
        ["sliding_window is 6", "swa_window_size is 7"],
    ),
    # windows
    "sliding layers without a window": (
        _edit(layer_types=[SLIDING] * 2, use_sliding_window=True, sliding_window=None),
        ["sliding layers", "sliding_window is not given"],
    ),
    "sliding layers and a window that is switched off": (
        _edit(layer_types=[SLIDING] * 2, use_sliding_window=False, sliding_window=6),
        ["layer_types", "use_sliding_window is false"],
    ),
    "use_swa without a window": (
        _edit(inner={"use_swa": True}),
        ["sliding layers", "sliding_window is not given"],
    ),
    "a window below zero": (
        _edit(layer_types=[SLIDING] * 2, use_sliding_window=True, sliding_window=-1),
        ["sliding_window must be at least 1", "-1"],
    ),
    "a window of nothing": (
        _edit(layer_types=[SLIDING] * 2, use_sliding_window=True, sliding_window=0),
        ["sliding_window must be at least 1, got 0"],
    ),
    "a window of nothing, by its other name": (
        _edit(sliding_window=None, inner={"use_swa": True, "swa_window_size": 0}),
        ["swa_window_size must be at least 1, got 0"],
    ),
    "a window of nothing in one layer": (
        _edit(layer_types=[SLIDING] * 2, use_sliding_window=True, sliding_window=[6, 0]),
        ["sliding_window must be at least 1, got 0"],
    ),
    "a window that is no integer": (
        _edit(layer_types=[SLIDING] * 2, use_sliding_window=True, sliding_window=2.5),
        ["sliding_window must be an integer", "2.5"],
    ),
    "a window for some of the layers it is for": (
        _edit(layer_types=[SLIDING] * 2, use_sliding_window=True, sliding_window=[6, None]),
        ["sliding layers", "sliding_window is not given"],
    ),
    "windows for another number of layers": (
        _edit(layer_types=[SLIDING] * 2, use_sliding_window=True, sliding_window=[6]),
        ["sliding_window", "[6]", "2 layers"],
    ),
    "types for another number of layers": (_edit(layer_types=[FULL]), ["layer_types", "2 layers"]),
    "a layer of another type": (
        _edit(layer_types=[FULL, "linear_attention"]),
        ["linear_attention"],
    ),
    "sliding layers from nobody knows where": (
        _edit(layer_types=None, use_sliding_window=True, sliding_window=6, max_window_layers=None),
        ["max_window_layers"],
    ),
    "causality for another number of layers": (_edit(is_causal=[True]), ["is_causal", "2 layers"]),
    # values
    "no hidden size": (_edit(hidden_size=None), ["lacks 'hidden_size'"]),
    "no block size": (_edit(block_size=None), ["lacks 'block_size'"]),
    "no captures": (
        _edit(num_target_layers=None, inner={"target_layer_ids": None}),
        ["lacks 'target_layer_ids'"],
    ),
    "captures by default of a tiny target": (
        _edit(num_target_layers=3, inner={"target_layer_ids": None}),
        ["num_target_layers", "3"],
    ),
    "empty captures": (_edit(inner={"target_layer_ids": []}), ["target_layer_ids", "[]"]),
    "captures below the embedding": (_edit(inner={"target_layer_ids": [-2]}), ["target_layer_ids"]),
    "nothing to draft": (_edit(block_size=0), ["block_size", "0"]),
    "more than can be drafted": (_edit(block_size=65), ["block_size 65", "65 tokens", "64"]),
    "more than can be drafted after an anchor": (
        _edit(block_size=66, inner={"shift_label": False}),
        ["block_size 66", "65 tokens", "64"],
    ),
    "a block out of all bounds": (_edit(block_size=10**9), ["block_size 1000000000", "64"]),
    "heads of odd size": (_edit(head_dim=7), ["head_dim must be even for RoPE, got 7"]),
    "heads that come out odd": (
        _edit(head_dim=None, hidden_size=36),
        ["head_dim must be even for RoPE, got 9"],
    ),
    "a target of no layers": (_edit(num_target_layers=0), ["num_target_layers", "0"]),
    "a target of half a layer": (_edit(num_target_layers=6.5), ["num_target_layers", "6.5"]),
    "two depths of the target": (
        _edit(inner={"num_target_layers": 7}),
        ["num_target_layers is 6", "dflash_config.num_target_layers is 7"],
    ),
    "only the anchor to draft": (
        _edit(block_size=1, inner={"shift_label": False}),
        ["block_size 1", "nothing to draft"],
    ),
    "a size that is no integer": (_edit(hidden_size="32"), ["hidden_size", "'32'"]),
    "a switch that is no switch": (_edit(inner={"use_swa": "false"}), ["use_swa", "'false'"]),
    "heads that do not divide": (
        _edit(num_key_value_heads=3),
        ["num_attention_heads 4", "num_key_value_heads 3"],
    ),
    "a negative mask": (_edit(inner={"mask_token_id": -1}), ["mask_token_id", "-1"]),
    "a negative cap": (_edit(final_logit_softcapping=-1.0), ["final_logit_softcapping", "-1.0"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_by_name(name):
    edit, words = REFUSED[name]
    base = specforge()
    edit(base)
    with pytest.raises(ConfigError) as refusal:
        parse_config(base, "drafter x")
    message = str(refusal.value)
    assert "\n" not in message
    for word in ["drafter x", *words]:
        assert word in message


NUMBERS = ["rms_norm_eps", "input_embedding_scale", "output_multiplier", "rope_theta"]
NUMBERS += ["final_logit_softcapping"]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400])
def test_a_number_that_is_not_finite_is_refused_by_name(name, text):
    """JSON as Python reads it has all of these."""
    record = {**specforge(), name: json.loads(text)}
    with pytest.raises(ConfigError, match=rf"^drafter x: {name} must be a finite number from 0"):
        parse_config(record, "drafter x")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_confidence_and_rope_take_no_number_that_is_not_finite(value):
    record = specforge(enable_confidence_head=None, confidence_head_alpha=value)
    with pytest.raises(ConfigError, match="confidence_head_alpha must be a finite number"):
        parse_config(record, "x")
    for kind in ("linear", "yarn"):
        rope = {"rope_type": kind, "rope_theta": 1e4, "factor": value}
        record = without(specforge(), "rope_theta") | {"rope_parameters": rope}
        with pytest.raises(ConfigError, match=r"factor"):
            parse_config(record, "x")


def test_dflash_config_must_be_an_object():
    with pytest.raises(ConfigError, match=r"dflash_config must be an object, got \[1\]"):
        parse_config({**specforge(), "dflash_config": [1]}, "x")


def test_an_unknown_option_that_is_off_is_let_through():
    assert parse_config({**specforge(), "some_new_switch": False, "other": None}, "x")


def test_an_option_is_honoured_neutral_or_ignored_and_only_one_of_them():
    names = [*options.HONOURED, *options.NEUTRAL, *options.IGNORED]
    assert len(names) == len(set(names))
    assert set(options.ALIASES.values()) <= options.HONOURED
    assert not set(options.ALIASES) & set(names)


def test_training_options_may_differ_between_places():
    record = {**specforge(loss_decay_gamma=7.0), "loss_decay_gamma": 4.0}
    assert parse_config(record, "x") == parse_config(specforge(), "x")
