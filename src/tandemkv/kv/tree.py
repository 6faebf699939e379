"""The one prefix tree: blocks of tokens, each with a run of pages per layer group.

Law: a node's tokens follow its parent's; its key is a function of both; a whole block may have
children, a partial one (the last, partly filled block of a sequence) has none. A run's pages
belong to that node alone, and its spans, which lie inside the block, name the only slots that may
be read. Matching compares tokens, never keys alone. The tree holds no page: pools count holders.

    root ── block [0,16) ── block [16,32) ─┬─ block [32,48)
                                           └─ partial [32,37)     matched by longest common prefix
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from hashlib import sha256

from tandemkv.base.errors import InvariantError
from tandemkv.base.ids import NO_PAGE, GroupId, PageId
from tandemkv.base.spans import Span, SpanSet
from tandemkv.kv.keys import TOKEN_BYTES, Namespace, block_key, root_key
from tandemkv.kv.layout import Layout

Spans = tuple[Span, ...]
SIBLINGS_WEIGHED = 8
"""How many siblings on each side are weighed when several share the longest common prefix."""


class Run:
    """The pages of one layer group in one block, and the slots of them that are canonical.

    pages: page table of the block (NO_PAGE where no slot is canonical); size: pages in it. parts:
    absolute slots, or None when the run is full: all of a whole block, from `low` on (the block's
    start, or the lookahead). refs: sequences that hold it. attached: whether it is in the tree.
    """

    __slots__ = ("attached", "group", "low", "node", "pages", "parts", "refs", "size")

    def __init__(
        self, node: Node, group: int, pages: list[PageId], size: int, low: int, parts: Spans | None
    ) -> None:
        self.node = node
        self.group = group
        self.pages = pages
        self.size = size
        self.low = low
        self.parts = parts
        self.refs = 1
        self.attached = True

    @property
    def full(self) -> bool:
        return self.parts is None

    @property
    def spans(self) -> Spans:
        """The slots that may be read."""
        return ((self.low, self.node.stop),) if self.parts is None else self.parts


class Node:
    """One block of a prefix: tokens [start, stop) under their parent's.

    A chain is the common case: an only child is held as such; more are a dictionary by tokens,
    with their tokens in sorted order beside it.
    """

    __slots__ = (
        "key",
        "many",
        "only",
        "order",
        "parent",
        "pins",
        "runs",
        "start",
        "stop",
        "tokens",
    )

    def __init__(
        self,
        parent: Node | None,
        tokens: bytes,
        key: bytes,
        start: int,
        stop: int,
        runs: list[Run | None],
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.key = key
        self.start = start
        self.stop = stop
        self.only: Node | None = None
        self.many: dict[bytes, Node] | None = None
        self.order: list[bytes] | None = None
        self.runs = runs
        self.pins = 0

    def child(self, tokens: bytes) -> Node | None:
        """The child that holds exactly these tokens."""
        only = self.only
        if only is not None:
            return only if only.tokens == tokens else None
        return self.many.get(tokens) if self.many else None

    def children(self) -> list[Node]:
        if self.only is not None:
            return [self.only]
        return [self.many[tokens] for tokens in self.order] if self.many and self.order else []

    def near(self, tokens: bytes, before: int, after: int) -> list[Node]:
        """Children whose tokens sort near `tokens`: some before it, some from it on."""
        if self.only is not None:
            return [self.only]
        if not self.many or not self.order:
            return []
        at = bisect_left(self.order, tokens)
        return [self.many[other] for other in self.order[max(0, at - before) : at + after]]

    def link(self, child: Node) -> None:
        if self.only is None and not self.many:
            self.only = child
            return
        if self.only is not None:
            self.many, self.order = {self.only.tokens: self.only}, [self.only.tokens]
            self.only = None
        if self.many is not None and self.order is not None:
            self.many[child.tokens] = child
            insort(self.order, child.tokens)

    def unlink(self, child: Node) -> None:
        if self.only is child:
            self.only = None
        elif self.many and self.order:
            del self.many[child.tokens]
            del self.order[bisect_left(self.order, child.tokens)]
            if len(self.many) == 1:
                (self.only,) = self.many.values()
                self.many = self.order = None

    @property
    def stands(self) -> bool:
        """Whether the tree needs this node: it has pages, a child, or a sequence's path ends."""
        return bool(self.pins or self.only or self.many or any(self.runs))


