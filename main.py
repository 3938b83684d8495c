"""Thinwire from a checkout: ``python main.py --type_node PS|Worker|Supervisor|...``.

Installed, the same is the command ``thinwire``; everything is in `thinwire.cli`.
"""

from thinwire.cli.commands import run_role

if __name__ == "__main__":
    run_role()
