"""Division of a script's training data among the workers of a run.

The module `place` holds a worker's id and the rules by which workers divide data. The module `data`
finds the type of a script's data; `arrays`, `datasets` (tf.data), `batches` (PyDataset),
`torch_loader` and `torch_batches` (DataLoader) and `ray_data` each divide data of one type. On
every backend of Keras the workers get the same rows: `row_order` orders the rows of arrays,
`array_pipeline` (TensorFlow) and `array_batches` (JAX, PyTorch) gather them, and `passes` numbers
the passes over the data. Only the modules of tf.data import TensorFlow (`array_pipeline`,
`datasets`, `windows`, `by_rows` and `pipeline`, which describes the transformations of tf.data),
and only `torch_loader` and `torch_batches` import PyTorch; each is imported when a script needs it.
The module `fit_counts` numbers a script's calls of `fit`, for the seeds of shuffles. The module
`randomness` gives each worker different random numbers in `fit`, and `common_randomness` gives code
that orders data the same ones.
"""
