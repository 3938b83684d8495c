"""Runs any Keras script as a worker: `keras` hooks into Keras, `data` divides the script's data.

`session` is a script's worker without any use of Keras. `settings` reads the flags of the run that
a script joins. `server` starts a PS from a script. `gradient_sgd` and `adacomp` serve scripts with
a training loop that does not use Keras' `fit`.
"""
