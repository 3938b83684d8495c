"""The report of a finished run, or of several side by side: one self-contained page with pictures.

`writer.write_report` and `writer.write_comparison` read summary.json and metrics.jsonl and write;
`figures` draws the pictures, `page` the HTML. ``python -m thinwire.supervisor.report`` compares
runs. matplotlib is imported when the first picture is drawn, so nothing is re-exported here.
"""
