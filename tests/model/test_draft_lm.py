"""An independent draft model: rows and drafts are those of the model run whole, with transformers.

SELF is the strongest probe: with the target's own weights every greedy draft is the target's own
argmax, after any history of chunks, acceptances and holes.
"""

from __future__ import annotations

import pytest
import torch
from drafting import GREEDY, PAGE, VOCAB, Served, bind, tiny_model, tiny_target
from golden import captures

from tandemkv.base.errors import ConfigError
from tandemkv.base.sampling import SamplingParams
from tandemkv.kv.layout import Domain, RebuildFrom
from tandemkv.model.draft_lm import DraftModel
from tandemkv.model.drafter import DraftInputs, Drafts
from tandemkv.model.sampling import Purpose, draft_distribution, sample, uniform

K = 4
N = 13


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def plain():
    return tiny_model()


def self_drafter(target):
    drafter = DraftModel(target, tiny_target())
    bind(drafter)
    return drafter


def sequence(length: int = 40, seed: int = 3, first_page: int = 0, **kwargs) -> Served:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
    pages = list(range(first_page, first_page + length // PAGE))
    return Served(tokens, None, pages, lookahead=0, **kwargs)


def step(drafter, stops, num_drafts=K, writes=None) -> Drafts:
    """Rows up to each stop (those that coverage lacks), then proposals from the anchor there."""
    ids, positions, segments = [], [], []
    for i, (s, stop) in enumerate(stops):
        missing = s.coverage.missing(0, stop) if writes is None else writes[i]
        s.done = missing[0][0] if missing else stop
        segments.append(s.segment(len(ids), stop, num_drafts, missing))
        ids += s.tokens[s.done : stop]
        positions += range(s.done, stop)
    drafts = drafter.run(
        DraftInputs(
            token_ids=torch.tensor(ids, dtype=torch.long),
            next_ids=torch.tensor(ids, dtype=torch.long),
            positions=torch.tensor(positions, dtype=torch.long),
            features=None,
            segments=segments,
        )
    )
    for s, stop in stops:
        s.coverage.add(0 if writes is None else s.done, stop)
        s.done = stop
    return drafts


def continuation(model, tokens, num, vocab=VOCAB) -> tuple[list[int], list[torch.Tensor]]:
    """Greedy continuation of tokens by a transformers model run whole each time, and its logits."""
    tokens, logits = list(tokens), []
    for _ in range(num):
        logits.append(captures(model, tokens, [-1])[1][-1, :vocab])
        tokens.append(int(logits[-1].argmax()))
    return tokens[-num:], logits


def test_its_groups_are_draft_groups_rebuilt_from_tokens(target):
    drafter = DraftModel(target, tiny_target())
    (group,) = drafter.layer_groups(8, "float32")
    assert group.domain is Domain.DRAFT
    assert (group.lookahead, group.pointwise, group.page_size) == (0, False, 8)
    assert group.rebuild_from is RebuildFrom.TOKENS
    assert group.layers == tuple(range(6))
    assert group.name not in [g.name for g in target.layer_groups(8)]
    assert drafter.spec.exact_proposals
    assert drafter.spec.taps == ()


@pytest.mark.parametrize("chunk", [1, 3, 4, N])
def test_self_drafts_are_the_targets_argmax_whatever_the_chunks(target, plain, chunk):
    drafter, s = self_drafter(target), sequence()
    for start in range(0, N, chunk):
        stop = min(start + chunk, N)
        drafts = step(drafter, [(s, stop)], K if stop == N else 0)
    expected, logits = continuation(plain, s.tokens[: N + 1], K)
    assert drafts.tokens == [expected]
    assert drafts.probs == [None]
    gaps = [float(row.topk(2).values.diff().abs()) for row in logits]
    assert drafts.gaps[0] == pytest.approx(min(gaps), abs=1e-3)


@pytest.mark.parametrize("accepted", range(K + 1))
def test_rows_written_while_proposing_are_true_rows_of_accepted_drafts(target, plain, accepted):
    drafter, s = self_drafter(target), sequence()
    (drafts,) = step(drafter, [(s, N)]).tokens
    for _ in range(3):
        n = s.done
        s.tokens[n + 1 : n + 1 + accepted] = drafts[:accepted]
        if accepted < K:
            s.tokens[n + 1 + accepted] = (drafts[accepted] + 1) % VOCAB
        s.coverage.add(n, n + min(accepted + 1, K))  # anchor and drafts fed, as far as accepted
        rows_to_run = n + accepted + 1 - s.coverage.stop
        assert rows_to_run == (1 if accepted == K else 0)
        (drafts,) = step(drafter, [(s, n + accepted + 1)]).tokens
        assert drafts == continuation(plain, s.tokens[: s.done + 1], K)[0]


def test_counting_a_rejected_drafts_row_as_written_is_seen(target, plain):
    """The fault that the test above must catch: one row too many is taken for true."""
    drafter, s = self_drafter(target), sequence()
    (drafts,) = step(drafter, [(s, N)]).tokens
    s.tokens[N + 1] = (drafts[0] + 1) % VOCAB
    s.coverage.add(N, N + 2)
    (drafts,) = step(drafter, [(s, N + 3)]).tokens
    assert drafts != continuation(plain, s.tokens[: N + 4], K)[0]


def test_a_batch_drafts_what_each_sequence_drafts_alone(target, plain):
    drafter = self_drafter(target)
    stops = [(sequence(seed=i, first_page=10 * i), n) for i, n in enumerate((5, 1, 17, 12))]
    drafts = step(drafter, stops)
    for (s, n), tokens in zip(stops, drafts.tokens, strict=True):
        assert tokens == continuation(plain, s.tokens[: n + 1], K)[0]


def test_a_lost_span_is_rebuilt_from_tokens_alone(target, plain):
    drafter, s = self_drafter(target), sequence()
    step(drafter, [(s, N)], 0)
    for slot in range(4, 8):
        drafter._pools[0].data[s.pages[slot // PAGE], :, :, slot % PAGE] = float("nan")
    s.coverage.remove(4, 8)
    step(drafter, [(s, 8)], 0)  # the drafter alone over [4, 8): the rest is still there
    drafts = step(drafter, [(s, N)])
    assert drafts.tokens == [continuation(plain, s.tokens[: N + 1], K)[0]]


def test_a_masked_hole_never_reads_what_lies_in_it(target):
    drafter, s = self_drafter(target), sequence()
    step(drafter, [(s, N)], 0)
    drafter._pools[0].data[s.pages[1]] = float("nan")
    s.coverage.remove(4, 8)
    (tokens,) = step(drafter, [(s, N)], writes=[[]]).tokens
    assert len(tokens) == K
    assert drafter._pools[0].read(s.pages, [N]).isfinite().all()


def test_a_smaller_model_of_the_same_vocabulary_drafts_its_own_argmax(target):
    drafter = DraftModel(target, tiny_target(5, hidden=16, layers=2))
    bind(drafter)
    s = sequence()
    drafts = step(drafter, [(s, N)])
    model = tiny_model(5, hidden=16, layers=2)
    assert drafts.tokens == [continuation(model, s.tokens[: N + 1], K)[0]]


@pytest.mark.parametrize("vocab", [VOCAB + 8, VOCAB - 8])
def test_vocabularies_that_differ_by_padding_share_the_smaller_one(target, vocab):
    drafter = DraftModel(target, tiny_target(5, vocab=vocab))
    bind(drafter)
    s = sequence()
    common = min(vocab, VOCAB)
    s.tokens = [min(t, common - 1) for t in s.tokens]
    drafts = step(drafter, [(s, N)])
    expected = continuation(tiny_model(5, vocab=vocab), s.tokens[: N + 1], K, common)[0]
    assert drafts.tokens == [expected]
    other = sequence(first_page=20, params=SamplingParams(temperature=1.0))
    other.tokens[5] = VOCAB - 1  # an id that a smaller draft model lacks is no error
    (probs,) = step(drafter, [(other, N)]).probs
    assert probs.shape == (K, VOCAB)
    assert float(probs[:, common:].sum()) == 0.0


def test_sampled_drafts_come_with_the_distribution_they_were_sampled_from(target, plain):
    drafter = self_drafter(target)
    params = SamplingParams(temperature=0.8, top_p=0.9)
    s = sequence(params=params)
    (tokens,), (probs,) = (d := step(drafter, [(s, N)])).tokens, d.probs
    known = s.tokens[: N + 1]
    for j, token in enumerate(tokens):
        assert sample(probs[j], uniform(s.seed, N + 1 + j, Purpose.DRAFT, N)) == token
        logits = captures(plain, [*known, *tokens[:j]], [-1])[1][-1:]
        assert torch.allclose(probs[j], draft_distribution(logits, params)[0], atol=1e-3)


def test_sequences_may_want_different_numbers_of_drafts_or_none(target, plain):
    drafter = self_drafter(target)
    stops = [(sequence(seed=i, first_page=10 * i), N) for i in range(3)]
    ids = [t for s, n in stops for t in s.tokens[:n]]
    segments = [
        s.segment(N * i, N, want, [(0, N)])
        for i, ((s, _), want) in enumerate(zip(stops, (3, 0, 1), strict=True))
    ]
    drafts = drafter.run(
        DraftInputs(
            token_ids=torch.tensor(ids),
            next_ids=torch.tensor(ids),
            positions=torch.arange(N).repeat(3),
            features=None,
            segments=segments,
        )
    )
    for (s, n), want, tokens in zip(stops, (3, 0, 1), drafts.tokens, strict=True):
        assert tokens == (continuation(plain, s.tokens[: n + 1], want)[0] if want else [])


@pytest.mark.parametrize("num_pages", [3, 4])
def test_proposals_end_where_the_pages_end(target, num_pages):
    drafter, s = self_drafter(target), sequence()
    s.pages = [*s.pages[:num_pages], -1]
    drafts = step(drafter, [(s, 10)], 8)
    assert len(drafts.tokens[0]) == num_pages * PAGE - 10


def test_a_run_with_nothing_to_do_does_nothing(target):
    drafter, s = self_drafter(target), sequence()
    step(drafter, [(s, N)], 0)
    assert step(drafter, [(s, N)], 0).tokens == [[]]


def test_another_vocabulary_is_refused_with_both_sizes():
    with pytest.raises(ConfigError, match=r"tiny: draft model has a vocabulary of 1500.* 64"):
        DraftModel(tiny_target(), tiny_target(1, vocab=1500), origin="tiny")


def test_windowed_groups_keep_their_windows(target):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from tandemkv.model.target import ATTENTION, Target

    def model(attention):
        torch.manual_seed(4)
        return Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=VOCAB,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=256,
                use_sliding_window=True,
                sliding_window=6,
                max_window_layers=2,
                initializer_range=0.2,
                attn_implementation=attention,
            )
        ).eval()

    drafter = DraftModel(target, Target(model(ATTENTION), fingerprint="w"))
    pools = bind(drafter)
    assert [p.group.window for p in pools] == [None, 6]
    assert len({p.group.name for p in pools}) == 2
    s = sequence()
    ids = torch.tensor(s.tokens[:N])
    segment = s.segment(0, N, K, [(0, N)])
    segment.pages, segment.readable, segment.writes = [s.pages] * 2, [[], []], [[(0, N)]] * 2
    drafts = drafter.run(DraftInputs(ids, ids, torch.arange(N), None, [segment]))
    assert drafts.tokens == [continuation(model("eager"), s.tokens[: N + 1], K)[0]]
    assert GREEDY.greedy
