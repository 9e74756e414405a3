#!/usr/bin/env python3
"""Runs `verify` on every server in PEERS, all with the same scripted model, and writes the results
to docs/yardstick.md.

    python benchmarks/yardstick.py              all servers
    python benchmarks/yardstick.py NAME…        these, and the earlier results of the others
    python benchmarks/yardstick.py --resume …   only the checks for which there was no time before
    python benchmarks/yardstick.py --page       only writes the page again

Run by the leg `yardstick`. Each server is the newest on PyPI, in an environment of its own below
`build`, which is removed after its run, since several require torch with CUDA: gigabytes each. The
results stay below `build/yardstick`, one file a server.

A check can fail because of the server or because of what it is tried with. Four things tell:

- This project's own server runs first, and must pass: the checks and the scripts agree.
- The stand-in answers a message that it does not know with a sentence of its own. If that is in the
  response, the server has changed the message, which a real model might not mind; such failures are
  counted by themselves (`UNKNOWN`).
- Features that work on a Mac only fail with an error that `peers.py` knows; such failures are
  counted by themselves, too.
- If the stand-in's code is in a traceback in the server's log, the page says so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from operator import truediv
from pathlib import Path
from typing import Any

import httpx
from bench_table import table
from peers import KEY, PEERS, REPOSITORY, Peer, install, serving, settings, version

from vllm_mlx_harmony.cli.process import ADDRESS
from vllm_mlx_harmony.standin import write
from vllm_mlx_harmony.verify import checks, trial
from vllm_mlx_harmony.verify.apis import APIS
from vllm_mlx_harmony.verify.samples import SCRIPTS
from vllm_mlx_harmony.verify.suite import CHECKS
from vllm_mlx_harmony.verify.values import Failed

BUILD = REPOSITORY / "build" / "yardstick"
PAGE, README = REPOSITORY / "docs" / "yardstick.md", REPOSITORY / "README.md"
MODEL = "gpt-oss-20b-stand-in"
"""The name of the model's directory: some servers tell a model's family by its name."""

READ, WHOLE = 60.0, 1800.0
"""Seconds: for each read, and for all checks of a server."""

UNKNOWN = "scripted"
"""A word of `standin.FALLBACK` that is a token: streams have it in one piece."""

CODE = re.compile(r"standin_\w+\.py")
"""The stand-in's code, in a traceback."""

Results = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if this project's own server passed and the page is written."""
    parser = argparse.ArgumentParser(description="Runs verify on every server that is known.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--page", action="store_true", help="only write the page again")
    parser.add_argument("--keep", action="store_true", help="keep environments, use kept ones")
    parser.add_argument("--resume", action="store_true", help="run what was not run before")
    given = parser.parse_args(argv)
    if unknown := set(given.names) - set(PEERS):
        parser.error(f"no server is called {', '.join(sorted(unknown))}")
    BUILD.mkdir(parents=True, exist_ok=True)
    for name in () if given.page else given.names or PEERS:
        results = measured(name, keep=given.keep, resume=given.resume)
        (BUILD / f"{name}.json").write_text(json.dumps(results, indent=1), "utf-8")
        print(f"{name}: {' · '.join(summary(results))}", flush=True)
    found = results_of(PEERS)
    for page, text in ((PAGE, written(found)), (README, readme(README.read_text("utf-8"), found))):
        page.write_text(text, "utf-8")
        subprocess.run([sys.executable, "-m", "mdformat", page], check=True)
    ours: list[Results] = next(
        (result["checks"] for result in found if result["name"] == "light"), []
    )
    return int(not ours or any(check["state"] == "failed" for check in ours))


def measured(name: str, *, keep: bool, resume: bool) -> Results:
    """Installs, starts and checks a server."""
    earlier = results_of([name]) if resume else []
    before: list[Results] = [check for results in earlier for check in results["checks"]]
    peer, place = PEERS[name], BUILD / "environments" / name
    date = datetime.now(UTC).date().isoformat()
    results: Results = {
        "name": name,
        "date": date,
        "checks": before,
        "problem": "",
        "tracebacks": 0,
    }
    try:
        try:
            if not place.exists():
                install(place, peer)
        except subprocess.CalledProcessError:
            return {**results, "version": "–", "problem": "it cannot be installed on this machine"}
        results["version"] = version(place, peer.distribution or name)
        with tempfile.TemporaryDirectory(prefix=f"{name}-", ignore_cleanup_errors=True) as home:
            model = write(Path(home) / "models" / MODEL, SCRIPTS)
            log = Path(home) / "server.log"
            try:
                key = KEY if "{key}" in peer.command else None
                with serving(peer, place, model, log) as (url, _):
                    results["checks"] = asyncio.run(checked(url, key, str(model), before))
            except (RuntimeError, httpx.HTTPError) as error:
                results["problem"] = str(error) or type(error).__name__
            text = log.read_text("utf-8", "replace") if log.exists() else ""
            results["tracebacks"] = len(CODE.findall(text))
            (BUILD / f"{name}.log").write_text(text, "utf-8")
    finally:
        if not keep:
            shutil.rmtree(place, ignore_errors=True)
    return results


