"""Descriptions of networks for tests, in this process and in another."""

import dataclasses
import hashlib

import keras

from thinwire.models.flat_model import SharedModel, moving_statistics
from thinwire.models.tasks import TASKS
from thinwire.runtime.run.settings import ModelChoice

SEED = 3
#: Height and channels of the images where they are not 28 and 1.
IMAGES = {"resnet18-cifar": (32, 3), "inception-bn-small": (32, 3)}


@dataclasses.dataclass(frozen=True)
class Built:
    """A network; tests that change its weights put them back."""

    shared: SharedModel
    digest: str  # of the initial values

    @property
    def model(self) -> keras.Model:
        return self.shared.model


def build(name: str) -> Built:
    task = next(task for task, row in TASKS.items() if name in row.networks)
    choice = ModelChoice(name, None, *IMAGES.get(name, (28, 1)), nb_classes=10, task=task)
    shared = SharedModel(choice, SEED)
    return Built(shared, _digest(shared.model))


def _digest(model: keras.Model) -> str:
    """Return a checksum of paths and values, dropout's seeds left out."""
    result = hashlib.sha256()
    for variable in [*model.trainable_variables, *moving_statistics(model)]:
        result.update(variable.path.encode())
        result.update(memoryview(variable.numpy()).cast("B"))
    return result.hexdigest()
