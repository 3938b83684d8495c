"""Built-in networks, the user's own model, tasks, and the model's weights as a flat vector.

`registry.build_network` builds the network that --network names. Each family of networks (for
example ResNet) has its own module. `registry.load_user_model` imports the file that --model names.
`flat_model.SharedModel` holds a Keras model and W_global, the variables that workers share.
`loss.ensure_compiled_loss` returns the loss with which a model is trained. `tasks.TASKS` lists the
training tasks with their metrics, which `scores` computes. Functions of the package `models` import
Keras only where they use it, so that ``--help`` is fast.
"""
