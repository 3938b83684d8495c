"""Division of a script's training data among the workers of a run.

The module `place` holds a worker's id and the rules by which workers divide data. The module `data`
finds the type of a script's data; `arrays`, `datasets` (tf.data), `batches` (PyDataset) and
`ray_data` each divide data of one type. The module `pipeline` describes the transformations of
tf.data. The module `fit_counts` numbers a script's calls of `fit`, for the seeds of shuffles. The
module `randomness` gives each worker different random numbers in `fit`.
"""
