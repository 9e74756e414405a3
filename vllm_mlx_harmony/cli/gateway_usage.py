"""gateway usage: who used how much on a day, from the gateway's access logs.

Lines of both formats are read (`gateway.access_log`), and all others are skipped, so that a log may
also contain what a supervisor writes. A request belongs to the day on which it ended.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, timedelta

from vllm_mlx_harmony.cli.errors import STDIN, UsageError, called

EXAMPLES = """\
examples:
  vllm-mlx-harmony gateway usage gateway-*.log
  vllm-mlx-harmony gateway usage --day 2026-11-23 gateway-1.log.2.gz gateway-2.log.2.gz
  journalctl -u gateway -o cat --since "2 days ago" | vllm-mlx-harmony gateway usage
"""

FAILED = ("error", "timeout")
"""Results of answers that failed after the status had been sent."""

_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)')


TOKENS = ("input", "cached", "output", "reasoning")
"""Of these, ``cached`` is part of ``input``, and ``reasoning`` of ``output``."""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-mlx-harmony gateway usage",
        description="Prints the requests and tokens of each key on one day (UTC), from access\n"
        "logs in either format. Cached tokens are part of the input, and reasoning of the output.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    about = "access log of a gateway, may end in .gz (default: standard input)"
    parser.add_argument("logs", nargs="*", metavar="LOG", default=[STDIN], help=about)
    days = "yesterday, today, or YYYY-MM-DD (default: %(default)s)"
    parser.add_argument("--day", type=day, default="yesterday", metavar="DAY", help=days)
    return parser


def day(word: str) -> str:
    today = datetime.now(UTC).date()
    named = {"today": today, "yesterday": today - timedelta(days=1)}
    return str(named.get(word) or date.fromisoformat(word))


def main(arguments: Sequence[str]) -> int:
    """Raises ``UsageError`` for a log that cannot be read."""
    parsed = parser().parse_args(arguments)
    used: dict[str, Counter[str]] = {}
    for log in parsed.logs:
        for line in _lines(log):
            if found := request(line, parsed.day):
                key, numbers = found
                used.setdefault(key, Counter()).update(numbers)
    print(f"{parsed.day} (UTC): {sum(sums['requests'] for sums in used.values()):,} requests")
    columns = ("requests", "failed", *TOKENS)
    rows: list[tuple[str, ...]] = [("key", *columns)]
    for key, sums in sorted(used.items(), key=lambda row: -row[1]["input"] - row[1]["output"]):
        rows.append((key, *(f"{sums[name]:,}" for name in columns)))
    width = max(len(row[0]) for row in rows)
    for key, *cells in rows:
        print(f"{key:{width}}", *(f"{cell:>14}" for cell in cells))
    return 0


def request(line: str, day: str) -> tuple[str, dict[str, int]] | None:
    """The key of a request of a ``day`` (``YYYY-MM-DD``), and what is added to each column.

    ``None`` for a line of another day, or of anything else. There may be a prefix before the line.
    """
    try:
        if (at := line.find('{"time": ')) >= 0:
            found = json.loads(line[at:])
        else:
            pairs = _FIELD.findall(line, max(0, line.find("time=")))
            found = {name: json.loads(text) if text[0] == '"' else text for name, text in pairs}
        if not found["time"].startswith(day):
            return None
        failed = int(found["status"]) >= 400 or found["result"] in FAILED  # noqa: PLR2004
        counts = {"requests": 1, "failed": int(failed)}
        return found["key"] or "-", counts | {name: int(found[name]) for name in TOKENS}
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def _lines(log: str) -> Iterator[str]:
    opened = gzip.open if log.endswith(".gz") else open
    try:
        with sys.stdin.buffer if log == STDIN else opened(log, "rb") as file:
            for line in file:
                yield line.decode("utf-8", "replace")
    except (OSError, EOFError) as error:
        problem = getattr(error, "strerror", None) or error
        raise UsageError(f"{called(log)} cannot be read: {problem}") from error
