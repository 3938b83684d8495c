"""Runs plain torch scripts as workers: `thinwire.distribute(optimizer, model=module)`.

The module `distribute` prepares an optimizer of torch for a run, and `optimizers` defines what its
`step` and its other methods then do. The module `session` defines ``optimizer.thinwire``, which
drives the state machine of `thinwire.script.member` and exchanges with the servers. The module
`modules` reads and writes a module's parameters as one vector, `groups` describes an optimizer for
the PS, and `states` moves the optimizer's state between the worker, the PS and checkpoints. No
module of this package imports Keras.
"""
