"""How much of a payload goes into one message, by how fast the ones before it went.

A whole message is the smallest sign of life that the other end sees. On a link of 0.5 Mbit/s one of
1 MiB takes 17 s, and its sender would be taken for dead each time; on a fast one small messages
cost time for nothing.
"""

from __future__ import annotations

from proto.framing import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES

_FIRST_BYTES = 32 << 10
#: For one message; much less than any lease.
_TARGET_SECONDS = 0.5
#: So many that pass easily in a row double the size. Systems take megabytes into their buffers at
#: once, whatever the link: pieces of 1 MiB come after 8 MiB that went well.
_IN_A_ROW = 8


class ChunkPace:
    """Bytes of a payload's next piece; for the one thread that sends them.

    Doubles while pieces pass easily, and falls to what passes in the time aimed at. Begins small:
    nothing is known of a new connection.
    """

    def __init__(self) -> None:
        self.num_bytes = _FIRST_BYTES
        self._num_easy = 0

    def note(self, num_bytes: int, seconds: float) -> None:
        """Hear how long a message of so many bytes took to be taken by the network."""
        if seconds > _TARGET_SECONDS:
            fitting = int(num_bytes * _TARGET_SECONDS / seconds)
            self.num_bytes = max(MIN_CHUNK_BYTES, min(self.num_bytes, fitting))
            self._num_easy = 0
        elif num_bytes >= self.num_bytes:
            self._num_easy = self._num_easy + 1 if seconds < _TARGET_SECONDS / 4 else 0
            if self._num_easy == _IN_A_ROW:
                self.num_bytes, self._num_easy = min(MAX_CHUNK_BYTES, 2 * self.num_bytes), 0
