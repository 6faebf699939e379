"""A stand-in for models and runner: it answers step plans with tokens of the path alone.

Law: what it emits is a function of the tokens before it, so the text of a request is known without
a scheduler (`plain`). Every KV cell holds a digest of the tokens it depends on and is checked on
every read, so a foreign, stale or missing row is an error, not a wrong token. Drafts depend on the
draft rows that can be read: a hole changes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from tandemkv.base.sampling import SamplingParams
from tandemkv.base.spans import SpanSet
from tandemkv.kv.layout import Domain, LayerGroup, Layout, RebuildFrom
from tandemkv.kv.manager import KVManager
from tandemkv.sched.batch import Output, Segment, SegmentResult, StepPlan, StepResult
from tandemkv.sched.request import FinishReason, Request
from tandemkv.sched.scheduler import Scheduler
from tandemkv.sched.stop import cut

SCRATCH = b"scratch"


def digest(tokens: Sequence[int], salt: bytes = b"") -> bytes:
    return hashlib.blake2b(bytes(tokens) + b"|" + salt, digest_size=8).digest()


def next_token(tokens: Sequence[int], vocab: int) -> int:
    """The target's greedy choice after `tokens`."""
    return int.from_bytes(digest(tokens, b"next"), "little") % vocab


def plain(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    vocab: int,
    eos: Sequence[int] = (),
    max_model_len: int = 10_000,
) -> tuple[list[int], FinishReason]:
    """Output and reason of a request decoded alone, token by token."""
    tokens, output = list(prompt), []
    stops = (*params.stop_token_ids, *(() if params.ignore_eos else eos))
    while True:
        room = min(params.max_tokens - len(output), max_model_len - len(tokens))
        kept, reason = cut([next_token(tokens, vocab)], room, stops)
        tokens += kept
        output += kept
        if reason is not None:
            return output, reason


def group(name: str, **kw) -> LayerGroup:
    fields = {"layers": (0,), "num_kv_heads": 1, "head_dim": 2, "page_size": 4}
    return LayerGroup(name=name, **{**fields, **kw})


def eagle_layout(block: int = 4, draft_page: int = 2) -> Layout:
    """A full-attention target and a drafter one token ahead."""
    return Layout(
        block_size=block,
        groups=(
            group("target", domain=Domain.TARGET),
            group("draft", domain=Domain.DRAFT, page_size=draft_page, lookahead=1, pointwise=True),
        ),
    )


def windowed_layout() -> Layout:
    """Full and windowed target layers, a windowed drafter one token ahead."""
    return Layout(
        block_size=4,
        groups=(
            group("full", domain=Domain.TARGET),
            group("near", domain=Domain.TARGET, page_size=2, window=6),
            group("draft", domain=Domain.DRAFT, page_size=2, window=5, lookahead=1, pointwise=True),
        ),
    )


def draft_model_layout() -> Layout:
    """A target and an independent draft model, rebuilt from tokens."""
    return Layout(
        block_size=4,
        groups=(
            group("target", domain=Domain.TARGET),
            group("draft", domain=Domain.DRAFT, rebuild_from=RebuildFrom.TOKENS),
        ),
    )


def block_drafter_layout(
    window: int | None = 5, *, block: int = 4, target_page: int = 4, draft_page: int = 1
) -> Layout:
    """A target and a pointwise drafter that looks not ahead and not far back."""
    return Layout(
        block_size=block,
        groups=(
            group("target", domain=Domain.TARGET, page_size=target_page),
            group(
                "block", domain=Domain.DRAFT, page_size=draft_page, window=window, pointwise=True
            ),
        ),
    )


def two_drafts_layout(window: int = 5, *, block: int = 4, draft_page: int = 1) -> Layout:
    """Unequal pages in four groups: a sliding target, and draft groups with and without window."""
    return Layout(
        block_size=block,
        groups=(
            group("full", domain=Domain.TARGET, page_size=block),
            group("near", domain=Domain.TARGET, page_size=2, window=6),
            group("all", domain=Domain.DRAFT, page_size=block, pointwise=True),
            group(
                "block", domain=Domain.DRAFT, page_size=draft_page, window=window, pointwise=True
            ),
        ),
    )


def target_layout() -> Layout:
    """No drafter."""
    return Layout(block_size=4, groups=(group("target", domain=Domain.TARGET),))


