"""README and docs/ are true: commands, flags, defaults, methods, links.

No command is run: each command goes through its own parser and through all checks that a node
makes before it starts. `test_documents_run.py` runs the commands.
"""

import argparse
import contextlib
import importlib
import importlib.util
import inspect
import io
import itertools
import os
import re

import pytest
from absl import flags

from tests import documents
from tests.command_line import given, own_flags
from thinwire.cli import node
from thinwire.cli.commands import COMMANDS, TOOLS
from thinwire.flags import launch, observability
from thinwire.flags import script as script_flags
from thinwire.flags.run import read_run
from thinwire.launcher import tf_config
from thinwire.ops.types import ConfigurationError
from thinwire.script.settings import read_settings

ROOT = documents.ROOT
#: Foreign programs that a page may call.
FOREIGN = ("tensorboard", "pip", "pytest")
#: Flags of these programs, of absl, of bench/transport/netns.sh, a placeholder, and an example.
FOREIGN_FLAGS = {"logdir", "flagfile", "help", "helpfull", "check", "flag", "power_exponent"}
#: Flags of Slurm's commands.
FOREIGN_FLAGS |= {"nodes", "ntasks", "cpus-per-task", "resv-ports", "requeue", "kill-on-bad-exit"}
#: Flags of Ray's.
FOREIGN_FLAGS |= {"address", "working-dir"}
#: Flags of kubectl and docker.
FOREIGN_FLAGS |= {"for", "timeout", "rm"}
#: Words of a command that only exist at a reader's.
AT_THE_READERS = {"--data_dir=/data": f"--data_dir={ROOT / 'data'}", "...": None}
#: Script in examples/ -> its node type; the script takes main.py's settings.
SCRIPTS = {"server.py": "PS", "loop_worker.py": "Worker"}
PARSE = argparse.ArgumentParser.parse_args


class Parsed(Exception):
    """The parser has accepted the words; the program itself must not run."""


# -- commands -----------------------------------------------------------------------------------


