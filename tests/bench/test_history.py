"""The history of bench rows: each row at each date, and the repository's page."""

from bench import history, origin
from bench.__main__ import documents
from bench.table import Row
from tests.bench.test_results import FACTS


def keep(folder, date, stem, ratios):
    rows = [Row(work, 1.0, "ms", 1.0, ratio, 2.0, "lower") for work, ratio in ratios.items()]
    facts = FACTS | {"date": f"{date} 03:04 UTC"}
    origin.write(stem, facts, documents(facts, {"loop": rows}, []), folder)


def test_every_row_has_its_ratio_on_each_date(tmp_path):
    keep(tmp_path, "2026-01-02", "bench", {"step": 3.0, "push": 1.0})
    keep(tmp_path, "2026-02-03", "bench-loop", {"step": 9.0, "push": 1.25})
    keep(tmp_path, "2026-02-03", "bench", {"step": 1.5, "new": 2.0})
    (tmp_path / "2026-01-02-many.csv").write_text("streams,rate\n1,2\n")  # a row with other columns
    lines = history.write(tmp_path).read_text().splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert table == [
        "| part | work | unit | 2026-01-02 | 2026-02-03 | goal |",
        "|---|---|---|---|---|---|",
        "| loop | step | ms | **3.00** | 1.50 | <= 2 |",
        "| loop | push | ms | 1.00 | 1.25 | <= 2 |",
        "| loop | new | ms |  | 2.00 | <= 2 |",
    ]


def test_the_page_is_what_the_tables_give():
    page = origin.RESULTS / history.INDEX
    assert page.read_text() == history.index(history.read(origin.RESULTS)), (
        "bench/results has other tables than its index.md: python -m bench.history"
    )