class Found:
    """Where a match ended: whole blocks, then perhaps the first `extra` tokens of one more."""

    __slots__ = ("end", "nodes", "partial", "root")

    def __init__(self, root: Node | None, nodes: list[Node], partial: Node | None, end: int):
        self.root = root
        self.nodes = nodes
        self.partial = partial
        self.end = end

    def coverage(self, group: GroupId, *, full_only: bool = False) -> SpanSet:
        """Canonical slots of `group` along the path, before `end`.

        full_only: of completely covered blocks only (they can be shared without a copy).
        """
        out = SpanSet()
        start = stop = 0
        for node in self.nodes:
            run = node.runs[group]
            if run is None:
                continue
            if run.parts is None:
                if run.low != stop:
                    out.add(start, stop)
                    start = run.low
                stop = node.stop
            elif not full_only:
                for a, b in run.parts:
                    if a != stop:
                        out.add(start, stop)
                        start = a
                    stop = b
        out.add(start, stop)
        run = self.partial.runs[group] if self.partial and not full_only else None
        for a, b in run.spans if run else ():
            out.add(a, min(b, self.end))
        return out


def common_tokens(a: bytes, b: bytes) -> int:
    """Length, in tokens, of the longest common prefix of two packed token strings."""
    size = min(len(a), len(b))
    diff = int.from_bytes(a[:size], "little") ^ int.from_bytes(b[:size], "little")
    same = size if not diff else ((diff & -diff).bit_length() - 1) // 8
    return same // TOKEN_BYTES


