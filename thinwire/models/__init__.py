"""Networks by name, the user's own model, and the model as one flat vector.

`registry.build_network` builds a network by the name of --network, one module for each family;
`registry.load_user_model` imports the file of --model. `flat_model.SharedModel` shares the model's
W_global variables, `loss.ensure_compiled_loss` gives its loss, `tasks.TASKS` what a model may be
for, with the metrics of `scores`. Keras is imported where it is used,
so that ``--help`` is fast.
"""
