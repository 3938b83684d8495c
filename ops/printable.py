"""Escaping of text from other machines before the text enters logs, documents or messages."""

from __future__ import annotations

import traceback

_LONGEST_LINE = 1000


def printable(text: str, longest: int) -> str:
    r"""Return the first `longest` characters of a text, with unprintable characters escaped.

    Without escaping, a line break in text from another machine would start a forged log line.
    Without escaping, a control sequence in text from another machine would control a terminal. Half
    a surrogate pair cannot be encoded for sending.

    >>> printable("fine\nERROR", 11)
    'fine\\nERROR'
    """
    text = text[:longest]
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def printable_traceback(error: BaseException) -> str:
    """Return an error's traceback with escaped lines, because errors may quote other machines."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    return "\n".join(printable(line, _LONGEST_LINE) for line in lines)
