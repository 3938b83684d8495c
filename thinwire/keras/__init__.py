"""Keras scripts as workers: `thinwire.distribute` and what stands behind it.

`distribute` prepares a model, `fit` surrounds Keras' own fit, `session` is the worker behind it
(``model.thinwire``), `step` stands in the place of the compiled optimizer's `apply`, `checks`
refuses what cannot be right, `forwarding` keeps attributes of earlier versions.
"""
