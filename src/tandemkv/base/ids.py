"""Index types, so that a page is never mistaken for a slot.

Law: an index of one kind is never used as another. Positions are absolute, from 0, in a sequence;
a slot is one token's place in a layer group (slot = row position + lookahead); a page is a physical
run of slots in one group's pool. This module does not allocate or translate anything.
"""

from typing import NewType

GroupId = NewType("GroupId", int)
"""Index of a layer group in its Layout."""
PageId = NewType("PageId", int)
"""Index of a physical page in one group's pool."""
SeqId = NewType("SeqId", int)
"""Identity of one held sequence; never reused, so a late result lands in no other sequence."""
RequestId = NewType("RequestId", str)
"""A client's request; suspension ends its sequence, resumption opens a new one."""

NO_PAGE = PageId(-1)
"""Page-table entry of a slot range that the sequence does not hold. Never an address."""
