"""Requests to workers over HTTP. The one door to httpx.

Law: what fails on the way, at any point, is a Failed that says in one line what happened, and how:
the connection was refused, it broke, or nobody answered in time. Nothing of the environment is
read, and no redirect is followed. Whom to ask, and what then, is not decided here.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

import httpx

from tandemkv.base.errors import PeerError

CONNECT_S = 2.0
IDLE_S = 2.0
"""How long an idle connection is kept: less than servers do (uvicorn: 5 s), so that a request is
not sent into a connection that is being closed."""

Header = tuple[bytes, bytes]

# RFC 9110, 7.6.1: they speak of one connection, and are not passed on.
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer"
    b" transfer-encoding upgrade".split()
)
# What each side of a proxy says for itself.
_OWN = frozenset((b"host", b"content-length", b"expect", b"date", b"server"))


class Failed(PeerError):
    """A worker did not answer. kind: refused, broken, silent, unavailable or lost."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Reply:
    """A worker's answer: status and headers are here, its body is still to be read."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self.status = response.status_code
        self.headers = passed_on(response.headers.raw)

    @property
    def is_events(self) -> bool:
        """Whether it is a stream of server-sent events."""
        return self._response.headers.get("content-type", "").startswith("text/event-stream")

    async def parts(self) -> AsyncIterator[bytes]:
        """The body's bytes as they come, still encoded as content-encoding says."""
        with _named():
            async for part in self._response.aiter_raw():
                yield part


class Upstream:
    """Connections to workers, as many as are needed. To be used on one event loop, and closed."""

    def __init__(self) -> None:
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=IDLE_S),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def ask(
        self,
        method: str,
        url: str,
        content: bytes = b"",
        headers: Sequence[Header] = (),
        *,
        timeout_s: float,
    ) -> tuple[int, bytes]:
        """Status and body of a short answer. timeout_s: for each wait, connecting included."""
        with _named():
            response = await self._client.request(
                method, url, content=content, headers=list(headers), timeout=timeout_s
            )
        return response.status_code, response.content

    @contextlib.asynccontextmanager
    async def send(
        self, method: str, url: str, headers: Sequence[Header], content: bytes
    ) -> AsyncIterator[Reply]:
        """A request whose answer may take as long as it likes; leaving closes it."""
        headers = [(b"accept-encoding", b"identity"), *headers]
        names = {name for name, _ in headers[1:]}
        headers = headers[1:] if b"accept-encoding" in names else headers
        request = self._client.build_request(method, url, headers=headers, content=content)
        with _named():
            response = await self._client.send(request, stream=True)
        try:
            yield Reply(response)
        finally:
            await response.aclose()


def passed_on(headers: Iterable[Header]) -> list[Header]:
    """The headers that a proxy passes on, in order; names in lower case."""
    found = [(name.lower(), value) for name, value in headers]
    dropped = {
        word.strip().lower()
        for name, value in found
        if name == b"connection"
        for word in value.split(b",")
    }
    dropped |= _HOP_BY_HOP | _OWN
    return [(name, value) for name, value in found if name not in dropped]


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Raise what httpx raises as a Failed."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol) as error:
        raise Failed("refused", f"cannot connect ({_line(error)})") from None
    except httpx.TimeoutException:
        raise Failed("silent", "does not answer") from None
    except (httpx.HTTPError, httpx.StreamError) as error:
        raise Failed("broken", f"the connection broke ({_line(error)})") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
