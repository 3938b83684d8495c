"""Thinwire's command line: `commands` runs a subcommand, `node` runs one node of a training run."""
