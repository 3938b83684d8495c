"""The part of a shard that serves Keras scripts: takes their model and synchronizes their fits.

`offering` receives a script's model and `initial_model` builds the shard's state from that model.
`barriers` makes all scripts wait for each other. `phases` replaces the shard's model when a script
compiles another model. `evaluations` and `run_control` serve the script that evaluates, and end
the run.
"""
