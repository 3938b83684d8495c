"""What a shard does for Keras scripts: it takes their model, and lets their calls of `fit` meet.

`offering` receives a script's model and `initial_model` builds the shard's state from it.
`barriers` let all scripts wait for each other, `phases` replaces the model where a script compiles
another one, and `evaluations` and `run_control` serve the script that evaluates and the end of a
run.
"""
