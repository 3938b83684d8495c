"""The Advisor: measures devices and links, and proposes a composition of training policies.

`measure` performs two short real runs on the nodes of the planned run. `predict` simulates
candidate compositions on a virtual clock with the measured links, and chooses the first candidate
that is fast enough. `role` is the Advisor's process: it writes advice.json
(`thinwire.runtime.telemetry.predictions`) and prints the proposed command line. The package
re-exports nothing, because its modules import TensorFlow.
"""
