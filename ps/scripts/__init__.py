"""The part of a shard that serves Keras scripts: receives their model, synchronizes their fits.

`offering` receives the model of a worker's script, and `initial_model` builds the shard's state
from that model. `barriers` makes the scripts of all workers wait for each other. `phases` replaces
the shard's model when a script compiles another model. `evaluations` and `run_control` serve the
script that evaluates, and end the run.
"""
