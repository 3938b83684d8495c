"""The start order of `thinwire run`, and files that later processes must not touch."""

import pytest

from tests.thinwire.launcher.commands import Command, commands, toy_script

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

#: Every process clears the files at its top, by several functions. The evaluator does so when the
#: workers reach their first step; a victim is killed, and does so during training.
SCRIPT = """
how, victim, me = sys.argv[1], int(sys.argv[2]), thinwire.worker_id()

def note(*words):
    with open("order.log", "a") as log:
        log.write(" ".join(map(str, words)) + "\\n")

def lines(word):
    return [line for line in open("order.log") if line.startswith(word)]

def wait_for(word, count=1):
    while len(lines(word)) < count:
        threading.Event().wait(0.05)

note("top", me, os.getpid())
if me == 0 and len(lines("top 0")) == 1:
    wait_for("before", 2)
shutil.rmtree("out/tree", ignore_errors=True)
os.makedirs("out/tree", exist_ok=True)
if os.path.exists("out/removed.txt"):
    os.remove("out/removed.txt")
pathlib.Path("out/unlinked.txt").unlink(missing_ok=True)
open("out/opened.txt", "w").close()
note("cleared", me)

model = dense()
optimizer = keras.optimizers.SGD(0.02)

def write():
    for name in ("tree/x.txt", "removed.txt", "unlinked.txt", "opened.txt"):
        with open(f"out/{name}", "w") as file:
            file.write("chief")

class Watch(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        note("step", me)
    def on_epoch_end(self, epoch, logs=None):
        if me == 1 and epoch == 1:
            write()
        if me == victim and epoch == 2 and len(lines(f"top {victim}")) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if me == 1 and victim == 0 and epoch == 2 and len(lines("top 0")) == 1:
            os.kill(int(lines("top 0")[0].split()[2]), signal.SIGKILL)
        if victim >= 0 and epoch == 3:
            wait_for(f"cleared {victim}", 2)

if how == "fit":
    model.compile(optimizer, "mse")
    model = thinwire.distribute(model)
    if me:
        note("before", me)
    model.fit(x, y, batch_size=8, epochs=8, shuffle=False, verbose=0, validation_data=(x, y),
              callbacks=[keras.callbacks.ModelCheckpoint("out/tree/{epoch}.weights.h5",
                                                         save_weights_only=True),
                         keras.callbacks.CSVLogger("out/tree/log.csv"),
                         keras.callbacks.TensorBoard("out/tree/tb"), Watch()])
else:
    optimizer = thinwire.distribute(optimizer, model=model)
    if me:
        note("before", me)
    import tensorflow as tf
    for _ in range(20):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        note("step", me)
    note("after", me)
"""


class Clearing(Command):
    """One `thinwire run` of this file's script."""

    script = toy_script(SCRIPT, rows=32)

    def __init__(self, folder, *arguments):
        super().__init__(folder, "--nb_workers=2", *arguments)

    @property
    def order(self):
        return (self.folder / "order.log").read_text().splitlines()

    def out(self, name):
        return (self.folder / "out" / name).read_text()

    def held_back(self, node):
        """Return the lines about held files in a process's output."""
        shown = (self.folder / "run" / "logs" / f"{node}.out").read_text().splitlines()
        return [line for line in shown if "held back" in line]


@pytest.fixture
def command(tmp_path):
    with commands(Clearing, tmp_path) as start:
        yield start


@pytest.mark.parametrize("method", ["bsp", "asgd"])
@pytest.mark.parametrize("how", ["fit", "loop"])
def test_nobody_trains_before_all_have_come_to_distribute(command, how, method):
    run = command(f"--method={method}", "toy.py", how, "-1")
    assert run.end() == 0, run.output()
    first = next(at for at, line in enumerate(run.order) if line.startswith("step"))
    cleared = sorted(line for line in run.order[:first] if line.startswith("cleared"))
    assert cleared == ["cleared 0", "cleared 1", "cleared 2"]
    if how == "loop":
        after = sorted(line for line in run.order if line.startswith("after"))
        assert after == ["after 1", "after 2"], "the evaluator never passes it"
        assert sum(line.startswith("step") for line in run.order) == 40
        assert "started the evaluator" not in run.output()
        return
    assert "held back" not in run.output()
    check(run)
    assert len(run.out("tree/log.csv").splitlines()) == 1 + 8


def check(run, last=8):
    for name in ("tree/x.txt", "removed.txt", "unlinked.txt", "opened.txt"):
        assert run.out(name) == "chief", name
    names = {path.name for path in (run.folder / "out" / "tree").iterdir()}
    assert {f"{epoch}.weights.h5" for epoch in range(1, last + 1)} | {"tb", "log.csv"} <= names
    assert list((run.folder / "out" / "tree" / "tb").rglob("events*"))


@pytest.mark.product
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_one_that_starts_again_clears_nothing_of_the_chief_s(command, victim):
    run = command("--method=asgd", "--restart_workers=1", "toy.py", "fit", str(victim))
    assert run.end() == 0, run.output()
    assert run.order.count(f"cleared {victim}") == 2
    check(run, last=2 if victim == 1 else 8)  # others may write while the chief is away
    found = run.held_back(f"worker-{victim}" if victim else "evaluator")
    assert len(found) == 1 and "out/tree/" in found[0], found
    epochs = [line.split(",")[0] for line in run.out("tree/log.csv").splitlines()]
    if victim != 1:
        assert epochs == ["epoch", *map(str, range(8))]
    else:
        assert epochs[:3] == ["epoch", "0", "1"] and epochs.count("epoch") == 1