class Tree:
    """All prefixes of one deployment, a root per namespace."""

    def __init__(self, layout: Layout, model_fingerprint: str) -> None:
        self.layout = layout
        self.model_fingerprint = model_fingerprint
        self.roots: dict[Namespace, Node] = {}
        self.num_nodes = 0

    def root(self, namespace: Namespace) -> Node:
        """The namespace's root, made on first use."""
        node = self.roots.get(namespace)
        if node is None:
            key = root_key(self.model_fingerprint, namespace)
            node = self.roots[namespace] = Node(None, b"", key, 0, 0, self._no_runs())
        return node

    def _no_runs(self) -> list[Run | None]:
        return [None] * len(self.layout.groups)

    def match(self, packed: bytes, namespace: Namespace) -> Found:
        """Longest published prefix of the packed tokens. Takes nothing, changes nothing."""
        root = node = self.roots.get(namespace)
        nodes: list[Node] = []
        if node is None:
            return Found(None, nodes, None, 0)
        step, size, at = self.layout.block_size * TOKEN_BYTES, len(packed), 0
        while at + step <= size:
            part = packed[at : at + step]
            child = node.only
            if child is None or child.tokens != part:
                child = node.child(part)
                if child is None:
                    break
            nodes.append(child)
            node = child
            at += step
        partial, extra = self._nearest(node, packed[at : at + step])
        return Found(root, nodes, partial, at // TOKEN_BYTES + extra)

    def _nearest(self, node: Node, rest: bytes) -> tuple[Node | None, int]:
        """The child with the longest common prefix with `rest`; of equals, the best covered.

        In sorted order the longest common prefix is always that of a neighbour of `rest`.
        """
        near = node.near(rest, SIBLINGS_WEIGHED, SIBLINGS_WEIGHED) if rest else []
        lengths = [common_tokens(child.tokens, rest) for child in near]
        extra = max(lengths, default=0)
        if not extra:
            return None, 0
        best = [child for child, k in zip(near, lengths, strict=True) if k == extra]
        end = node.stop + extra
        return max(best, key=lambda child: self._worth(child, end)), extra

    def _worth(self, node: Node, end: int) -> int:
        """Canonical slots before `end`, all groups."""
        runs = [run for run in node.runs if run]
        return sum(max(0, min(b, end) - a) for run in runs for a, b in run.spans)

    def add(self, parent: Node, tokens: bytes) -> Node:
        """A new block under `parent`; its runs are attached by the publisher."""
        start = parent.stop
        stop = start + len(tokens) // TOKEN_BYTES
        key = block_key(parent.key, tokens)
        node = Node(parent, tokens, key, start, stop, self._no_runs())
        parent.link(node)
        self.num_nodes += 1
        return node

    def chain(self, parent: Node, parts: Sequence[bytes]) -> list[Node]:
        """Whole blocks under `parent`, each the only child of the one before; runs to be set."""
        node = self.add(parent, parts[0])
        nodes = [node]
        block, at, unset = self.layout.block_size, node.stop, self._no_runs()
        for part in parts[1:]:
            key = sha256(node.key + part).digest()
            child = Node(node, part, key, at, at + block, unset)
            node.only = child
            nodes.append(child)
            node = child
            at += block
        self.num_nodes += len(parts) - 1
        return nodes

    def prefixes(self, parent: Node, tokens: bytes) -> list[Node]:
        """Partial children of `parent` whose tokens are a proper prefix of `tokens`."""
        if not parent.many:
            return []
        cuts = range(TOKEN_BYTES, len(tokens), TOKEN_BYTES)
        return [child for cut in cuts if (child := parent.many.get(tokens[:cut])) is not None]

    def extensions(self, parent: Node, tokens: bytes) -> list[Node]:
        """A few children of `parent` that begin with `tokens` (itself included)."""
        near = parent.near(tokens, 0, SIBLINGS_WEIGHED)
        return [child for child in near if child.tokens.startswith(tokens)]

    def prune(self, node: Node) -> None:
        """Take out `node` and then its ancestors while they hold no page, child or pin."""
        while not node.stands:
            parent = node.parent
            if parent is None:
                self.roots = {name: root for name, root in self.roots.items() if root is not node}
                return
            if parent.child(node.tokens) is not node:
                return
            parent.unlink(node)
            self.num_nodes -= 1
            node = parent

    def nodes(self) -> list[Node]:
        """Every block, parents before children (for checks and for emptying the cache)."""
        out: list[Node] = list(self.roots.values())
        for node in out:
            out.extend(node.children())
        return out[len(self.roots) :]

    def check(self) -> None:
        """Raise InvariantError unless every node, key, order and run obeys the module's law."""
        for namespace, root in self.roots.items():
            if root.key != root_key(self.model_fingerprint, namespace) or root.start or root.stop:
                raise InvariantError(f"root of {namespace} has a foreign key or tokens")
        nodes = self.nodes()
        if len(nodes) != self.num_nodes:
            raise InvariantError(f"the tree counts {self.num_nodes} blocks but has {len(nodes)}")
        for node in [*self.roots.values(), *nodes]:
            tokens = [child.tokens for child in node.children()]
            several = sorted(node.many) if node.many else None
            if node.order != several or (several and (node.only or len(several) < 2)):
                raise InvariantError(f"children of block [{node.start}, {node.stop}) out of order")
            if len(set(tokens)) != len(tokens) or any(
                child.parent is not node for child in node.children()
            ):
                raise InvariantError(
                    f"children of block [{node.start}, {node.stop}) are not its own"
                )
        for node in nodes:
            self._check_node(node)

    def _check_node(self, node: Node) -> None:
        where = f"block [{node.start}, {node.stop})"
        parent = node.parent
        if parent is None or node.key != block_key(parent.key, node.tokens):
            raise InvariantError(f"{where} does not carry the key of its tokens")
        size = node.stop - node.start
        if node.start != parent.stop or len(node.tokens) != size * TOKEN_BYTES or size < 1:
            raise InvariantError(f"{where} does not follow its parent")
        block = self.layout.block_size
        if node.start % block or size > block or (size < block and node.children()):
            raise InvariantError(f"{where} is not aligned, too long, or partial with children")
        if not node.stands:
            raise InvariantError(f"{where} holds no page, child or pin, yet stands")
        for index, run in enumerate(node.runs):
            if run is not None:
                self._check_run(node, index, run)

    def _check_run(self, node: Node, index: int, run: Run) -> None:
        group = self.layout.groups[index]
        where = f"block [{node.start}, {node.stop}), group {group.name}"
        if run.node is not node or run.group != index or not run.attached or run.refs < 0:
            raise InvariantError(f"{where}: run is misplaced")
        spans = SpanSet(run.spans)
        spans.check()
        if tuple(spans) != run.spans or not run.spans:
            raise InvariantError(f"{where}: spans {run.spans} are empty or out of order")
        low = max(node.start, group.lookahead)
        if spans.start < low or spans.stop > node.stop:
            raise InvariantError(f"{where}: spans {run.spans} leave the block")
        whole = node.stop - node.start == self.layout.block_size
        if run.full != (whole and spans.covers(low, node.stop)):
            raise InvariantError(f"{where}: marked full wrongly")
        for j, page in enumerate(run.pages):
            start = node.start + j * group.page_size
            if bool(spans.within(start, start + group.page_size)) != (page != NO_PAGE):
                raise InvariantError(f"{where}: a page without rows, or rows without a page")
        if run.size != sum(page != NO_PAGE for page in run.pages):
            raise InvariantError(f"{where}: {run.size} pages counted, not so")
