"""DFlash and DSpark against an independent dense reference, and against the authors' own code.

Every comparison is with float64 rows and drafts (golden_block.py), whatever the chunking, batching,
windows and holes. Pools are full of NaN before use, so a read outside the readable slots cannot
pass. The last part seeds faults and checks that the comparison sees each.
"""

from __future__ import annotations

import msgspec
import pytest
import torch
from drafting import (
    PAGE,
    VOCAB,
    Served,
    bind,
    block_config,
    block_weights,
    prefill,
    serve,
    tiny_target,
)
from golden_block import GoldenBlock

from tandemkv.base.errors import ConfigError
from tandemkv.base.sampling import SamplingParams
from tandemkv.model import block_attention
from tandemkv.model.dflash import DFlash
from tandemkv.model.drafter import DraftInputs, Drafts, DraftSegment
from tandemkv.model.sampling import Purpose, draft_distribution, sample, uniform

N = 17
METHODS = ("dflash", "dspark")


@pytest.fixture(scope="module")
def target():
    return tiny_target()


class Case:
    """A block drafter with random weights, its reference, and sequences with random captures."""

    def __init__(self, target, method: str = "dspark", *extra: str, length: int = 40, **changes):
        options = {
            k: changes.pop(k) for k in ("draft_vocab", "confidence_threshold") if k in changes
        }
        ranking = changes.pop("ranking", None)
        config = block_config(method, **changes)
        weights = block_weights(config, *extra)
        ids = None
        if ranking is not None:
            weights["draft_vocab"] = torch.tensor(ranking)
            ids = sorted(ranking[: options["draft_vocab"]])
        self.drafter = DFlash(target, config, weights, **options)
        self.pools = bind(self.drafter)
        self.config = config
        self.golden = GoldenBlock(
            {k: v for k, v in weights.items() if k != "draft_vocab"},
            config,
            target.embedding_weight,
            target.head_weight,
            ids,
        )
        self.generator = torch.Generator().manual_seed(3)
        self.length = length

    def sequence(self, first_page: int = 0, **changes) -> Served:
        tokens = torch.randint(0, VOCAB, (self.length,), generator=self.generator).tolist()
        shape = (self.length, len(self.config.taps), 32)
        captures = torch.randn(shape, generator=self.generator) * 4
        pages = list(range(first_page, first_page + self.length // PAGE + 1))
        groups = len(self.pools)
        return Served(tokens, captures, pages, lookahead=0, num_groups=groups, **changes)

    def wanted(self, s: Served, n: int, num: int = 4, **how) -> list[int]:
        return self.golden.draft(s.captures[:n], s.tokens[n], num, **how)[0]

    def lead(self, s: Served, n: int, num: int = 4, **how):
        """The smallest lead of a draft over the next best, to compare `Drafts.gaps` with."""
        top = self.golden.draft(s.captures[:n], s.tokens[n], num, **how)[1].topk(2).values
        return pytest.approx(float((top[:, 0] - top[:, 1]).min()), rel=1e-3, abs=1e-4)


VARIANTS = {
    "window": {},
    "full attention": {"windows": (None, None)},
    "two windows": {"windows": (None, 5)},
    "window below the block": {"windows": (3, 3)},
    "causal": {"causal": (True, False)},
    "norm per capture": {"fc_norm": True},
    "a token as mask": {"mask_token_id": 9},
    "one layer, seven drafts": {"num_layers": 1, "windows": (8,), "num_draft_tokens": 7},
    "scales and softcap": {"embedding_scale": 1.7, "logit_scale": 0.5, "logit_softcap": 3.0},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_and_rows_are_the_references(target, method, variant):
    case = Case(target, method, **VARIANTS[variant])
    s = case.sequence()
    num = case.config.num_draft_tokens
    for n in (2, 5, 9, N, 21, 30):
        drafts = prefill(case.drafter, s, n, n, num)
        assert drafts.tokens == [case.wanted(s, n, num)]
        assert drafts.gaps == [case.lead(s, n, num)]
    wanted = case.golden.rows(s.captures[:N]).float()
    for pool in case.pools:
        stored = pool.read(s.pages, list(range(N)))
        for place, layer in enumerate(pool.group.layers):
            torch.testing.assert_close(stored[:, place], wanted[:, layer], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("extra", [("embed_tokens.weight",), ("lm_head.weight",)])
def test_copies_of_embedding_and_head_are_used_where_the_checkpoint_brings_them(
    target, method, extra
):
    case = Case(target, method, *extra)
    s = case.sequence()
    assert prefill(case.drafter, s, N, N, 4).tokens == [case.wanted(s, N)]


@pytest.mark.parametrize(
    ("kind", "bias"),
    [
        ("vanilla", ()),
        ("gated", ()),
        ("gated", ("markov_head.gate_proj.bias",)),
        ("rnn", ()),
        ("rnn", ("markov_head.joint_proj.bias",)),
    ],
)
def test_every_markov_head_is_the_references(target, kind, bias):
    case = Case(target, "dspark", *bias, markov_head_type=kind, markov_rank=5, num_draft_tokens=6)
    s = case.sequence()
    for n in (9, N, 30):
        drafts = prefill(case.drafter, s, n, n, 6)
        assert drafts.tokens == [case.wanted(s, n, 6)]
        assert drafts.gaps == [case.lead(s, n, 6)]


def test_a_markov_head_changes_what_is_drafted(target):
    with_head, without = Case(target), Case(target, markov_rank=0, confidence=False)
    s, t = with_head.sequence(), without.sequence()
    assert (
        prefill(with_head.drafter, s, N, N, 4).tokens != prefill(without.drafter, t, N, N, 4).tokens
    )


def test_a_reduced_head_drafts_only_ranked_tokens(target):
    ranking = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5)).tolist()[:30]
    case = Case(target, ranking=ranking, draft_vocab=12)
    s = case.sequence()
    (tokens,) = prefill(case.drafter, s, N, N, 4).tokens
    assert tokens == case.wanted(s, N)
    assert set(tokens) <= set(ranking[:12])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8])
