"""What holds for every test: quiet TensorFlow, no GPU, repeatable random examples."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

from hypothesis import settings  # TensorFlow reads the environment at import

settings.register_profile("house", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("house")
