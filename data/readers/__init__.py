"""Readers of stored data sets, one module for each format; they check whatever they read.

`idx` (MNIST's format), `cifar10` (its binary version), `adacomp` (1,200 files of training images)
and `imagenet` (folders, or TFRecords by `tfrecords`) read files; `synthetic` generates images
without any. They know formats only: where files lie is in `thinwire.data.sources`, the names of
sets are in `thinwire.data.registry`.
"""
