import pytest

from tests.frameworks import PACKAGES, kernels_of, placing
from thinwire.ops.kernels import load_kernels


@pytest.fixture(scope="session", params=["numpy", *PACKAGES])
def bodies(request):
    """Kernels for arrays of the host; those of JAX and torch compute on the device all the same."""
    if request.param == "numpy":
        return load_kernels("numpy")
    kernels = kernels_of(request.param)
    return kernels if request.param == "tf" else placing(kernels)
