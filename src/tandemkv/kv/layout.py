"""Layer groups and the layout of a deployment: the numbers that everything else derives from.

Law: what makes a drafter special is declared here, once (domain, window, lookahead, what it is
rebuilt from); no other module asks which drafter is in use. This module holds no state.

    slot:   0    1    2    3    4    5   ...      a draft row with lookahead D of position i lives
    row :   -    r0   r1   r2   r3   r4  ...      in slot i + D (here D = 1); slots 0..D-1 never
                                                  hold a row and are never a hole
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from tandemkv.base.errors import ConfigError
from tandemkv.base.ids import GroupId


class Domain(StrEnum):
    TARGET = "target"
    DRAFT = "draft"


class Role(StrEnum):
    KEY = "key"
    VALUE = "value"
    INDEX_KEY = "index_key"
    LATENT = "latent"
    STATE = "state"


class RebuildFrom(StrEnum):
    TOKENS = "tokens"
    HIDDEN = "hidden"


DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class LayerGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share geometry and rules; one pool, one page size.

    layers: the layer indices, within the domain. page_size: slots per page. window: None, or W,
    attention reaches back W tokens (the query's own included). lookahead D: row i is a function
    of tokens 0..i+D. rebuild_from: what a lost row can be recomputed from. pointwise: a row
    depends on its own position's inputs alone.
    """

    name: str
    domain: Domain
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    dtype: str = "float32"
    roles: tuple[Role, ...] = (Role.KEY, Role.VALUE)
    page_size: int = 16
    window: int | None = None
    lookahead: int = 0
    rebuild_from: RebuildFrom = RebuildFrom.HIDDEN
    pointwise: bool = False

    def __post_init__(self) -> None:
        problems: list[str] = []
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            problems.append(f"page_size {self.page_size} is not a power of two")
        if self.window is not None and self.window < 1:
            problems.append(f"window {self.window} is below 1")
        if self.lookahead < 0:
            problems.append(f"lookahead {self.lookahead} is negative")
        if self.domain is Domain.TARGET and self.lookahead:
            problems.append("a target group has lookahead 0")
        if self.dtype not in DTYPE_BYTES:
            problems.append(f"dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        if not self.layers or self.num_kv_heads < 1 or self.head_dim < 1:
            problems.append("layers, num_kv_heads and head_dim must not be empty or zero")
        if problems:
            raise ConfigError(f"layer group {self.name!r}: " + "; ".join(problems))

    @property
    def required(self) -> bool:
        """A target group is; a draft group's loss degrades speed, never correctness."""
        return self.domain is Domain.TARGET

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token's rows, all layers and roles of the group."""
        per_role = self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]
        return len(self.layers) * len(self.roles) * per_role

    @property
    def page_bytes(self) -> int:
        return self.slot_bytes * self.page_size

    def first_needed(self, n: int) -> int:
        """First slot a sequence with n target rows needs, its next anchor at position n.

        The one function behind claims, admission, eviction value, transfers and tests.
        """
        if self.window is None:
            return self.lookahead
        return max(self.lookahead, n - self.window + 1)


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """All layer groups of a deployment and the block size that is common to them.

    block_size: tokens per block, a multiple of every group's page_size.
    """

    block_size: int
    groups: tuple[LayerGroup, ...]

    def __post_init__(self) -> None:
        if not any(g.domain is Domain.TARGET for g in self.groups):
            raise ConfigError("a layout needs at least one target group")
        if self.block_size < 1:
            raise ConfigError(f"block_size {self.block_size} is below 1")
        names = [g.name for g in self.groups]
        if len(set(names)) != len(names):
            raise ConfigError(f"layer group names are not unique: {', '.join(names)}")
        for group in self.groups:
            if self.block_size % group.page_size:
                raise ConfigError(
                    f"block_size {self.block_size} is not a multiple of page_size"
                    f" {group.page_size} of layer group {group.name!r}"
                )

    @property
    def target_groups(self) -> tuple[GroupId, ...]:
        return tuple(GroupId(i) for i, g in enumerate(self.groups) if g.domain is Domain.TARGET)

    @property
    def draft_groups(self) -> tuple[GroupId, ...]:
        return tuple(GroupId(i) for i, g in enumerate(self.groups) if g.domain is Domain.DRAFT)

    @property
    def lookahead(self) -> int:
        """The largest lookahead of any group: how far before a claim's end a pass starts."""
        return max(g.lookahead for g in self.groups)
