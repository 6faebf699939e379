"""What a run leaves to read: the curve (JSON and a picture), the acceptance table, the model card.

Law: every number written was measured in this run; what was not measured is not mentioned. This
module computes no acceptance and trains nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tandemkv.train.evaluate import Acceptance
from tandemkv.train.options import TrainOptions, write_atomically
from tandemkv.train.trainer import Point

_NOT_SHOWN = (
    "out", "target", "prompts", "texts", "evaluate", "evaluate_limit", "data", "pools",
    "data_tokens", "data_seconds", "steps", "tokens", "seconds", "pause_after", "resume",
    "checkpoint_s", "held_out", "max_new_tokens", "draft_vocab_rows", "device", "quiet",
)  # fmt: skip
"""Options that a card leaves out: places, budgets and what is said elsewhere on it."""


def write_curve(directory: Path, curve: Sequence[Point]) -> None:
    """curve.json, and its picture: curve.png where matplotlib is there, else curve.svg."""
    records = [msgspec.to_builtins(point) for point in curve]
    rounded = [
        {k: round(v, 5) if isinstance(v, float) else v for k, v in record.items()}
        for record in records
    ]
    write_atomically(directory / "curve.json", json.dumps(rounded))
    trained = [point for point in curve if not point.held_out]
    if not trained:
        return
    try:
        import matplotlib
    except ImportError:
        write_atomically(directory / "curve.svg", curve_svg(trained))
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, left = pyplot.subplots(figsize=(7, 3.5), dpi=100)
    x = [point.tokens / 1e6 for point in trained]
    left.plot(x, [point.ce for point in trained], lw=0.8, color="#1f77b4")
    left.set_xlabel("million tokens")
    left.set_ylabel("cross entropy", color="#1f77b4")
    low = min(point.ce for point in trained)
    left.set_ylim(low * 0.9, low * 3)
    right = left.twinx()
    right.plot(x, [point.tau for point in trained], lw=0.8, color="#d62728")
    right.set_ylabel("tau (expected tokens per step)", color="#d62728")
    figure.tight_layout()
    figure.savefig(directory / "curve.png")
    pyplot.close(figure)


def curve_svg(curve: Sequence[Point], width: int = 640, height: int = 320) -> str:
    """The curve as a small SVG: cross entropy (blue) and tau (red) over tokens."""
    last = max(point.tokens for point in curve) or 1

    def line(values: Sequence[float], colour: str) -> str:
        low, high = min(values), max(values)
        span = (high - low) or 1.0
        wide, tall = (width - 60) / last, (height - 50) / span
        at = " ".join(
            f"{40 + wide * p.tokens:.1f},{height - 30 - tall * (v - low):.1f}"
            for p, v in zip(curve, values, strict=True)
        )
        return f'<polyline fill="none" stroke="{colour}" points="{at}"/>'

    body = line([p.ce for p in curve], "#1f77b4") + line([p.tau for p in curve], "#d62728")
    label = f"cross entropy (blue), tau (red) over {last / 1e6:.1f} M tokens"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">{body}'
        f'<text x="40" y="{height - 8}" font-size="12">{label}</text></svg>\n'
    )


def acceptance_table(results: Sequence[Acceptance]) -> str:
    """Acceptance results as a Markdown table."""
    lines = [
        "| set | variant | K | prompts | loops cut | steps | AL | 95 % | AL, steps 1-16"
        " | by position |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in results:
        positions = " ".join(f"{x:.3f}" for x in r.by_position)
        lines.append(
            f"| {r.set} | {r.variant} | {r.num_drafts} | {r.prompts} | {r.looped} | {r.steps}"
            f" | {r.al:.2f} | {r.low:.2f}-{r.high:.2f} | {r.early:.2f} | {positions} |"
        )
    return "\n".join(lines)


def model_card(
    title: str,
    options: TrainOptions,
    sizes: Mapping[str, Any],
    curve: Sequence[Point],
    results: Sequence[Acceptance],
) -> str:
    """A model card skeleton from what the run recorded."""
    last = next((p for p in reversed(curve) if not p.held_out), None)
    held = next((p for p in reversed(curve) if p.held_out), None)
    lines = [
        f"# {title} drafter",
        "",
        f"Target: {sizes.get('target')}. Trained by `tandemkv train {options.method}` on the"
        " target's own answers (self-distillation); embedding and head are the target's, frozen,"
        " not included.",
        "",
        "## Training",
        "",
        *(f"- {name}: {value}" for name, value in sizes.items()),
    ]
    if last:
        lines.append(
            f"- training batch at step {last.step}: cross entropy {last.ce:.3f}, L1 {last.l1:.3f},"
            f" tau {last.tau:.3f}"
        )
    if held:
        lines.append(
            f"- held-out rows: cross entropy {held.ce:.3f}, L1 {held.l1:.3f}, tau {held.tau:.3f}"
        )
    shown = {k: v for k, v in msgspec.to_builtins(options).items() if k not in _NOT_SHOWN}
    lines += ["- options: " + ", ".join(f"{k} {v}" for k, v in shown.items()), ""]
    lines += ["## Acceptance, greedy, held-out prompts", "", acceptance_table(results), ""]
    return "\n".join(lines)
