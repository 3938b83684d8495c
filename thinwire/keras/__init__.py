"""Keras scripts as workers: `thinwire.distribute` and what stands behind it.

`distribute` prepares a model, `fit` surrounds Keras' own fit, `session` is the worker behind it
(``model.thinwire``), `step` stands in the place of the compiled optimizer's `apply`, `offers` makes
what a PS learns of the model, `clock` is what schedules are read at here, `fit_barriers` lets all
scripts meet around a fit, `measure` times steps for the Advisor, `checks` refuses what cannot be
right, `forwarding` keeps attributes of earlier versions.
"""
