"""Legal values of the command-line flags for data, in a module without imports for a fast
``--help``.
"""

#: Names of the data sets of images.
IMAGES = (
    "fashion_mnist_sample",
    "fashion_mnist",
    "mnist",
    "cifar10",
    "imagenet",
    "imagenet_synthetic",
    "synthetic",
)
#: Names of the data sets of text, for models that predict the next token.
TEXTS = ("stdlib",)
DATASETS = (*IMAGES, *TEXTS)
#: Length of a sequence of a text data set, in tokens.
CONTEXT = 64
#: Data sets of images that fit into memory.
IN_MEMORY_IMAGES = tuple(name for name in IMAGES if not name.startswith("imagenet"))
SCALINGS = ("standardize", "unit", "cifar10", "imagenet")
AUGMENTATIONS = ("none", "crop_flip", "resized_crop_flip")
PARTITIONS = ("iid", "contiguous", "class", "dirichlet", "file", "positions")
#: Values of the flag --partition that need the class of each example.
BY_CLASS = ("class", "dirichlet")
PARTS = ("train", "test")
#: Values of the flag --batch: a script's batch size is the size for the whole run, or for each
#: single worker.
BATCHES = ("global", "worker")
#: Values of the flag --shard. "auto": the workers of a script split the data that each worker
#: passes to `fit`. "off": each worker trains on all data that the worker passes to `fit`.
SHARDS = ("auto", "off")
