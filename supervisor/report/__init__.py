"""Reports of finished runs: one self-contained page with pictures, for one run or several runs.

The functions `writer.write_report` and `writer.write_comparison` read summary.json and
metrics.jsonl and write the report page. The module `figures` draws the pictures of a report, and
`page` makes its HTML. The command ``python -m thinwire.supervisor.report`` compares runs.
matplotlib is imported only when the first picture is drawn, so the package re-exports nothing.
"""
