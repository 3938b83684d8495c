"""When a worker pushes: every mini-batch, every H local steps, or when ESync's server decides.

A `Pacer` is consulted after each local step and sees only numbers, so that worker, state server,
Simulator and tests run the same one. A value of --pacer is a row of `PACERS`.
"""

from thinwire.ops.pacing.base import Pacer, PaceReport, QueryingPacer
from thinwire.ops.pacing.registry import PACERS

__all__ = ["PACERS", "PaceReport", "Pacer", "QueryingPacer"]
