"""Control plane: match + claim + publish of a long prompt beside the bare hash chain of its blocks.

The limit it is held to is five times the hash chain, cold and on a full hit. No model, no torch.
Also the cost of a decode step's bookkeeping, which must not grow with the context.

    python benchmarks/control_plane.py [--tokens N] [--block N] [--repeat N] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable

from tandemkv.kv.keys import Namespace, block_keys, pack_tokens, root_key, token_bytes
from tandemkv.kv.layout import Domain, LayerGroup, Layout
from tandemkv.kv.manager import Claim, KVManager
from tandemkv.lab.provenance import write_figures
from tandemkv.lab.script import count, lines, parser, run

LIMIT = 5.0


def make_layout(block: int) -> Layout:
    """A full-attention target and an EAGLE-3 drafter, as served by default."""
    target = LayerGroup(
        name="target", domain=Domain.TARGET, layers=tuple(range(30)), num_kv_heads=3, head_dim=64,
        page_size=block,
    )  # fmt: skip
    draft = LayerGroup(
        name="draft", domain=Domain.DRAFT, layers=(0,), num_kv_heads=3, head_dim=64,
        page_size=block, lookahead=1, pointwise=True,
    )  # fmt: skip
    return Layout(block_size=block, groups=(target, draft))


def timed(work: Callable[[], object]) -> float:
    """CPU seconds of this process, so that a busy machine does not blur the ratios."""
    start = time.process_time()
    work()
    return time.process_time() - start


def hash_chain(tokens: list[int], block: int) -> None:
    packed = token_bytes(pack_tokens(tokens))
    for _ in block_keys(root_key("model", Namespace()), packed, block):
        pass


def serve(manager: KVManager, tokens: list[int]) -> Claim:
    """Match, claim, and publish as if every planned pass had run at once."""
    manager.match(tokens)
    claim = manager.claim(tokens)
    assert claim is not None
    seq = claim.seq
    manager.copied(seq)
    manager.append(seq, [7])
    for start, stop in claim.plan.compute:
        manager.commit(seq, stop, seq.writes(start, stop))
    manager.publish(seq)
    return claim


def decode(manager: KVManager, claim: Claim, steps: int) -> None:
    """Bookkeeping of `steps` verify steps of 5 rows, 3 of them accepted."""
    seq = claim.seq
    for _ in range(steps):
        start = seq.committed
        manager.reserve(seq, start + 6)
        writes = seq.writes(start, start + 5)
        manager.append(seq, [1, 2, 3])
        clipped = [[(a, min(b, start + 3 + g)) for a, b in w] for g, w in enumerate(writes)]
        manager.commit(seq, start + 3, clipped)
        manager.publish(seq)


def measure(num_tokens: int, block: int, repeat: int) -> dict[str, float]:
    rng = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in ("chain", "cold", "hit", "free", "step")}
    for _ in range(repeat):
        tokens = [rng.randrange(50_000) for _ in range(num_tokens)]
        manager = KVManager(make_layout(block), [num_tokens // block + 512] * 2)
        gc.collect()
        times["chain"].append(timed(lambda tokens=tokens: hash_chain(tokens, block)))
        held: list[Claim] = []
        times["cold"].append(timed(lambda m=manager, t=tokens, h=held: h.append(serve(m, t))))
        times["step"].append(timed(lambda m=manager, h=held: decode(m, h[0], 200)) / 200)
        manager.finish(held[0].seq)
        times["hit"].append(timed(lambda m=manager, t=tokens, h=held: h.append(serve(m, t))))
        times["free"].append(timed(lambda m=manager, h=held: m.finish(h[1].seq)))
        manager.check()
    best = {name: min(values) for name, values in times.items()}
    return {
        "tokens": num_tokens,
        "block": block,
        "hash_chain_ms": best["chain"] * 1e3,
        "cold_ms": best["cold"] * 1e3,
        "full_hit_ms": best["hit"] * 1e3,
        "release_ms": best["free"] * 1e3,
        "decode_step_us": best["step"] * 1e6,
        "cold_over_hash_chain": best["cold"] / best["chain"],
        "full_hit_over_hash_chain": best["hit"] / best["chain"],
    }


def main(args: argparse.Namespace) -> None:
    figures = measure(args.tokens, args.block, args.repeat)
    short = measure(1024, args.block, args.repeat)
    figures["decode_step_us_at_1k"] = short["decode_step_us"]
    held = dict.fromkeys(("cold_over_hash_chain", "full_hit_over_hash_chain"), LIMIT)
    print(*lines(figures, held), sep="\n")
    if args.json:
        write_figures(args.json, {**figures, "limit": LIMIT})


def options() -> argparse.ArgumentParser:
    found = parser(__doc__)
    found.add_argument(
        "--tokens", type=count, default=32_768, help="tokens of the prompt (default: %(default)s)"
    )
    found.add_argument(
        "--block",
        type=count,
        default=16,
        help="tokens per block, a power of two (default: %(default)s)",
    )
    found.add_argument(
        "--repeat",
        type=count,
        default=9,
        help="runs of each; the best is told (default: %(default)s)",
    )
    return found


if __name__ == "__main__":
    sys.exit(run(main, options()))
