"""Generated rows: the loop filter, plans, files, the order of batches."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from tandemkv.base.errors import ConfigError
from tandemkv.train import data
from tandemkv.train.options import PoolOptions
from tandemkv.train.prompts import Prompt
from tandemkv.train.selfplay import ANSWER, FORCED

POOL = PoolOptions(name="chat", rows=4, length=64, self_prompted=0.25)


def test_a_token_is_in_a_loop_once_its_ngram_occurred_twice_before():
    phrase = list(range(100, 112))
    tokens = torch.tensor([[1, 2, *phrase, *phrase, *phrase, *phrase, 3]])
    kinds = torch.full_like(tokens, ANSWER)
    kept = data.loss_mask(tokens, kinds)[0].tolist()
    third_end = 2 + 36 - 1
    assert all(kept[:third_end])
    assert not any(kept[third_end : 2 + 48])
    assert kept[-1]


def test_repetition_of_the_prompt_is_no_loop():
    phrase = list(range(100, 112))
    tokens = torch.tensor([[*phrase, *phrase, *phrase]])
    kinds = torch.full_like(tokens, FORCED)
    kinds[0, 24:] = ANSWER
    assert data.loss_mask(tokens, kinds)[0, 24:].all()


def test_every_prompt_is_used_once_before_any_is_used_again():
    prompts = [Prompt(tokens=[i]) for i in range(9)]
    plan = data.RowPlan(POOL, prompts, seed=3)
    used = [p.tokens[0] for n in range(6) for p in plan.batch(n)[0] if p]
    assert len(used) == 18
    assert set(Counter(used).values()) == {2}
    assert sorted(used[:9]) == list(range(9))


def test_a_plan_is_a_function_of_its_seed():
    prompts = [Prompt(tokens=[i]) for i in range(9)]
    one, two, other = (data.RowPlan(POOL, prompts, seed=s).batch(5) for s in (1, 1, 2))
    assert one == two
    assert one != other


class CountingPlayer:
    """Stands in for SelfPlay: rows whose content is the seed, and how many were asked for."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def run(self, rows, temperatures, *, max_answer, max_question, seed, report):
        self.seeds.append(seed)
        report(POOL.length // 2)
        tokens = torch.full((len(rows), POOL.length), seed % 50)
        return tokens, torch.full_like(tokens, ANSWER, dtype=torch.int8)


def _fill(directory: Path, player: CountingPlayer, tokens: int) -> None:
    data.generate([POOL], [], directory, lambda _: player, tokens=tokens, seconds=None, seed=1)


def test_a_stopped_generation_goes_on_where_it_was(tmp_path: Path):
    whole, first, second = CountingPlayer(), CountingPlayer(), CountingPlayer()
    batch = POOL.rows * POOL.length
    _fill(tmp_path / "a", whole, 4 * batch)
    _fill(tmp_path / "b", first, 2 * batch)
    _fill(tmp_path / "b", second, 4 * batch)
    assert first.seeds + second.seeds == whole.seeds
    pools = [data.load_pools(tmp_path / x, 0, torch.device("cpu"))["chat"] for x in "ab"]
    assert torch.equal(pools[0].tokens, pools[1].tokens)


def test_generation_reports_how_far_it_is_over_all_pools_and_within_a_batch(tmp_path: Path):
    pools = [POOL, data.PoolOptions(name="long", rows=4, length=64, share=3.0)]
    batch, seen = POOL.rows * POOL.length, []
    data.generate(
        pools, [], tmp_path, lambda _: CountingPlayer(), tokens=4 * batch, seconds=None, seed=1,
        report=seen.append,
    )  # fmt: skip
    assert [(at.pool, at.rows, at.tokens / batch) for at in seen] == [
        ("chat", 0, 0.5), ("chat", 4, 1), ("long", 0, 0.5), ("long", 4, 1), ("long", 4, 1.5),
        ("long", 8, 2), ("long", 8, 2.5), ("long", 12, 3),
    ]  # fmt: skip
    assert [at.share for at in seen] == pytest.approx([i / 8 for i in range(1, 9)])


def test_generation_by_seconds_never_reports_more_than_all(tmp_path: Path):
    seen: list[data.Generated] = []
    data.generate(
        [POOL], [], tmp_path, lambda _: CountingPlayer(), tokens=None, seconds=1e-9, seed=1,
        report=seen.append,
    )  # fmt: skip
    assert [at.share for at in seen] == [1.0, 1.0]


def test_a_batch_without_its_record_does_not_count(tmp_path: Path):
    _fill(tmp_path, CountingPlayer(), POOL.rows * POOL.length * 2)
    (tmp_path / "chat-0001.json").unlink()
    pools = data.load_pools(tmp_path, 0, torch.device("cpu"))
    assert len(pools["chat"].tokens) == POOL.rows


def test_an_empty_data_directory_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="no generated rows"):
        data.load_pools(tmp_path, 0, torch.device("cpu"))


def test_seconds_leave_no_batch_half_done(tmp_path: Path):
    data.generate(
        [POOL], [], tmp_path, lambda _: CountingPlayer(), tokens=None, seconds=1e-9, seed=1
    )
    records = [json.loads(f.read_text()) for f in tmp_path.glob("chat-*.json")]
    assert [r["rows"] for r in records] == [POOL.rows]


def pools_of(rows: int = 40) -> dict[str, data.Pool]:
    tokens = torch.arange(rows, dtype=torch.int32)[:, None].expand(rows, 8).contiguous()
    return {"chat": data.Pool(tokens, torch.ones(rows, 8).bool(), held_out=5)}


def test_held_out_rows_are_never_trained_on():
    pools = pools_of()
    order = data.BatchOrder(pools, 24, seed=0)
    seen = {int(x) for _ in range(60) for x in order.next()[0][:, 0]}
    assert seen == set(range(5, 40))
    assert pools["chat"].held_out[0][:, 0].tolist() == [0, 1, 2, 3, 4]


def test_an_order_goes_on_from_its_state():
    one, two = (data.BatchOrder(pools_of(), 24, seed=0) for _ in range(2))
    for _ in range(7):
        one.next()
    two.restore(one.state())
    for _ in range(20):
        assert torch.equal(one.next()[0], two.next()[0])


def test_ids_are_ranked_by_how_often_they_carry_loss():
    tokens = torch.tensor([[3, 3, 5, 7, 7, 7, 9, 9]], dtype=torch.int32)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]]).bool()
    ranking = data.token_ranking({"a": data.Pool(tokens, mask, 0)}, 10)
    assert ranking.tolist() == [7, 3, 5, 0, 1, 2, 4, 6, 8, 9]
