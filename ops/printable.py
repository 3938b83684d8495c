"""Text of other machines in a form that logs, documents and messages can hold."""

from __future__ import annotations

import traceback

_LONGEST_LINE = 1000


def printable(text: str, longest: int) -> str:
    r"""Return the beginning of a text, with escapes for all that is not printable.

    A line break would begin a line of a log that nobody has written, an escape sequence would
    control a terminal, and half a surrogate pair cannot be sent.

    >>> printable("fine\nERROR", 11)
    'fine\\nERROR'
    """
    text = text[:longest]
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def printable_traceback(error: BaseException) -> str:
    """Return an error with its traceback, line by line; its text may quote another machine."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    return "\n".join(printable(line, _LONGEST_LINE) for line in lines)
