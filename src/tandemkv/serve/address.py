"""A listening socket for the server.

Law: it imports no engine, so that an address that cannot be had is said before anything loads. This
module accepts no connection.
"""

from __future__ import annotations

import socket

from tandemkv.base.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError, one line, if the address cannot be had."""
    try:
        if not 0 <= port < 1 << 16:
            raise OSError("ports are in [0, 65536)")
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(2048)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error}; choose another --host or --port"
        ) from None
    return bound
