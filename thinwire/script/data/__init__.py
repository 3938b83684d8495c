"""Sharing a script's data among the workers of a run.

`place` is who shares with how many; `data` finds the form of what a script gives, which `arrays`,
`datasets` (tf.data) and `batches` (PyDataset) then share; `pipeline` knows the transformations of
tf.data; `fit_counts` numbers the fits, for seeds; `randomness` is what each worker draws by itself.
"""
