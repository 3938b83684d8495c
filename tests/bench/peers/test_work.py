"""The peers' workload: one model in every data layout, progress lines, processes."""

import dataclasses
import json
import subprocess
import sysconfig

import numpy as np
import pytest

from bench.peers import decoder_work, evaluating, wide_work, work
from bench.peers.contenders import CONTENDERS, ENVIRONMENTS, OURS, ROOT, over_emulated_link
from bench.peers.lab import SERVER, Lab, Place, worker
from tests.command_line import run_of
from thinwire.script.settings import read_settings

TORCH = ENVIRONMENTS / "torch" / "bin" / "python"
TEXT = sysconfig.get_path("stdlib")


def task(tmp_path, **more):
    return work.Work(10.0, 0, 2, 64, 0.03, 0.9, 1, folder=str(tmp_path), **more)


def lab():
    names = [SERVER, worker(0), worker(1)]
    places = {n: Place(("in", n), f"10.0.0.{k}", "way0") for k, n in enumerate(names)}
    return Lab(places, range(7000, 7004))


def test_weights_are_glorot_uniform_and_the_same_for_all():
    flat = work.initial(1)
    assert flat.shape == (1_199_882,) and flat.dtype == np.float32
    np.testing.assert_array_equal(flat, work.initial(1))
    first, bias, *_ = work.unflatten(flat)
    limit = (6 / (9 * (1 + 32))) ** 0.5
    assert not bias.any() and 0.95 * limit < abs(first).max() <= limit


def test_channels_first_is_the_same_model():
    flat = np.arange(work.NUM_PARAMETERS, dtype=np.float32)
    ours, theirs = work.unflatten(flat), work.to_channels_first(flat)
    assert theirs[0].shape == (32, 1, 3, 3) and theirs[2].shape == (64, 32, 3, 3)
    assert theirs[2][5, 7, 1, 2] == ours[2][1, 2, 7, 5]
    # Row 3, column 4, channel 6 of 12 x 12 x 64 inputs, to unit 9.
    assert theirs[4][9, 6 * 144 + 3 * 12 + 4] == ours[4][(3 * 12 + 4) * 64 + 6, 9]
    assert theirs[6][2, 100] == ours[6][100, 2]
    np.testing.assert_array_equal(work.from_channels_first(theirs), flat)


def test_the_decoder_has_the_shape_of_the_built_in_one():
    keras = pytest.importorskip("keras")
    del keras
    from bench.peers.thinwire_decoder import build_model

    model = build_model()
    assert [weights.shape for weights in model.weights] == [s for _, s in decoder_work.TENSORS]
    assert model.count_params() == decoder_work.NUM_PARAMETERS == 867_328
    flat = work.flatten(model.get_weights())
    np.testing.assert_array_equal(flat, decoder_work.initial(1))
    assert abs(flat).max() == 1.0 and 0.019 < flat[: 256 * 128].std() < 0.021


def test_outputs_first_is_the_same_decoder():
    flat = np.arange(decoder_work.NUM_PARAMETERS, dtype=np.float32)
    names = [name for name, _ in decoder_work.TENSORS]
    ours = dict(zip(names, work.unflatten(flat, decoder_work.TENSORS), strict=True))
    turned = decoder_work.to_outputs_first(flat)
    theirs = dict(zip(names, turned, strict=True))
    # Input 5 to entry 7 of head 2, and back; torch's Linear has [outputs, inputs].
    assert theirs["block1/query/kernel"][2 * 32 + 7, 5] == ours["block1/query/kernel"][5, 2, 7]
    assert theirs["block1/query/bias"][2 * 32 + 7] == ours["block1/query/bias"][2, 7]
    assert theirs["block1/output/kernel"][5, 2 * 32 + 7] == ours["block1/output/kernel"][2, 7, 5]
    assert theirs["block3/wide/kernel"].shape == (512, 128)
    assert theirs["block3/narrow/kernel"][3, 500] == ours["block3/narrow/kernel"][500, 3]
    assert theirs["logits/kernel"][200, 3] == ours["logits/kernel"][3, 200]
    np.testing.assert_array_equal(decoder_work.from_outputs_first(turned), flat)


TORCH_LOGITS = """
import sys
import numpy, torch
from bench.peers import torch_model, work
task = work.Work(1.0, 0, 2, 16, 1e-3, 0.9, 1, model=sys.argv[3], text=sys.argv[1])
own = torch_model.Trainee(task, 0)
given = torch.from_numpy(numpy.load(sys.argv[2]))
numpy.save(sys.argv[2], own.model.eval()(given).detach().numpy())
assert (own.weights == torch_model.initial(task)).all()
# the order in which a shard of Thinwire has the module
flat = torch.cat([w.detach().flatten() for w in own.model.parameters()]).numpy()
assert (torch_model.TorchLayout(task).to_keras(flat) == own.weights).all()
print(sum(weights.numel() for weights in own.model.parameters()))
"""


@pytest.mark.parametrize("name", [name for name in OURS if name.startswith("thinwire torch")])
def test_a_torch_script_of_ours_is_given_its_place_and_the_peers_options(name, tmp_path):
    wanted = task(tmp_path, model=OURS[name].model)
    nodes = CONTENDERS[name].nodes(wanted, lab())
    assert all(node.command[0] == str(TORCH) for node in nodes)  # an environment without Keras
    scripts = [node.command for node in nodes if "bench.peers.thinwire_torch" in node.command]
    options = work.parser("")
    options.add_argument("--rank", type=int)
    for rank, command in enumerate(scripts):
        known, settings = options.parse_known_args(command[3:])
        own = dataclasses.replace(wanted, momentum=OURS[name].momentum or wanted.momentum)
        assert work.from_arguments(known) == own and known.rank == rank
        found = read_settings(settings, {}, type_node="Worker")
        assert found.run.model_is_offered and found.worker().id_worker == rank + 1
        assert found.run.addresses == ("10.0.0.0:7000",)
        assert found.run.method.overlap == ("overlap" in name)


