"""Rules of this repository that no other tool checks."""

import ast
import functools
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("ps", "worker", "supervisor", "ops", "proto", "data", "thinwire")

#: Spelled in parts, so that this file does not hold them.
FORBIDDEN = {
    "an address of a package index": "|".join(["py" + r"pi\.", "files.python" + "hosted"]),
    "a folder of one machine": "|".join(["/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/[a-z]"]),
    "a page that readers do not have": "spe" + r"cs/|desi" + r"gn(\.md)? sections?",
    "an unfinished place": "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3]),
}


def _files(*suffixes):
    """Return this checkout's own files: what git tracks, or would."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in names.splitlines()]
    return [path for path in paths if path.suffix in suffixes and path.is_file()]


def _relative(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("what", sorted(FORBIDDEN))
def test_no_file_holds(what):
    pattern = re.compile(FORBIDDEN[what])
    found = [
        f"{_relative(path)}:{number}: {line.strip()}"
        for path in _files(".py", ".md", ".toml", ".txt", ".yaml", ".proto", ".flags", ".sh", "")
        for number, line in enumerate(_text(path).splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)


def _text(path):
    try:
        return path.read_text()
    except UnicodeDecodeError:
        return ""


@functools.cache
def _imports_and_classes(path):
    """Return these nodes of a module; to parse all modules takes 2 s."""
    nodes = ast.walk(ast.parse(path.read_text()))
    kinds = (ast.Import, ast.ImportFrom, ast.ClassDef)
    return [node for node in nodes if isinstance(node, kinds)]


def test_no_package_imports_main():
    for path in _files(".py"):
        if path.relative_to(ROOT).parts[0] not in PACKAGES or "tests" in path.parts:
            continue
        for node in _imports_and_classes(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module]
            assert "main" not in names, f"{_relative(path)}:{node.lineno} imports main"


def _links(text):
    """Return the local targets of a Markdown text's links and images, without code blocks."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", prose)
    return [t.split("#")[0] for t in targets if not re.match(r"[a-z]+:|#", t)]


def test_local_links_lead_somewhere():
    broken = [
        f"{_relative(path)}: {target}"
        for path in _files(".md")
        for target in _links(path.read_text())
        if not (path.parent / target).exists()
    ]
    assert not broken, broken


def test_requirements_are_pinned_and_name_no_index():
    for name in ("requirements.txt", "requirements-dev.txt", "requirements-backends.txt"):
        for line in (ROOT / name).read_text().splitlines():
            if line and not line.startswith(("#", "-r ")):
                requirement, _, _ = line.partition(" ; ")  # for which Pythons and systems
                assert re.fullmatch(r"[a-z0-9-]+==[\w.]+", requirement), f"{name}: {line}"


def _pins(name):
    lines = (line.partition(" ; ")[0] for line in (ROOT / name).read_text().splitlines())
    return dict(line.split("==") for line in lines if re.match(r"[a-z]", line))


def test_backends_are_tested_without_tensorflow_and_with_the_same_versions_otherwise():
    usual, pins = _pins("requirements.txt"), _pins("requirements-backends.txt")
    assert not [name for name in pins if "tensorflow" in name]
    usual |= _pins("requirements-dev.txt")
    others = {name for name in pins if name in usual and pins[name] != usual[name]}
    assert others <= {"mpmath"}  # sympy, which torch needs, takes an older one


def test_a_class_name_stands_for_one_thing():
    places = {}
    for path in _files(".py"):
        if path.relative_to(ROOT).parts[0] not in (*PACKAGES, "bench") or "_pb2" in path.name:
            continue
        for node in _imports_and_classes(path):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(_relative(path))
    shared = {name: found for name, found in places.items() if len(found) > 1}
    assert not shared, shared