async def checked(
    url: str, key: str | None, model: str, before: Sequence[Results]
) -> list[Results]:
    """The outcomes of all checks, as far as they were made within the time for a server.

    ``before`` are outcomes of an earlier run. Schemas come last: some servers take most of a minute
    to prepare one.
    """
    outcomes = [*before]
    done = {check["name"] for check in before}
    left = [check for check in CHECKS if check.name not in done]
    left.sort(key=lambda check: (check.name.endswith(".cancel"), ".schema-" in check.name))
    until = time.monotonic() + WHOLE
    async with trial.client(url, key, READ) as client:
        try:
            listed = await trial.models(client)
        except Failed:  # a check says so, too
            listed = {}
        name = next((name for name in listed if name in model or MODEL in name), model)
        server = trial.Server(client, name, key, listed.get(name))
        async for outcome in checks.run(server, left, 1):
            outcomes.append(asdict(outcome))
            if time.monotonic() > until:
                break
    return outcomes


def summary(results: Results) -> list[str]:
    if results["problem"]:
        return ["not checked", results["problem"].splitlines()[-1]]
    count = Counter(check["state"] for check in results["checks"])
    return [results["version"], *(f"{number} {state}" for state, number in count.items())]


# --- The page

INTRODUCTION = f"""# The yardstick: which server runs gpt-oss right?

`verify` asked every server here the same, in {len(CHECKS)} checks. In the place of gpt-oss, each
ran the [stand-in model](verify.md#any-server-without-weights), a script of correct Harmony, so what
fails is not the model's fault. `python3 ci/leg.py yardstick` installs the newest version of each
server from PyPI, starts it with the flags that its documentation has for gpt-oss, and writes this
page. Everybody can repeat one line of it:

```sh
uvx harmony-verify --write-stand-in gpt-oss-20b-stand-in
# start the server
uvx harmony-verify http://127.0.0.1:8080
```

- **wire** is what does not depend on the model: documents and events, errors, cancellation.
  **format** is what gpt-oss's Harmony needs: calls, reasoning, strict schemas, roles. **loop** is a
  tool loop of 20 turns. Each cell has the checks that passed, of those that the server offers.
- The checks of an API that a server does not offer count in **Passed** alone, as not passed.
- A failure is *unclear*, and does not count, if the model did not know the message because the
  server had added something to it. What is known to *need Metal* does not count, either: most
  servers are made for Macs, and these ran on CPUs, on Linux.
- A server that does not finish within half an hour is left out: how far it got would depend on the
  machine. llama.cpp is not here because [a GGUF file cannot play a
  script](verify.md#any-server-without-weights).
- The checks are tested with the server of this project, and with a fault for each
  (`tests/unit/verify`).
- Speed is not measured, nor what else is better about a server. Please tell us of a flag that we
  missed.
"""

TITLES = ("Server", "Version", "Passed", "wire", "format", "loop", "Not offered")
BEGIN, END = "<!-- yardstick -->", "<!-- /yardstick -->"
IN_README = 6
GROUPS = ("wire", "format", "loop")


def written(found: Sequence[Results]) -> str:
    """The page, best server first."""
    if not found:
        return f"{INTRODUCTION}\nNo server has been through all checks yet.\n"
    parts = [INTRODUCTION, table(TITLES, [row(result) for result in found])]
    return "\n".join([*parts, *map(section, found)])


def row(results: Results) -> tuple[str, ...]:
    peer, outcomes = PEERS[results["name"]], results["checks"]
    cells = []
    for group in GROUPS:
        of_group = [outcome for outcome in outcomes if outcome["name"].startswith(f"{group}.")]
        passed = sum(outcome["state"] == "passed" for outcome in of_group)
        failed = sum(blamed(outcome, peer) for outcome in of_group)
        cells.append(f"{passed}/{passed + failed}" if passed + failed else "–")
    return (
        peer.title,
        results["version"],
        "not checked" if results["problem"] else "{} of {}".format(*score(results)),
        *cells,
        ", ".join(absent(results)) or "–",
    )


def absent(results: Results) -> list[str]:
    """The APIs that a server does not have."""
    problems = {check["problem"] for check in results["checks"] if check["state"] == "unsupported"}
    return [
        api.name for api in APIS if any(f"POST {api.path} is" in problem for problem in problems)
    ]


