"""Input pipeline: turns stored images into mini-batches, in an order that can be resumed.

`cursor` orders the examples of a shard in each epoch. `lazy` scales and augments images in memory.
`decode` decodes image files with tf.data ahead of training. Random numbers depend only on the seed
and on the number of examples used before, so a resumed run trains on the same pixels.
"""
