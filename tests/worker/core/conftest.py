from tests.frameworks import device, hard_placement

__all__ = ["device", "hard_placement"]
