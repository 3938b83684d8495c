"""From the command line to a Run: defaults, overrides, data, and rejected flags."""

import math
import pathlib

import pytest
from absl import flags

from tests.command_line import given, own_flags, run_of, worker_of
from thinwire.flags.run import read_run
from thinwire.ops.codecs.registry import CODECS
from thinwire.ops.codecs.top_k import TopK
from thinwire.ops.downlink.registry import DOWN_CODECS
from thinwire.ops.methods.method import INTERFACES, METHODS
from thinwire.ops.optimizers.outer import SERVER_OPTIMIZERS
from thinwire.ops.optimizers.server import SCRIPT
from thinwire.ops.pacing.registry import PACERS
from thinwire.ops.routing.registry import ROUTERS
from thinwire.ops.sync.rule import SYNC_RULES, Gsp
from thinwire.ops.types import ConfigurationError
from thinwire.ops.weighting.per_entry import PerEntry
from thinwire.ops.weighting.registry import WEIGHTINGS
from thinwire.worker import flags as worker_flags

REGISTRIES = (
    *(PACERS, CODECS, DOWN_CODECS, ROUTERS),
    *(SYNC_RULES, WEIGHTINGS, (*SERVER_OPTIMIZERS, SCRIPT)),
)


def test_defaults():
    run = run_of()
    assert (run.type_node, run.nb_workers, run.nb_ps, run.seed) == ("Worker", 4, 1, 1)
    assert (run.method.name, run.data.dataset, run.model.network) == (
        *("adacomp", "fashion_mnist_sample"),
        "cnn",
    )
    assert run.method.codec == TopK(compression_rate=0.01)
    assert run.schedule.rate(0.0) == 0.02
    assert run.addresses == ("127.0.0.1:2223",)
    assert run.run_dir == pathlib.Path("runs/adacomp-fashion_mnist_sample")
    assert run_of("--model=examples/own_model.py").run_dir == pathlib.Path("runs/adacomp-own_model")
    assert (run.epochs, run.max_seconds, run.target) == (None, None, None)
    assert not run.overwrite
    own = worker_of()
    assert (own.id_worker, own.clip_norm) == (1, 0.0)


def test_a_worker_s_model_has_no_limit_of_updates_unless_given():
    assert (run_of().iter_max, run_of().model_is_offered) == (100_000, False)
    offered = run_of("--model_from=worker")
    assert (offered.iter_max, offered.model_is_offered) == (None, True)
    assert run_of("--model_from=worker", "--iter_max=7").iter_max == 7
    with pytest.raises(ConfigurationError, match="--network=cnn and --model_from=worker"):
        run_of("--model_from=worker", "--network=cnn")
    for flag in ("--fraction=0.5", "--draws=draws.txt"):
        with pytest.raises(ConfigurationError, match=f"{flag} and --model_from=worker: .* fit"):
            run_of("--model_from=worker", "--method=bsp", flag)


def test_every_flag_says_what_it_is_for():
    for flag in own_flags().values():
        assert len(flag.help) > 5, flag.name


@pytest.mark.parametrize(("interface", "registry"), list(zip(INTERFACES, REGISTRIES, strict=True)))
def test_an_interface_s_flag_offers_what_its_registry_holds(interface, registry):
    with given() as values:
        assert list(values[interface].parser.enum_values) == list(registry)
        assert values[interface].value is None


# -- methods ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_its_row(name):
    row = {key: str(value) for key, value in METHODS[name].items()}
    assert run_of(f"--method={name}").method.choices == row


@pytest.mark.parametrize(("interface", "registry"), list(zip(INTERFACES, REGISTRIES, strict=True)))
def test_an_explicit_flag_overrides_one_interface_alone(interface, registry):
    for value in registry:
        method = run_of("--method=asgd", f"--{interface}={value}").method
        assert method.choices == METHODS["asgd"] | {interface: value}, value


def test_hyper_parameters_reach_the_policy_that_has_them():
    method = run_of(
        "--compression_rate=0.2",
        "--value_dtype=int8",
        "--staleness_window=7",
        "--beyond_window=reject",
        "--momentum=0.5",
        "--weight_decay=0.125",
        "--global_lr=2",
        "--pacer=fixed",
        "--local_steps=3",
        "--sync=gsp",
        "--groups=4,1|3,2",
        "--staleness_bound=5",
        "--server_optimizer=sgd",
    ).method
    assert (method.codec.compression_rate, method.codec.value_dtype) == (0.2, "int8")
    assert method.weighting == PerEntry(7, "reject")
    assert (method.server.momentum, method.server.weight_decay) == (0.5, 0.125)
    assert method.server.global_lr == 2.0
    assert method.pacer.local_steps == 3
    assert method.sync == Gsp(((1, 4), (2, 3)), 5)