class FakeModel:
    """Runs step plans on digest cells. accept: of 256, how often a draft is the target's choice."""

    def __init__(self, layout: Layout, *, vocab: int = 11, accept: int = 200) -> None:
        self.layout = layout
        self.vocab = vocab
        self.accept = accept
        self.cells: list[dict[tuple[int, int], bytes]] = [{} for _ in layout.groups]
        self.proposals: dict[tuple[bytes, int], list[int]] = {}
        self.num_rows = 0

    def run(self, plan: StepPlan) -> StepResult:
        for copy in plan.copies:
            size = self.layout.groups[copy.group].page_size
            cells = self.cells[copy.group]
            for i in range(size):
                cells.pop((copy.dst, i), None)
                if (copy.src, i) in cells:
                    cells[copy.dst, i] = cells[copy.src, i]
        return StepResult(plan.step, [self._run(segment) for segment in plan.segments])

    def forget(self, manager: KVManager) -> None:
        """Erase the pages that became free (only known to a manager in debug mode)."""
        for g, pages in enumerate(manager.drain_freed()):
            gone = set(pages)
            self.cells[g] = {k: v for k, v in self.cells[g].items() if k[0] not in gone}

    def _run(self, segment: Segment) -> SegmentResult:
        seq = segment.seq
        known = [*seq.tokens[: segment.start], *segment.tokens]
        self.num_rows += segment.num_rows
        for g in self.layout.target_groups:
            self._target_pass(segment, g, known)
        result = SegmentResult(seq.id)
        if segment.verify:
            drafts = segment.tokens[1:]
            path = list(known[: segment.start + 1])
            for token in drafts:
                if next_token(path, self.vocab) != token:
                    break
                path.append(token)
            result.num_accepted = len(path) - segment.start - 1
            result.tokens = [*path[segment.start + 1 :], next_token(path, self.vocab)]
        elif segment.samples:
            result.tokens = [next_token(known, self.vocab)]
        final = segment.start + 1 + result.num_accepted if segment.verify else segment.stop
        tokens = [*seq.tokens, *result.tokens]
        missing = 0
        proposes = segment.num_propose and (result.tokens or not segment.samples)
        for g in self.layout.draft_groups:
            gaps = self._context_pass(segment, g, tokens, final)
            missing += sum(b - a for a, b in gaps)
            if proposes:
                self._check_gaps(segment, g, gaps, final)
        if proposes:
            result.drafts = self._propose(segment, tokens, missing)
        return result

    def _target_pass(self, segment: Segment, g: int, known: list[int]) -> None:
        window = self.layout.groups[g].window
        writes = SpanSet(segment.write[g])
        readable = segment.seq.coverage[g].copy()
        for position in range(segment.start, segment.stop):
            if position in writes:
                self._write(segment, g, position, digest(known[: position + 1]))
                readable.add(position, position + 1)
            low = 0 if window is None else max(0, position - window + 1)
            if not readable.covers(low, position + 1):
                raise AssertionError(f"position {position} lacks rows: {readable} from {low}")
            for slot in range(low, position + 1):
                self._read(segment, g, slot, known)

    def _context_pass(
        self, segment: Segment, g: int, tokens: list[int], final: int
    ) -> list[tuple[int, int]]:
        """Write the draft rows that are asked for; which of the needed slots cannot be read."""
        spec = self.layout.groups[g]
        for a, b in segment.write[g]:
            for slot in range(a, min(b, final + spec.lookahead)):
                assert slot < len(tokens), f"draft slot {slot} depends on an unknown token"
                self._write(segment, g, slot, digest(tokens[: slot + 1]))
        readable = segment.seq.coverage[g].copy()
        for a, b in segment.write[g]:
            readable.add(a, min(b, final + spec.lookahead))
        back = final if spec.window is None else spec.window - 1  # said again: it is the judge
        low, stop = max(spec.lookahead, final - back), final + spec.lookahead
        for a, b in readable.within(low, stop):
            for slot in range(a, b):
                self._read(segment, g, slot, tokens)
        return readable.missing(low, stop)

    def _check_gaps(
        self, segment: Segment, g: int, gaps: list[tuple[int, int]], final: int
    ) -> None:
        """A slot that is lacking was masked with a reason, or this pass writes no draft rows."""
        ahead = self.layout.groups[g].lookahead
        named = SpanSet((a, b) for a, b, _ in segment.seq.masks[g])
        if not segment.write[g]:
            named.add(segment.start + ahead, final + ahead)
        for a, b in gaps:
            assert not named.missing(a, b), (
                f"{segment.request.id}: slots [{a}, {b}) of group {g} are missing without a reason"
            )

    def _propose(self, segment: Segment, tokens: list[int], missing: int) -> list[int]:
        path = list(tokens)
        anchor = len(tokens) - 1
        for _ in range(segment.num_propose):
            token = next_token(path, self.vocab)
            draw = digest(path, b"draft")[0]
            if missing or draw >= self.accept:
                token = (token + 1) % self.vocab
            path.append(token)
        for g in self.layout.draft_groups:
            ahead = self.layout.groups[g].lookahead
            start = anchor + ahead
            for slot in range(start, start + segment.num_propose - bool(ahead)):
                self._write(segment, g, slot, SCRATCH)
        return path[len(tokens) :]

    def _cell(self, segment: Segment, g: int, slot: int) -> tuple[int, int]:
        size = self.layout.groups[g].page_size
        table = segment.seq.pages[g]
        page = table[slot // size] if slot // size < len(table) else -1
        if page < 0:
            raise AssertionError(
                f"{segment.request.id}: slot {slot} of group {g} has no page: {table}"
            )
        return page, slot % size

    def _write(self, segment: Segment, g: int, slot: int, value: bytes) -> None:
        self.cells[g][self._cell(segment, g, slot)] = value

    def _read(self, segment: Segment, g: int, slot: int, tokens: list[int]) -> None:
        found = self.cells[g].get(self._cell(segment, g, slot))
        if found != digest(tokens[: slot + 1]):
            raise AssertionError(
                f"{segment.request.id}: foreign row in group {g}, slot {slot}: {found!r}"
            )


class Rig:
    """A scheduler over a real cache, stepped with a FakeModel, every law checked at every step."""

    def __init__(
        self,
        layout: Layout,
        pages: Sequence[int],
        *,
        vocab: int = 11,
        accept: int = 200,
        eos: Sequence[int] = (),
        faults: frozenset[str] = frozenset(),
        **options,
    ) -> None:
        settings = {
            "max_batch_tokens": 64,
            "max_running": 8,
            "max_model_len": 200,
            "num_draft_tokens": 3 if layout.draft_groups else 0,
            **options,
        }
        self.layout = layout
        self.eos = tuple(eos)
        self.manager = KVManager(layout, pages, debug=True, faults=faults)
        self.scheduler = Scheduler(self.manager, eos_token_ids=eos, **settings)
        self.model = FakeModel(layout, vocab=vocab, accept=accept)
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, Output] = {}
        self.plans: list[StepPlan] = []

    def add(
        self, prompt: Sequence[int], *, name: str = "", priority: int = 0, watch=None, **params
    ):
        params = {"temperature": 0.0, "max_tokens": 12, **params}
        request = Request(
            id=name or f"r{len(self.requests)}",
            prompt=list(prompt),
            params=SamplingParams(**params),
            priority=priority,
            watch=watch,
        )
        self.scheduler.add(request)
        self.requests[request.id] = request
        self.outputs[request.id] = []
        return request

    def step(self) -> StepPlan:
        plan = self.plan()
        self.take(self.scheduler.apply(plan, self.model.run(plan)))
        self.plans.append(plan)
        self.settle()
        return plan

    def plan(self) -> StepPlan:
        """Plan, and erase what planning evicted before anyone writes there."""
        plan = self.scheduler.plan()
        self.settle()
        return plan

    def settle(self) -> None:
        self.model.forget(self.manager)
        self.scheduler.check()
        for usage in self.manager.usage():
            assert usage.free + usage.held + usage.cached == usage.total

    def take(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            assert output.request_id not in self.ends, "news of a request that had ended"
            self.outputs[output.request_id] += output.tokens
            if output.finished:
                self.ends[output.request_id] = output

    def run(self, limit: int = 2000) -> None:
        """Step until nothing is left; every request must have ended by then."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, f"still live after {limit} steps"
        assert set(self.ends) == set(self.requests)
        assert all(usage.held == 0 for usage in self.manager.usage())

    def expected(self, request: Request) -> tuple[list[int], FinishReason]:
        return plain(
            request.prompt,
            request.params,
            vocab=self.model.vocab,
            eos=self.eos,
            max_model_len=self.scheduler.limits.max_model_len,
        )

    def check_text(self, request: Request) -> None:
        """The request ended as it does without drafts, batch or cache."""
        end = self.ends[request.id]
        text, reason = self.expected(request)
        assert (self.outputs[request.id], end.finish_reason) == (text, reason), end.error
        assert end.num_output_tokens == len(text)
