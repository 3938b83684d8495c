"""Built-in networks, the user's own model, tasks, and the model as one flat vector.

`registry.build_network` builds the network that --network names; each family of networks has a
module. `registry.load_user_model` imports the file that --model names. `flat_model.SharedModel`
holds the model and the W_global variables that it shares. `loss.ensure_compiled_loss` returns a
model's loss. `tasks.TASKS` lists the tasks with their metrics, which `scores` computes. Functions
import Keras only where they use it, so that ``--help`` is fast.
"""