def unclear(outcome: Results) -> bool:
    """Whether the model did not know the message."""
    return outcome["state"] == "failed" and UNKNOWN in outcome["problem"] + outcome["received"]


def needs_metal(outcome: Results, peer: Peer) -> bool:
    """Whether the server might pass on a Mac."""
    text = peer.needs_metal
    return outcome["state"] == "failed" and bool(text) and text in outcome["problem"]


def blamed(outcome: Results, peer: Peer) -> bool:
    """Whether a failure is the server's."""
    return outcome["state"] == "failed" and not (unclear(outcome) or needs_metal(outcome, peer))


def section(results: Results) -> str:
    peer = PEERS[results["name"]]
    words = {
        "model": MODEL,
        "models": ".",
        "name": MODEL,
        "port": 8080,
        "key": "KEY",
        "host": ADDRESS,
    }
    typed = " ".join(f"{name}={value}" for name, value in settings(peer, words).items())
    install = " ".join(f'"{requirement}"' for requirement in peer.install).replace(
        f"{REPOSITORY}", SERVER
    )
    lines = [
        f"## {peer.title}\n",
        f"{results['version']}, {results['date']}{f'; {peer.note}' if peer.note else ''}.\n",
        f"```sh\nuv pip install {install}\n{typed}{' ' if typed else ''}"
        f"{peer.command.format(**words)}\n```\n",
    ]
    if results["problem"]:
        lines.append(f"Not checked: {results['problem'].splitlines()[-1]}\n")
    failed = [check for check in results["checks"] if check["state"] == "failed"]
    of_server = [check for check in failed if blamed(check, peer)]
    first = distinct(of_server)
    lines += [f"- `{check['name']}`: {check['holds']}. {problem(check)}" for check in first]
    notes = []
    if more := len(of_server) - len(first):
        notes.append(f"{more} more failed")
    if count := sum(needs_metal(check, peer) for check in failed):
        notes.append(f"{count} need Metal")
    if count := sum(map(unclear, failed)):
        notes.append(f"{count} unclear")
    if results["tracebacks"]:
        notes.append("the model's code is in tracebacks of its log")
    if notes:
        told = "; ".join(notes)
        lines.append(f"\n{told[0].upper()}{told[1:]}.\n")
    return "\n".join(lines)


SERVER = "vllm-mlx-harmony-server"


def distinct(failed: Sequence[Results]) -> list[Results]:
    """The first three failures, each of another kind."""
    found: dict[str, Results] = {}
    for check in failed:
        name = check["name"].rpartition(".")[2].partition("-")[0]
        if all(check["problem"] != other["problem"] for other in found.values()):
            found.setdefault(name, check)
    return [*found.values()][:SHOWN]


SHOWN, LENGTH = 3, 160


def problem(outcome: Results) -> str:
    """What is wrong, in one line that Markdown shows as it is."""
    text = " ".join(outcome["problem"].split())
    text = f"{text[:LENGTH]}…" if len(text) > LENGTH else text
    return f"`{text.replace('`', chr(39))}`"


def readme(text: str, found: Sequence[Results]) -> str:
    """README with the first rows of the table between its marks, if there are any."""
    before, _, rest = text.partition(BEGIN)
    rows = [row(result)[:3] for result in found[:IN_README]]
    shown = f"{README_SECTION}\n{table(TITLES[:3], rows)}\n" if rows else ""
    return f"{before}{BEGIN}\n\n{shown}{END}{rest.partition(END)[2]}"


README_SECTION = """\
## Which server runs gpt-oss right?

The same scripted model in every server, and the checks of [docs/verify.md](docs/verify.md), which
anybody can repeat with `uvx harmony-verify URL`. Checks that need a Mac do not count.
[docs/yardstick.md](docs/yardstick.md) has the details.
"""


def results_of(names: Iterable[str]) -> list[Results]:
    """The results of the servers that were asked everything, those that passed the largest share
    first. The others are not comparable: which checks were run depends on the machine."""
    files = [BUILD / f"{name}.json" for name in names]
    read: list[Results] = [json.loads(file.read_text("utf-8")) for file in files if file.exists()]
    found = [result for result in read if result["problem"] or len(result["checks"]) == len(CHECKS)]
    found.sort(key=lambda result: truediv(*score(result)), reverse=True)
    return found


def score(results: Results) -> tuple[int, int]:
    """The number of checks that a server passed, and of those that it could show here."""
    peer, outcomes = PEERS[results["name"]], results["checks"]
    passed = sum(outcome["state"] == "passed" for outcome in outcomes)
    hidden = sum(unclear(outcome) or needs_metal(outcome, peer) for outcome in outcomes)
    return passed, max(len(outcomes) - hidden, 1)


if __name__ == "__main__":
    sys.exit(main())
