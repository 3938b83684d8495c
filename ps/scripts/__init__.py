"""The part of a PS shard that serves Keras scripts: receives their model, synchronizes their fits.

The module `offering` receives the model of a worker's script, and the module `initial_model` builds
the shard's state from that model. The module `barriers` makes the scripts of all workers wait for
each other. The modules `evaluations` and `run_control` serve the evaluator's script, and end the
run when its scripts end.
"""
