"""Division of a script's training data among the workers of a run.

`place` describes a worker's place in the run (its id and the rules of division). `data` finds the
form of a script's data, and `arrays`, `datasets` (tf.data), `batches` (PyDataset) or `ray_data`
divides data of this form. `pipeline` describes the transformations of tf.data. `fit_counts` numbers
the calls of `fit`, for seeds. `randomness` gives each worker different random numbers in `fit`.
"""
