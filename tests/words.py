"""The project's words: each banned word and the word to use instead.

``python -m tests.words [FOLDER ...]`` lists every place that has a banned word, be it in an
identifier, a comment, a string or prose, and exits with 1 if there is one; ``make lint`` runs it.
Protocol messages are sent, accepted, rejected and recorded; things have the names that the
literature gives them. A line that must have such a word goes into ALLOWED.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

#: Prose and identifiers of everything that ships, and of the documents: pattern -> instead.
VERBS = {
    r"say|says|said|saying": "send, report, state, announce",
    r"tell|tells|told|telling": "notify, report, send, show",
    r"hear|hears|heard|hearing": "receive, on_<event>, note that; a peer is seen or alive",
    r"ask|asks|asked|asking|asker": "request, query, want",
    r"judge|judges|judged|judging": "check, decide",
    r"let go|lets go|letting go|put out|puts out": "release, let proceed; expel, quarantine",
    r"at once": "immediately, together",
}
#: Everywhere, tests too: pattern -> instead.
NOUNS = {
    r"seams?": "policy interface",
    r"rooms?": "package",
    r"houses?": "repository",
    r"ways? up|ways? down": "uplink, downlink",
    r"books": "counters",
    r"setbacks?": "divergence",
    r"Door|WaysOut|SimulatedWays|Setbacks|HandedOut|Books|DatagramLeg|leg_of|Outgoing|Wording": "",
    r"Spoken|KeptProcess|KeptShard|Keeps|Keeping|CodePlace|load_chosen|HeavyBall|heavy_ball": "",
    r"Unheard|Regrouped|Formed|LeftOut|Receptions?|CoreMaker|Participant|Asker|Joined": "",
    r"LeavesInOrder|StatusBoard|Beside|held_copies|handed_out|ways_out|datagram_leg": "",
    r"Arrivals|Meter|Keeper|KEEPER|CutShort|NotTrusted|SimulatedAsker|AmongWorkers|KerasFlat": "",
    r"meters_of|empty_books|count_anew|code_place|tells_top5|epoch_words": "",
}
#: (path, pattern of the line) that may hold a word of the list, and why it must.
ALLOWED: tuple[tuple[str, str], ...] = (
    ("tests/words.py", ""),  # the list itself
    ("CHANGELOG.md", ""),  # what was released under its former names
    ("data/sources.py", r"\.tell\(\)"),
    ("supervisor/report/page.py", r'"seams"'),  # a key of summary.json
    ("supervisor/report/writer.py", r'"seams"'),
    ("thinwire/tools/esync/convert.py", r"seams=\{\}"),
    ("docs/reference/figures.md", r"`seams`"),
    ("tests/thinwire/runtime/telemetry/test_run_status.py", r"\bseams\b"),
    ("tests/ps/wire/test_refused_bytes.py", r'"seams"'),
    ("tests/supervisor/samples.py", r'"seams"'),
    ("tests/supervisor/report/test_report.py", r"'seams'"),
    ("docs/reference/operations.md", r"\(\.\./\.\./tests/"),  # names of tests
    ("docs/guide/refusals.md", r"`no_room`"),  # the same reason
    ("docs/reference/security.md", r"`no_room`"),  # a reason in summary.json and in metrics
    ("docs/reference/security.md", r"::test_"),  # names of tests
    ("tests/proto/samples.py", r'message="no room"'),  # golden bytes
    ("thinwire/launcher/standalone.py", r"seams="),  # the same key
    ("thinwire/runtime/telemetry/run_status.py", r'"seams"|seams: dict'),  # a key of summary.json
    ("ps/telemetry/status.py", r'"seams": self|seams=self'),
    ("proto/security/connection_guard.py", '"no_room"'),  # a label of a metric, and documented
)
_SHIPPED = (
    "ops", "ps", "worker", "supervisor", "proto", "data", "thinwire", "main.py", "examples",
    "docs", "README.md", "BUILD_NOTES.md", "bench",
)  # fmt: off
_SUFFIXES = (".py", ".md", ".proto", ".toml", ".flags", ".sh")


def _pattern(words: dict[str, str], ignore_case: bool) -> re.Pattern[str]:
    # Words within identifiers count too: `is_told`, `tell_all`.
    alternatives = "|".join(words)
    return re.compile(rf"(?<![A-Za-z])({alternatives})(?![A-Za-z])", re.I if ignore_case else 0)


def _files(folders: list[str]) -> list[str]:
    command = ["git", "ls-files", "--", *folders]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = (name for name in names.splitlines() if name.endswith(_SUFFIXES))
    return [name for name in paths if "_pb2" not in name and (ROOT / name).is_file()]


def found(folders: list[str]) -> list[str]:
    """Return `path:line: word: text` of every place with a word of the list."""
    upper = {words: hint for words, hint in NOUNS.items() if words[0].isupper()}
    lower = {words: hint for words, hint in NOUNS.items() if not words[0].isupper()}
    everywhere = [_pattern(lower, True), _pattern(upper, False)]
    shipped = _pattern(VERBS, True)
    hits = []
    for name in _files(folders):
        patterns = [*everywhere, shipped] if name.startswith(_SHIPPED) else everywhere
        allowed = [re.compile(line) for path, line in ALLOWED if path == name]
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
            for pattern in patterns:
                match = pattern.search(line)
                if match and not any(each.search(line) for each in allowed):
                    hits.append(f"{name}:{number}: {match[1]}: {line.strip()}")
    return hits


def main(arguments: list[str]) -> int:
    """Print the places; return the exit code."""
    options = argparse.ArgumentParser(prog="python -m tests.words", description=__doc__)
    options.add_argument("folders", nargs="*", default=["."], help="all, if none is given")
    hits = found(options.parse_args(arguments).folders)
    for hit in hits:
        sys.stdout.write(hit + "\n")
    if hits:
        sys.stdout.write(f"{len(hits)} places; tests/words.py has what to write instead.\n")
    return 1 if hits else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
