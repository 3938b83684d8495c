"""Start one node of Thinwire from a checkout: ``python main.py --type_node PS|Worker|Supervisor``.

The command ``thinwire`` of an installation does the same as ``python main.py`` in a checkout. The
command line of main.py is parsed and run by `thinwire.cli`.
"""

from thinwire.cli.commands import run_role

if __name__ == "__main__":
    run_role()
