"""Keras scripts as workers: `thinwire.distribute` and the modules that implement it.

The module `distribute` prepares a Keras model for a run. The module `fit` wraps the model's `fit`.
The module `session` defines ``model.thinwire``, the worker of one model. It connects these modules:

- `run_member`: a model's membership in the run. `catching_up`: a restarted script skips the fits
  that its run has completed.
- `step` replaces an optimizer's `apply` by a push and a pull. `optimizers` holds the replacements
  of all optimizers of a script. `plan` and `trial` find out before the first step which optimizer
  steps which variables.
- `joining` offers (describes) the model to the PS and joins the run. `phases` starts a new phase of
  the run when a script's model changes. `succession`: several models of one script, trained one
  after the other.
- `exchange` pushes and pulls in each step. `held_weights` and `assignments` find weights that the
  script set itself. `central` fetches the shards' weights and optimizer state for callbacks and
  saved files.
- `fit_lifecycle`: one call of `fit`. `early_stop` ends a `fit` in all scripts after the same epoch.
  `fit_barriers`: barriers of all scripts around a `fit`. `train_metrics` merges training metrics
  over the workers. `evaluations`: evaluations by the Supervisor. `own_loop`: a training loop that
  the script writes itself.

`offers` describes the model for the PS, `clock` holds the step count that schedules are read at,
`measure` times steps for `thinwire advise`, and `checks` rejects invalid models and optimizers.
"""
