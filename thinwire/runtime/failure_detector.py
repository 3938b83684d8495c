"""Adaptive timeouts for heartbeats and retries, estimated from measured durations.

The caller passes in every moment and duration, so that the failure detector reads no clock. Without
a clock of its own, the failure detector computes equal timeouts in a live server, the simulator and
the replay of a server's journal.

Source: Mean and mean deviation are Jacobson's ("Congestion Avoidance and Control", SIGCOMM 1988),
with RFC 6298's constants for TCP's retransmission timer. Doubling a timeout after a false alarm
is Karn's back-off (RFC 6298, section 5). Measuring heartbeats instead of requests is
the idea of accrual detectors (Hayashibara et al., "The phi accrual failure detector", SRDS 2004).
Accrual detectors assume a distribution of the intervals; this module uses RFC 6298's four
deviations instead.

Differences: Data that arrives between two heartbeats shows that the peer is alive, but does not
count as a heartbeat. Otherwise a burst of data would shorten the expected interval, and the next
pause would look like a failure. A peer is declared dead only after a silence of at least twice the
longest recent silence that ended with an arrival.
"""

from __future__ import annotations

import dataclasses

_MEAN_GAIN, _DEVIATION_GAIN = 1 / 8, 1 / 4  # weights of a new duration: alpha and beta of RFC 6298
_DEVIATIONS = 4.0  # number of mean deviations in the timeout: K of RFC 6298
_MARGIN = 2.0  # the timeout is at least this multiple of the peer's longest recent silence
#: Factor by which each heartbeat reduces the longest silence and the patience.
_FORGOTTEN = 7 / 8
_MOST_PATIENCE = 8.0  # upper bound of the timeout's factor `patience`


@dataclasses.dataclass
class MeanDeviation:
    """Exponentially weighted mean and mean deviation of durations.

    Attributes:
        mean_seconds: Mean duration, in seconds (SRTT of RFC 6298).
        deviation_seconds: Mean deviation, in seconds (RTTVAR of RFC 6298).
        num_samples: Number of durations that were added. If the number is 0, mean and deviation
            have no meaning.
    """

    mean_seconds: float = 0.0
    deviation_seconds: float = 0.0
    num_samples: int = 0

    def add(self, seconds: float) -> None:
        """Update the mean and the deviation with one measured duration, in seconds.

        >>> spread = MeanDeviation()
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
        """Mean plus four mean deviations of durations, in seconds, which few durations exceed."""
        return self.mean_seconds + _DEVIATIONS * self.deviation_seconds


@dataclasses.dataclass
class RtoEstimator:
    """Adaptive timeout after which a peer that sends heartbeats and other data counts as dead.

    Attributes:
        least_seconds: Lower bound of the timeout, in seconds: more than two heartbeat intervals.
        most_seconds: Upper bound of the timeout, in seconds, which applies until the peer has sent
            two heartbeats.
        last_arrival_at: Moment of the peer's newest message, or of the call of `begin`, in clock
            seconds.
        beat_at: Moment of the peer's newest heartbeat, in clock seconds; None before the first
            heartbeat.
        longest_seconds: Longest recent time between two messages of the peer, in seconds.
        patience: Factor of the timeout: 1 at first, doubled by each false alarm.
        beats: Mean and deviation of the intervals between the peer's heartbeats.
    """

    least_seconds: float
    most_seconds: float
    last_arrival_at: float = 0.0
    beat_at: float | None = None
    longest_seconds: float = 0.0
    patience: float = 1.0
    beats: MeanDeviation = dataclasses.field(default_factory=MeanDeviation)

    def begin(self, now: float) -> None:
        """Start waiting for the peer's messages at moment ``now``, and keep earlier estimates."""
        self.last_arrival_at, self.beat_at = now, None

    def record_arrival(self, now: float) -> None:
        """Record that data other than a heartbeat arrived from the peer at moment ``now``."""
        self.longest_seconds = max(self.longest_seconds, now - self.last_arrival_at)
        self.last_arrival_at = max(self.last_arrival_at, now)

    def record_beat(self, now: float) -> None:
        """Record that a heartbeat of the peer arrived at moment ``now``; update the estimates."""
        if self.beat_at is not None and now > self.beat_at:
            self.beats.add(now - self.beat_at)
            self.longest_seconds *= _FORGOTTEN
            self.patience = max(1.0, _FORGOTTEN * self.patience)
        self.beat_at = now
        self.record_arrival(now)

    def excuse(self, seconds: float, now: float) -> None:
        """Exclude from the peer's silence the time in which this process was suspended."""
        self.last_arrival_at = min(now, self.last_arrival_at + seconds)
        if self.beat_at is not None:
            self.beat_at = min(now, self.beat_at + seconds)

    def record_alarm(self) -> None:
        """Record that the caller declared the peer dead; double the patience, for a false alarm."""
        self.patience = min(_MOST_PATIENCE, 2 * self.patience)

    @property
    def timeout_seconds(self) -> float:
        """Silence of the peer after which the caller must declare the peer dead, in seconds."""
        if not self.beats.num_samples:
            return self.most_seconds
        expected = max(self.beats.most_seconds, _MARGIN * self.longest_seconds)
        return min(self.most_seconds, max(self.least_seconds, self.patience * expected))

    @property
    def deadline(self) -> float:
        """Moment, in clock seconds, at which the caller declares a peer dead if nothing arrives."""
        return self.last_arrival_at + self.timeout_seconds


@dataclasses.dataclass
class RetryDeadline:
    """Adaptive time limit for attempts at an operation that may fail, for example a connection.

    Attributes:
        least_seconds: Time limit of the first attempt, in seconds. The limits of later attempts are
            not lower.
        most_seconds: Upper bound of the time limit of an attempt, in seconds.
        took: Mean and deviation of the durations of successful attempts.
        num_failed: Number of failed attempts since the last success. Each failure doubles the next
            time limit.
    """

    least_seconds: float
    most_seconds: float
    took: MeanDeviation = dataclasses.field(default_factory=MeanDeviation)
    num_failed: int = 0

    @property
    def timeout_seconds(self) -> float:
        """Time limit of the next attempt at the operation, in seconds."""
        expected = self.took.most_seconds if self.took.num_samples else self.least_seconds
        doubled = max(self.least_seconds, expected) * 2.0 ** min(self.num_failed, 32)
        return min(self.most_seconds, doubled)

    def succeed(self, seconds: float) -> None:
        """Record the duration of an attempt at the operation that succeeded."""
        self.took.add(seconds)
        self.num_failed = 0

    def fail(self) -> None:
        """Record that an attempt at the operation exceeded its time limit."""
        self.num_failed += 1


@dataclasses.dataclass
class Backoff:
    """Exponential backoff with jitter, whose pauses between attempts double up to a maximum.

    The jitter spreads the attempts of peers that failed at the same moment.

    Attributes:
        first_seconds: Upper bound of the first pause between attempts, in seconds.
        most_seconds: Upper bound of every pause between attempts, in seconds.
        num_pauses: Number of pauses that `next_seconds` has returned so far.
    """

    first_seconds: float
    most_seconds: float
    num_pauses: int = 0

    def next_seconds(self, draw: float) -> float:
        """Return the length of the next pause between attempts, in seconds.

        Args:
            draw: Uniform random number in [0, 1). 0 gives half of the pause's upper bound.
        """
        full = min(self.most_seconds, self.first_seconds * 2.0 ** min(self.num_pauses, 32))
        self.num_pauses += 1
        return full * (0.5 + 0.5 * draw)
