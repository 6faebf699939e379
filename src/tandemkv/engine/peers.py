"""The workers that one worker exchanges rows with: offers compared, connections made, words sent.

Law: a worker is a peer once its offer fits ours and its memory can be reached; one that does not
fit is refused by name, on both sides. A connection that was closed is made again by the next
greeting or ask. This module knows no session and no request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from tandemkv.base.errors import PeerError
from tandemkv.transfer import wire
from tandemkv.transfer.offer import GroupPair, Offer, PeerPlan, Refusal, match
from tandemkv.transfer.plan import Route, routes
from tandemkv.transfer.transport import PeerName, Transport


class Peer:
    """A worker that fits: what goes between us, and how its memory is reached."""

    def __init__(self, offer: Offer, plan: PeerPlan, name: PeerName) -> None:
        self.offer, self.plan, self.name = offer, plan, name
        self.out: dict[int, tuple[GroupPair, Route]] = {}
        self.into: dict[int, tuple[GroupPair, Route]] = {}
        for pair in plan.pairs:
            (self.out[pair.index],) = [(pair, r) for r in routes(pair.mine, pair.theirs)]
            (self.into[pair.peer_index],) = [(pair, r) for r in routes(pair.theirs, pair.mine)]


class Peers:
    """By engine id. send(peer, frame): the control channel, which may lose frames.

    refused: why a worker is no peer; left_out: draft groups not exchanged, by reason.
    """

    def __init__(
        self,
        offer: Offer,
        transport: Transport,
        send: Callable[[str, bytes], None],
        secret: bytes | None = None,
    ) -> None:
        self.offer = offer
        self.known: dict[str, Peer] = {}
        self.refused: dict[str, str] = {}
        self.left_out: Counter[str] = Counter()
        self._transport, self._send, self._secret = transport, send, secret
        self._names: dict[PeerName, str] = {}

    def frame(self, message: Any, target: str) -> bytes:
        """A message of ours as bytes."""
        return wire.encode(message, source=self.offer.engine_id, target=target, secret=self._secret)

    def say(self, peer: str, message: Any) -> None:
        """Over the control channel."""
        self._send(peer, self.frame(message, peer))

    def name_of(self, peer: PeerName) -> str:
        """The engine id behind a name of the data plane; "" if there is none."""
        return self._names.get(peer, "")

    def meet(self, message: wire.Hello | wire.Welcome) -> None:
        """Make a worker a peer, or refuse it by name."""
        theirs = message.offer
        plan = match(self.offer, theirs)
        if isinstance(plan, Refusal):
            self.refused[theirs.engine_id] = str(plan)
            self.say(
                theirs.engine_id,
                wire.Refused(field=plan.field, mine=str(plan.mine), theirs=str(plan.theirs)),
            )
            return
        try:
            name = self._transport.connect(theirs.transport_blob)
        except PeerError as error:
            self.refused[theirs.engine_id] = str(error)
            return
        self.refused.pop(theirs.engine_id, None)
        if theirs.engine_id not in self.known:
            self.left_out.update(left.reason for left in plan.left_out)
        self.known[theirs.engine_id] = Peer(theirs, plan, name)
        self._names[name] = theirs.engine_id
        if isinstance(message, wire.Hello):
            self.say(theirs.engine_id, wire.Welcome(offer=self.offer))

    def forget(self, peer: str) -> Peer | None:
        """A worker that is gone and never comes back under this engine id."""
        self.refused.pop(peer, None)
        return self.known.pop(peer, None)

    def turned_down(self, peer: str, message: wire.Refused) -> None:
        """A worker refused us."""
        self.refused[peer] = f"{message.field} is {message.mine} there and {message.theirs} here"
