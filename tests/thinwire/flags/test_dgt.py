"""DGT's flags reach the policy and the transport; the original's environment variables."""

import dataclasses
import logging
import pathlib
import re

import pytest
from absl import flags

from tests.command_line import given
from thinwire.flags import dgt
from thinwire.flags.method import ROUTER
from thinwire.flags.run import read_run
from thinwire.ops.routing.base import Transport
from thinwire.ops.routing.dgt import Dgt
from thinwire.ops.routing.dgt_choices import DgtChoices
from thinwire.ops.types import ConfigurationError

ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in (*dgt.VARIABLES, *dgt.NOT_READ):
        monkeypatch.delenv(name, raising=False)


def run_of(*arguments):
    with given("--method=dgt", *arguments):
        return read_run()


def test_every_flag_has_its_field_and_the_field_s_default():
    fields = {
        field.name: field.default
        for settings in (DgtChoices, Transport)
        for field in dataclasses.fields(settings)
    }
    assert {option.name: option.default for option in ROUTER.options} == fields
    run = run_of()
    assert (run.method.router, run.transport) == (Dgt(), Transport())


def test_flags_reach_policy_and_transport():
    run = run_of(
        "--dgt_k=0.5",
        "--dgt_adaptive_k=1",
        "--dgt_random=fixed",
        "--dgt_low_bits=8",
        "--nodgt_clear_zero",
        "--dgt_mtu=1452",
        "--dgt_dscp=compact",
    )
    assert run.method.router == Dgt(
        dgt_k=0.5, dgt_adaptive_k=True, dgt_random="fixed", dgt_low_bits=8, dgt_clear_zero=False
    )
    assert run.transport == Transport(dgt_mtu=1452, dgt_dscp="compact")


@pytest.mark.parametrize(
    "bad",
    [
        "dgt_channels=8",
        "dgt_k=1.5",
        "dgt_k=nan",
        "dgt_block_size=6",
        "dgt_low_bits=5",
        "dgt_random=2",
        "dgt_mtu=100",
        "dgt_drop_rate=2",
        "dgt_reception=both",
    ],
)
def test_illegal_values_end_before_anything_is_read(bad):
    with pytest.raises(flags.Error, match=bad.partition("=")[0]):
        run_of(f"--{bad}")


@pytest.mark.parametrize("setting", ["dgt_k=0.5", "dgt_mtu=1452", "dgt_info=true"])
def test_settings_of_another_router_are_refused(setting):
    with (
        given("--method=bsp", f"--{setting}"),
        pytest.raises(ConfigurationError, match=f"--{setting.partition('=')[0]}=.*--router=dgt"),
    ):
        read_run()


# -- variables of the original ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("DMLC_UDP_CHANNEL_NUM", "7", "dgt_channels", 7),
        ("DMLC_K", "0.5", "dgt_k", 0.5),
        ("DMLC_K_MIN", "0.1", "dgt_k_min", 0.1),
        ("ADAPTIVE_K_FLAG", "1", "dgt_adaptive_k", True),
        ("DGT_ENABLE_BLOCK", "0", "dgt_enable_block", False),
        ("DGT_BLOCK_SIZE", "8192", "dgt_block_size", 8192),
        ("DGT_CONTRI_ALPHA", "0.9", "dgt_alpha", 0.9),
        ("DGT_CONTRIBUTION_ALPHA", "0.9", "dgt_alpha", 0.9),
        ("DGT_RECONSTRUCT", "0", "dgt_reception", "drop"),
        ("DGT_ENABLE_SEND_DROP", "1", "dgt_send_drop", True),
        ("DGT_SET_RANDOM", "1", "dgt_random", "1"),
        ("CLEAR_ZERO", "0", "dgt_clear_zero", False),
        ("DGT_INFO", "1", "dgt_info", True),
        ("PS_DROP_MSG", "5", "dgt_drop_rate", 0.05),
        ("ENABLE_DGT", "2", "dgt_transport", "grpc"),
    ],
)
def test_a_variable_speaks_where_its_flag_is_not_given(
    variable, text, name, value, monkeypatch, caplog
):
    monkeypatch.setenv(variable, text)
    with caplog.at_level(logging.INFO, logger="absl"):
        run = run_of()
    found = vars(run.method.router) | vars(run.transport)
    assert found[name] == value
    assert found == vars(Dgt()) | vars(Transport()) | {name: value}
    assert re.search(f"--{name}={value}\\b.* {variable}={text}", caplog.text)


def test_every_variable_is_documented():
    text = (ROOT / "docs" / "guide/methods.md").read_text()
    for variable in (*dgt.VARIABLES, *dgt.NOT_READ):
        assert f"`{variable}`" in text, variable


def test_a_flag_beats_a_variable(monkeypatch, caplog):
    monkeypatch.setenv("DMLC_K", "0.5")
    with caplog.at_level(logging.INFO, logger="absl"):
        assert run_of("--dgt_k=0.8").method.router.dgt_k == 0.8
    assert re.search(r"--dgt_k=0\.8 .* DMLC_K=0\.5", caplog.text)


def test_what_a_variable_said_is_handed_on_like_a_flag(monkeypatch):
    monkeypatch.setenv("ENABLE_DGT", "3")
    with given("--method=dgt") as values:
        read_run()
        named = [
            name for name in ("dgt_transport", "dgt_low_bits", "dgt_k") if values[name].present
        ]
        assert named == ["dgt_transport", "dgt_low_bits"]
        assert "--dgt_low_bits=4" in values.flags_into_string()


def test_variables_are_not_read_for_another_router(monkeypatch, caplog):
    monkeypatch.setenv("DMLC_K", "nonsense")
    monkeypatch.setenv("SUDO_PASSWD", "secret")
    with caplog.at_level(logging.INFO, logger="absl"), given("--method=bsp"):
        read_run()
    assert "DMLC_K" not in caplog.text and "SUDO_PASSWD" not in caplog.text


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("DMLC_K", "much"),
        ("DMLC_K", "2"),
        ("ADAPTIVE_K_FLAG", "yes"),
        ("DGT_BLOCK_SIZE", "0"),
        ("DGT_BLOCK_SIZE", "6"),
        ("PS_DROP_MSG", "some"),
        ("ENABLE_DGT", "4"),
    ],
)
def test_a_bad_variable_is_named(variable, text, monkeypatch):
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigurationError, match=f"{variable}='{text}'.*unset it"):
        run_of()


@pytest.mark.parametrize("variable", dgt.NOT_READ)
def test_what_means_nothing_here_is_told_and_its_value_is_not(variable, monkeypatch, caplog):
    monkeypatch.setenv(variable, "secret-5")
    with caplog.at_level(logging.INFO, logger="absl"):
        assert run_of().method.router == Dgt()
    assert f"variable {variable} is not read;" in caplog.text and "secret" not in caplog.text


def test_the_switch_of_the_original_does_not_choose_the_router(monkeypatch, caplog):
    monkeypatch.setenv("ENABLE_DGT", "0")
    with caplog.at_level(logging.INFO, logger="absl"):
        assert run_of().method.router == Dgt()
    assert "ENABLE_DGT=0 has no effect" in caplog.text
