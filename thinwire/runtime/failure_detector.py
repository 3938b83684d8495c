"""How long to wait for what is seen again and again, learnt from how it came so far.

Plain calculation on moments and durations that the caller passes in: no clock is read, so the
cores, the simulator and a journal's replay come to the same figures.

Source: mean and mean deviation are Jacobson's ("Congestion Avoidance and Control", SIGCOMM 1988)
as RFC 6298 fixes them for TCP's retransmission timer; what doubles after a false alarm is Karn's
back-off, section 5 there. That beats of life, and not requests, are measured is the accrual
detectors' idea (Hayashibara et al., "The phi accrual failure detector", SRDS 2004); where they
assume a distribution, RFC 6298's four deviations serve here.

Differences: bulk that travels between two beats proves life but is no beat, else a burst of it
would let the next pause look like death; and nothing is suspected within twice the longest silence
that lately proved to be none.
"""

from __future__ import annotations

import dataclasses

_MEAN_GAIN, _DEVIATION_GAIN = 1 / 8, 1 / 4  # alpha and beta of RFC 6298
_DEVIATIONS = 4.0  # K of RFC 6298
_MARGIN = 2.0  # over the longest silence of late
_FORGOTTEN = 7 / 8  # what is left of it, and of an alarm's patience, after each beat
_MOST_PATIENCE = 8.0


@dataclasses.dataclass
class MeanDeviation:
    """Mean and mean deviation of durations, the newest counting most.

    Attributes:
        mean_seconds: SRTT of RFC 6298.
        deviation_seconds: RTTVAR.
        num_samples: How many there were; the figures mean nothing before the first.
    """

    mean_seconds: float = 0.0
    deviation_seconds: float = 0.0
    num_samples: int = 0

    def add(self, seconds: float) -> None:
        """Take in one duration.

        >>> spread = Spread()
        >>> spread.add(2.0)
        >>> spread.add(4.0)
        >>> spread.mean_seconds, spread.deviation_seconds, spread.most_seconds
        (2.25, 1.25, 7.25)
        """
        if not self.num_samples:
            self.mean_seconds, self.deviation_seconds = seconds, seconds / 2
        else:
            error = seconds - self.mean_seconds
            self.deviation_seconds += _DEVIATION_GAIN * (abs(error) - self.deviation_seconds)
            self.mean_seconds += _MEAN_GAIN * error
        self.num_samples += 1

    @property
    def most_seconds(self) -> float:
        """What hardly any duration exceeds: four deviations above the mean."""
        return self.mean_seconds + _DEVIATIONS * self.deviation_seconds


@dataclasses.dataclass
class RtoEstimator:
    """When to give up a peer that sends something every now and then.

    Attributes:
        least_seconds: Silence that never means anything: more than two beats of the peer.
        most_seconds: Silence that always does; also what is waited before anything is known.
        last_arrival_at: Newest sign of life, or beginning.
        beat_at: Newest beat; None before the first one.
        longest_seconds: Longest silence of late that ended.
        patience: Above 1 after alarms that were false.
        beats: Time from beat to beat.
    """

    least_seconds: float
    most_seconds: float
    last_arrival_at: float = 0.0
    beat_at: float | None = None
    longest_seconds: float = 0.0
    patience: float = 1.0
    beats: MeanDeviation = dataclasses.field(default_factory=MeanDeviation)

    def begin(self, now: float) -> None:
        """Begin to wait (again) now; the estimates stay."""
        self.last_arrival_at, self.beat_at = now, None

    def record_arrival(self, now: float) -> None:
        """Record a sign of life that is no beat."""
        self.longest_seconds = max(self.longest_seconds, now - self.last_arrival_at)
        self.last_arrival_at = max(self.last_arrival_at, now)

    def record_beat(self, now: float) -> None:
        """Record a beat."""
        if self.beat_at is not None and now > self.beat_at:
            self.beats.add(now - self.beat_at)
            self.longest_seconds *= _FORGOTTEN
            self.patience = max(1.0, _FORGOTTEN * self.patience)
        self.beat_at = now
        self.record_arrival(now)

    def excuse(self, seconds: float, now: float) -> None:
        """Leave out a time in which nothing could arrive, because this process stood still."""
        self.last_arrival_at = min(now, self.last_arrival_at + seconds)
        if self.beat_at is not None:
            self.beat_at = min(now, self.beat_at + seconds)

    def record_alarm(self) -> None:
        """Record that the peer was given up; if it proves to live, be twice as patient."""
        self.patience = min(_MOST_PATIENCE, 2 * self.patience)

    @property
    def timeout_seconds(self) -> float:
        """Silence after which the peer is to be given up."""
        if not self.beats.num_samples:
            return self.most_seconds
        expected = max(self.beats.most_seconds, _MARGIN * self.longest_seconds)
        return min(self.most_seconds, max(self.least_seconds, self.patience * expected))

    @property
    def deadline(self) -> float:
        """When the peer is to be given up if nothing arrives before."""
        return self.last_arrival_at + self.timeout_seconds


@dataclasses.dataclass
class RetryDeadline:
    """How long to try what may take long or never come about, such as a connection.

    Attributes:
        least_seconds: Of the first attempt, and of any.
        most_seconds: Of any.
        took: Durations of those that succeeded.
        num_failed: Since the last success; each doubles the time of the next attempt.
    """

    least_seconds: float
    most_seconds: float
    took: MeanDeviation = dataclasses.field(default_factory=MeanDeviation)
    num_failed: int = 0

    @property
    def timeout_seconds(self) -> float:
        """Time for the next attempt."""
        expected = self.took.most_seconds if self.took.num_samples else self.least_seconds
        doubled = max(self.least_seconds, expected) * 2.0 ** min(self.num_failed, 32)
        return min(self.most_seconds, doubled)

    def succeed(self, seconds: float) -> None:
        """Record the duration of an attempt that succeeded."""
        self.took.add(seconds)
        self.num_failed = 0

    def fail(self) -> None:
        """Record that an attempt took all its time in vain."""
        self.num_failed += 1


@dataclasses.dataclass
class Backoff:
    """Pauses between attempts: each twice the one before, and drawn so that peers spread.

    Attributes:
        first_seconds: The first pause at most.
        most_seconds: Any pause at most.
        num_pauses: So far.
    """

    first_seconds: float
    most_seconds: float
    num_pauses: int = 0

    def next_seconds(self, draw: float) -> float:
        """Return the next pause.

        Args:
            draw: Uniform in [0, 1): from half of the pause to all of it.
        """
        full = min(self.most_seconds, self.first_seconds * 2.0 ** min(self.num_pauses, 32))
        self.num_pauses += 1
        return full * (0.5 + 0.5 * draw)
