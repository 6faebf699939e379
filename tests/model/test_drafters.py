"""load_drafter: names and options as vLLM users write them; anything else is refused by name."""

from __future__ import annotations

import pytest
import torch
from drafting import VOCAB, eagle_config, eagle_weights, tiny_model, tiny_target

from tandemkv.base.errors import ConfigError
from tandemkv.model import drafters, eagle3_checkpoint
from tandemkv.model.draft_lm import DraftModel
from tandemkv.model.drafters import load_drafter
from tandemkv.model.eagle3 import Eagle3
from tandemkv.model.ngram import Ngram


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = eagle_config()
    weights = eagle_weights(config) | {"draft_vocab": torch.arange(VOCAB)}
    path = tmp_path_factory.mktemp("drafter") / "eagle3"
    return str(eagle3_checkpoint.save(path, weights, config))


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


def test_a_refusal_names_the_path_that_was_asked_for(checkpoint):
    with pytest.raises(ConfigError, match=r"eagle3: made for a target of hidden size 32.* 16"):
        load_drafter("eagle3", checkpoint, tiny_target(hidden=16))


def test_without_a_path_the_shipped_drafter_is_meant(target, monkeypatch, tmp_path, checkpoint):
    monkeypatch.setitem(drafters.SHIPPED, "eagle3", tmp_path / "none")
    with pytest.raises(ConfigError, match="needs a checkpoint"):
        load_drafter("eagle3", None, target)


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
