"""Runs Keras scripts as workers: `thinwire.distribute` and the modules that implement it.

The module `distribute` prepares a Keras model for a run. The module `fit` patches the `fit` of a
Keras model. The module `session` defines ``model.thinwire``, which makes one model train as a
worker. The object ``model.thinwire`` connects the other modules of this package:

- The module `run_member` holds a model's membership in the run. The module `catching_up` lets a
  restarted script skip the calls of `fit` that its run has completed.
- The module `step` replaces an optimizer's `apply` by a push to the PS and a pull. The module
  `optimizers` holds the replacements of all optimizers of a script. The modules `plan` and `trial`
  find out before the first step which optimizer updates which variables.
- The module `phases` carries out the actions of the model's state machine: it joins the run, and
  starts a new phase of the run when a script's model changes. The module `offers` describes the
  model for the PS. The module `succession` handles several models of one script, trained one after
  the other.
- The module `exchange` pushes to the PS and pulls from it in each step. The module `held_weights`
  finds weights that the script set itself. The module `central` fetches the shards' weights and
  optimizer state for callbacks and saved files.
- The module `fit_lifecycle` handles one call of `fit`. The module `fit_barriers` holds barriers of
  all scripts around a `fit`. The module `train_metrics` merges training metrics over the workers.
  The module `evaluations` gets validation metrics from the Supervisor. The module `own_loop`
  handles a training loop that the script writes itself.

The module `clock` holds the step count at which learning-rate schedules are read, `measure` times
steps for `thinwire advise`, and `checks` rejects invalid models and optimizers.
"""