@pytest.mark.product
@pytest.mark.skipif(not TORCH.exists(), reason="no torch: run bench/peers/setup.sh")
@pytest.mark.parametrize("model", [work.DECODER, work.WIDE, work.MNIST_CNN])
def test_torch_computes_what_keras_does(tmp_path, model):
    from bench.peers import thinwire_decoder, thinwire_model, thinwire_wide

    given = np.random.default_rng(1).normal(size=(2, 28, 28, 1)).astype(np.float32)
    ours, size = {
        work.DECODER: (thinwire_decoder.build_model, decoder_work.NUM_PARAMETERS),
        work.WIDE: (thinwire_wide.build_model, wide_work.NUM_PARAMETERS),
        work.MNIST_CNN: (thinwire_model.build_model, work.NUM_PARAMETERS),
    }[model]
    if model == work.DECODER:
        given = np.arange(128).reshape(2, 64)
    path = tmp_path / "logits.npy"
    np.save(path, given if model != work.MNIST_CNN else given.transpose(0, 3, 1, 2))
    command = [str(TORCH), "-c", TORCH_LOGITS, TEXT, str(path), model]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(found.stdout) == size
    logits = ours().predict_on_batch(given)
    np.testing.assert_allclose(np.load(path), logits, atol=1e-5)


def test_an_untrained_decoder_guesses_among_all_bytes(tmp_path):
    score, path = evaluating.evaluator(work.DECODER, TEXT), tmp_path / "weights.npy"
    flat = decoder_work.initial(1)
    np.save(path, flat)
    assert score(path) == pytest.approx(-np.log(256), abs=0.1)
    flat[7] = np.nan
    np.save(path, flat)
    assert score(path) == -np.inf


@pytest.mark.product
def test_the_wide_perceptron_has_25_million_weights_and_is_the_same_either_way():
    assert wide_work.NUM_PARAMETERS == 24_925_082
    flat = np.arange(wide_work.NUM_PARAMETERS, dtype=np.float32)
    turned = wide_work.to_outputs_first(flat)
    assert [each.shape for each in turned[:2]] == [(4096, 784), (4096,)]
    np.testing.assert_array_equal(wide_work.from_outputs_first(turned), flat)


def test_progress_keeps_snapshots_at_its_interval(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(work.time, "monotonic", lambda: now[0])
    progress = work.PeerProgress(task(tmp_path), "0", snapshots=True)
    over = []
    for steps in range(1, 103):
        over.append(progress.report(steps, lambda: np.ones(3, np.float32)))
        now[0] += 0.1
    lines = [json.loads(line) for line in (tmp_path / "progress-0.jsonl").read_text().splitlines()]
    assert lines[0] == {"time": 100.0, "steps": 1, "snapshot": None}
    times = [line["time"] for line in lines if line["snapshot"]]
    np.testing.assert_allclose(np.diff([100.0, *times]), 2.0, atol=0.11)
    assert len(list(tmp_path.glob("*.npy"))) == len(times) == 5
    assert over.index(True) in (100, 101) and lines[-1]["snapshot"]
    assert len(lines) < 50  # not one for each step


@pytest.mark.parametrize("limit", ["steps", "last"])
def test_progress_ends_by_steps_or_by_word(tmp_path, limit):
    progress = work.PeerProgress(task(tmp_path, steps=3 if limit == "steps" else 0), "0", True)
    weights = lambda: np.zeros(1, np.float32)  # noqa: E731
    assert not progress.report(1, weights) and not progress.report(2, weights)
    assert progress.report(3, weights, last=limit == "last")
    assert (tmp_path / "00000.npy").exists()


def test_the_first_round_is_kept(tmp_path):
    progress = work.PeerProgress(task(tmp_path), "server", snapshots=True)
    assert not progress.report(None, lambda: np.zeros(1, np.float32))
    assert (tmp_path / "00000.npy").exists()


def test_work_survives_the_command_line(tmp_path):
    wanted = task(tmp_path, steps=20, snapshot_seconds=0.5)
    options = work.parser("")
    assert work.from_arguments(options.parse_args(work.to_arguments(wanted))) == wanted


@pytest.mark.parametrize("name", list(CONTENDERS))
def test_every_contender_has_workers_in_their_places_and_one_that_leads(name, tmp_path):
    nodes = CONTENDERS[name].nodes(task(tmp_path), lab())
    assert sum(node.leads for node in nodes) == 1
    places = [node.place for node in nodes]
    assert places.count("worker0") == places.count("worker1") == 1
    alone = name.startswith("torch DDP")
    assert (SERVER in places) != alone  # where torchft and hivemind meet
    assert all("0.03" in " ".join(node.command) for node in nodes if node.place != SERVER)


@pytest.mark.parametrize("name", list(OURS))
def test_flags_of_ours_are_accepted(name):
    trained = work.Work(10.0, 0, 2, 64, 0.03, 0.9, 1, model=OURS[name].model, text=TEXT)
    run_of("--type_node=PS", "--insecure", *OURS[name].shared_flags(trained))


def test_ours_can_emulate_its_link(tmp_path):
    for name in OURS:
        commands = [
            node.command for node in over_emulated_link(name, 10.0).nodes(task(tmp_path), lab())
        ]
        assert sum("--link_mbps=10" in command for command in commands) == 3
    with pytest.raises(KeyError):
        over_emulated_link("torch DDP", 10.0)
