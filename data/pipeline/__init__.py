"""Input pipeline that turns stored images into mini-batches, and can be resumed at any batch.

The module `cursor` orders the examples of a worker's shard in each epoch. The module `lazy` scales
and augments images in memory. The module `decode` decodes image files with tf.data ahead of
training. The random numbers of an example's augmentation depend only on the seed and on the number
of examples before it, so a resumed run trains on the pixels of an uninterrupted run.
"""
