"""`train`: generate, train, evaluate, write; each stage goes on where it was stopped.

Law: the run directory is the state: options.json, data/, checkpoint.pt, and at the end weights/
with the drafter, its card and its curve. Ctrl-C at any time loses at most the batch in hand. What
can be checked is checked before the target is loaded. What is judged is what was written. This
module only puts the stages in order; what differs between methods is theirs (`methods`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from tandemkv.base.errors import ConfigError
from tandemkv.train import data, evaluate, prompts, report
from tandemkv.train.methods import method_of
from tandemkv.train.options import (
    CPU_POOLS,
    CPU_TOKENS,
    GPU_POOLS,
    GPU_TOKENS,
    PoolOptions,
    TrainOptions,
    write_atomically,
)
from tandemkv.train.progress import Progress
from tandemkv.train.record import claim_directory, holds_run, resume_command, resumed
from tandemkv.train.selfplay import SelfPlay
from tandemkv.train.teacher import Teacher, choose_device, load_teacher
from tandemkv.train.trainer import Trainer


class TrainResult(msgspec.Struct, frozen=True):
    """finished: False when the run paused; weights: where the drafter lies once it is finished."""

    finished: bool
    steps: int
    tokens: int
    weights: Path | None
    acceptance: list[evaluate.Acceptance]


def train(options: TrainOptions) -> TrainResult:
    """Train a drafter for a target by self-distillation; the options' class says which kind.

    Returns when the budget is used (weights, card, curve and acceptance are written) or when it was
    paused (call again with resume). Raises ConfigError for options that cannot work, and
    KeyboardInterrupt, which says how to go on once there is something to go on with.
    """
    options = resumed(options)
    options.validate()
    for path in (*options.prompts, *options.evaluate):
        prompts.check_prompts(path)
    progress = Progress(options.quiet)
    try:
        return _train(options, progress)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(*_how_to_go_on(options)) from None
    finally:
        progress.close()


def _how_to_go_on(options: TrainOptions) -> list[str]:
    return [f"stopped; go on with: {resume_command(options)}"] if holds_run(options) else []


def _train(options: TrainOptions, progress: Progress) -> TrainResult:
    out, device = Path(options.out), choose_device(options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    progress.note(f"loading the target, {options.target or 'the embedded default'}, on {device}")
    teacher = load_teacher(options.target, device)
    chat = prompts.ChatFormat(teacher.tokenizer, teacher.eos_token_ids)
    scripts = chat.scripts()
    claim_directory(options)
    pools_asked = options.pools or (GPU_POOLS if teacher.device.type == "cuda" else CPU_POOLS)
    _generate(options, pools_asked, teacher, chat, scripts, progress)
    pools = data.load_pools(options.data_dir, options.held_out, teacher.device)
    ranking = data.token_ranking(pools, teacher.vocab_size)
    trainer = _trainer(options, teacher, pools, ranking, out)
    progress.note(f"training on batches of about {options.batch_tokens} tokens")
    finished = trainer.fit(progress.trained, out / "checkpoint.pt", progress.stopping)
    if not finished:
        report.write_curve(out, trainer.curve)
        progress.note(
            f"paused at step {trainer.step} ({100 * trainer.progress:.0f} %);"
            f" go on with: {resume_command(options)}"
        )
        return TrainResult(False, trainer.step, trainer.tokens, None, [])
    return _finish(options, trainer, chat, scripts, ranking, progress)


def _generate(
    options: TrainOptions,
    pools: tuple[PoolOptions, ...],
    teacher: Teacher,
    chat: prompts.ChatFormat,
    scripts: prompts.TurnScripts,
    progress: Progress,
) -> None:
    """Make the training rows, unless an earlier call finished them."""
    finished = options.data_dir / "finished"
    if finished.exists():
        progress.note(f"taking the generated rows in {options.data_dir}")
        return
    given = prompts.training_prompts(
        options.prompts, options.texts, chat, copies=1500, seed=options.seed
    )
    longest = max(pool.length for pool in pools)
    if longest > teacher.max_length:
        pools = tuple(p for p in pools if p.length <= teacher.max_length)
        if not pools:
            raise ConfigError(f"pools: all rows are longer than the target's {teacher.max_length}")
        progress.note(f"target reads {teacher.max_length} tokens: longer rows are left out")
    budget = options.data_tokens or (None if options.data_seconds else _default_tokens(teacher))
    limit = f"{budget} tokens" if budget else f"{options.data_seconds:g} s"
    progress.note(f"generating training rows: {limit}, {', '.join(pool.name for pool in pools)}")
    data.generate(
        pools,
        given,
        options.data_dir,
        lambda pool: SelfPlay(teacher, scripts, pool.rows, pool.length),
        tokens=budget,
        seconds=options.data_seconds,
        seed=options.seed,
        report=progress.generated,
    )
    finished.touch()
    if teacher.device.type == "cuda":
        torch.cuda.empty_cache()


def _default_tokens(teacher: Teacher) -> int:
    return GPU_TOKENS if teacher.device.type == "cuda" else CPU_TOKENS


def _trainer(
    options: TrainOptions, teacher: Teacher, pools: dict[str, data.Pool], ranking: Tensor, out: Path
) -> Trainer:
    torch.manual_seed(options.seed)
    trainee = method_of(options).build(options, teacher)
    trainer = Trainer(options, teacher, trainee, pools, ranking)
    if (out / "checkpoint.pt").exists():
        trainer.restore(out / "checkpoint.pt")
    return trainer


def evaluation_sets(
    options: TrainOptions, chat: prompts.ChatFormat, pools: dict[str, data.Pool]
) -> dict[str, list[prompts.Prompt]]:
    """The asked-for sets by file name, and `held_out`: first turns of rows never trained on."""
    sets = {Path(path).stem: prompts.read_prompts(path, chat) for path in options.evaluate}
    held: list[prompts.Prompt] = []
    for pool in pools.values():
        tokens, mask = pool.held_out
        for row, said in zip(tokens, mask, strict=True):
            at = torch.nonzero(said).flatten()
            if len(at) and int(at[0]) > 1:
                held.append(prompts.Prompt(tokens=row[: int(at[0])].tolist()))
    if held:
        sets["held_out"] = held
    return {name: found[: options.evaluate_limit] for name, found in sets.items()}


def _finish(
    options: TrainOptions,
    trainer: Trainer,
    chat: prompts.ChatFormat,
    scripts: prompts.TurnScripts,
    ranking: Tensor,
    progress: Progress,
) -> TrainResult:
    """Held-out loss, weights, acceptance, card; weights first, so that they are safe."""
    teacher, target = trainer.teacher, Path(options.out) / "weights"
    held = trainer.held_out()
    curve = [*trainer.curve, held] if held else trainer.curve
    rows = min(options.draft_vocab_rows, teacher.vocab_size)
    record = {"steps": trainer.step, "tokens": trainer.tokens, "seconds": round(trainer.seconds)}
    trainer.method.export(target, trainer.trainee, teacher, ranking, rows, record)
    report.write_curve(target, curve)
    progress.note(f"weights are written; measuring acceptance, K {options.num_draft_tokens}")
    written, _ = trainer.method.load(target, teacher)
    results = judge(options, written, teacher, chat, scripts, trainer.pools, ranking)
    write_atomically(target / "acceptance.json", msgspec.json.encode(results))
    sizes = data_sizes(options) | {
        "target": options.target or "the embedded default",
        "trained": f"{trainer.step} steps, {trainer.tokens} tokens, {trainer.seconds:.0f} s on"
        f" {_device_name(teacher.device)}",
    }
    card = report.model_card(trainer.method.title, options, sizes, curve, results)
    write_atomically(target / "MODEL_CARD.md", card)
    if results:
        progress.note(report.acceptance_table(results))
    else:
        progress.note("no held-out prompts (--evaluate, --held-out): acceptance is not measured")
    progress.note(f"weights in {target}")
    return TrainResult(True, trainer.step, trainer.tokens, target, results)


def judge(
    options: TrainOptions,
    trainee: evaluate.Drafting,
    teacher: Teacher,
    chat: prompts.ChatFormat,
    scripts: prompts.TurnScripts,
    pools: dict[str, data.Pool],
    ranking: Tensor,
) -> list[evaluate.Acceptance]:
    """Acceptance on every evaluation set."""
    sets = evaluation_sets(options, chat, pools)
    answers = evaluate.answer_prompts(teacher, scripts, sets, options.max_new_tokens)
    variants = method_of(options).variants(options, teacher.vocab_size)
    return evaluate.evaluate(teacher, trainee, answers, variants, ranking)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def data_sizes(options: TrainOptions) -> dict[str, Any]:
    """Rows, tokens and seconds of the generated data, by pool."""
    totals: dict[str, dict[str, float]] = {}
    for file in sorted(options.data_dir.glob("*-[0-9][0-9][0-9][0-9].json")):
        record = json.loads(file.read_text())
        total = totals.setdefault(file.stem.rpartition("-")[0], {})
        for name in ("rows", "answer_tokens", "loss_tokens", "seconds"):
            total[name] = total.get(name, 0) + record[name]
        total["length"] = record["length"]
    return {
        f"pool {name}": f"{int(t['rows'])} rows of {int(t['length'])} tokens,"
        f" {int(t['answer_tokens'])} answer tokens, {int(t['loss_tokens'])} with loss,"
        f" {t['seconds']:.0f} s"
        for name, t in totals.items()
    }
