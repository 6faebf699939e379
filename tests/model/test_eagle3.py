"""EAGLE-3 against an independent dense reference, whatever the chunking, batching and branching.

Every comparison is with teacher-forced float64 rows and chains (golden.py). Pools are full of NaN
before use, so a read outside the readable slots cannot pass. The last part seeds faults and checks
that the comparison sees each.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from drafting import (
    PAGE,
    VOCAB,
    Served,
    bind,
    eagle_config,
    eagle_weights,
    prefill,
    rows_of,
    serve,
    tiny_model,
    tiny_target,
)
from golden import GoldenEagle, captures

from tandemkv.base.errors import ConfigError
from tandemkv.base.sampling import SamplingParams
from tandemkv.base.spans import SpanSet
from tandemkv.model.attention import AttentionSegment, GroupRows, KVPool
from tandemkv.model.draft_head import DEFAULT_DRAFT_VOCAB, default_draft_vocab
from tandemkv.model.drafter import DraftInputs
from tandemkv.model.eagle3 import Eagle3
from tandemkv.model.sampling import Purpose, draft_distribution, sample, uniform

K = 4
N = 13


@pytest.fixture(scope="module")
def target():
    return tiny_target()


class Case:
    """A drafter with random weights, its reference, and a sequence with random captures."""

    def __init__(self, target, *extra: str, length: int = 40, seed: int = 3, **changes) -> None:
        used = changes.pop("used", None)
        config = eagle_config(**changes)
        weights = eagle_weights(config, *extra)
        if used is not None:
            weights["d2t"] = torch.tensor(used) - torch.arange(len(used))
        self.drafter = Eagle3(target, config, weights)
        (self.pool,) = bind(self.drafter)
        self.golden = GoldenEagle(weights, config, target.embedding_weight, target.head_weight)
        self.generator = torch.Generator().manual_seed(seed)
        self.num_taps = len(config.taps)
        self.length = length

    def sequence(self, first_page: int = 0) -> Served:
        tokens = torch.randint(0, VOCAB, (self.length,), generator=self.generator).tolist()
        features = torch.randn(self.length, self.num_taps, 32, generator=self.generator)
        features[0] *= 50  # token 0 is an attention sink: a legitimate outlier
        return Served(tokens, features, list(range(first_page, first_page + self.length // PAGE)))

    def expected(self, s: Served, n: int, num: int = K, **kwargs):
        return self.golden.chain(s.captures[:n], s.tokens[: n + 1], num, **kwargs)

    def rows_are_teacher_forced(self, s: Served, n: int) -> bool:
        rows = rows_of(self.pool, s, 0, n)
        return torch.allclose(rows.double(), self.golden.rows(s.captures[:n], s.tokens), atol=2e-5)


OPTIONS = {
    "classic": ((), {}),
    "fc_norm": ((), {"fc_norm": True}),
    "norm_before_fc": ((), {"norm_before_fc": True}),
    "norm_output": ((), {"norm_output": True}),
    "norm_before_residual": ((), {"norm_before_residual": True}),
    "five captures": ((), {"taps": (-1, 0, 1, 2, 4)}),
    "q/k norms": (("midlayer.self_attn.q_norm.weight", "midlayer.self_attn.k_norm.weight"), {}),
    "own head": (("lm_head.weight",), {}),
    "own embedding": (("embed_tokens.weight",), {}),
    "own theta": ((), {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
    "own RoPE scaling": (
        (),
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 4.0}},
    ),
    "own head, reduced": (
        ("lm_head.weight",),
        {"draft_vocab_size": 16, "used": [*range(0, 32, 2)]},
    ),
    "frozen subset": ((), {"draft_vocab_size": 20, "used": [*range(3, 63, 3)]}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_rows_and_chain_are_those_of_the_published_formulas(target, name):
    extra, changes = OPTIONS[name]
    case = Case(target, *extra, **changes)
    s = case.sequence()
    drafts = prefill(case.drafter, s, N, 5, K)
    expected, logits = case.expected(s, N)
    assert case.rows_are_teacher_forced(s, N)
    assert drafts.tokens == [expected]
    assert drafts.probs == [None]
    top = logits.topk(2).values
    assert drafts.gaps[0] == pytest.approx(float((top[:, 0] - top[:, 1]).min()), abs=1e-4)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 8, N])
def test_rows_do_not_depend_on_the_chunk_size(target, chunk):
    case = Case(target)
    s = case.sequence()
    drafts = prefill(case.drafter, s, N, chunk, K)
    assert case.rows_are_teacher_forced(s, N)
    assert drafts.tokens == [case.expected(s, N)[0]]


@pytest.mark.parametrize("accepted", range(K + 1))
def test_rows_after_accepting_any_number_of_drafts_are_teacher_forced(target, accepted):
    case = Case(target)
    s = case.sequence()
    (drafts,) = prefill(case.drafter, s, N, N, K).tokens
    for _ in range(4):
        n = s.done
        s.tokens[n + 1 : n + 1 + accepted] = drafts[:accepted]
        if accepted < K:  # the recovered token is another one than the draft
            s.tokens[n + 1 + accepted] = (drafts[accepted] + 1) % VOCAB
        (drafts,) = serve(case.drafter, [(s, n + accepted + 1)], K).tokens
        assert case.rows_are_teacher_forced(s, s.done)
        assert drafts == case.expected(s, s.done)[0]


@pytest.mark.parametrize("shared", [4, 8, 12])
def test_a_branch_at_a_page_end_reads_no_slot_of_the_other_branch(target, shared):
    case = Case(target)
    first = case.sequence()
    prefill(case.drafter, first, 16, 16, K)
    before = case.pool.data[first.pages[: shared // PAGE]].clone()
    other = case.sequence(first_page=20)
    other.tokens[:shared] = first.tokens[:shared]
    other.captures[:shared] = first.captures[:shared]
    assert other.tokens[shared] != first.tokens[shared]
    other.pages[: shared // PAGE] = first.pages[: shared // PAGE]
    other.coverage = SpanSet([(1, shared)])  # slots of the shared pages, all of them
    other.done = shared - 1  # one token early: the row of shared - 1 needs the new successor
    drafts = serve(case.drafter, [(other, 16)], K)
    assert case.rows_are_teacher_forced(other, 16)
    assert drafts.tokens == [case.expected(other, 16)[0]]
    assert torch.equal(
        case.pool.data[first.pages[: shared // PAGE]].nan_to_num(), before.nan_to_num()
    )
    assert case.rows_are_teacher_forced(first, 16)


@pytest.mark.parametrize("hole", [(2, 5), (4, 8), (1, 12), (5, 6)])
def test_a_masked_hole_is_a_shorter_context_and_nothing_else(target, hole):
    case = Case(target)
    s = case.sequence()
    prefill(case.drafter, s, N - 1, N)
    for slot in range(*hole):
        case.pool.data[s.pages[slot // PAGE], :, :, slot % PAGE] = float("nan")
    s.coverage.remove(*hole)
    segment_drafts = serve(case.drafter, [(s, N)], K)
    hidden = [slot - 1 for slot in range(*hole)]
    assert segment_drafts.tokens == [case.expected(s, N, hidden=hidden)[0]]


def test_a_batch_of_sequences_drafts_what_each_drafts_alone(target):
    together, alone = Case(target), Case(target)
    stops = [5, 1, 17, 12]
    batch = [together.sequence(first_page=10 * i) for i in range(len(stops))]
    singles = [alone.sequence(first_page=10 * i) for i in range(len(stops))]
    drafts = serve(together.drafter, list(zip(batch, stops, strict=True)), K)
    for i, (s, stop) in enumerate(zip(singles, stops, strict=True)):
        single = serve(alone.drafter, [(s, stop)], K)
        assert drafts.tokens[i] == single.tokens[0] == alone.expected(s, stop)[0]
        assert drafts.gaps[i] == pytest.approx(single.gaps[0], abs=1e-5)


def test_sequences_may_want_different_numbers_of_drafts(target):
    case = Case(target)
    sequences = [case.sequence(first_page=10 * i) for i in range(4)]
    for s in sequences:
        prefill(case.drafter, s, N - 1, N)
    wanted = [2, 0, 4, 1]
    drafts = case.drafter.run(_one_row_each(sequences, wanted))
    for s, num, tokens in zip(sequences, wanted, drafts.tokens, strict=True):
        assert tokens == case.expected(s, N, num)[0]
    assert drafts.gaps[1] == float("inf")


def _one_row_each(sequences, wanted):
    n = N - 1
    return DraftInputs(
        token_ids=torch.tensor([s.tokens[n] for s in sequences]),
        next_ids=torch.tensor([s.tokens[n + 1] for s in sequences]),
        positions=torch.tensor([n] * len(sequences)),
        features=torch.stack([s.captures[n] for s in sequences]),
        segments=[
            s.segment(i, n + 1, num, [(n + 1, n + 2)])
            for i, (s, num) in enumerate(zip(sequences, wanted, strict=True))
        ],
    )


# ------------------------------------------------------------------ what is written, and what not


def test_only_the_slots_asked_for_are_written(target):
    case = Case(target)
    s = case.sequence()
    prefill(case.drafter, s, N, N)
    s.done = 3
    case.drafter.run(_context_only(s, N, [(6, 8)]))
    before = case.pool.data.clone()
    s.tokens[6] = (s.tokens[6] + 1) % VOCAB
    case.drafter.run(_context_only(s, N, [(6, 8)]))
    changed = (case.pool.data.nan_to_num() != before.nan_to_num()).flatten(4).any(-1).any(2).any(1)
    slots = {int(p) * PAGE + int(o) for p, o in changed.nonzero()}
    assert slots == {6}  # a wrong successor damages one slot: that of the token itself


def _context_only(s, stop, writes):
    span = slice(s.done, stop)
    return DraftInputs(
        token_ids=torch.tensor(s.tokens[span]),
        next_ids=torch.tensor(s.tokens[s.done + 1 : stop + 1]),
        positions=torch.arange(s.done, stop),
        features=s.captures[span],
        segments=[s.segment(0, stop, 0, writes)],
    )


def test_proposing_writes_no_page(target):
    case = Case(target)
    s = case.sequence()
    prefill(case.drafter, s, N, N, 0)
    before = case.pool.data.clone()
    s.done = N - 1
    serve(case.drafter, [(s, N)], K)
    assert torch.equal(case.pool.data.view(torch.int32), before.view(torch.int32))


def test_a_row_that_is_held_already_still_serves_the_first_draft(target):
    case = Case(target)
    s = case.sequence()
    prefill(case.drafter, s, N, N, 0)
    s.done = N - 1  # resumed: the pass over [n - 1, n) is for the hidden state alone
    drafts = serve(case.drafter, [(s, N)], K)
    assert drafts.tokens == [case.expected(s, N)[0]]


def test_nothing_is_proposed_without_the_last_row(target):
    case = Case(target)
    s = case.sequence()
    prefill(case.drafter, s, 6, 6)
    inputs = _context_only(s, 9, [(7, 10)])
    inputs.segments[0].num_rows, inputs.segments[0].num_drafts = N, K
    drafts = case.drafter.run(inputs)
    assert (drafts.tokens, drafts.probs, drafts.gaps) == ([[]], [None], [float("inf")])
    assert case.rows_are_teacher_forced(s, 9)


def test_a_chain_needs_no_page_beyond_its_context(target):
    case = Case(target)
    s = case.sequence()
    s.pages = s.pages[: N // PAGE + 1]
    drafts = prefill(case.drafter, s, N, N, 8)
    assert drafts.tokens == [case.expected(s, N, 8)[0]]


# ------------------------------------------------------------------ sampled drafts


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_p=0.8),
        SamplingParams(temperature=1.3, top_k=5, min_p=0.02),
    ],
)
@pytest.mark.parametrize("name", ["classic", "frozen subset", "own head, reduced"])
def test_sampled_drafts_come_with_the_distribution_they_were_sampled_from(target, name, params):
    extra, changes = OPTIONS[name]
    case = Case(target, *extra, **changes)
    s = case.sequence()
    s.params = params
    drafts = prefill(case.drafter, s, N, N, K)
    (tokens,), (probs,) = drafts.tokens, drafts.probs
    assert probs.shape == (K, VOCAB)
    assert torch.allclose(probs.sum(1), torch.ones(K), atol=1e-5)
    for j, token in enumerate(tokens):
        u = uniform(s.seed, N + 1 + j, Purpose.DRAFT, N)
        assert sample(probs[j], u) == token
    rows = {int(t): r for r, t in enumerate(case.golden.ids)}
    _, logits = case.expected(s, N, pick=lambda _, step: rows[tokens[step]])
    q = torch.zeros(K, VOCAB).double()
    q[:, case.golden.ids] = draft_distribution(logits, params)
    assert torch.allclose(probs.double(), q, atol=1e-4)


def test_greedy_and_sampled_sequences_share_a_batch(target):
    case = Case(target)
    greedy, sampled = case.sequence(), case.sequence(first_page=20)
    sampled.params = SamplingParams(temperature=1.0)
    drafts = serve(case.drafter, [(greedy, N), (sampled, N)], K)
    assert drafts.tokens[0] == case.expected(greedy, N)[0]
    assert drafts.probs[0] is None
    assert drafts.probs[1].shape == (K, VOCAB)


def test_a_deterministic_request_drafts_its_best_token_and_says_one_hot(target):
    case = Case(target)
    s = case.sequence()
    s.params = SamplingParams(temperature=1.0, top_k=1)
    drafts = prefill(case.drafter, s, N, N, K)
    assert drafts.tokens == [case.expected(s, N)[0]]
    assert drafts.probs == [None]


# ------------------------------------------------------------------ on a real pass of a target


def test_captured_layers_are_outputs_of_the_layers_named(target):
    """The target's features, as served over pages, are the hidden states transformers gives."""
    case = Case(target)
    tokens = case.sequence().tokens[: N + 1]
    dense, _ = captures(tiny_model(), tokens, case.drafter.spec.taps)
    pools = [KVPool(g, 8, poison=True) for g in target.layer_groups(PAGE)]
    segment = AttentionSegment(0, N + 1, 0, list(range(8)), [], [(0, N + 1)])
    out = target.forward(
        torch.tensor(tokens),
        torch.arange(N + 1),
        [GroupRows(pool, [segment]) for pool in pools],
        case.drafter.spec.taps,
    )
    assert torch.allclose(out.features, dense, atol=1e-4)
    shifted, _ = captures(tiny_model(), tokens, [t + 1 for t in (0, 2)])
    assert not torch.allclose(out.features[:, :2], shifted, atol=1e-2)


