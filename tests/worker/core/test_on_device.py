"""Weights, local steps and replies on a device give the same run as on the host.

On TensorFlow, JAX and torch, where they are installed.
"""

import importlib

import numpy as np
import pytest

from tests.frameworks import PACKAGES
from tests.virtual.run import MiniRun
from tests.virtual.toy import KERNELS, method
from thinwire.worker.core.mirror import DeviceMirror

#: Method, and its choices.
METHODS = {
    "asgd": ("asgd", {}),
    "adacomp": ("adacomp", {"compression_rate": 0.2}),
    "dgs": ("dgs", {"compression_rate": 0.2}),
    "relay": ("gd", {"overrides": {"down_codec": "relay"}, "compression_rate": 0.2}),
    "esync": ("esync", {}),
    "momentum": ("esync", {"local_optimizer": "momentum", "local_momentum": 0.5}),
    "averaged": ("esync", {"local_optimizer": "adam", "local_opt_state": "average"}),
    "fedavg": ("fedavg", {"local_steps": 3}),
    "fedprox": ("fedprox", {"local_steps": 3, "prox_mu": 0.1}),
    "diloco": ("diloco", {"local_steps": 3}),
    "sparseloco": ("sparseloco", {"local_steps": 3, "chunk": 8, "chunk_k": 2}),
    "ahead": ("sparseloco", {"local_steps": 3, "chunk": 8, "chunk_k": 2, "error_ahead": 0.3}),
}


#: Methods whose local steps are those of a Keras optimizer.
BY_KERAS = ("momentum", "averaged")


def run_on(device, keeps_weights=True):
    """Return a class of runs of workers with a device's kernels, and shards with numpy's.

    Without `keeps_weights`, the workers' weights are on the host, as in the Simulator and in
    scripts.
    """

    class DeviceRun(MiniRun):
        keeps_on_device = keeps_weights

        def _shard(self, number, initial):
            self.kernels = KERNELS
            shard = super()._shard(number, initial)
            self.kernels = device
            return shard

    return DeviceRun


def placer(device):
    return lambda array: device.joined([array])


def check_backend(device):
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != PACKAGES[device.name]:
        pytest.skip(f"Keras computes the local steps on {keras.backend.backend()}")


def played(kind, chosen, wrap, nb_ps):
    run = kind(chosen, iter_max=12, nb_ps=nb_ps)
    for worker in run.workers.values():
        worker.submitted = wrap
    return run.run()


#: Where the gradients are, and how many shards.
WAYS = {
    *((name, "device", 1 + number % 2) for number, name in enumerate(METHODS)),
    *((name, "host", 1) for name in ("adacomp", "ahead")),
}
#: Methods whose features other methods cover: fedprox, ahead.
LIKE_OTHERS = ("fedavg", "sparseloco")


@pytest.mark.parametrize(
    ("name", "place", "nb_ps"),
    [
        pytest.param(*way, marks=[pytest.mark.product] * (way[0] in LIKE_OTHERS))
        for way in sorted(WAYS)
    ],
)
def test_a_run_is_the_same_bit_for_bit(device, name, place, nb_ps):
    if name in BY_KERAS:
        check_backend(device)
    wrap = placer(device) if place == "device" else np.asarray
    made, choices = METHODS[name]
    chosen = method(made, nb_workers=2, **choices)
    expected = played(MiniRun, chosen, np.asarray, nb_ps)
    found = played(run_on(device), chosen, wrap, nb_ps)
    assert found.shards[0].version == expected.shards[0].version >= 12
    np.testing.assert_array_equal(found.theta, expected.theta)
    for number, worker in found.workers.items():
        assert isinstance(worker.core.weights, type(device.zeros([1])[0]))
        other = expected.workers[number].core
        np.testing.assert_array_equal(np.asarray(worker.core.weights), other.weights)
        np.testing.assert_array_equal(worker.core.base, other.base)


@pytest.mark.parametrize("name", ["dgs", "esync", "ahead"])
def test_weights_of_the_host_go_with_kernels_of_the_device(device, name):
    made, choices = METHODS[name]
    chosen = method(made, nb_workers=2, **choices)
    expected = played(MiniRun, chosen, np.asarray, nb_ps=1)
    found = played(run_on(device, keeps_weights=False), chosen, np.asarray, nb_ps=1)
    assert isinstance(found.workers[1].core.weights, np.ndarray)
    np.testing.assert_array_equal(found.theta, expected.theta)


def test_local_steps_survive_the_process(device):
    check_backend(device)
    chosen = method("esync", nb_workers=2, local_optimizer="momentum", local_momentum=0.5)
    run = played(run_on(device), chosen, placer(device), nb_ps=1)
    core, other = run.workers[1].core, run.workers[2].core
    other.base[:] = core.base
    other._mirror.note(0, 28, None)
    other._mirror.catch_up()
    core.round.step(placer(device)(np.ones(28, np.float32)), 0.1)
    core.round.record(8, 1.0)
    saved = core.save()
    assert isinstance(saved["round"]["weights"], np.ndarray)
    other.restore(saved, core.step)
    other.versions = list(core.versions)
    np.testing.assert_array_equal(np.asarray(other.resume_round()), np.asarray(core.weights))


#: Function that copies arrays to the device.
CONVERSIONS = {
    "tf": ("tensorflow", "convert_to_tensor"),
    "jax": ("thinwire.ops.kernels.jax_ops", "to_device"),
    "torch": ("thinwire.ops.kernels.torch_ops", "to_device"),
}


@pytest.mark.parametrize("parts", [[(0, [3, 5])], [(0, None), (10, [1])], [(90, [2, 2, 3])], []])
def test_a_mirror_copies_what_has_changed(device, parts, monkeypatch):
    model = np.arange(100, dtype=np.float32)
    mirror, moved = DeviceMirror(model, device), []
    module, name = CONVERSIONS[device.name]
    module = importlib.import_module(module)
    convert = getattr(module, name)

    def converted(value, *given, **named):
        moved.append(np.asarray(value).nbytes if isinstance(value, np.ndarray) else 0)
        return convert(value, *given, **named)

    for start, indices in parts:
        model[start : start + 10][slice(None) if indices is None else indices] += 1000.0
        mirror.note(start, 10, None if indices is None else np.array(indices))
    monkeypatch.setattr(module, name, converted)
    mirror.catch_up()
    monkeypatch.undo()
    np.testing.assert_array_equal(np.asarray(mirror.array), model)
    count = sum(10 if indices is None else len(indices) for _, indices in parts)
    # of JAX and torch, positions count too; JAX fills up positions and values to 16 places
    assert sum(moved) <= (4 * count if device.name == "tf" else 8 * max(count, 16 * bool(count)))


def test_a_mirror_of_which_much_has_changed_is_copied_whole(device):
    model = np.zeros(30, np.float32)
    mirror = DeviceMirror(model, device)
    mirror.note(0, 10, None)
    model[20] = 1.0  # a change without a note to the mirror
    mirror.catch_up()
    assert np.asarray(mirror.array)[20] == 1.0
