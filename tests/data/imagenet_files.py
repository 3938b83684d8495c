"""Small ImageNets in the two layouts; the color of an image identifies the image."""

from pathlib import Path

import numpy as np
import tensorflow as tf

CLASSES = ["n01440764", "n01443537", "n02087394"]
PER_CLASS = {"train": 5, "val": 2}


def colours(part: str) -> np.ndarray:
    """[n, 3] uint8: a distinct color for each image, in order of class and number."""
    count = len(CLASSES) * PER_CLASS[part]
    order = np.arange(count) * 40 % 256
    return np.stack([order, 255 - order, (order * 7 + 30) % 256], axis=1).astype(np.uint8)


def encoded(part: str) -> list[bytes]:
    """Images of varying sizes in one color with a bright left half."""
    images = []
    for number, colour in enumerate(colours(part)):
        height, width = 40 + 3 * (number % 7), 56 - 5 * (number % 4)
        image = np.broadcast_to(colour // 2, (height, width, 3)).copy()
        image[:, : width // 2] += 60
        encode = tf.io.encode_png if number == 3 else tf.io.encode_jpeg  # as in the real set
        images.append(encode(image).numpy())
    return images


def write_folders(root: Path, parts: tuple[str, ...] = ("train", "val")) -> None:
    for part in parts:
        for number, content in enumerate(encoded(part)):
            name = CLASSES[number // PER_CLASS[part]]
            folder = root / part / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}_{number:03d}.JPEG").write_bytes(content)


def example(content: bytes, label: int, **extra: tf.train.Feature) -> bytes:
    """A record as the usual builders write it."""
    features = {
        "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[content])),
        "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
        "image/height": tf.train.Feature(int64_list=tf.train.Int64List(value=[40])),
        "image/object/bbox/xmin": tf.train.Feature(
            float_list=tf.train.FloatList(value=[0.25, 0.5])
        ),
        "image/class/synset": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"n01440764"])),
        "image/filename": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b""])),
    }
    features |= extra
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def write_records(root: Path, first_label: int = 1, num_files: int = 3) -> None:
    """The images of `write_folders` in the same order, cut into files."""
    root.mkdir(parents=True, exist_ok=True)
    for part, name in (("train", "train"), ("val", "validation")):
        records = [
            example(content, first_label + number // PER_CLASS[part])
            for number, content in enumerate(encoded(part))
        ]
        cuts = np.array_split(np.arange(len(records)), num_files)
        for number, chosen in enumerate(cuts):
            path = root / f"{name}-{number:05d}-of-{num_files:05d}"
            with tf.io.TFRecordWriter(str(path)) as writer:
                for index in chosen:
                    writer.write(records[index])