# ------------------------------------------------------------------ the checks can fail


def _feed_back_normalised(drafter: Eagle3) -> None:
    drafter.config = msgspec.structs.replace(drafter.config, norm_output=True)


def _shift_positions(drafter: Eagle3) -> None:
    angles = drafter._rotary.angles
    drafter._rotary.angles = lambda positions: angles(positions + 1)


def _shift_map(drafter: Eagle3) -> None:
    drafter.head.ids = (drafter.head.ids + 1) % VOCAB


def _hidden_half_first(drafter: Eagle3) -> None:
    inputs = drafter._inputs
    drafter._inputs = lambda *args: inputs(*args).roll(drafter.config.hidden_size, -1)


def _residual_is_normalised(drafter: Eagle3) -> None:
    drafter.config = msgspec.structs.replace(drafter.config, norm_before_residual=True)


def _captures_in_another_order(drafter: Eagle3) -> None:
    fuse = drafter.fuse
    drafter.fuse = lambda features: fuse(features.roll(1, 1))


FAULTS: dict[str, Callable[[Eagle3], None]] = {
    "the state fed back is normalised": _feed_back_normalised,
    "positions are off by one": _shift_positions,
    "d2t is shifted": _shift_map,
    "the hidden half comes first": _hidden_half_first,
    "the residual is normalised": _residual_is_normalised,
    "captures are in another order": _captures_in_another_order,
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_comparison_with_the_reference_sees(target, name):
    case = Case(target, draft_vocab_size=32, used=[*range(0, 64, 2)])
    FAULTS[name](case.drafter)
    s = case.sequence()
    drafts = prefill(case.drafter, s, N, N, K)
    right = drafts.tokens == [case.expected(s, N)[0]] and case.rows_are_teacher_forced(s, N)
    assert not right


def test_the_comparison_sees_a_prediction_fed_at_a_chunk_end(target):
    case = Case(target)
    s = case.sequence()
    wrong = {7: (s.tokens[8] + 1) % VOCAB}
    serve(case.drafter, [(s, 8)], successors=wrong)
    serve(case.drafter, [(s, N)])
    assert not case.rows_are_teacher_forced(s, N)
    damaged = ~torch.isclose(
        rows_of(case.pool, s, 0, N).double(), case.golden.rows(s.captures[:N], s.tokens), atol=2e-5
    ).flatten(1).all(1)
    assert damaged.nonzero().flatten().tolist() == [7]


def test_the_comparison_sees_rows_made_from_the_drafters_own_states(target):
    """The fault: rows of accepted drafts keep the states they were drafted from."""
    case = Case(target)
    s = case.sequence()
    layer, states = case.drafter._layer, []
    case.drafter._layer = lambda *args: states.append(layer(*args)) or states[-1]
    (drafts,) = prefill(case.drafter, s, N, N, K).tokens
    s.tokens[N + 1 : N + 1 + K] = drafts
    case.drafter.fuse = lambda features: torch.cat(states[:K])
    serve(case.drafter, [(s, N + K)])
    assert not case.rows_are_teacher_forced(s, N + K)


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_hidden_size": 48}, ["hidden size 48", "has 32"]),
        ({"vocab_size": 70, "draft_vocab_size": 70}, ["vocabulary of 70", "has 64"]),
        ({"taps": (0, 2, 6)}, ["output of layer 6", "layers 0..5"]),
        ({"taps": (-2, 2, 4)}, ["output of layer -2"]),
        ({"hidden_size": 24, "head_dim": 6, "target_hidden_size": 32}, ["24", "32", "of its own"]),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, ["dynamic"]),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_with_both_values(target, changes, words):
    config = eagle_config(**changes)
    with pytest.raises(ConfigError) as refusal:
        Eagle3(target, config, eagle_weights(config), origin="drafter x")
    for word in ["drafter x", *words]:
        assert word in str(refusal.value)


