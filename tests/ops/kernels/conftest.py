import pytest

from thinwire.ops.kernels import load_kernels


@pytest.fixture(scope="session", params=["numpy", "tf"])
def bodies(request):
    return load_kernels(request.param)
