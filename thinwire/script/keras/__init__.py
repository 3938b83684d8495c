"""Keras scripts as workers: `thinwire.distribute` and what stands behind it.

`distribute` prepares a model, `fit` surrounds Keras' own fit, `session` is the worker behind it
(``model.thinwire``), which puts these together:

- `run_member`: a model's place in the run; `catching_up`: a script that was started again.
- `step` stands in the place of an optimizer's `apply`; `optimizers`: all that do so; `plan` and
  `trial`: what steps, found before the first step.
- `joining` offers the model to the PS and joins; `phases`: when that is done anew; `succession`:
  the models of one script, one after the other.
- `exchange`: what becomes of a step; `held_weights` and `assignments`: weights that the script
  sets itself; `central`: what the shards hold, for callbacks and files.
- `fit_lifecycle`: one call of `fit`; `early_stop`: all end it together; `fit_barriers` lets all
  scripts meet around it; `train_metrics` are merged over them; `evaluations`: by the Supervisor;
  `own_loop`: a loop of the script's own.

`offers` makes what a PS learns of the model, `clock` is what schedules are read at here, `measure`
times steps for the Advisor, `checks` refuses what cannot be right.
"""
