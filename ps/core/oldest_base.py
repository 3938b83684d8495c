"""The oldest version that a push may still be based on."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from thinwire.ps.core.members import Member


class OldestBase:
    """Looks through the members now and then; with many workers not at every release."""

    def __init__(self) -> None:
        """Know nothing."""
        self._found = 0
        self._found_at: int | None = None  # the version at which it was looked for

    def find(self, members: Mapping[int, Member], live: Collection[int], version: int) -> int:
        """Return a version that no live worker's next push is older than.

        With many workers the last one found serves for a while: it is too old, never too new.
        """
        if self._found_at is None or version - self._found_at >= len(live) // 16:
            self._found = min((members[each].oldest_base for each in live), default=version)
            self._found_at = version
        return self._found
