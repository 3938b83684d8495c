"""Each line of the threat model names existing tests."""

import re

from tests.documents import ROOT, rows

PAGE = (ROOT / "docs" / "reference/security.md").read_text()
OPPONENTS = ("stranger", "worker that was let in", "upstream site", "Another user", "neighbor")
ITS_TEST = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def test_every_opponent_has_lines_and_every_line_tests_that_exist():
    parts = PAGE.split("## Who can do what")[1].split("\n## ")[0].split("\n### ")[1:]
    assert [name for name in OPPONENTS if any(name in part.splitlines()[0] for part in parts)] == [
        *OPPONENTS
    ]
    for part in parts:
        lines = rows(part, "can", "cannot", "tests")
        assert lines, part.splitlines()[0]
        for can, cannot, tests in lines:
            assert can and cannot
            named = ITS_TEST.findall(tests)
            assert named and len(named) == tests.count("::"), f"{can}: no test of that form"
            for path, name in named:
                text = (ROOT / "tests" / path).read_text()
                assert re.search(rf"^def {name}\(", text, re.MULTILINE), f"{path} has no {name}"
