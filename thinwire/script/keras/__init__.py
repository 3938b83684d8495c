"""Keras scripts as workers: `thinwire.distribute` and the modules that implement it.

`distribute` prepares a model. `fit` wraps Keras' own fit. `session` is the worker of a model
(``model.thinwire``) and connects these modules:

- `run_member`: a model's membership in the run. `catching_up`: a script that was restarted.
- `step` replaces an optimizer's `apply`. `optimizers` holds all replaced optimizers. `plan` and
  `trial` find the optimizers and their variables before the first step.
- `joining` offers the model to the PS and joins the run. `phases` starts a new phase when a
  script's model changes. `succession`: several models of one script, trained one after the other.
- `exchange` pushes and pulls in each step. `held_weights` and `assignments` find weights that the
  script set itself. `central` fetches the shards' state for callbacks and files.
- `fit_lifecycle`: one call of `fit`. `early_stop` ends a `fit` in all scripts after the same epoch.
  `fit_barriers`: barriers of all scripts around a `fit`. `train_metrics` merges training metrics
  over the workers. `evaluations`: evaluations by the Supervisor. `own_loop`: a training loop that
  the script writes itself.

`offers` describes the model for the PS, `clock` holds the step count that schedules are read at,
`measure` times steps for the Advisor, and `checks` rejects invalid models and optimizers.
"""