def test_captured_layers_default_to_the_published_ones():
    config = eagle_config(taps=None)
    drafter = Eagle3(tiny_target(layers=8), config, eagle_weights(config))
    assert drafter.spec.taps == (1, 3, 4)


def test_a_narrower_drafter_with_its_own_tables_matches_the_reference(target):
    extra = ("lm_head.weight", "embed_tokens.weight")
    case = Case(target, *extra, hidden_size=24, head_dim=6, target_hidden_size=32)
    s = case.sequence()
    assert prefill(case.drafter, s, N, 5, K).tokens == [case.expected(s, N)[0]]


def test_the_fingerprint_follows_weights_options_and_vocabulary(target):
    def prints(**changes):
        used = changes.pop("used", None)
        seed = changes.pop("seed", 1)
        config = eagle_config(**changes)
        weights = eagle_weights(config, seed=seed)
        if used:
            weights["d2t"] = torch.tensor(used) - torch.arange(len(used))
        return Eagle3(target, config, weights).spec.fingerprint

    seen = [prints(), prints(seed=2), prints(norm_output=True), prints(taps=(0, 2, 3))]
    seen.append(prints(draft_vocab_size=4, used=[1, 2, 3, 9]))
    assert len(set(seen)) == len(seen)
    assert prints() == seen[0]


def test_a_cpu_drafts_over_the_frequent_rows_and_an_accelerator_over_the_whole_head():
    assert default_draft_vocab("cpu", 32768, 49152) == DEFAULT_DRAFT_VOCAB
    assert default_draft_vocab("cpu", 300, 49152) == 300
    assert default_draft_vocab("cuda", 32768, 49152) == 49152
