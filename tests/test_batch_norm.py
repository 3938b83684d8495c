"""BatchNorm's moving statistics reach the Supervisor, the saved model and the checkpoint."""

import keras
import numpy as np
import pytest

from thinwire.runtime.persistence.checkpoint import Checkpoints

pytestmark = pytest.mark.timeout(150)

#: Values around 50, spread over 100: with the initial statistics (0 and 1) logits are huge.
MODEL = """
import keras
import numpy as np


def build_model():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.BatchNormalization(momentum=0.8), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((6,)), *layers])


def load_data():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(600, 6)).astype("float32")
    y = (x @ rng.normal(size=(6, 3))).argmax(1).astype("int32")
    x = 50 + 100 * x
    return (x[:480], y[:480]), (x[480:], y[480:])
"""


@pytest.fixture
def flags(tmp_path):
    (tmp_path / "normed.py").write_text(MODEL)
    return (f"--model={tmp_path / 'normed.py'}", "--learning_rate=0.1", "--batch_size=20")


@pytest.mark.product
def test_what_workers_normalise_by_is_what_is_evaluated_and_saved(nodes, flags):
    # Only the first of the two shards holds the statistics.
    nodes.cluster(2, "--method=asgd", "--iter_max=200", *flags, nb_ps=2, supervisor=True)
    for name in nodes.processes:
        assert nodes.wait(name, 120) == 0, nodes.output(name)[-3000:]

    summary = nodes.summary()
    assert summary["test_accuracy"] > 0.9 and summary["test_loss"] < 1, summary
    assert summary["num_parameters"] == 6 * 3 + 3 + 2 * 6
    _, state = Checkpoints.in_folder(nodes.run_dir / "checkpoints" / "ps-0").load_latest()
    mean, variance = np.split(state["core"]["averages"]["mean"], 2)
    np.testing.assert_allclose(mean, 50, atol=30)
    np.testing.assert_allclose(variance, 100**2, rtol=0.5)

    model = keras.models.load_model(nodes.run_dir / "best.keras", compile=False)
    images, labels = load_data()[1]
    accuracy = np.mean(np.asarray(model(images)).argmax(1) == labels)
    assert accuracy == pytest.approx(summary["best_test_accuracy"], abs=1e-6)


def load_data():
    scope: dict = {}
    exec(MODEL, scope)
    return scope["load_data"]()


@pytest.mark.product
def test_statistics_and_local_slots_travel_together(nodes, flags):
    """On the virtual clock: the real cores in one process."""
    nodes.common = (*nodes.common, "--nb_workers=3", "--nb_ps=2", "--method=esync", *flags)
    nodes.start(
        "simulator",
        "--type_node=Simulator",
        "--iter_max=30",
        "--sim_step_seconds=0.1",
        "--slowdown=1,1,4",
        "--local_optimizer=momentum",
        "--local_opt_state=average",
        "--local_lr=0.02",
    )
    assert nodes.wait("simulator", 120) == 0, nodes.output("simulator")[-3000:]
    assert nodes.summary()["test_accuracy"] > 0.9, nodes.summary()


@pytest.mark.product
def test_a_supervisor_warns_where_it_will_not_get_them(nodes, flags):
    nodes.common = (*nodes.common, "--reconnect_timeout_seconds=0.5", "--nobn_sync", *flags)
    nodes.supervisor()
    assert nodes.wait("supervisor") == 3  # there is no PS
    warning = "--nobn_sync: BatchNorm's moving statistics stay on the workers"
    assert nodes.output("supervisor").count(warning) == 1
