"""Epsilon equals the reference library's value, and is reported by a run."""

import importlib.util
import math

import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian
from dp_accounting.rdp import RdpAccountant

from thinwire.ops.privacy import accountant
from thinwire.ops.privacy.accountant import BLOCK, epsilon, in_words, privacy_block
from thinwire.ops.privacy.central import CentralPrivacy, Privacy
from thinwire.ops.types import ConfigurationError


@pytest.mark.parametrize(("noise", "rounds", "delta"), [(1.0, 1, 1e-5), (1.1, 100, 1e-6)])
def test_epsilon_is_that_of_the_library(noise, rounds, delta):
    direct = RdpAccountant()
    for _ in range(rounds):
        direct.compose(GaussianDpEvent(noise))
    assert epsilon(noise, rounds, delta) == pytest.approx(direct.get_epsilon(delta), rel=1e-12)


@pytest.mark.parametrize(("noise", "rounds"), [(0.5, 10), (1.0, 1), (2.0, 50), (8.0, 1000)])
def test_epsilon_is_at_least_the_exact_one_and_near_it(noise, rounds):
    """This many Gaussian releases equal one with noise / sqrt(rounds), with a known epsilon."""
    exact = get_epsilon_gaussian(noise / math.sqrt(rounds), 1e-5)
    assert exact <= epsilon(noise, rounds, 1e-5) <= 1.12 * exact


def test_before_the_first_round_nothing_is_released():
    assert epsilon(1.0, 0, 1e-5) == 0.0


def test_the_block_of_a_run():
    block = privacy_block(CentralPrivacy(0.5, 2.0), 1e-6, 7)
    assert block == {
        BLOCK: {
            **{"clip": 0.5, "noise": 2.0, "delta": 1e-6, "rounds": 7},
            "epsilon": epsilon(2.0, 7, 1e-6),
        }
    }
    words = in_words(block)
    assert f"epsilon {epsilon(2.0, 7, 1e-6):.4g} at delta 1e-06" in words
    assert "7 rounds" in words


def test_a_clip_alone_promises_nothing():
    block = privacy_block(CentralPrivacy(0.5), 1e-5, 7)
    assert block[BLOCK]["epsilon"] is None
    assert "epsilon" not in in_words(block)


def test_without_privacy_there_is_no_block():
    assert privacy_block(Privacy(), 1e-5, 7) == {}
    assert in_words({}) == ""


def test_a_missing_library_is_named(monkeypatch):
    accountant.check_installed()
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "dp_accounting" else find(name)
    )
    with pytest.raises(ConfigurationError, match=r"pip install 'thinwire\[dp\]'"):
        accountant.check_installed()