def test_chunks_change_nothing(target, method, chunk):
    case = Case(target, method)
    s = case.sequence()
    assert prefill(case.drafter, s, N, chunk, 4).tokens == [case.wanted(s, N)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [1, 2, 5, 6, 7, 8, 12])
def test_contexts_shorter_and_longer_than_the_window(target, method, n):
    case = Case(target, method)
    s = case.sequence()
    assert prefill(case.drafter, s, n, n, 4).tokens == [case.wanted(s, n)]


@pytest.mark.parametrize("method", METHODS)
def test_sequences_of_any_length_share_a_run(target, method):
    case = Case(target, method, windows=(None, 6))
    lengths = [1, 5, 30, 12]
    served = [case.sequence(first_page=1 + 12 * i) for i in range(len(lengths))]  # page 0: NaN
    drafts = serve(case.drafter, list(zip(served, lengths, strict=True)), 4)
    assert drafts.tokens == [case.wanted(s, n) for s, n in zip(served, lengths, strict=True)]


@pytest.mark.parametrize("method", METHODS)
def test_a_smaller_k_drafts_the_same_tokens_fewer_of_them(target, method):
    case = Case(target, method)
    s = case.sequence()
    prefill(case.drafter, s, N, N)
    whole = case.wanted(s, N)
    for k in (4, 0, 1, 3, 2, 7):
        assert serve(case.drafter, [(s, N)], k).tokens == [whole[:k]]


@pytest.mark.parametrize("method", METHODS)
def test_sequences_that_want_unlike_numbers_of_drafts_share_a_run(target, method):
    case = Case(target, method)
    wanted = (1, 4, 0, 2, 3, 9)
    served = [case.sequence(first_page=10 * i) for i in range(len(wanted))]
    drafts = serve(case.drafter, [(s, N) for s in served], wanted)
    for i, (s, k) in enumerate(zip(served, wanted, strict=True)):
        assert drafts.tokens[i] == case.wanted(s, N)[:k]
        assert drafts.gaps[i] == (case.lead(s, N, min(k, 4)) if k else float("inf"))


@pytest.mark.parametrize("method", METHODS)
def test_decoding_step_by_step_stays_with_the_reference(target, method):
    """Accepted counts 0..K in turn, K changing, a step without drafts among them."""
    case = Case(target, method)
    s = case.sequence()
    prefill(case.drafter, s, 6, 4)
    n = 6
    for step, k in zip((1, 5, 2, 3, 1, 4), (4, 2, 0, 4, 3, 4), strict=True):
        n += step
        assert serve(case.drafter, [(s, n)], k).tokens == [case.wanted(s, n)[:k]]


