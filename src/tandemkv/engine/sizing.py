"""How large the pages and the pool of a layer group are, from its geometry and the load.

Law: an unwindowed group gets a page for every cached token; a windowed one its window for each
running request plus room for branch points, whatever the context's length. Every number comes with
its reason. This module allocates nothing and knows no model.

    a running request      | block | .... window .... | drafts, twice | block |    and, of all
    a branch point         | block | .... window .... |                            requests, a batch
"""

from __future__ import annotations

import msgspec

from tandemkv.kv.layout import LayerGroup, Layout

PAGES_PER_WINDOW = 8
"""At least so many pages to a window: what a page holds beyond it is little then."""

BRANCHES_PER_REQUEST = 2
"""Windows kept for each request beside its own: where it left a path that others take (the end of
a system prompt), and where the request before it ended (its next turn goes on there)."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the pools are made for. cached_tokens: capacity of unwindowed groups, in tokens.
    length: of the longest request. running: requests that hold pages at once. batch: rows of one
    step, all requests together. num_draft_tokens: K."""

    cached_tokens: int
    length: int
    running: int
    batch: int
    num_draft_tokens: int


def choose_page_size(group: LayerGroup, block: int) -> tuple[int, str]:
    """Slots per page of a group, and why. Attention reads pages of any power of two."""
    if group.window is None:
        return block, "one page per block: all of it is read"
    size, most = 1, min(block, group.window // PAGES_PER_WINDOW)
    while 2 * size <= most and block % (2 * size) == 0:
        size *= 2
    return size, (
        f"the largest power of two in the block of {block} and in 1/{PAGES_PER_WINDOW} of the"
        f" window of {group.window}: a window ends inside a page and wastes little of it"
    )


def window_slots(group: LayerGroup, layout: Layout, load: Load) -> int:
    """Slots of a windowed group that one request holds beside its rows of the step at most.

    Whole blocks are given back, hence one before the window; one more is filled before it is
    published. Drafts count twice: those verified, and those proposed next.
    """
    window = group.window or 0
    ahead = layout.lookahead + group.lookahead + 2 * load.num_draft_tokens + 1
    return min(load.length, window) + ahead + 2 * layout.block_size


def pool_pages(group: LayerGroup, layout: Layout, load: Load) -> tuple[int, str]:
    """Pages of a group's pool, and why."""
    pages = -(-load.cached_tokens // group.page_size)
    reason = f"{load.cached_tokens} cached tokens / {group.page_size} slots per page"
    if group.window is None:
        return pages, reason
    return min((_window_pages(group, layout, load), (pages, reason)), key=lambda choice: choice[0])


def _window_pages(group: LayerGroup, layout: Layout, load: Load) -> tuple[int, str]:
    window = min(load.length, group.window or 0)
    live = window_slots(group, layout, load)
    branches = BRANCHES_PER_REQUEST * (window + layout.block_size)
    slots = load.running * (live + branches) + load.batch
    return -(-slots // group.page_size), (
        f"window {group.window}: {load.running} requests x ({live} live slots + {branches} for"
        f" {BRANCHES_PER_REQUEST} branch points) + {load.batch} rows of a step"
    )


def tokens_within(budget: int, layout: Layout, load: Load) -> tuple[int, str]:
    """The most cached tokens whose pools, of all groups together, take `budget` bytes; and why.

    At least a block, whatever the budget.
    """

    def bytes_for(tokens: int) -> dict[bool, int]:
        sized = msgspec.structs.replace(load, cached_tokens=tokens)
        out = {True: 0, False: 0}
        for group in layout.groups:
            pages, _ = pool_pages(group, layout, sized)
            out[group.window is not None] += pages * group.page_bytes
        return out

    block = layout.block_size
    low, high = 1, 1 + budget // (block * min(group.slot_bytes for group in layout.groups))
    while high - low > 1:
        middle = (low + high) // 2
        fits = sum(bytes_for(middle * block).values()) <= budget
        low, high = (middle, high) if fits else (low, middle)
    per_token = sum(group.slot_bytes for group in layout.groups if group.window is None)
    windows = bytes_for(low * block)[True]
    why = f"{per_token} bytes per token over all unwindowed groups"
    if windows:
        why += f", {windows / 2**20:,.0f} MiB set aside for windows"
    return low * block, why
