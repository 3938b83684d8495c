"""Tables of docs/ agree with the code: defaults of flags, methods, policies, other names."""

import re

from tests import documents
from tests.command_line import own_flags
from tests.thinwire.runtime.telemetry.test_run_status import SUMMARY_KEYS
from thinwire.ops.codecs.registry import CODECS
from thinwire.ops.downlink.registry import DOWN_CODECS
from thinwire.ops.methods.method import INTERFACES, METHODS
from thinwire.ops.optimizers.outer import SERVER_OPTIMIZERS
from thinwire.ops.optimizers.server import SCRIPT
from thinwire.ops.pacing.registry import PACERS
from thinwire.ops.routing.registry import ROUTERS
from thinwire.ops.sync.rule import SYNC_RULES
from thinwire.ops.weighting.registry import WEIGHTINGS

ROOT = documents.ROOT
REGISTRIES = (
    *(PACERS, CODECS, DOWN_CODECS, ROUTERS),
    *(SYNC_RULES, WEIGHTINGS, (*SERVER_OPTIMIZERS, SCRIPT)),
)


def test_defaults_in_tables_are_the_flags():
    own, checked, wrong = own_flags(), 0, []
    for page in documents.pages():
        for cell, default, _ in documents.rows(page.read_text(), "flag", "default", "meaning"):
            names = re.findall(r"`--(\w+)`", cell)
            assert len(names) == 1, f"{page.name}: a row is of one flag, not of {cell}"
            checked += 1
            if not agrees(default, own[names[0]].default):
                wrong.append(f"{page.name}: --{names[0]} is {own[names[0]].default!r}: {default}")
    assert checked > 60
    assert not wrong, "\n".join(wrong)


def agrees(cell, default):
    """Return True if a table's cell starts with a default; cells in words have no default."""
    if default is None or default == []:
        return bool(cell)
    word = re.split(r"[ ,;]", cell)[0].strip("`")
    if isinstance(default, bool):
        return word == ("on" if default else "off")
    if isinstance(default, int | float):
        return bool(re.fullmatch(r"[\d.]+", word)) and float(word) == default
    return word == str(default)


def as_text(row):
    return {name: str(value) for name, value in row.items()}


def test_the_table_of_methods_is_the_code_s():
    text = (ROOT / "docs" / "guide/methods.md").read_text()
    sentence = re.search(r"`asgd` is `(.*?)`", text, re.DOTALL)
    plain = dict(word.split("=") for word in sentence[1].split())
    assert plain == METHODS["asgd"]
    documented = {}
    for names, differences, _ in documents.rows(
        text, "`--method`", "differs from `asgd` in", "page"
    ):
        for name in re.findall(r"`(\w+)`", names):
            documented[name] = plain | dict(re.findall(r"`(\w+)=([\w.]+)`", differences))
    assert documented == {name: as_text(row) for name, row in METHODS.items()}


def test_the_table_of_interfaces_is_the_code_s():
    text = (ROOT / "docs" / "guide/methods.md").read_text()
    table = documents.rows(text, "interface", "question", "values", "pages")
    documented = {
        flag.strip("`-"): set(re.findall(r"`(\w+)`", values)) for flag, _, values, _ in table
    }
    assert documented == {
        name: set(registry) for name, registry in zip(INTERFACES, REGISTRIES, strict=True)
    }


def test_a_page_s_composition_is_the_method_s():
    for page in (ROOT / "docs" / "methods").glob("*.md"):
        for line in page.read_text().split("\n\n"):
            found = re.match(r"`--method=(\w+)` = ((?:`\w+=[\w.]+`[ \n,]*)+)", line)
            if found:
                parts = dict(re.findall(r"`(\w+)=([\w.]+)`", found[2]))
                assert METHODS["asgd"] | parts == as_text(METHODS[found[1]]), page.name


def test_every_key_of_the_summary_is_explained():
    text = (ROOT / "docs" / "reference/figures.md").read_text()
    tables = [
        *documents.rows(text, "key", "meaning"),
        *documents.rows(text, "block of `summary.json`", "what"),
    ]
    documented = {name for cell, _ in tables for name in re.findall(r"`(\w+)`", cell)}
    assert set(SUMMARY_KEYS.split()) <= documented


def test_originals_are_named_once():
    """guide/methods.md alone has the tables of other programs' names."""
    for page in documents.pages():
        if page != documents.ROOT / "docs" / "guide" / "methods.md":
            assert not re.search(r"(?m)^\| original", page.read_text()), page.name


def test_files_that_are_named_exist():
    packages = "bench|data|docs|examples|ops|proto|ps|supervisor|tests|thinwire|worker"
    missing = []
    for page in documents.pages():
        for name in re.findall(rf"`((?:{packages})/[\w./*]*)`", page.read_text()):
            if not any(list(ROOT.glob(found)) for found in (name, f"{name}.py")):
                missing.append(f"{page.name}: {name}")
    assert not missing, missing


def test_names_of_code_in_the_architecture_exist():
    """A class has the member that the page names; an interface exists, as a name of types."""
    files = [
        path.read_text()
        for package in ("ops", "ps", "worker", "proto", "thinwire")
        for path in (ROOT / package).rglob("*.py")
    ]
    text = (ROOT / "docs" / "guide/architecture.md").read_text()
    named = sorted(set(re.findall(r"\b([A-Z][a-z]\w+)\.([a-z_]\w+)", text)))
    assert len(named) > 10
    for owner, name in named:
        is_alias = any(re.search(rf"(?m)^{owner} = ", file) for file in files)
        homes = [file for file in files if re.search(rf"(?m)^class {owner}\b", file)]
        has = any(re.search(rf"(?m)^    (def {name}\(|{name}: )", file) for file in homes)
        assert is_alias or has, f"{owner}.{name}"


def test_pages_that_code_cites_exist():
    packages = ("data", "ops", "proto", "ps", "supervisor", "thinwire", "worker")
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for package in packages
        for path in (ROOT / package).rglob("*.py")
        for name in re.findall(r"docs/[\w/]+\.md", path.read_text())
        if not (ROOT / name).exists()
    ]
    assert not missing, missing
