"""The growth of a process is measured within each of its incarnations."""

from tests.chaos.soak_samples import Sample, growth, sample


def life(mib, files=lambda second: 20, seconds=400):
    return [Sample(t, mib(t), files(t), 9) for t in map(float, range(seconds))]


def test_a_process_that_warms_up_is_flat():
    found = growth("ps-0", life(lambda t: 300 + min(t, 80)), 600)
    assert found.is_flat and found.judged
    assert found.mib_per_hour == 0


def test_a_process_that_grows_is_not():
    found = growth("ps-0", life(lambda t: 300 + t / 4), 600)
    assert not found.is_flat
    assert 890 < found.mib_per_hour < 910


def test_files_that_are_never_closed_are_seen():
    assert not growth("ps-0", life(lambda t: 300, lambda t: 20 + int(t) // 25), 600).is_flat


def test_a_short_life_is_not_judged():
    assert not growth("ps-0", life(lambda t: 300 + t, seconds=100), 600).judged
    assert growth("ps-0", life(lambda t: 300, seconds=10), 600) is None


def test_this_process_can_be_looked_at():
    import os

    seen = sample(os.getpid(), 0.0)
    assert seen.mib > 1 and seen.files > 2 and seen.threads >= 1
    assert sample(1 << 22, 0.0) is None