@pytest.fixture
def at_home(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("THINWIRE_TOKEN", raising=False)
    return monkeypatch


def test_every_command_is_one_that_starts(at_home):
    commands = documents.commands()
    assert len(commands) >= 40
    found = [
        f"{command.place}\n    {text}"
        for command in commands
        if (text := complaint(command, at_home))
    ]
    assert not found, "\n".join(found)


def block_of(text):
    return documents.CodeBlock(ROOT / "README.md", 1, "bash", text)


def test_bash_makes_words_of_a_block():
    text = """
    export THINWIRE_TOKEN="$(cat ~/run.token)"  # not 'closed
    for id in $(seq 2); do
      .venv/bin/python main.py --groups='1,2|3' \\
        --id_worker=$id &
    done; wait
    TF_CONFIG='{"a": 1}' python -m bench "two words"
    """
    found = list(documents.commands_of(block_of(text)))
    loop = sorted(found[:2], key=lambda command: command.words)
    assert [command.words for command in loop] == [
        ("main.py", "--groups=1,2|3", "--id_worker=1"),
        ("main.py", "--groups=1,2|3", "--id_worker=2"),
    ]
    assert found[2].words == ("-m", "bench", "two words")
    assert found[2].variables == {"THINWIRE_TOKEN": documents.TOKEN, "TF_CONFIG": '{"a": 1}'}


@pytest.mark.parametrize(
    "text",
    [
        "python main.py --no_such_flag=1",
        "python main.py --compression_rate=0",
        "python main.py --method=asgd --groups='1,2|3,4'",
        "python main.py --type_node=PS --ip_PS=0.0.0.0",
        "python main.py --type_node=Worker --hosts_file=hosts",
        "python main.py --model=examples/no_such.py",
        "python examples/server.py --metod=dgs",
        "python examples/no_such.py",
        "python -m bench.studies.accuracy --study nothing",
        "python -m thinwire.tools.esync.figures --out DIR",
        "make no-such-target",
        "bench/transport/netns.sh train --no_such_flag",
        "a_tool_of_nobody --help",
        "thinwire serve",
        "thinwire ps --no_such_flag=1",
        "thinwire report",
    ],
)
def test_commands_that_would_not_start_are_seen(at_home, text):
    (command,) = documents.commands_of(block_of(text))
    assert complaint(command, at_home)


def complaint(command, patch):
    """Return the problem of a command; an empty text if the command is valid."""
    if command.program == "thinwire" and command.words[0] not in COMMANDS:
        return f"thinwire has no command {command.words[0]}"
    # The reader's file of policies brings the flags; tests/test_adding_a_policy.py starts these.
    if any(word.startswith("--policy=") for word in command.words):
        return ""
    words = [AT_THE_READERS.get(word, word) for word in command.python_words]
    words = [word for word in words if word is not None]
    try:
        if command.program in ("python", "thinwire"):
            return _of_python(words, command.variables, patch)
        if command.program == "make":
            unknown = {word for word in words if "=" not in word} - make_targets()
            return f"make knows no {unknown}" if unknown else None
        if command.program == "bench/transport/netns.sh":
            return _of_main(words[1:], {}) if words[0] == "train" else None
    except (ConfigurationError, flags.Error, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None if command.program in FOREIGN else "no test knows this program"


def _of_python(words, variables, patch):
    if words[0] == "-m":
        return module_parses(words[1], words[2:], patch)
    if words[:2] == ["main.py", "run"]:
        return _of_run(words[2:])
    if words[0] == "main.py":
        return _of_main(words[1:], variables)
    script = ROOT / words[0]
    if not script.is_file():
        return "no such script"
    if script.name in SCRIPTS:
        read_settings(words[1:], {}, type_node=SCRIPTS[script.name])
    elif words[1:]:
        return "takes no flags that a test knows"
    return None


def _of_run(words):
    """Do what `thinwire run` does before it starts anything."""
    own = list(itertools.takewhile(lambda word: word.startswith("--"), words))
    with given(*launch.SCRIPT_DEFAULTS, *own) as values:
        script_flags.refuse(name for name in values if values[name].present)
        launch.check(runs_script=True)
        read_run()
    script = words[len(own)] if words[len(own) :] else None
    known = script == "train.py" or (script and (ROOT / script).is_file())
    return None if known or values.like or values.help else f"{script} is no script"


def _of_main(words, variables):
    """Do what main.py does before it starts a role."""
    with pytest.MonkeyPatch.context() as patch, given(*words) as values:
        for name, value in variables.items():
            patch.setenv(name, value) if value else patch.delenv(name, raising=False)
        if values.help:
            return None
        tf_config.fill(values, os.environ.get("TF_CONFIG", ""))
        run = read_run()
        if run.type_node == "Cluster":
            launch.check()
        elif run.type_node != "Advisor":
            launch.refuse_elsewhere(run)
        observability.check(run, values)
        node.CHECKS.get(run.type_node, lambda run: None)(run)
    return None


def make_targets():
    return set(re.findall(r"(?m)^([a-z]+):", (ROOT / "Makefile").read_text()))


def module_parses(name, words, patch):
    """Return a module's parser error for the words; an empty text if they are valid."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            run_to_its_parser(name, words, patch)
    except Parsed:
        return None
    except SystemExit:
        return said.getvalue()
    return f"python -m {name} parses nothing"


def run_to_its_parser(name, words, patch):
    """Raise Parsed from a module's main(), with its parser, after it has read any words."""

    def stop(parser, *_):
        if words is not None:
            PARSE(parser, words)
        raise Parsed(parser)

    patch.setattr(argparse.ArgumentParser, "parse_args", stop)
    found = importlib.util.find_spec(name)
    assert found is not None, f"there is no module {name}"
    is_package = found.submodule_search_locations is not None
    module = importlib.import_module(f"{name}.__main__" if is_package else name)
    needs_words = any(
        each.default is each.empty for each in inspect.signature(module.main).parameters.values()
    )
    module.main(*([words or []] if needs_words else []))


# -- flags --------------------------------------------------------------------------------------


def named_flags(text):
    return set(re.findall(r"(?<![\w-])--([a-zA-Z]\w*(?:-\w+)*)", text))


def test_every_flag_is_documented():
    text = "\n".join(page.read_text() for page in documents.pages())
    missing = sorted(set(own_flags()) - named_flags(text) - {"help", "helpfull"})
    assert not missing, f"no page of docs/ names --{', --'.join(missing)}"


def test_every_flag_that_is_named_exists(at_home):
    own = own_flags()
    known = set(own) | {f"no{name}" for name, flag in own.items() if flag.boolean}
    known |= FOREIGN_FLAGS | flags_of_modules(at_home)
    for page in documents.pages():
        unknown = named_flags(without_originals(page.read_text())) - known
        assert not unknown, f"{page.name}: there is no --{', --'.join(sorted(unknown))}"


def without_originals(text):
    """Leave out other programs' flag names: the first cells of those tables."""
    text, _, originals = text.partition("\n## Original flag")
    return text + "\n".join(re.sub(r"^\| .*? \|", "", line) for line in originals.splitlines())


def flags_of_modules(patch):
    """Return the flags of all `python -m` modules that the pages name."""
    named = [*documents.pages(), ROOT / "Makefile"]
    text = "\n".join(page.read_text() for page in named)
    found = set()
    called = re.findall(r"python -m ((?:bench|thinwire|tests)(?:\.\w+)*)", text)
    tools = (module for module, _ in TOOLS.values())
    for name in {*tools, *called} - {"thinwire"}:
        with pytest.raises(Parsed) as caught:
            run_to_its_parser(name, None, patch)
        found |= {
            option.removeprefix("--") for option in caught.value.args[0]._option_string_actions
        }
    return found


# -- links and excerpts ---------------------------------------------------------------------------


def test_links_lead_to_pages_and_headings():
    broken = []
    for page in documents.pages():
        for target in re.findall(r"\]\(([^)\s]+)\)", documents.prose(page)):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            other = (page.parent / path).resolve() if path else page
            if not other.exists() or (anchor and anchor not in documents.anchors(other)):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken, "\n".join(broken)


def test_every_page_is_linked_from_another():
    texts = {page: documents.prose(page) for page in documents.pages()}
    for page in texts:
        name = page.name
        others = [text for other, text in texts.items() if other != page]
        assert name == "README.md" or any(f"{name})" in t or f"{name}#" in t for t in others), name


def test_python_in_the_readme_is_that_of_the_examples():
    code = "".join(path.read_text() for path in (ROOT / "examples").glob("*.py"))
    lines = [
        line.strip()
        for block in documents.blocks()
        if block.page.name == "README.md" and block.language == "python"
        for line in block.text.splitlines()
        if line.strip() and "..." not in line
    ]
    assert [line for line in lines if line.split("  # ")[0] not in code] == []
