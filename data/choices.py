"""The legal values of flags about data; imports nothing, so that ``--help`` is fast."""

#: Of images, and of text, for models of tokens.
IMAGES = (
    "fashion_mnist_sample",
    "fashion_mnist",
    "mnist",
    "cifar10",
    "imagenet",
    "imagenet_synthetic",
    "synthetic",
)
TEXTS = ("stdlib",)
DATASETS = (*IMAGES, *TEXTS)
#: Tokens of a sequence of text.
CONTEXT = 64
#: Those whose images are in memory, as they are.
IN_MEMORY_IMAGES = tuple(name for name in IMAGES if not name.startswith("imagenet"))
SCALINGS = ("standardize", "unit", "cifar10", "imagenet")
AUGMENTATIONS = ("none", "crop_flip", "resized_crop_flip")
PARTITIONS = ("iid", "contiguous", "class", "dirichlet", "file", "positions")
#: Those of them that need a class of each example.
BY_CLASS = ("class", "dirichlet")
PARTS = ("train", "test")
#: --batch: of scripts, whose the batch size is: the whole run's, or each worker's.
BATCHES = ("global", "worker")
#: --shard: of scripts, whether the workers share what each of them gives to `fit`.
SHARDS = ("auto", "off")
