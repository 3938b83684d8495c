"""From stored images to mini-batches, in an order and with crops that a saved position restores.

`cursor` deals out the positions of a shard, epoch after epoch; `lazy` scales and augments images
that are in memory; `decode` decodes image files by tf.data ahead of the training. Draws depend on
the seed and an example's place in the walk alone, so a resumed run sees the same pixels.
"""
