"""Fixtures for tests with arrays on a device; the device is the processor."""

import pytest

from tests.frameworks import device, hard_placement, kernels_of, record_copies

__all__ = ["device", "hard_placement"]


@pytest.fixture
def copied(request, monkeypatch):
    """Bytes of every copy of a tensor to the host, on the test's `device` or on TensorFlow."""
    has_device = "device" in request.fixturenames
    kernels = request.getfixturevalue("device") if has_device else kernels_of("tf")
    return record_copies(monkeypatch, kernels)
