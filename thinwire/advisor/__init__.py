"""The Advisor: measures devices and links, and proposes a composition of training policies.

The module `measure` performs two short real training runs on the nodes of the planned run. The
module `predict` simulates candidate compositions of policies on a virtual clock with the measured
links, and chooses the first candidate that is fast enough. The module `role` runs the Advisor's
process, which writes advice.json (`thinwire.runtime.telemetry.predictions`) and prints the proposed
command line. The package `advisor` re-exports no names, because its modules import TensorFlow.
"""
