"""Places for unauthenticated clients: which client loses its place if all are taken."""

import pytest

from thinwire.proto.security.fair_places import FairPlaces, address_of


def test_a_newcomer_takes_the_place_of_the_first_of_the_greediest_address():
    places = FairPlaces()
    for number, address in enumerate("ABABB"):
        assert places.take(number, address, float(number), 5) == []
    assert places.take(5, "A", 5.0, 5) == [0], "three have A and B, and A is to blame"
    assert places.take(6, "C", 6.0, 5) == [1], "B has three"
    assert places.holders() == [2, 3, 4, 5, 6]
    assert places.shrink(2) == [2, 3, 5]
    assert len(places) == 2


def test_who_leaves_or_is_late_has_no_place():
    places = FairPlaces()
    for number in range(3):
        places.take(number, "A", float(number), 5)
    assert places.leave(1) and not places.leave(1)
    assert places.overdue(0.0) == [0]
    assert places.holders() == [2]


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("fuzz", "fuzz"),
    ],
)
def test_an_address_stands_for_all_that_its_owner_has(host, expected):
    assert address_of(host) == expected
