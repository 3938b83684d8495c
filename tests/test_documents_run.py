"""The commands of README and docs/ run in the order of their pages, with small budgets.

NOT_RUN lists the commands that cannot run in a test, with reasons; `test_documents.py` reads all.
"""

import dataclasses
import os
import signal
import subprocess
import sys

import pytest

from tests import documents
from tests.documents import ROOT
from tests.nodes import free_port
from thinwire.cli.commands import TOOLS

#: Flags added to a command line of main.py: flags given last win.
BUDGET = ("--iter_max=6", "--max_seconds=60", "--worker_threads=1", "--linger_seconds=5")
PATIENCE_SECONDS = 1200  # a machine that does other things first may take them
ALL_IN_ONE = ("--type_node=Cluster", "--type_node=Simulator", "--type_node=Standalone")
BY_HAND = ("--type_node=PS", "--type_node=Worker", "--type_node=Supervisor")
#: Data that may be missing on a machine -> data of the same shapes in the repository.
SHIPPED = {"--dataset=fashion_mnist": "--dataset=fashion_mnist_sample"}
#: Module of `python -m` -> what makes its commands small: words given last win.
SMALL: dict[str, tuple[str, ...]] = {
    "bench.systems.picture": ("--out=picture.svg",),
    "bench.studies.uneven": ("--seconds=3", "--dataset=fashion_mnist_sample", "--methods=ssgd"),
    "thinwire.proto.security.certificates": (),
    "thinwire.tools.esync.figures": (),
    "thinwire.tools.esync.convert": (),
    "tests.chaos.process": ("--kills=1",),
    "tests.chaos.simulated": ("--runs=4",),
    "tests.chaos.simulated_day": ("--hours=12", "--workers=40", "--minutes=30"),
}
#: Values that a reader fills in for words in capitals.
READERS = {"RUN": "runs/first", "ANOTHER_RUN": "runs/own", "DIR": "figures"}
READERS["DIR/NETWORK/MODE"] = "figures/cnn/dgs"
RUNS = ("--run_dir=runs/first", "--run_dir=runs/own")
#: Part of a command -> why it is not run.
NOT_RUN = {
    "--hosts_file": "needs hosts; tests/thinwire/launcher/test_ssh.py has some",
    "--policy=mine.py": "needs the reader's file; tests/test_adding_a_policy.py has some",
    "s3://bucket": "needs a bucket; tests/thinwire/runtime/persistence has a server",
    "--launcher=ray": "needs a cluster; tests/thinwire/launcher/test_ray.py has some",
    "--tls_cert": "leaves its method to the reader; tests/test_secure_processes.py trains so",
    "--ps_hosts=10.0.0.1:2223,10.0.0.9:2224": "needs two hosts; "
    "tests/test_life_and_death_processes.py has two ports",
    "Advisor": "measures for a minute; tests/thinwire/advisor/test_role.py does it",
    "main.py --method=adacomp": "TF_CONFIG names other machines; "
    "tests/thinwire/launcher/test_tf_config.py",
    "python -m bench.": "trains for minutes or hours; tests/bench runs its parts",
    TOOLS["health"][0]: "requests the state of a node elsewhere; "
    "tests/proto/grpc/test_health.py has one",
    "python examples/": "tests/thinwire/test_examples.py",
    "main.py run": "tests/thinwire/launcher/test_run_processes.py and tests/scripts run scripts",
    "manifests": "is for an image of the reader's; tests/thinwire/tools/test_manifests.py",
    "thinwire.tools.status": "needs a run that goes on; tests/thinwire/tools/test_status.py",
    "thinwire.tools.stop": "needs a run that goes on; tests/thinwire/tools/test_stop.py",
    "thinwire.tools.doctor": "names other hosts; tests/thinwire/tools/test_doctor.py",
    "tests.scripts.quality": "takes hours; tests/scripts/test_scripts.py runs some of it",
    "bench/transport/netns.sh": "needs root",
    "pip install": "changes this environment",
    "pytest": "runs tests",
    "tensorboard": "serves until it is stopped",
    "make": "installs, or takes minutes; the maintainers run each",
}


def is_run(command):
    alone = any(word in ALL_IN_ONE for word in command.python_words)
    return is_small(command) or (
        not reason(command)
        and (alone or by_hand(command) or command.python_words[:2] == ("-m", TOOLS["report"][0]))
    )


