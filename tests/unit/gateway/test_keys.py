"""``gateway keys``: keys are added to the gateway's file and revoked, as digests."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

from vllm_mlx_harmony.__main__ import main
from vllm_mlx_harmony.cli import process
from vllm_mlx_harmony.gateway.limits import digest
from vllm_mlx_harmony.gateway.settings import load

HEAD = '# Of the team.\nmodel = "m"  # ours\nengines = ["http://a"]\n'
FILES = {
    "no keys": HEAD,
    "a table": HEAD + '\n[keys]  # whose\nold = "key-of-old"  # until May\n',
    "inline": HEAD + 'keys = { old = "key-of-old" } # all\n',
    "before engines": 'model = "m"\n[keys]\nold = "key-of-old"\n\n[[engines]] # one\nurl = "http://a"\n',
}


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home of its own, where locks are."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "gateway.toml"
    path.write_text(FILES["a table"])
    return path


def keys(file: Path, *arguments: str) -> int:
    return main(["gateway", "keys", *arguments, "--config", str(file)])


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_added_keys_work_and_revoked_ones_do_not(
    content: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(content)
    file.chmod(0o640)
    assert keys(file, "add", "alice", "bob") == 0
    shown = dict(line.split(" ") for line in capsys.readouterr().out.splitlines())
    assert len(set(shown.values())) == 2 and all(len(key) > 40 for key in shown.values())
    read = {key.name: key.digest for key in load({}, {}, str(file)).keys}
    assert {name: digest(key) for name, key in shown.items()}.items() <= read.items()
    assert not any(key in file.read_text() for key in shown.values())
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert keys(file, "revoke", "bob") == 0
    assert [key.name for key in load({}, {}, str(file)).keys] == [
        *(["old"] if "old" in content else []),
        "alice",
    ]
    for comment in ("# Of the team.", "# ours", "# whose", "# until May", "# all", "# one"):
        assert (comment in content) is (comment in file.read_text())


def test_keys_added_concurrently_are_all_kept(file: Path) -> None:
    names = [f"user{number}" for number in range(4)]
    running = [
        subprocess.Popen(
            process.python(
                "vllm_mlx_harmony", "gateway", "keys", "add", name, "--config", str(file)
            ),
            stdout=subprocess.DEVNULL,
        )
        for name in names
    ]
    assert [command.wait(60) for command in running] == [0] * 4
    assert {key.name for key in load({}, {}, str(file)).keys} == {"old", *names}


def test_missing_file_is_not_created(tmp_path: Path) -> None:
    assert keys(tmp_path / "typo" / "gateway.toml", "add", "alice") == 2
    assert list(tmp_path.iterdir()) == []


def test_list_shows_limits_and_no_key(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = f'ci = {{ key = "sha256:{digest("key-of-ci").hex()}", tokens_per_day = 5_000 }}\n'
    file.write_text(FILES["a table"] + table)
    assert keys(file, "list") == 0
    shown = digest("key-of-ci").hex()[:12]
    assert capsys.readouterr().out.splitlines() == [
        "old  in plain text",
        f"ci  sha256:{shown}…  tokens_per_day = 5000",
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("add", "old"), "there is already a key for old"),
        (("add", "new", "new"), "there is already a key for new"),
        (("revoke", "new"), "there is no key for new"),
        (("revoke", "old"), "the last key cannot be revoked"),
        (("add", "a b"), "is not a name"),
    ],
)
def test_invalid_command_changes_nothing(
    arguments: tuple[str, ...], expected: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keys(file, *arguments) == 2
    assert expected in capsys.readouterr().err
    assert file.read_text() == FILES["a table"]


@pytest.mark.parametrize(
    ("content", "expected"), [("keys = 5", "not a table"), ("keys", "is not TOML"), (None, "read")]
)
def test_unusable_file_is_an_error(
    content: str | None, expected: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.unlink() if content is None else file.write_text(content)
    assert keys(file, "add", "new") == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("--port", "99999", "--port: '99999' should be less than"),
        ("--key", "", "--key: key 1 is not printable ASCII"),
    ],
)
def test_invalid_setting_of_the_gateway_is_an_error(
    flag: str, value: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = ["gateway", "--engine", "http://127.0.0.1:9", "--model", "m"]
    assert main([*gateway, flag, value]) == 2
    assert expected in capsys.readouterr().err
