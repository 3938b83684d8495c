"""The differences between Keras' backends TensorFlow, JAX and torch in a training step.

The module `base` defines the interface `Backend`; the function `backend` returns the implementation
for the backend that Keras uses in this process. Only the module of a backend imports its framework.
"""
