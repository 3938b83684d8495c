"""A local port that drops packets like a port behind a firewall."""

import contextlib
import socket
from collections.abc import Iterator

#: More connections than the listen queue holds; the system drops further connections.
_NUM_FILLING = 8


@contextlib.contextmanager
def dropping(host: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
    """Have a port at which the system drops each first packet; yield it.

    Args:
        host: A loopback address.
        port: 0 takes a free one.
    """
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        listening.bind((host, port))
        listening.listen(0)
        address = listening.getsockname()
        for _ in range(_NUM_FILLING):
            filling = stack.enter_context(socket.socket())
            filling.setblocking(False)
            filling.connect_ex(address)
        with contextlib.suppress(TimeoutError), socket.create_connection(address, 0.1):
            raise AssertionError("the port answers")
        yield int(address[1])
