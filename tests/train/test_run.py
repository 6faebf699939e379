"""A whole run on a tiny target: it learns, stops, goes on bit for bit, and writes what is read."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import msgspec
import pytest
import torch

from tandemkv.base.errors import ConfigError
from tandemkv.model import eagle3_checkpoint
from tandemkv.train import Eagle3Options, PoolOptions, report, run, train_eagle3, weights
from tandemkv.train.teacher import load_teacher
from tandemkv.train.trainer import Trainer, schedule

POOLS = (
    PoolOptions(name="chat", rows=16, length=96, max_answer=40, max_question=8),
    PoolOptions(name="long", rows=4, length=160, max_answer=40, max_question=8),
)


@pytest.fixture(scope="module")
def rows(target, tmp_path_factory) -> Path:
    """Generated rows, shared by the runs of this file."""
    data = tmp_path_factory.mktemp("rows") / "data"
    options = options_of(target, data.parent / "first", data, steps=1)
    train_eagle3(options)
    return data


def options_of(target: Path, out: Path, data: Path | None, **changes) -> Eagle3Options:
    """Options of a run of seconds."""
    values = {
        "out": str(out), "target": str(target), "pools": POOLS, "data_tokens": 4000,
        "batch_tokens": 400, "unroll": 3, "head_rows": 100, "head_random": 30, "held_out": 4,
        "num_draft_tokens": 2, "max_new_tokens": 12, "evaluate_limit": 2, "draft_vocab_rows": 64,
        "quiet": True, "device": "cpu", "data": str(data) if data else None,
    }  # fmt: skip
    return Eagle3Options(**(values | changes))


def parameters(out: Path) -> dict[str, torch.Tensor]:
    return torch.load(out / "checkpoint.pt", weights_only=True)["model"]


def paused_after(monkeypatch, steps: int) -> None:
    """Let the next run stop itself after so many steps, as Ctrl-C would."""
    whole = Trainer._one_step

    def one_step(self):
        point = whole(self)
        if self.step == steps:
            os.kill(os.getpid(), signal.SIGINT)
        return point

    monkeypatch.setattr(Trainer, "_one_step", one_step)


def test_training_lowers_the_held_out_loss(target, rows, tmp_path):
    done = train_eagle3(options_of(target, tmp_path / "run", rows, steps=60))
    curve = json.loads((done.weights / "curve.json").read_text())
    before = train_eagle3(options_of(target, tmp_path / "short", rows, steps=1))
    first = json.loads((before.weights / "curve.json").read_text())[-1]
    assert curve[-1]["held_out"]
    assert first["held_out"]
    assert curve[-1]["ce"] < first["ce"] - 0.3
    assert curve[-1]["tau"] > first["tau"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_stopped_run_ends_with_the_parameters_of_one_that_was_not(
    target, rows, tmp_path, monkeypatch, optimizer
):
    options = {"steps": 9, "optimizer": optimizer}
    train_eagle3(options_of(target, tmp_path / "whole", rows, **options))
    with monkeypatch.context() as patch:
        paused_after(patch, 4)
        paused = train_eagle3(options_of(target, tmp_path / "halves", rows, **options))
    assert (paused.finished, paused.steps) == (False, 4)
    train_eagle3(options_of(target, tmp_path / "halves", rows, resume=True, **options))
    whole, halves = parameters(tmp_path / "whole"), parameters(tmp_path / "halves")
    assert all(torch.equal(whole[name], halves[name]) for name in whole)


def test_a_resumed_run_that_lost_its_place_in_the_data_is_caught(
    target, rows, tmp_path, monkeypatch
):
    train_eagle3(options_of(target, tmp_path / "whole", rows, steps=9))
    with monkeypatch.context() as patch:
        paused_after(patch, 4)
        train_eagle3(options_of(target, tmp_path / "halves", rows, steps=9))
    monkeypatch.setattr("tandemkv.train.data.BatchOrder.restore", lambda *_: None)
    train_eagle3(options_of(target, tmp_path / "halves", rows, steps=9, resume=True))
    whole, halves = parameters(tmp_path / "whole"), parameters(tmp_path / "halves")
    assert not all(torch.equal(whole[name], halves[name]) for name in whole)


def test_pause_after_stops_and_says_how_to_go_on(target, rows, tmp_path, capsys):
    options = options_of(target, tmp_path / "run", rows, steps=500, pause_after=0.2, quiet=False)
    assert not train_eagle3(options).finished
    said = capsys.readouterr().out
    assert f"go on with: tandemkv train eagle3 --out {tmp_path / 'run'} --resume\n" in said
    assert (tmp_path / "run" / "checkpoint.pt").exists()


def test_the_engine_reads_what_a_run_writes(target, rows, tmp_path):
    done = train_eagle3(options_of(target, tmp_path / "run", rows, steps=3))
    config, tensors = eagle3_checkpoint.read(done.weights)
    assert config.taps == (1, 3, 4)
    assert config.fc_norm
    ranked = tensors[eagle3_checkpoint.RANKING]
    assert len(ranked) == 64
    card = (done.weights / "MODEL_CARD.md").read_text()
    assert "3 steps" in card
    assert "| held_out | full | 2 |" in card
    assert {f.name for f in done.weights.iterdir()} >= {"acceptance.json", "curve.json"}


def test_exported_parameters_come_back(target, rows, tmp_path):
    done = train_eagle3(options_of(target, tmp_path / "run", rows, steps=3))
    teacher = load_teacher(str(target), torch.device("cpu"))
    trainee, ranking = weights.load_trainee(done.weights, teacher)
    trained = parameters(tmp_path / "run")
    for name, value in trainee.state_dict().items():
        assert torch.equal(value, trained[name].bfloat16().float())
    assert sorted(ranking.tolist()) == list(range(teacher.vocab_size))


def test_a_directory_with_a_run_is_not_overwritten(target, rows, tmp_path):
    train_eagle3(options_of(target, tmp_path / "run", rows, steps=1))
    with pytest.raises(ConfigError, match="already holds a run"):
        train_eagle3(options_of(target, tmp_path / "run", rows, steps=1))


def test_every_bad_option_is_named_at_once(target, tmp_path):
    bad = options_of(
        target, tmp_path, None, tokens=-1, steps=1, optimizer="sgd", prompts=("nowhere.jsonl",)
    )
    with pytest.raises(ConfigError) as caught:
        train_eagle3(bad)
    said = str(caught.value)
    for part in ("exactly one of", "tokens must be above 0", "optimizer must be", "nowhere.jsonl"):
        assert part in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"device": "cuda:77"}, "cuda:77"), ({"target": "/nowhere/model"}, "/nowhere/model")],
)
def test_a_missing_device_or_target_is_one_line(target, tmp_path, changes, said):
    options = options_of(target, tmp_path / "run", None, steps=1)
    with pytest.raises(ConfigError, match=said) as caught:
        train_eagle3(msgspec.structs.replace(options, **changes))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_the_schedule_rises_then_falls_to_its_end():
    rates = [schedule(i / 100, 0.1, 0.02) for i in range(101)]
    assert max(rates) == rates[10] == 1.0
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0.02)


def test_each_budget_measures_its_own_progress(target, rows, tmp_path):
    teacher = load_teacher(str(target), torch.device("cpu"))
    pools = run.data.load_pools(rows, 4, teacher.device)
    ranking = run.data.token_ranking(pools, teacher.vocab_size)
    for budget, used in (("steps", 10), ("tokens", 2000), ("seconds", 30.0)):
        options = options_of(target, tmp_path, rows, **{budget: used * 2})
        trainer = run._trainer(options, teacher, pools, ranking, tmp_path)
        trainer.step, trainer.tokens, trainer.seconds = 10, 2000, 30.0
        assert trainer.progress == pytest.approx(0.5)


def test_the_head_of_a_step_holds_the_common_ids_and_some_others(target, rows, tmp_path):
    teacher = load_teacher(str(target), torch.device("cpu"))
    pools = run.data.load_pools(rows, 4, teacher.device)
    ranking = run.data.token_ranking(pools, teacher.vocab_size)
    trainer = run._trainer(options_of(target, tmp_path, rows, steps=1), teacher, pools, ranking,
                           tmp_path)  # fmt: skip
    one, two = (trainer._head_ids(torch.Generator().manual_seed(s)) for s in (1, 2))
    assert torch.equal(one[:70], ranking[:70])
    assert len(one.unique()) == len(two) == 100
    assert not torch.equal(one, two)


def test_the_curve_is_drawn_without_matplotlib_too():
    from tandemkv.train.trainer import Point

    curve = [Point(i, i * 100, float(i), 5.0 - i, 1.0, 1.0 + i, 0.1, 1e-3) for i in range(4)]
    drawn = report.curve_svg(curve)
    assert drawn.startswith("<svg")
    assert drawn.count("<polyline") == 2


def test_options_survive_the_record(target, tmp_path):
    options = options_of(target, tmp_path, None, steps=3)
    assert msgspec.json.decode(msgspec.json.encode(options), type=Eagle3Options) == options
