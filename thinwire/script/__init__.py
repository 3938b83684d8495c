"""Runs a Keras script as a worker: module `keras` patches Keras, `data` divides the training data.

The module `session` implements the worker for a script that does not use Keras. The module
`settings` reads the flags of the training run that a script joins. The module `server` starts a
parameter server (PS) from a script. The modules `gradient_sgd` and `adacomp` serve scripts with a
training loop that does not use Keras' `fit`.
"""
