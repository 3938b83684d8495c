"""The command line: `commands` chooses a command, `node` runs one node of a run."""