@pytest.mark.parametrize("method", METHODS)
def test_holes_are_masked_to_the_token(target, method):
    case = Case(target, method, windows=(12, 12))
    s = case.sequence()
    prefill(case.drafter, s, N, N)
    for pool in case.pools:
        for slot in (8, 9, 13):
            pool.data[s.pages[slot // PAGE], :, :, slot % PAGE] = float("nan")
    for slot in (8, 9, 13):
        s.coverage.remove(slot, slot + 1)
    segment = s.segment(0, N, 4, [])
    segment.row_stop = 0
    drafts = case.drafter.run(_no_rows(segment))
    assert drafts.tokens == [case.wanted(s, N, holes=(8, 9, 13))]
    assert drafts.tokens != [case.wanted(s, N)]


@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_without_any_context_drafts_from_the_anchor_alone(target, method):
    case = Case(target, method)
    s = case.sequence()
    segment = s.segment(0, N, 4, [])
    segment.row_stop = 0
    drafts = case.drafter.run(_no_rows(segment))
    assert drafts.tokens == [case.wanted(s, N, holes=range(N))]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("blind", [0, 1])
def test_a_sequence_without_any_context_shares_a_run_with_one_that_has_some(target, method, blind):
    """No sequence has page 0, where padding points by default: it is full of NaN."""
    case = Case(target, method)
    served = [case.sequence(first_page=1 + 12 * i) for i in range(2)]
    segments = []
    for i, s in enumerate(served):
        if i != blind:
            prefill(case.drafter, s, N, N)
        segments.append(s.segment(0, N, 4, []))
        segments[-1].row_stop = 0
    drafts = case.drafter.run(_no_rows(*segments))
    for i, s in enumerate(served):
        holes = range(N) if i == blind else ()
        assert drafts.tokens[i] == case.wanted(s, N, holes=holes)
        assert drafts.gaps[i] == case.lead(s, N, holes=holes)


@pytest.mark.parametrize("method", METHODS)
def test_each_group_has_a_page_table_coverage_and_writes_of_its_own(target, method):
    """The groups lack unlike rows of the first run and are asked for unlike rows in the second."""
    case = Case(target, method, windows=(None, 7))
    s = case.sequence()
    tables = [s.pages, [40 - page for page in s.pages]]
    first = [[(0, 3), (5, 12)], [(4, 10)]]
    second = [[(12, 15), (16, N)], [(13, N)]]
    held = [[*range(3), *range(5, 15), 16], [*range(4, 10), *range(13, N)]]
    _grouped_run(case, s, 12, 0, tables, [[], []], first)
    drafts = _grouped_run(case, s, N, 4, tables, first, second)
    holes = {g: set(range(N)) - set(held[g]) for g in (0, 1)}
    assert drafts.tokens == [case.wanted(s, N, holes=holes)]
    assert drafts.gaps == [case.lead(s, N, holes=holes)]
    rows = case.golden.rows(s.captures[:N]).float()
    for g, pool in enumerate(case.pools):
        stored = pool.read(tables[g], list(range(N)))[:, 0]
        torch.testing.assert_close(stored[held[g]], rows[held[g], g], atol=2e-4, rtol=2e-4)
        assert stored[list(holes[g])].isnan().all()


@pytest.mark.parametrize("method", METHODS)
def test_slots_below_the_window_are_never_read(target, method):
    case = Case(target, method, windows=(6, 6))
    s = case.sequence()
    prefill(case.drafter, s, N, N)
    edge = N - 6 + 1
    for pool in case.pools:
        for slot in range(edge):
            pool.data[s.pages[slot // PAGE], :, :, slot % PAGE] = float("nan")
    s.pages = [-1 if (i + 1) * PAGE <= edge else page for i, page in enumerate(s.pages)]
    assert serve(case.drafter, [(s, N)], 4).tokens == [case.wanted(s, N)]
    assert case.pools[0].group.first_needed(N) == edge
    for pool in case.pools:
        pool.data[s.pages[edge // PAGE], :, :, edge % PAGE] += 1
    moved = serve(case.drafter, [(s, N)], 4)
    assert moved.tokens != [case.wanted(s, N)] or moved.gaps != [case.lead(s, N)]


@pytest.mark.parametrize("method", METHODS)
def test_sampled_drafts_come_with_the_distributions_they_came_from(target, method):
    params = SamplingParams(temperature=0.8, top_p=0.9)
    case = Case(target, method)
    s = case.sequence(params=params, seed=11)

    def pick(logits, step):
        q = draft_distribution(logits.float()[None], params)[0]
        return sample(q, uniform(11, N + 1 + step, Purpose.DRAFT, N))

    drafts = prefill(case.drafter, s, N, N, 4)
    tokens, logits, _ = case.golden.draft(s.captures[:N], s.tokens[N], 4, pick=pick)
    assert drafts.tokens == [tokens]
    wanted = torch.stack([draft_distribution(row.float()[None], params)[0] for row in logits])
    torch.testing.assert_close(drafts.probs[0], wanted, atol=1e-4, rtol=1e-3)


def test_greedy_and_sampled_sequences_share_a_run(target):
    case = Case(target, "dspark")
    greedy = case.sequence()
    warm = case.sequence(first_page=12, params=SamplingParams(temperature=0.7))
    drafts = serve(case.drafter, [(greedy, N), (warm, N)], 4)
    assert drafts.tokens[0] == case.wanted(greedy, N)
    assert drafts.probs[0] is None
    assert drafts.probs[1] is not None
    assert drafts.probs[1].shape == (4, VOCAB)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("with_markov", [True, False])
@pytest.mark.parametrize("bias", [(), ("confidence_head.proj.bias",)])
def test_confidence_ends_a_block_where_survival_falls_below_the_threshold(
    target, method, with_markov, bias
):
    changes = {"confidence": True, "num_draft_tokens": 6}
    changes |= {"confidence_with_markov": with_markov and method == "dspark"}
    for threshold in (0.0, 0.05, 0.2, 0.5, 0.9, 1.0):
        case = Case(target, method, *bias, confidence_threshold=threshold, **changes)
        s = case.sequence()
        tokens, _, chances = case.golden.draft(s.captures[:N], s.tokens[N], 6)
        survival, kept = 1.0, 0
        for chance in chances:
            survival *= chance
            if survival < threshold:
                break
            kept += 1
        drafts, kept = prefill(case.drafter, s, N, N, 6), max(1, kept)
        assert drafts.tokens == [tokens[:kept]]
        assert drafts.gaps == [case.lead(s, N, kept)]


def test_whether_a_draft_is_kept_does_not_depend_on_it_or_on_later_ones(target):
    """Else the length would tell of the token, and sampling would be biased."""
    kept: dict[tuple[int, ...], set[bool]] = {}
    case = Case(target, confidence_threshold=0.25)
    n = 9
    s = case.sequence(params=SamplingParams(temperature=1.5))
    prefill(case.drafter, s, n, n)
    for seed in range(200):
        s.seed = seed
        (tokens,) = serve(case.drafter, [(s, n)], 4).tokens
        for j in range(len(tokens) + 1):
            if j < 4:
                kept.setdefault(tuple(tokens[:j]), set()).add(len(tokens) > j)
    assert all(len(answers) == 1 for answers in kept.values())
    assert {True} in kept.values()
    assert {False} in kept.values()


def _no_rows(*segments: DraftSegment) -> DraftInputs:
    """A run in which no sequence has anything to write."""
    none = torch.empty(0, dtype=torch.long)
    return DraftInputs(none, none, none, None, list(segments))


def _grouped_run(case: Case, s: Served, stop: int, num: int, pages, readable, writes) -> Drafts:
    """One run of one sequence up to `stop`, with a page table and spans for each group."""
    segment = s.segment(0, stop, num, [])
    segment.pages, segment.readable, segment.writes = pages, readable, writes
    at = torch.arange(s.done, stop)
    ids = torch.tensor(s.tokens)
    inputs = DraftInputs(ids[at], ids[at + 1], at, s.captures[s.done : stop], [segment])
    s.done = stop
    return case.drafter.run(inputs)


# --------------------------------------------------------------------------- the authors' own code


@pytest.mark.parametrize("windows", [(None, None), (6, 6)], ids=["full", "sliding"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_trunk_is_that_of_the_authors_package(target, windows, causal):
    """dflash 0.1.0 (z-lab): its model with its cache, the same weights, drafts compared."""
    model = pytest.importorskip("dflash.model", reason="the authors' package is not installed")
    from transformers import Qwen3Config

    config = block_config(
        "dflash", windows=windows, causal=(causal, causal), mask_token_id=9, rms_norm_eps=1e-6
    )
    weights = block_weights(config)
    sliding = windows[0]
    theirs = model.DFlashDraftModel(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            rms_norm_eps=1e-6,
            rope_theta=10000.0,
            attn_implementation="sdpa",
            use_sliding_window=sliding is not None,
            sliding_window=sliding,
            layer_types=["sliding_attention" if sliding else "full_attention"] * 2,
            is_causal=causal,
            num_target_layers=6,
            dflash_config={"target_layer_ids": [0, 2, 4], "mask_token_id": 9, "block_size": 5},
        )
    ).eval()
    theirs.load_state_dict(weights)
    drafter = DFlash(target, config, weights)
    bind(drafter)
    generator = torch.Generator().manual_seed(8)
    tokens = torch.randint(0, VOCAB, (30,), generator=generator).tolist()
    captures = torch.randn((30, 3, 32), generator=generator) * 4
    s = Served(tokens, captures, list(range(9)), lookahead=0)
    cache = model._make_cache(theirs.config)
    done = 0
    for n in (7, 8, 12, 13, 20):
        ids = torch.tensor([[tokens[n], 9, 9, 9, 9]])
        with torch.no_grad():
            hidden = theirs(
                target_hidden=captures[None, done:n].flatten(2),
                noise_embedding=torch.nn.functional.embedding(ids, target.embedding_weight),
                position_ids=torch.arange(done, n + 5)[None],
                past_key_values=cache,
                use_cache=True,
            )[0, 1:]
        model._crop_to(cache, n)
        done = n
        wanted = (hidden @ target.head_weight.T).argmax(-1).tolist()
        assert serve(drafter, [(s, n)], 4).tokens == [wanted]


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({}, {"num_draft_tokens": 5}, "num_draft_tokens 5 was asked for.*trained to draft 4"),
        ({}, {"draft_vocab": 9}, "draft_vocab 9 was asked for.*does not rank"),
        ({"confidence": False}, {"confidence_threshold": 0.5}, "has no confidence head"),
        ({}, {"confidence_threshold": 1.5}, r"confidence_threshold must be in \[0, 1\]"),
        ({"taps": (0, 2, 6)}, {}, "output of layer 6.*layers 0..5"),
        (
            {"hidden_size": 16, "target_hidden_size": 32},
            {},
            "hidden size 16 is not the target's 32",
        ),
        ({"target_hidden_size": 16}, {}, "target of hidden size 16"),
        ({"vocab_size": 32}, {}, "vocabulary of 32"),
        ({"mask_token_id": 64}, {}, "mask token 64"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(target, changes, options, words):
    config = block_config(**changes)
    with pytest.raises(ConfigError, match=words) as refusal:
        DFlash(target, config, block_weights(config), **options)
    assert "\n" not in str(refusal.value)


# --------------------------------------------------------------------------- seeded faults


def _narrow_window(case: Case) -> None:
    group = msgspec.structs.replace(case.pools[0].group, window=5)
    case.pools[0].group = group


def _late_block(case: Case) -> None:
    forward = case.drafter.trunk.forward
    case.drafter.trunk.forward = lambda tokens, anchors, contexts: forward(
        tokens, [n + 1 for n in anchors], contexts
    )


def _causal_block(case: Case) -> None:
    case.drafter.config = msgspec.structs.replace(case.config, causal=(True, True))


def _context_through_the_input_norm(case: Case) -> None:
    trunk = case.drafter.trunk
    fuse, norm = trunk.fuse, trunk._layers[0].input_norm
    trunk.fuse = lambda features: trunk._rms(fuse(features), norm)


def _previous_draft_forgotten(case: Case) -> None:
    markov = case.drafter._markov
    embed, first = markov.embed, []
    markov.embed = lambda tokens: embed(first[0] if first else first.append(tokens) or tokens)


def _swap_captures(case: Case) -> None:
    fuse = case.drafter.trunk.fuse
    case.drafter.trunk.fuse = lambda features: fuse(features.flip(1))


FAULTS = {
    "a window one slot short": _narrow_window,
    "the draft block one position late": _late_block,
    "rows kept from later ones": _causal_block,
    "context rows through the input norm": _context_through_the_input_norm,
    "the Markov head stays with the anchor": _previous_draft_forgotten,
    "captures in another order": _swap_captures,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_with_the_reference_sees(target, fault):
    """Against the logits' gaps and the drafts of several anchors."""
    honest, faulty = Case(target), Case(target)
    FAULTS[fault](faulty)
    differs = False
    for n in (9, 12, 17, 21):
        s, t = honest.sequence(), faulty.sequence()
        a, b = prefill(honest.drafter, s, n, n, 4), prefill(faulty.drafter, t, n, n, 4)
        assert a.tokens == [honest.wanted(s, n)]
        differs |= b.tokens != [faulty.wanted(t, n)]
        differs |= b.gaps[0] != pytest.approx(a.gaps[0], rel=1e-3, abs=1e-5)
    assert differs


def test_padding_is_masked(target, monkeypatch):
    """A shorter sequence beside a longer one would otherwise see its first row many times."""
    case = Case(target)
    served = [case.sequence(first_page=12 * i) for i in range(2)]
    stops = [(served[0], 3), (served[1], 12)]
    honest = block_attention._mask

    def unmasked(at, *rest):
        return honest(at.clamp_min(0) + 1000 * (at < 0), *rest)

    monkeypatch.setattr(block_attention, "_mask", unmasked)
    wrong = serve(case.drafter, stops, 4)
    assert wrong.tokens[0] != case.wanted(served[0], 3) or wrong.gaps[0] != case.lead(served[0], 3)
