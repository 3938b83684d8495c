"""Runs any Keras script as a worker: `keras` hooks into Keras, `data` divides the script's data.

`session` is a worker without Keras, and `settings` are the flags of the run that a script joins.
`server` starts a PS from a script, and `gradient_sgd` and `adacomp` are for training loops of the
script's own.
"""
