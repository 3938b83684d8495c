"""Dividing a script's data among the workers of a run.

`place` describes a worker's place in the run. `data` finds the form of a script's data, and
`arrays`, `datasets` (tf.data), `batches` (PyDataset) or `ray_data` divides that form. `pipeline`
knows the transformations of tf.data. `fit_counts` numbers the calls of `fit`, for seeds.
`randomness` gives each worker different random numbers during `fit`.
"""