def is_small(command):
    """Return True if the command runs a module and has its arguments for a small run."""
    return command.python_words[:1] == ("-m",) and command.python_words[1] in SMALL


def by_hand(command):
    page = command.block.page.name
    return page == "cluster.md" and any(word in BY_HAND for word in command.python_words)


def reason(command):
    text = " ".join((command.program, *command.python_words))
    return next((why for part, why in NOT_RUN.items() if part in text), None)


def test_every_command_is_run_or_has_a_reason():
    left = [each.place for each in documents.commands() if not is_run(each) and not reason(each)]
    assert not left, left


def test_every_reason_is_for_a_command():
    texts = [" ".join((each.program, *each.python_words)) for each in documents.commands()]
    needless = [part for part in NOT_RUN if not any(part in text for text in texts)]
    assert not needless, needless


class Checkout:
    """A folder that looks like the checkout, with a separate `runs/`."""

    def __init__(self, folder):
        self.folder = folder
        self.started = []
        for path in ROOT.iterdir():
            if path.name not in ("runs", "build") and not path.name.startswith("."):
                (folder / path.name).symlink_to(path)

    def start(self, command, *more):
        own = ("-m", "thinwire") if command.program == "thinwire" else ()
        words = [*own, *(SHIPPED.get(word, word) for word in command.words)]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": str(ROOT)}
        environment |= {name: text for name, text in command.variables.items() if text}
        with open(self.folder / f"{len(self.started)}.out", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, *words, *more],
                cwd=self.folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append((command, process, log.name))

    def complaints(self, seconds=PATIENCE_SECONDS):
        """Wait for all started commands; return the failure of each failed command."""
        found = []
        for command, process, log in self.started:
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = "no end"
            if code != 0:
                with open(log) as text:
                    found.append(f"{command.place}\n  {code}: {text.read()[-2000:]}")
        return found

    def reap(self):
        for _, process, _ in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def checkout(tmp_path):
    made = Checkout(tmp_path)
    yield made
    made.reap()


@pytest.mark.product
@pytest.mark.timeout(3600)
def test_commands_that_are_whole_runs(checkout):
    for command in documents.commands():
        if is_run(command) and not by_hand(command) and not is_small(command):
            checkout.start(command, *(BUDGET if command.python_words[0] == "main.py" else ()))
            checkout.started[-1][1].wait(PATIENCE_SECONDS)  # pages use the results of earlier lines
    assert len(checkout.started) >= 8
    complaints = checkout.complaints()
    assert not complaints, "\n".join(complaints)


@pytest.mark.product
@pytest.mark.timeout(3600)
def test_commands_of_modules(checkout):
    """With the runs that the commands read: README's first run and the run of the user's model."""
    commands = documents.commands()
    looked_at = [
        each
        for each in commands
        if is_run(each) and each.python_words[0] == "main.py" and each.python_words[-1] in RUNS
    ]
    for command in looked_at:
        checkout.start(command, *BUDGET)
        checkout.started[-1][1].wait(PATIENCE_SECONDS)
    for command in filter(is_small, commands):
        readers = READERS | ({"RUN": "runs/imported"} if "import" in command.python_words else {})
        words = tuple(readers.get(word, word) for word in command.words)
        checkout.start(dataclasses.replace(command, words=words), *SMALL[command.python_words[1]])
        checkout.started[-1][1].wait(PATIENCE_SECONDS)
    complaints = checkout.complaints()
    assert not complaints, "\n".join(complaints)


@pytest.mark.product
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("run", ["ten", "lan"])
def test_nodes_that_are_started_by_hand(checkout, run):
    """Ten workers are two here, and all machines this one."""
    more = (*BUDGET, "--nb_workers=2", f"--port={free_port()}", "--ip_PS=127.0.0.1")
    for command in documents.commands():
        words = command.python_words
        if not by_hand(command) or f"--run_dir=runs/{run}" not in words:
            continue
        number = next((int(w.partition("=")[2]) for w in words if w.startswith("--id_worker")), 0)
        if number <= 2:
            checkout.start(command, *more)
            if (run, number) == ("lan", 1):  # "with --id_worker=2 on the second"
                checkout.start(command, *more, "--id_worker=2")
    assert len(checkout.started) == 4
    complaints = checkout.complaints()
    assert not complaints, "\n".join(complaints)
