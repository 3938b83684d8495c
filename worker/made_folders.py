"""Records which folders this process's script has made, or another worker made before it.

Every worker of a run executes the training script. When the script calls `os.mkdir`, one worker
makes the folder, and all other workers find an existing folder. Even a script that checks
`os.path.exists` first would raise FileExistsError, because another worker may make the folder
between the check and the call of `os.mkdir`. Therefore a folder that another worker made in this
run counts as made by this process, too. The script gets a FileExistsError only for a folder that is
older than the run, or that the script itself has made before.
"""

from __future__ import annotations

import os

from thinwire.worker.temporary import is_temporary


class MadeFolders:
    """Set of the folders that count as made by the training script of this process.

    Attributes:
        own: Paths of the folders that this process, not another worker, has made.

    Args:
        began: Time at which the training run began, in seconds since 1970.
    """

    def __init__(self, began: float) -> None:
        self._began = began
        self.own: set[str] = set()
        self._shared: set[str] = set()  # paths of folders that another worker has made in this run

    def __contains__(self, place: str) -> bool:
        """Return True if the folder at path `place` counts as made by the script."""
        return place in self.own or place in self._shared

    def share(self, place: str) -> bool:
        """Count an existing folder as made by the script, if a worker has made it in this run.

        Args:
            place: Path of an existing folder, without symbolic links.

        Returns:
            True if the folder counts as made by the script now.
        """
        try:
            status = os.stat(place)
        except OSError:
            return False
        is_new = max(status.st_mtime, status.st_ctime) >= self._began
        if not (is_new and os.path.isdir(place)) or is_temporary(place):
            return False
        self.own.discard(place)
        self._shared.add(place)
        return True

    def forget(self, place: str) -> None:
        """Record that a folder is deleted, so that it no longer counts as made by the script."""
        self.own.discard(place)
        self._shared.discard(place)
