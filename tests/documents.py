"""README and docs/ as data: pages, headings, links, tables, and commands as bash reads them.

Bash runs each block of commands with functions instead of the programs. The functions record
their arguments; so bash itself handles quotes, loops, variables and continued lines.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterator

from thinwire.cli.commands import ROLES, RUN, TOOLS

ROOT = pathlib.Path(__file__).resolve().parents[1]
#: Placeholder of the token in files that only a reader has.
TOKEN = "a token of the reader's own"

_SHELL = ("bash", "sh")
#: How a block begins that holds commands without naming a language.
_LOOKS_LIKE_SHELL = re.compile(r"(python|thinwire|make|export|git|cd|\.venv/|bench/|[A-Z_]+=)")
#: Programs that are called by a path, for which bash would look in the file system.
_BY_PATH = (
    ".venv/bin/python",
    ".venv/bin/tensorboard",
    "bench/transport/netns.sh",
    "bench/peers/setup.sh",
)
_VARIABLES = ("THINWIRE_TOKEN", "TF_CONFIG")
_PRELUDE = f"""
record() {{
  local words; printf -v words '%s\\x1f' "$@"
  printf '%s\\x1d%s\\x1d%s\\x1e' "${{THINWIRE_TOKEN:-}}" "${{TF_CONFIG:-}}" "$words" >&2
}}
command_not_found_handle() {{ record "$@"; }}
seq() {{ command -p seq "$@"; }}
cat() {{ printf '%s' "{TOKEN}"; }}
cd() {{ record cd "$@"; }}
source() {{ :; }}
srun() {{ while [[ $1 == -* ]]; do shift; done; "$@"; }}
ray() {{ while [[ $1 != -- ]]; do shift; done; shift; "$@"; }}
""" + "".join(f'{name}() {{ record {name} "$@"; }}\n' for name in _BY_PATH)


@dataclasses.dataclass(frozen=True)
class CodeBlock:
    """One fenced block."""

    page: pathlib.Path
    line: int
    language: str
    text: str

    @property
    def is_shell(self) -> bool:
        unnamed = not self.language and _LOOKS_LIKE_SHELL.match(self.text.lstrip())
        return self.language in _SHELL or bool(unnamed)


@dataclasses.dataclass(frozen=True)
class Command:
    """One command of a block, after bash has split the command into words."""

    block: CodeBlock
    program: str
    words: tuple[str, ...]
    variables: dict[str, str]

    @property
    def python_words(self) -> tuple[str, ...]:
        """Arguments of the node's command, or of the command that a `thinwire` command starts."""
        if self.program != "thinwire":
            return self.words
        name, *rest = self.words
        if name in ROLES:
            return ("main.py", f"--type_node={ROLES[name][0]}", *rest)
        if name in RUN:
            return ("main.py", name, *rest)
        return ("-m", TOOLS[name][0], *rest)

    @property
    def place(self) -> str:
        page = self.block.page.relative_to(ROOT)
        return f"{page}:{self.block.line}: {self.program} {' '.join(self.words)}"


def pages() -> list[pathlib.Path]:
    """Return the pages that users read."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks() -> Iterator[CodeBlock]:
    """Yield every fenced block of every page."""
    for page in pages():
        text = page.read_text()
        for found in re.finditer(r"(?m)^```(\w*)\n(.*?)^```$", text, re.DOTALL):
            line = text.count("\n", 0, found.start()) + 1
            yield CodeBlock(page, line, found[1], found[2])


def commands() -> list[Command]:
    """Return every command of every page."""
    return [command for block in blocks() if block.is_shell for command in commands_of(block)]


def commands_of(block: CodeBlock) -> Iterator[Command]:
    """Yield a block's commands, in the order in which bash comes to them."""
    done = subprocess.run(
        [str(shutil.which("bash")), "-c", _PRELUDE + block.text],
        cwd="/",
        env={"PATH": "/nowhere", "HOME": "/nowhere"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    *records, rest = done.stderr.split("\x1e")
    assert not rest.strip(), f"{block.page.name}:{block.line}: bash says {rest}"
    for record in records:
        *values, words = record.split("\x1d")
        program, *arguments = words.removesuffix("\x1f").split("\x1f")
        name = "python" if program == ".venv/bin/python" else program
        yield Command(block, name, tuple(arguments), dict(zip(_VARIABLES, values, strict=True)))


def prose(page: pathlib.Path) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"(?ms)^```.*?^```$", "", page.read_text())


def anchors(page: pathlib.Path) -> set[str]:
    """Return the anchors that a link's #part may name, spelled as GitHub does."""
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"(?m)^#+ (.*)$", prose(page)):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        names.add(f"{slug}-{found[slug]}" if slug in found else slug)
        found[slug] = found.get(slug, 0) + 1
    return names


def rows(text: str, *header: str) -> list[list[str]]:
    """Return the rows of all tables that have this header, each as its cells."""
    cells = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] if line[:1] == "|" else []
        for line in text.splitlines()
    ]
    found, inside = [], False
    for row in cells:
        if row == list(header):
            inside = True
        elif not row:
            inside = False
        elif inside and not set("".join(row)) <= set("-:"):
            found.append(row)
    return found
