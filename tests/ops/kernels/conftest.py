import pytest

from ops import kernels


@pytest.fixture(scope="session", params=["numpy", "tf"])
def bodies(request):
    return kernels.load(request.param)
