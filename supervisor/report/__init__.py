"""Reports of finished runs: one self-contained page with pictures, for one run or several runs.

The functions `writer.write_report` and `writer.write_comparison` read summary.json and
metrics.jsonl and write the report page. In a report, the module `figures` draws the pictures and
`page` makes the HTML. The command ``python -m thinwire.supervisor.report`` compares runs.
matplotlib is imported only when the first picture is drawn, so the package re-exports nothing.
"""
