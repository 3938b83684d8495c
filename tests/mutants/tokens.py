"""Compares code token by token, so that layout and comments do not matter."""

from __future__ import annotations

import functools
import io
import itertools
import tokenize
from collections.abc import Sequence
from typing import NamedTuple

_LAYOUT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)


class Token(NamedTuple):
    """A token and its place in the code, in characters."""

    text: str
    start: int
    end: int
    line: int  # the number of its first line, from 1


def line_starts(code: str) -> list[int]:
    """Return the offset of each line's first character."""
    return [0, *itertools.accumulate(len(line) for line in io.StringIO(code, newline="\n"))]


@functools.lru_cache(16)
def read(code: str) -> tuple[Token, ...]:
    """Return the tokens of code, without layout, comments and commas before a closing bracket.

    The code may be part of a statement, and may leave brackets open.

    Raises:
        SyntaxError: The code is no sequence of tokens, or its lines are indented inconsistently.
    """
    starts, tokens = line_starts(code), []
    try:
        for kind, text, (line, column), (last, end), _ in tokenize.generate_tokens(
            io.StringIO(code, newline="\n").readline
        ):
            if kind not in _LAYOUT:
                token = Token(text, starts[line - 1] + column, starts[last - 1] + end, line)
                tokens.append(token)
    except tokenize.TokenError:
        pass  # a bracket is open at the end; the tokens before the end have all been read
    return tuple(
        token
        for token, following in itertools.zip_longest(tokens, tokens[1:])
        if not (token.text == "," and following and following.text in (")", "]", "}"))
    )


def same(one: str, other: str) -> bool:
    """Whether two pieces of code differ at most in their layout and comments."""
    return [token.text for token in read(one)] == [token.text for token in read(other)]


def places(tokens: Sequence[Token], sought: str) -> list[tuple[int, int]]:
    """Return start and end, in characters, of each occurrence of code among the tokens."""
    texts, wanted = [token.text for token in tokens], [token.text for token in read(sought)]
    if not wanted:
        return []
    return [
        (tokens[first].start, tokens[first + len(wanted) - 1].end)
        for first in range(len(texts) - len(wanted) + 1)
        if texts[first : first + len(wanted)] == wanted
    ]


def replaced(code: str, start: int, end: int, new: str) -> str:
    """Return the code with other text from `start` to `end`.

    The lines of `new` after the first get the indentation of the line on which it begins.
    """
    line = code[code.rfind("\n", 0, start) + 1 : start]
    indentation = line[: len(line) - len(line.lstrip())]
    first, *others = new.strip("\n").split("\n")
    lines = [first, *(indentation + other if other.strip() else other for other in others)]
    return code[:start] + "\n".join(lines) + code[end:]
