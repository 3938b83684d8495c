"""The Advisor: measures devices and links, predicts compositions of policies, proposes one.

`measure` performs two short real runs on the nodes of the planned run. `predict` simulates
candidates on a virtual clock with the measured links, and chooses the first candidate that is fast
enough. `role` is the process: it writes advice.json (`thinwire.runtime.telemetry.predictions`) and
prints the command to run. The package re-exports nothing, because its modules import TensorFlow.
"""
