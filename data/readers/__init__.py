"""Readers of stored data sets, one module per format; every reader checks its data.

The module `idx` reads MNIST's format, `cifar10` the binary version of CIFAR-10, `adacomp` a layout
of 1,200 files of training images, `imagenet` folders of images or (with `tfrecords`) TFRecords.
`source_text` reads text. The module `synthetic` generates examples without files.
The module `thinwire.data.sources` finds the files of data sets, and `thinwire.data.registry`
defines the names of the data sets.
"""
