"""The folders that the script of this process has made, and those that another worker made first.

Every worker runs the script. Where the script calls `os.mkdir`, one worker makes the folder, and
the others find it a moment later. `os.path.exists` was false for all of them, so each of the others
would raise FileExistsError, which the script alone never does. Such a folder counts as made by
this process, too. A folder that is older than the run, or that the script itself has made before,
raises as alone.
"""

from __future__ import annotations

import os

from thinwire.worker.temporary import is_temporary


class MadeFolders:
    """Folders that the script of this process takes for its own.

    Args:
        began: When the run began, in seconds since 1970.
    """

    def __init__(self, began: float) -> None:
        self._began = began
        self._own: set[str] = set()
        self._shared: set[str] = set()  # made by another worker

    def __contains__(self, place: str) -> bool:
        """Return whether the script has made a folder or counts as having made it."""
        return place in self._own or place in self._shared

    def is_own(self, place: str) -> bool:
        """Return whether this process has made a folder itself."""
        return place in self._own

    def add_own(self, place: str) -> None:
        """Note a folder that this process makes now."""
        self._own.add(place)

    def share(self, place: str) -> bool:
        """Take a folder for made by this process, if another worker has made it in this run.

        Args:
            place: A path without symbolic links, which exists.

        Returns:
            Whether it is such a folder.
        """
        try:
            status = os.stat(place)
        except OSError:
            return False
        is_new = max(status.st_mtime, status.st_ctime) >= self._began
        if not (is_new and os.path.isdir(place)) or is_temporary(place):
            return False
        self._own.discard(place)
        self._shared.add(place)
        return True

    def forget(self, place: str) -> None:
        """Note that a folder is deleted."""
        self._own.discard(place)
        self._shared.discard(place)