def test_defaults_that_depend_on_the_choice():
    assert run_of("--method=ssp").method.sync.bound == 3
    assert run_of("--method=gsp").method.sync == Gsp(((1, 2, 3, 4),))
    assert run_of("--server_optimizer=momentum").method.server.momentum == 0.9
    assert run_of("--server_optimizer=momentum", "--momentum=0").method.server.momentum == 0


def test_groups_from_a_file(tmp_path):
    file = tmp_path / "groups.txt"
    file.write_text("# two fast ones\n1 2\n\n3,4\n")
    run = run_of("--method=gsp", f"--groups_file={file}")
    assert run.method.sync.groups == ((1, 2), (3, 4))
    with pytest.raises(ConfigurationError, match="--groups and --groups_file"):
        run_of("--method=gsp", f"--groups_file={file}", "--groups=1|2|3|4")
    file.write_bytes(b"\xff\xfe1")
    with pytest.raises(ConfigurationError, match="groups.txt"):
        run_of("--method=gsp", f"--groups_file={file}")


# -- refusals -------------------------------------------------------------------------------------


def test_no_number_may_be_nan_or_infinite():
    names = [flag.name for flag in own_flags().values() if flag.flag_type() == "float"]
    assert {"learning_rate", "compression_rate", "momentum", "lease_seconds"} <= set(names)
    for name in names:
        for bad in (math.nan, math.inf, -math.inf):
            with pytest.raises(flags.Error, match=name), given(f"--{name}={bad}"):
                pass


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method=asgd", "--groups=1|2|3|4"], "--groups is for --sync=gsp"),
        (["--method=gsp", "--groups=1,2|3"], "name 3 workers, but --nb_workers=4"),
        (["--method=asgd", "--staleness_bound=1"], "--sync=ssp, gsp, but this run has --sync=asp"),
        (["--partition=file"], "--partition=file"),
        (["--data_sharding_file=f.txt"], "--data_sharding_file"),
        (["--lr_schedule=0.5:x"], "lr_schedule"),
        (["--lr_schedule=1.5:0.1"], "lr_schedule"),
        (["--server_optimizer=adam", "--momentum=0.9"], "--momentum .*--server_optimizer=adam"),
        (["--model=no_such_file.py"], "--model=no_such_file.py"),
        (["--data_dir=no_such_folder"], "--data_dir=no_such_folder"),
    ],
)
def test_choices_that_exclude_each_other(arguments, words):
    with pytest.raises(ConfigurationError, match=words):
        run_of(*arguments)


def test_the_flags_a_node_keeps_repeat_its_run(tmp_path):
    arguments = (
        "--method=gsp",
        "--groups=1,3|2",
        "--nb_workers=3",
        "--link_mbps=1,2,3",
        "--ps_hosts=a:1,b:2",
        "--lr_schedule=0.5:0.1",
        "--overwrite",
        "--epochs=2.5",
        "--down_codec=delta",
        "--id_worker=2",
    )
    file = tmp_path / "flags-worker-2.txt"
    with given(*arguments) as values:
        run, own = read_run(), worker_flags.read(3)
        file.write_text(values.flags_into_string())
    with given(f"--flagfile={file}"):
        assert read_run() == run
        assert worker_flags.read(3) == own


def test_scaling_and_augmentation_are_the_data_sets_own_unless_given():
    assert run_of().data.scaling is None and run_of().data.augment is None
    run = run_of("--dataset=cifar10", "--scaling=unit", "--augment=none")
    assert (run.data.scaling, run.data.augment) == ("unit", "none")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--dataset=imagenet", "--nb_classes=1000"], True),
        (["--dataset=imagenet", "--nb_classes=5"], False),
        (["--dataset=cifar10"], False),
        (["--dataset=cifar10", "--top5"], True),
    ],
)
def test_when_the_best_five_answers_are_told(arguments, expected):
    assert run_of(*arguments).top5 is expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--top5", "--nb_classes=5"], "--top5 and --nb_classes=5"),
        (["--augment=resized_crop_flip"], "not for --dataset=fashion_mnist_sample"),
        (["--dataset=imagenet", "--augment=crop_flip"], "none or resized_crop_flip"),
    ],
)
def test_what_a_data_set_does_not_know_is_refused(arguments, words):
    with pytest.raises(ConfigurationError, match=words):
        run_of(*arguments)
