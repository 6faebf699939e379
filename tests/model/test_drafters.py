"""load_drafter: names and options as vLLM users write them; anything else is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from block_layouts import deepspec, dspark, old_dflash, specforge, write
from block_layouts import dflash as published_dflash
from drafting import (
    VOCAB,
    block_config,
    block_weights,
    eagle_config,
    eagle_weights,
    tiny_model,
    tiny_target,
)

from tandemkv.base.errors import ConfigError
from tandemkv.model import dflash_checkpoint, drafters, eagle3_checkpoint
from tandemkv.model.dflash import DFlash
from tandemkv.model.draft_lm import DraftModel
from tandemkv.model.drafters import find_drafter, load_drafter, method_of
from tandemkv.model.eagle3 import Eagle3
from tandemkv.model.ngram import Ngram

BLOCKS = ("dflash", "dspark")


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = eagle_config()
    weights = eagle_weights(config) | {"draft_vocab": torch.arange(VOCAB)}
    path = tmp_path_factory.mktemp("drafter") / "eagle3"
    return str(eagle3_checkpoint.save(path, weights, config))


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """Checkpoints of DFlash, without a confidence head, and of DSpark, with one: by method."""
    paths = {}
    for method in BLOCKS:
        config = block_config(method)
        weights = block_weights(config) | {"draft_vocab": torch.arange(VOCAB - 1, -1, -1)}
        path = tmp_path_factory.mktemp("drafter") / method
        paths[method] = str(dflash_checkpoint.save(path, weights, config))
    return paths


def test_eagle3_loads_with_the_targets_dtype_and_device(target, checkpoint):
    drafter = load_drafter("eagle3", checkpoint, target, num_draft_tokens=3, draft_vocab=20)
    assert isinstance(drafter, Eagle3)
    assert drafter.spec.num_draft_tokens == 3
    assert drafter.dtype == torch.float32
    assert len(drafter.head.ids) == 20
    half = load_drafter("eagle3", checkpoint, target, dtype="bfloat16")
    assert half.dtype == torch.bfloat16


def test_vllms_speculative_config_means_the_same(target, checkpoint):
    config = {
        "method": "eagle3",
        "model": checkpoint,
        "num_speculative_tokens": 5,
        "draft_tensor_parallel_size": 1,
    }
    drafter = load_drafter("eagle3", None, target, options=config)
    assert drafter.spec.num_draft_tokens == 5
    lookup = {"prompt_lookup_max": 3, "prompt_lookup_min": 1, "num_speculative_tokens": 2}
    ngram = load_drafter("ngram", None, target, options=lookup)
    assert isinstance(ngram, Ngram)
    assert (ngram.max_ngram, ngram.min_ngram, ngram.spec.num_draft_tokens) == (3, 1, 2)


@pytest.mark.parametrize("method", BLOCKS)
def test_block_drafters_load_with_the_targets_dtype_and_device(target, blocks, method):
    drafter = load_drafter(method, blocks[method], target)
    assert isinstance(drafter, DFlash)
    assert (drafter.spec.method, drafter.spec.num_draft_tokens) == (method, 4)
    assert drafter.dtype == torch.float32
    assert drafter.head.ids is None
    half = load_drafter(method, blocks[method], target, dtype="bfloat16")
    assert half.dtype == torch.bfloat16


@pytest.mark.parametrize("method", BLOCKS)
def test_block_drafters_draft_fewer_tokens_over_fewer_rows_if_asked(target, blocks, method):
    options = {"method": method, "model": blocks[method], "num_speculative_tokens": 3}
    drafter = load_drafter(method, None, target, options=options, draft_vocab=10)
    assert drafter.spec.num_draft_tokens == 3
    assert drafter.head.ids.tolist() == list(range(VOCAB - 10, VOCAB))


@pytest.mark.parametrize("value", [0, 0.25, 1])
def test_a_confidence_threshold_is_taken_by_a_drafter_with_the_head(target, blocks, value):
    options = {"confidence_threshold": value}
    assert load_drafter("dspark", blocks["dspark"], target, options=options)
    with pytest.raises(ConfigError, match=r"dflash: confidence_threshold .* no confidence head"):
        load_drafter("dflash", blocks["dflash"], target, options=options)


@pytest.mark.parametrize("value", ["0.5", True, -0.1, 1.1, [0.5]])
def test_a_confidence_threshold_is_a_number_from_0_to_1(blocks, value):
    """Found wrong before the target is loaded."""
    with pytest.raises(ConfigError, match="confidence_threshold must be a number from 0 to 1"):
        find_drafter("dspark", blocks["dspark"], options={"confidence_threshold": value})


@pytest.mark.parametrize("method", BLOCKS)
def test_more_drafts_than_it_was_trained_for_are_refused(target, blocks, method):
    with pytest.raises(ConfigError, match=rf"{method}: num_draft_tokens 5 .* trained to draft 4"):
        load_drafter(method, blocks[method], target, num_draft_tokens=5)


def test_a_checkpoint_of_another_method_is_refused_before_the_target_is_needed(blocks, checkpoint):
    for method, other in (BLOCKS, BLOCKS[::-1]):
        with pytest.raises(ConfigError, match=f"is a {other} checkpoint, not {method}"):
            find_drafter(method, blocks[other])
        with pytest.raises(ConfigError, match="LlamaForCausalLMEagle3"):
            find_drafter(method, checkpoint)
        with pytest.raises(ConfigError) as refusal:
            find_drafter("eagle3", blocks[other])
        assert "\n" not in str(refusal.value)


def test_a_directory_says_which_method_it_is(tmp_path, blocks, checkpoint):
    assert method_of(checkpoint) == "eagle3"
    assert {name: method_of(path) for name, path in blocks.items()} == {m: m for m in BLOCKS}
    files = {
        "dflash": (old_dflash(), published_dflash()[1]),
        "dspark": (specforge(), dspark()[1]),
    }
    for method, (record, weights) in files.items():
        assert method_of(str(write(tmp_path / method, record, weights))) == method
    assert method_of(str(write(tmp_path / "deepspec", deepspec(), dspark()[1]))) == "dspark"
    with pytest.raises(ConfigError, match="no such directory"):
        method_of(str(tmp_path / "none"))


def test_a_draft_model_loads_from_a_model_directory(target, tmp_path):
    tiny_model(5, hidden=16, layers=2).save_pretrained(tmp_path / "small")
    drafter = load_drafter("draft_model", str(tmp_path / "small"), target, num_draft_tokens=2)
    assert isinstance(drafter, DraftModel)
    assert drafter.spec.num_draft_tokens == 2
    assert drafter.model.spec.dtype == "float32"


@pytest.mark.parametrize(
    ("method", "path", "kwargs", "words"),
    [
        ("medusa", None, {}, "'medusa' is not one of eagle3, dflash, dspark, draft_model, ngram"),
        ("ngram", None, {"options": {"promt_lookup_max": 2}}, "did you mean 'prompt_lookup_max'"),
        ("eagle3", None, {"options": {"prompt_lookup_max": 2}}, "'prompt_lookup_max'"),
        ("eagle3", None, {"options": {"draft_tensor_parallel_size": 2}}, "draft_tensor_parallel"),
        ("ngram", None, {"options": {"method": "eagle3"}}, "method is 'ngram'.*'eagle3'"),
        ("ngram", "some/model", {}, "takes no model, got 'some/model'"),
        ("ngram", None, {"draft_vocab": 4}, "draft_vocab does not apply"),
        ("ngram", None, {"num_draft_tokens": 0}, "num_draft_tokens must be at least 1, got 0"),
        ("ngram", None, {"options": {"num_speculative_tokens": "3"}}, "must be an integer"),
        ("draft_model", None, {}, "needs a model"),
        ("draft_model", "/no/such/model", {}, "/no/such/model"),
        ("eagle3", "/no/such/drafter", {}, "/no/such/drafter: no such directory"),
        ("dspark", "/no/such/drafter", {}, "/no/such/drafter: no such directory"),
        ("dspark", None, {"options": {"prompt_lookup_max": 2}}, "'prompt_lookup_max'"),
        (
            "dspark",
            None,
            {"options": {"confidence_treshold": 0.5}},
            "did you mean 'confidence_threshold'",
        ),
        ("eagle3", None, {"options": {"confidence_threshold": 0.5}}, "'confidence_threshold'"),
        ("ngram", None, {"options": {"confidence_threshold": 0.5}}, "'confidence_threshold'"),
    ],
)
def test_what_no_drafter_honours_is_refused_by_name(target, method, path, kwargs, words):
    with pytest.raises(ConfigError, match=words) as refusal:
        load_drafter(method, path, target, **kwargs)
    assert "\n" not in str(refusal.value)


def test_arguments_and_options_may_agree_but_not_differ(target, checkpoint):
    options = {"num_speculative_tokens": 3}
    assert load_drafter("ngram", None, target, num_draft_tokens=3, options=options)
    with pytest.raises(ConfigError, match=r"num_draft_tokens is 2, .*'num_speculative_tokens'.* 3"):
        load_drafter("ngram", None, target, num_draft_tokens=2, options=options)


def test_a_refusal_names_the_path_that_was_asked_for(checkpoint, blocks):
    for method, path in {"eagle3": checkpoint, **blocks}.items():
        words = f"{path}: made for a target of hidden size 32.* 16"
        with pytest.raises(ConfigError, match=words):
            load_drafter(method, path, tiny_target(hidden=16))


@pytest.mark.parametrize("method", ["eagle3", *BLOCKS])
def test_without_a_path_the_shipped_drafter_is_meant(
    target, monkeypatch, tmp_path, checkpoint, blocks, method
):
    monkeypatch.setitem(drafters.SHIPPED, method, tmp_path / "none")
    with pytest.raises(ConfigError, match=f"'{method}' needs a checkpoint"):
        load_drafter(method, None, target)
    path = {"eagle3": checkpoint, **blocks}[method]
    monkeypatch.setitem(drafters.SHIPPED, method, Path(path))
    assert load_drafter(method, None, target).spec.method == method


def test_a_tokenizer_that_numbers_tokens_otherwise_is_refused(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    def saved(name, order):
        path = tmp_path / name
        tiny_model().save_pretrained(path)
        vocab = {f"t{word}": number for number, word in enumerate(order)}
        tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
        return str(path)

    from tandemkv.model.checkpoint import load_target

    target = load_target(saved("target", range(VOCAB)), device="cpu", dtype="float32")
    same = saved("same", range(VOCAB))
    assert load_drafter("draft_model", same, target)
    other = saved("other", reversed(range(VOCAB)))
    with pytest.raises(ConfigError, match=r"other.*'t0'.*63.*0"):
        load_drafter("draft_model", other, target)
