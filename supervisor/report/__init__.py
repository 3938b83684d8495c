"""Reports of finished runs: one self-contained page with pictures, for one run or several runs.

`writer.write_report` and `writer.write_comparison` read summary.json and metrics.jsonl and write
the page. `figures` draws the pictures and `page` makes the HTML. The command line ``python -m
thinwire.supervisor.report`` compares runs. matplotlib is imported when the first picture is drawn,
so the package re-exports nothing.
"""
