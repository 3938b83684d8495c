"""Lets shards of a few entries relay: in a small model most bytes describe the block."""

import pytest

from thinwire.ops.downlink import relay


@pytest.fixture
def descriptions_cost_nothing(monkeypatch):
    monkeypatch.setattr(relay, "_DESCRIPTION_BYTES", 0)


@pytest.fixture
def small_models_relay(monkeypatch, descriptions_cost_nothing):
    """Keep several rounds as well."""
    monkeypatch.setattr(relay, "_KEPT_BYTES", 4)
