"""The target over pages against plain transformers on the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest
import tiny
import torch
from paging import LENGTH, Pages, prompt

from tandemkv.base.errors import ConfigError, InvariantError
from tandemkv.kv.layout import Domain
from tandemkv.model.attention import AttentionSegment, GroupRows, KVPool
from tandemkv.model.target import ATTENTION, Target

TOLERANCE = 2e-5  # float32, logits of order 1


@torch.inference_mode()
def plain(kind: str, tokens: Sequence[int], **inputs) -> torch.Tensor:
    """Logits [n, V] of plain transformers on the same tiny weights, attention spelled out."""
    model = tiny.model_of(kind, attention="eager")
    return model(torch.tensor([list(tokens)]), use_cache=False, **inputs).logits[0]


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.fixture(params=tiny.KINDS)
def kind(request) -> str:
    return request.param


def test_one_prefill_gives_the_logits_of_transformers(kind, tiny_target):
    tokens = prompt(1)
    close(Pages(tiny_target(kind)).logits(("a", tokens, 0, LENGTH)), plain(kind, tokens))


def test_every_chunk_size_gives_the_same_logits(kind, tiny_target):
    tokens = prompt(2)
    expected = plain(kind, tokens)
    for size in (1, 2, 3, 5, 7, 8, 12, 13, 16, 20, 28):
        pages = Pages(tiny_target(kind))
        cuts = [*range(0, LENGTH, size), LENGTH]
        chunks = [pages.logits(("a", tokens, a, b)) for a, b in pairwise(cuts)]
        close(torch.cat(chunks), expected)


def test_prefill_decode_and_verify_rows_share_a_batch(kind, tiny_target):
    a, b, c = prompt(3), prompt(4, 21), prompt(5, 17)
    pages = Pages(tiny_target(kind), page_sizes=(8, 2))
    pages.run([("a", a, 0, 24)])
    pages.run([("b", b, 0, 20)])
    logits = pages.logits(("a", a, 24, 29), ("b", b, 20, 21), ("c", c, 0, 17))
    close(logits[:5], plain(kind, a)[24:])
    close(logits[5:6], plain(kind, b)[20:])
    close(logits[6:], plain(kind, c))


def test_a_pass_that_starts_early_reads_held_rows_and_does_not_write_them(kind, tiny_target):
    tokens = prompt(6)
    pages = Pages(tiny_target(kind))
    pages.run([("a", tokens, 0, 20)])
    tables = pages.tables_of("a", 20)
    before = [p.read(t, range(20)).clone() for p, t in zip(pages.pools, tables, strict=True)]
    logits = pages.logits(("a", tokens, 19, LENGTH), readable=[(0, 20)], held=20)
    close(logits, plain(kind, tokens)[19:])
    for pool, table, rows in zip(pages.pools, tables, before, strict=True):
        assert torch.equal(pool.read(table, range(20)), rows)


def test_a_hole_is_masked_as_an_explicit_mask_masks_it(tiny_target):
    tokens = prompt(7)
    pages = Pages(tiny_target("llama"))
    pages.run([("a", tokens, 0, 24)])
    logits = pages.logits(("a", tokens, 24, LENGTH), readable=[(0, 5), (11, 24)])
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    mask[24:, 5:11] = False
    mask = torch.zeros(LENGTH, LENGTH).masked_fill(~mask, float("-inf"))
    close(logits, plain("llama", tokens, attention_mask=mask[None, None])[24:])
    assert (logits - plain("llama", tokens)[24:]).abs().max() > 1e-2


def test_pages_outside_coverage_may_hold_nan(kind, tiny_target):
    tokens = prompt(8)
    pages = Pages(tiny_target(kind))
    pages.run([("a", tokens, 0, 26)])  # 26: the last pages of both sizes are partly NaN
    assert any(pool.data.isnan().any() for pool in pages.pools)
    logits = pages.logits(("a", tokens, 26, LENGTH))
    close(logits, plain(kind, tokens)[26:])


def test_a_windowed_layer_needs_only_the_pages_of_its_window(tiny_target):
    tokens = prompt(9)
    pages = Pages(tiny_target("mistral"))
    pages.run([("a", tokens, 0, 28)])
    (table,) = pages.tables_of("a", 29)
    first = (28 - tiny.WINDOW + 1) // 4
    pages.pools[0].poison(table[:first])
    table[:first] = [-1] * first
    logits = pages.logits(("a", tokens, 28, 29), readable=[(first * 4, 28)])
    close(logits, plain("mistral", tokens)[28:])


# -- taps, head, spec ------------------------------------------------------------------------------


@torch.inference_mode()
def test_taps_are_the_residual_stream_after_a_layer(kind, tiny_target):
    tokens = prompt(10)
    target = tiny_target(kind)
    pages = Pages(target)
    pages.run([("a", tokens, 0, 9)], taps=(0,))
    last = target.spec.num_layers - 1
    output = pages.run([("a", tokens, 9, LENGTH)], taps=(last, -1, 0))
    model = tiny.model_of(kind)
    streams = {}
    for layer, module in enumerate(model.model.layers):
        module.register_forward_hook(lambda m, i, o, layer=layer: streams.update({layer: o}))
    inner = model(torch.tensor([tokens]), output_hidden_states=True)
    assert output.features.shape == (LENGTH - 9, 3, target.spec.hidden_size)
    expected = [streams[last][0], inner.hidden_states[0][0], inner.hidden_states[1][0]]
    close(output.features, torch.stack(expected, 1)[9:])
    close(output.features[:, 1], target.embed(torch.tensor(tokens[9:])))


def test_a_pass_without_taps_has_no_features(tiny_target):
    assert Pages(tiny_target()).run([("a", prompt(1), 0, 3)]).features is None


def test_a_tapped_layer_that_does_not_exist_is_refused(tiny_target):
    with pytest.raises(ConfigError, match=r"tapped layer 2 is not in LlamaForCausalLM's layers"):
        Pages(tiny_target()).run([("a", prompt(1), 0, 3)], taps=(2,))


def test_the_head_gives_float32_and_its_weights_are_at_hand(tiny_target):
    target = tiny_target("qwen2")
    hidden = torch.randn(3, 32)
    logits = target.logits(hidden)
    assert logits.dtype is torch.float32
    close(logits, hidden @ target.head_weight.T)
    assert target.head_weight.data_ptr() == target.embedding_weight.data_ptr()  # tied
    untied = tiny_target("llama")
    assert untied.head_weight.data_ptr() != untied.embedding_weight.data_ptr()


def test_a_spec_states_what_the_engine_needs(tiny_target):
    spec = tiny_target("llama").spec
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size) == (2, 32, tiny.VOCAB_SIZE)
    assert (spec.max_model_len, spec.eos_token_ids) == (512, (tiny.EOS_TOKEN_ID,))
    assert (spec.dtype, spec.device, len(spec.fingerprint)) == ("float32", "cpu", 64)


# -- layer groups ----------------------------------------------------------------------------------


def test_layers_are_grouped_by_window(tiny_target):
    shapes = {
        kind: [(g.name, g.layers, g.window) for g in tiny_target(kind).layer_groups(16)]
        for kind in ("llama", "mistral", "gemma3")
    }
    assert shapes == {
        "llama": [("target", (0, 1), None)],
        "mistral": [("target_w11", (0, 1), 11)],
        "gemma3": [("target", (1,), None), ("target_w11", (0, 2), 11)],
    }


def test_a_groups_geometry_is_the_models(tiny_target):
    (group,) = tiny_target("qwen3").layer_groups(32)
    assert (group.domain, group.lookahead, group.page_size) == (Domain.TARGET, 0, 32)
    assert (group.num_kv_heads, group.head_dim, group.dtype) == (2, 8, "float32")


def test_a_window_that_the_config_switches_off_makes_no_group():
    model = tiny.model_of("qwen2", attention=ATTENTION, sliding_window=11)
    assert [g.window for g in Target(model, fingerprint="f").layer_groups(16)] == [None]
    changes = {"sliding_window": 11, "use_sliding_window": True, "max_window_layers": 1}
    model = tiny.model_of("qwen2", attention=ATTENTION, **changes)
    groups = Target(model, fingerprint="f").layer_groups(16)
    assert [(g.window, g.layers) for g in groups] == [(None, (0,)), (11, (1,))]


@torch.inference_mode()
def test_other_classes_give_their_own_logits_too():
    for name, extra in {
        "Gemma2": {"sliding_window": 11, "attn_logit_softcapping": 2.0},
        "GptOss": {"sliding_window": 11, "num_local_experts": 4, "num_experts_per_tok": 2},
        "Cohere": {"logit_scale": 0.3},
        "Granite": {"logits_scaling": 3.0},
        "Phi3": {"pad_token_id": 0},
    }.items():
        models = [build(name, attention, head_dim=8, **extra) for attention in (ATTENTION, "eager")]
        for model in models:
            tiny.draw_weights(model, 3)
        tokens = prompt(11)
        theirs = models[1](torch.tensor([tokens]), use_cache=False).logits[0].float()
        pages = Pages(Target(models[0], fingerprint="f"))
        ours = torch.cat([pages.logits(("a", tokens, a, b)) for a, b in ((0, 13), (13, LENGTH))])
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


# -- refusals --------------------------------------------------------------------------------------


def build(name: str, attention: str = ATTENTION, **extra):
    import transformers

    size = {
        "vocab_size": tiny.VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    cls = getattr(transformers, f"{name}ForCausalLM")
    config = cls.config_class(**{**size, **extra})
    return cls._from_config(config, attn_implementation=attention).eval()


@pytest.mark.parametrize(
    ("name", "extra", "reason"),
    [
        ("Mamba", {}, "layers 0, 1 do not attend"),
        ("Bloom", {}, "layers 0, 1 do not attend"),
        ("Llama4", {"head_dim": 8}, "chunked_attention"),
        ("FalconH1", {}, "hybrid"),
        (
            "DeepseekV3",
            {
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "n_group": 1,
                "topk_group": 1,
                "q_lora_rank": 8,
                "kv_lora_rank": 8,
                "qk_rope_head_dim": 4,
                "qk_nope_head_dim": 4,
                "v_head_dim": 4,
            },
            "do not fit key/value pages",
        ),
    ],
)
def test_a_class_that_cannot_be_paged_is_refused_by_name(name, extra, reason):
    with pytest.raises(ConfigError, match=rf"{name}ForCausalLM cannot be served.*{reason}") as e:
        Target(build(name, **extra), fingerprint="f")
    assert "\n" not in str(e.value)


def test_state_outside_the_pages_is_found_by_running_the_model():
    model = tiny.model_of("llama", attention=ATTENTION)
    layer = model.model.layers[1]

    def shift(module, args, output):  # a token shift: row i needs the hidden state of row i - 1
        return output + output.roll(1, dims=1)

    layer.register_forward_hook(shift)
    with pytest.raises(ConfigError, match="two passes over pages differ from one whole pass"):
        Target(model, fingerprint="f")


def test_logits_changed_after_the_head_are_found_by_running_the_model():
    model = tiny.model_of("llama", attention=ATTENTION)

    def double(module, args, output):
        output.logits = output.logits * 2

    model.register_forward_hook(double)
    with pytest.raises(ConfigError, match="changes its logits after the head"):
        Target(model, fingerprint="f")


def test_a_window_that_never_reaches_attention_is_refused():
    model = tiny.model_of("llama", attention=ATTENTION)
    model.config.sliding_window = 7
    with pytest.raises(ConfigError, match="sliding window 7 does not reach its attention"):
        Target(model, fingerprint="f")


def test_rope_that_depends_on_the_batch_is_served_up_to_its_trained_length():
    rope = {
        "rope_type": "dynamic",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    model = tiny.model_of("llama", attention=ATTENTION, rope_parameters=rope)
    assert Target(model, fingerprint="f").spec.max_model_len == 128


def test_rows_of_another_groups_window_are_a_broken_law(tiny_target):
    target = tiny_target("gemma3")
    pools = [KVPool(g, 4) for g in target.layer_groups(8)]
    segment = AttentionSegment(0, 1, 0, [0], [], [(0, 1)])
    rows = [GroupRows(pool, [segment]) for pool in reversed(pools)]
    with pytest.raises(InvariantError, match="attends with window"):
        target.forward(torch.tensor([1]), torch.tensor([0]), rows)


# -- seeded faults: what the comparisons above must catch ------------------------------------------


def test_a_window_off_by_one_is_caught(tiny_target):
    tokens = prompt(12)
    pages = Pages(tiny_target("mistral"))
    pages.run([("a", tokens, 0, 28)])
    good = pages.logits(("a", tokens, 28, 29))
    (group,) = pages.groups
    segment = AttentionSegment(0, 1, 28, pages.tables_of("a", 29)[0], [(0, 28)], [(28, 29)])
    pool = pages.pools[0]
    pool.group = msgspec.structs.replace(group, window=tiny.WINDOW - 1)
    rows = GroupRows(pool, [segment])
    pool.group = group
    bad = pages.target.forward(torch.tensor(tokens[28:]), torch.tensor([28]), [rows])
    expected = plain("mistral", tokens)[28:]
    close(good, expected)
    assert (pages.target.logits(bad.hidden) - expected).abs().max() > 100 * TOLERANCE


def test_two_swapped_pages_are_caught(tiny_target):
    tokens = prompt(13)
    pages = Pages(tiny_target("llama"))
    pages.run([("a", tokens, 0, 28)])
    (table,) = pages.tables_of("a", 29)
    table[1], table[2] = table[2], table[1]  # a permutation alone is invisible: keys hold RoPE
    close(pages.logits(("a", tokens, 28, 29)), plain("llama", tokens)[28:])
    table[3] = table[1]
    gap = pages.logits(("a", tokens, 28, 29)) - plain("llama", tokens)[28:]
    assert gap.abs().max() > 100 * TOLERANCE


def test_a_wrong_position_is_caught(tiny_target):
    tokens = prompt(14)
    pages = Pages(tiny_target("llama"))
    pages.run([("a", tokens, 0, 20)])
    tables = pages.tables_of("a", 21)
    segment = AttentionSegment(0, 1, 20, tables[0], [(0, 20)], [(20, 21)])
    rows = [GroupRows(pages.pools[0], [segment])]
    bad = pages.target.forward(torch.tensor(tokens[20:21]), torch.tensor([21]), rows)
    gap = pages.target.logits(bad.hidden) - plain("llama", tokens)[20:21]
    assert gap.abs().max() > 100 * TOLERANCE


# -- real weights ----------------------------------------------------------------------------------


@torch.inference_mode()
def test_the_default_model_gives_the_logits_of_transformers(default_target):
    from transformers import AutoModelForCausalLM

    from tandemkv.model.checkpoint import load_tokenizer, resolve

    tokenizer = load_tokenizer(None)
    chat = [{"role": "user", "content": "Name the capital of France, and one of its rivers."}]
    tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(resolve(None), dtype=torch.float32).eval()
    answer = model.generate(torch.tensor([tokens]), max_new_tokens=8, do_sample=False)[0].tolist()
    theirs = model(torch.tensor([answer]), use_cache=False).logits[0]
    pages = Pages(default_target, page_sizes=(16,))
    cuts = [0, 19, len(tokens), *range(len(tokens) + 1, len(answer) + 1)]
    ours = [pages.logits(("a", answer, a, b)) for a, b in pairwise(cuts)]
    ours = torch.cat(ours)
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
    assert "Paris" in tokenizer.decode(answer[len(tokens) :])
