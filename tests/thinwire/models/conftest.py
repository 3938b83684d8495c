"""Networks that several test files look at, each built once."""

from collections.abc import Callable

import pytest

from tests.thinwire.models.built import Built, build


@pytest.fixture(scope="package")
def network() -> Callable[[str], Built]:
    """Build each network when it is first asked for; tests leave its weights as they were."""
    known: dict[str, Built] = {}

    def once(name: str) -> Built:
        if name not in known:
            known[name] = build(name)
        return known[name]

    return once
