"""The command `thinwire`: its subcommands, their help, and its work without TensorFlow."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import given
from tests.light_starts import ends
from tests.missing import without
from thinwire import __version__
from thinwire.cli import commands as cli
from thinwire.cli import help_text, node
from thinwire.ops.options import Option
from thinwire.proto.messages import PROTOCOL_VERSION

ROOT = Path(__file__).resolve().parents[3]
MAIN = str(ROOT / "main.py")
#: Most that help may take, in imports of numpy: 1.8 measured, TensorFlow is above 10.
HELP_OF_NUMPY = 3
OPTIONS = [option for topic in help_text.TOPICS for option in topic.options]
#: Numbers without a dimension are counts, identities or factors, and are documented too.
UNITS = re.compile(
    r"seconds|milliseconds|Mbit/s|bytes|bits|kB|fraction|factor|count|number|port|pixels|updates|"
    r"iterations|epochs|steps|examples|replies|entries|rounds|offences|columns|L2 norm|pushes|"
    r"threads|restarts|class|numbers|change of weights|probability"
)
HEAVY = {"tensorflow", "keras", "numpy", "grpc", "matplotlib", "rich", "prometheus_client"}


def run(*arguments, seconds=60, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds,
        env=os.environ | environment,
        check=False,
    )


#: Command lines for the tests below, all played together.
PLAYED = (
    ("-m", "thinwire", "ps", "--type_node=Worker"),
    ("-m", "thinwire", "ps", "--id_ps=3"),
    (MAIN, "--type_node=PS", "--id_ps=3"),
    (MAIN, "--helpfull"),
    ("-m", "thinwire", "--type_node=PS", "--help"),
    ("-m", "thinwire", "version"),
    ("-m", "thinwire", "--version"),
    ("-m", "thinwire", "help", "ps"),
    ("-m", "thinwire", "help", "suprvisor"),
)
HELPED = {command: ("-m", "thinwire", command, "--help") for command in cli.COMMANDS}
HELPED |= {"main.py": (MAIN, "--help")}
HELPED |= {
    f"main.py --type_node={role}": (MAIN, f"--type_node={role}", "--help") for role in node.ROLES
}


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    return ends([*PLAYED, *HELPED.values()], tmp_path_factory.mktemp("played"))


@pytest.mark.parametrize("arguments", [(), ("help",), ("--help",), ("-h",)])
def test_alone_it_lists_its_commands(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["thinwire", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.run_command()
    assert ended.value.code == 0
    listed = re.findall(r"(?m)^  ([a-z]+) +[a-z]", capsys.readouterr().out)
    assert listed == list(cli.COMMANDS)


@pytest.mark.parametrize(
    ("unknown", "meant"),
    [("suprvisor", "supervisor"), ("PS", "ps"), ("Simulator", "simulate"), ("adviser", "advise")],
)
def test_an_unknown_command_is_refused_with_the_one_that_was_meant(
    unknown, meant, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["thinwire", unknown, "--seed=1"])
    with pytest.raises(SystemExit) as ended:
        cli.run_command()
    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert f"'{unknown}'. Did you mean {meant}?" in error
    assert all(command in error for command in cli.COMMANDS)


def test_what_is_like_no_command_has_no_proposal(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["thinwire", "xyzzy"])
    with pytest.raises(SystemExit):
        cli.run_command()
    assert "Did you mean" not in capsys.readouterr().err


def test_every_role_has_a_command_its_module_and_its_help():
    roles = [role for role, _ in cli.ROLES.values()]
    assert roles == list(node.ROLES) == list(help_text.ROLE_HELP) == list(help_text.ROLES)


def test_a_command_s_role_is_not_another(played):
    done = played["-m", "thinwire", "ps", "--type_node=Worker"]
    assert done.returncode == 1
    assert "--type_node=Worker" in done.stderr and "thinwire ps" in done.stderr


@pytest.mark.parametrize("how", [(MAIN, "--type_node=PS"), ("-m", "thinwire", "ps")])
def test_a_command_and_main_take_the_same_flags(how, played):
    done = played[*how, "--id_ps=3"]
    assert (done.returncode, "--id_ps=3: this run has shards 0..0" in done.stderr) == (2, True)


def test_no_module_of_ours_is_imported_by_a_second_name():
    for name in (*node.ROLES.values(), *(module for module, _ in cli.TOOLS.values())):
        importlib.import_module(name)
    assert not {"data", "ops", "proto", "ps", "supervisor", "worker"} & set(sys.modules)


def test_the_package_is_not_run_by_its_path():
    done = run(str(ROOT / "thinwire"), "version")
    assert done.returncode == 1
    assert "python -m thinwire" in done.stderr


# -- help ---------------------------------------------------------------------------------------


def processor_seconds(*how):
    """Return the processor time of a Python that succeeds; other work makes it longer."""
    before = os.times()
    assert run(*how).returncode == 0
    after = os.times()
    spent = after.children_user + after.children_system
    return spent - before.children_user - before.children_system


@pytest.mark.processes  # its time is measured: nothing else may run
@pytest.mark.parametrize("command", ["run", "main.py"])
def test_help_is_instant(command):
    how = (command,) if command == "main.py" else ("-m", "thinwire", command)
    best = numpy = float("inf")
    for _ in range(8):
        best = min(best, processor_seconds(*how, "--help"))
        numpy = min(numpy, processor_seconds("-c", "import numpy"))
        if best <= HELP_OF_NUMPY * numpy:
            break
    assert best <= HELP_OF_NUMPY * numpy, f"{best:.2f} s at best, numpy's import {numpy:.2f} s"


@pytest.mark.parametrize("command", HELPED)
def test_help_needs_nothing_heavy(command, played):
    done = played[HELPED[command]]
    assert done.returncode == 0 and "thinwire" in done.modules
    assert len(done.stdout) > 100 and done.stderr == ""
    allowed = {"grpc", "numpy"} if command == "certificates" else set()
    assert not done.modules & HEAVY - allowed


def shown(text):
    return re.findall(r"(?m)^  --(\w+) ", text)


@pytest.mark.parametrize("command", list(cli.ROLES))
def test_help_has_the_few_dozen_flags_that_matter_by_topic(command):
    text = help_text.text_of(f"thinwire {command}", cli.ROLES[command][0])
    names = shown(text)
    assert len(set(names)) == len(names)
    assert 20 <= len(names) <= 75
    assert len([line for line in text.splitlines() if re.fullmatch(r"[A-Z].*:", line)]) >= 5
    assert f"thinwire {command} --helpfull shows all {len(OPTIONS)} flags" in text
    advanced = {option.name for option in OPTIONS if option.is_advanced}
    assert not advanced & set(names)


@pytest.mark.parametrize(
    ("command", "has", "lacks"),
    [
        ("ps", {"id_ps", "journal", "method", "tls_cert"}, {"id_worker", "link_mbps", "launcher"}),
        ("worker", {"id_worker", "link_mbps", "batch_size"}, {"id_ps", "journal", "hosts_file"}),
        ("supervisor", {"eval_interval_seconds"}, {"id_ps", "id_worker", "link_mbps"}),
        ("cluster", {"hosts_file", "nb_workers", "link_mbps"}, {"id_ps", "id_worker"}),
        ("standalone", {"learning_rate", "model"}, {"ip_PS", "groups", "tls_cert", "launcher"}),
        ("simulate", {"sim_failures", "link_mbps"}, {"tls_cert", "ip_PS", "launcher", "insecure"}),
        ("advise", {"probe_seconds", "hosts_file"}, {"id_worker", "sim_failures"}),
    ],
)
def test_help_has_what_matters_to_the_command_alone(command, has, lacks):
    names = set(shown(help_text.text_of("thinwire", cli.ROLES[command][0])))
    assert has <= names
    assert not lacks & names


def test_helpfull_has_every_flag_and_main_s_help_no_advanced_one(played):
    done = played[MAIN, "--helpfull"]
    assert (done.returncode, shown(done.stdout)) == (0, [option.name for option in OPTIONS])
    common = [option.name for option in OPTIONS if not option.is_advanced]
    text = played[HELPED["main.py"]].stdout
    assert shown(text) == common
    assert "--type_node" in text
    assert played["-m", "thinwire", "--type_node=PS", "--help"].stdout == help_text.text_of(
        str(ROOT / "thinwire" / "__main__.py"), "PS"
    )


def test_what_a_role_s_help_leaves_out_exists():
    for role in help_text.ROLE_HELP.values():
        names = {option.name for topic in role.topics for option in topic.options}
        assert not set(role.without) - {option.name for option in OPTIONS}
        assert names & set(role.without) or not role.without


def test_lists_of_choices_break_between_two_choices(monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    words = set(re.split(r"[\s|]+", help_text.text_of("thinwire", None, full=True)))
    for option in OPTIONS:
        wanted = re.split(r"[\s|]+", f"{option.text} [{option.values_and_default}]")
        assert {word for word in wanted if len(word) < 38} <= words, option.name


@pytest.mark.parametrize("command", list(cli.TOOLS))
def test_every_flag_of_a_tool_names_its_unit_and_its_default(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as end:
        importlib.import_module(cli.TOOLS[command][0]).main(["--help"])
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if line.startswith("  --")]
    assert end.value.code == 0 and bool(lines) == (command != "version")
    for line in lines:
        assert re.search(r" [A-Z].*\. \[.+; (default .+|no default)\]$", line), line
    assert "``" not in text and "import" not in text


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_flag_names_its_unit_and_its_default(option: Option):
    assert len(option.text.split()) >= 2 and option.text.rstrip().endswith((".", ".)"))
    assert "\n" not in option.text and len(option.text) <= 300
    if option.kind in ("integer", "number"):
        assert UNITS.search(option.unit), f"--{option.name} has no unit: {option.unit!r}"
    if option.kind in ("text", "list"):
        assert option.unit, f"--{option.name}: what does it take?"
    if option.default in (None, ""):
        assert option.unset, f"--{option.name}: what holds if it is not given?"
    assert re.search(r"; default \S", option.values_and_default)
    for suffix, unit in (("_seconds", "seconds"), ("_ms", "milliseconds"), ("_mbps", "Mbit/s")):
        if option.name.endswith(suffix):
            assert unit in option.unit, option.name


def test_the_flags_are_those_of_the_tables():
    with given() as values:
        assert {option.name for option in OPTIONS} <= set(values)


# -- without TensorFlow -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def without_tensorflow(tmp_path_factory):
    return without(tmp_path_factory.mktemp("without"), "tensorflow")


TOOLS_ALONE = (
    ("version",),
    ("certificates", "--out=certs"),
    ("report", "."),
    ("health", "127.0.0.1:1", "--seconds=1"),
)


@pytest.fixture(scope="module")
def played_without_tensorflow(without_tensorflow, tmp_path_factory):
    """Return the ends by the words that follow `thinwire`."""
    lines = [("-m", "thinwire", *words) for words in TOOLS_ALONE]
    lines += [("-m", "thinwire", command, "--run_dir=run") for command in cli.ROLES]
    found = ends(lines, tmp_path_factory.mktemp("played"), **without_tensorflow)
    return {words[2:]: end for words, end in found.items()}


@pytest.mark.parametrize("command", list(cli.ROLES))
def test_a_role_without_tensorflow_names_the_extras(command, played_without_tensorflow):
    done = played_without_tensorflow[command, "--run_dir=run"]
    assert done.returncode == 2, done.stderr
    assert "pip install 'thinwire[cpu]'" in done.stderr and "thinwire[gpu]" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (done.folder / "run").exists()


def test_a_script_without_tensorflow_is_pointed_to_the_extras(without_tensorflow):
    done = run("-c", "import thinwire; thinwire.distribute(None)", **without_tensorflow)
    assert "thinwire[cpu]" in done.stderr.splitlines()[-1]


def test_tools_do_without_tensorflow(played_without_tensorflow):
    version, made, missing, health = (played_without_tensorflow[words] for words in TOOLS_ALONE)
    assert "not installed" in version.stdout
    assert made.returncode == 0
    assert (made.folder / "certs" / "worker-4.crt").exists()
    assert (missing.returncode, "summary.json" in missing.stderr) == (2, True)
    assert health.returncode == 3


def test_version_names_what_matters(played):
    done = played["-m", "thinwire", "version"]
    rows = dict(line.split(None, 1) for line in done.stdout.splitlines())
    assert rows["thinwire"].startswith(f"{__version__} (checkout in {ROOT})")
    assert f"wire protocol           {PROTOCOL_VERSION}" in done.stdout
    for name in ("python", "platform", "processors", "tensorflow", "keras", "numpy", "grpcio"):
        assert rows[name][0].isalnum(), name
    assert {"protobuf", "ray", "cryptography", "ml_dtypes"} <= rows.keys()


# -- short forms --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("short", "whole"), [(("--version",), ("version",)), (("help", "ps"), ("ps", "--help"))]
)
def test_short_forms(short, whole, played):
    done = played["-m", "thinwire", *short]
    assert done.returncode == 0
    assert done.stdout == played["-m", "thinwire", *whole].stdout


def test_help_on_what_is_no_command_names_the_commands(played):
    done = played["-m", "thinwire", "help", "suprvisor"]
    assert done.returncode == 1 and "Did you mean supervisor?" in done.stderr
