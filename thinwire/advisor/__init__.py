"""The Advisor: measures devices and links, predicts compositions, and proposes one.

`measure` runs two short real runs on the nodes in question; `predict` plays candidates on a virtual
clock with the measured links and chooses the first that is fast enough; `role` is the process,
which writes advice.json (`thinwire.runtime.telemetry.predictions`) and prints the command to run.
The modules import TensorFlow, so nothing is re-exported here.
"""
