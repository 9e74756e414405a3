"""Activation and the patch table on the real host: what is patched, when, and how it is undone."""

from __future__ import annotations

import argparse
import ast
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_mlx", reason="needs the host")

import vllm_mlx.cli
import vllm_mlx.server
from fastapi.testclient import TestClient

from vllm_mlx_harmony import host
from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.engine import resources
from vllm_mlx_harmony.engine.mlx_engine import Options
from vllm_mlx_harmony.host import (
    activation,
    contract,
    entry_points,
    flags,
    mount,
    patching,
    server_globals,
    startup_banner,
)
from vllm_mlx_harmony.host.adapter import VllmMlx
from vllm_mlx_harmony.host.mount import Route
from vllm_mlx_harmony.host.patching import Patch
from vllm_mlx_harmony.host.tool_parser import HarmonyToolParser
from vllm_mlx_harmony.host.vllm_mlx_engine import NotHarmonyModel
from vllm_mlx_harmony.required_names import OTHERS, Name, Requirement, find_problem
from vllm_mlx_harmony.server.endpoint import Endpoint
from vllm_mlx_harmony.server.settings import ServerSettings

APP = vllm_mlx.server.app


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Lets the application build what it caches at its first requests."""
    web = TestClient(APP)
    web.get("/v1/models")
    web.get("/openapi.json")


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    host.uninstall()
    contract.deactivate()
    before = snapshot()
    yield
    host.uninstall()
    contract.deactivate()
    assert differences(before) == []


Snapshot = dict[tuple[str, ...], Any]


def snapshot() -> Snapshot:
    """Every attribute of every loaded module of the host and of its classes, and the routes."""
    attributes: Snapshot = {}
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] == "vllm_mlx" and isinstance(module, ModuleType):
            for attribute, value in vars(module).items():
                attributes[name, attribute] = value
                if isinstance(value, type) and value.__module__ == name:
                    attributes.update({(name, attribute, key): v for key, v in vars(value).items()})
    table = vllm_mlx.tool_parsers.ToolParserManager.tool_parsers
    attributes.update({("parser", name): parser for name, parser in table.items()})
    attributes.update({("route", str(i)): route for i, route in enumerate(APP.router.routes)})
    attributes.update({("app", name): value for name, value in vars(APP).items()})
    return attributes


CACHES = {
    "__annotations__",
    "__warningregistry__",
    "_abc_impl",
    "openapi_schema",
    "_openapi_routes_version",
}


def differences(before: Snapshot) -> list[tuple[str, ...]]:
    """Names whose objects have changed. Modules imported since then do not count."""
    after = snapshot()
    modules = {name for name, *_ in before}
    names = set(before) | {name for name in after if name[0] in modules}
    changed = [
        name
        for name in names
        if (name in before) is not (name in after) or before.get(name) is not after.get(name)
    ]
    return sorted(
        name
        for name in changed
        if name[-1] not in CACHES and not isinstance(after.get(name), ModuleType)
    )


def parse_flags(*arguments: str) -> argparse.Namespace:
    """A command line, parsed by the host's own parser."""
    return vllm_mlx.cli.create_parser().parse_args(["serve", *arguments])


class ServeCommand:
    """Replaces the host's serve_command; records its arguments and what was patched when it ran."""

    def __init__(self) -> None:
        self.calls: list[argparse.Namespace] = []
        self.changed: list[tuple[str, ...]] = []
        self.before: Snapshot = {}

    def __call__(self, args: argparse.Namespace) -> str:
        self.calls.append(args)
        self.changed = differences(self.before)
        return "served"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServeCommand]:
    command = ServeCommand()
    monkeypatch.setattr(vllm_mlx.cli, "serve_command", command)
    command.before = snapshot()
    yield command
    host.uninstall()


def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any) -> Any:
        return original(*args)

    return wrapper


def shout(original: Callable[..., str]) -> Callable[..., str]:
    return lambda *args: original(*args).upper()


PARSERS = "vllm_mlx.tool_parsers:ToolParserManager.tool_parsers"


def patch(target: str, replacement: patching.Replacement | str, *parameters: str) -> Patch:
    return Patch(target, "a test", " ".join(parameters) or None, replacement=replacement)


def route(
    path: str, method: str, answer: Callable[..., Any], guard: tuple[str, str] | None = None
) -> Route:
    return Route(Endpoint(path, (method,), answer, "a test", dependencies_of=guard))


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> tuple[Requirement, ...]:
    """A small table on the real host, so that these tests do not depend on the real rows."""
    rows: tuple[Requirement, ...] = (
        Name("vllm_mlx.cli:main", "is there", ""),
        patch("vllm_mlx.server:_sanitize_log_text", shout),
        patch("vllm_mlx.engine.simple:SimpleEngine.is_mllm", lambda p: property(p.fget)),
        patch("vllm_mlx.engine.simple:SimpleEngine.start", wrap),
        patch(PARSERS, lambda parsers: {**parsers, "new": parsers["harmony"]}),
        route("/v1/chat/completions", "POST", lambda: {"ours": True}),
        route("/v1/models/{model_id}", "GET", lambda model_id: model_id, ("/v1/models", "GET")),
    )
    monkeypatch.setattr(contract, "table", lambda *_, **__: rows)
    monkeypatch.setattr(contract, "find", lambda _: entry_points.Extensions(object, print, object))
    return rows


# --- activation ---------------------------------------------------------------------------------

CLOSED = [
    (),
    ("--tool-call-parser", "qwen"),
    ("--tool-call-parser", "qwen", "--enable-auto-tool-choice"),
    ("--reasoning-parser", "harmony"),
    ("--tool-call-parser", "auto", "--enable-auto-tool-choice", "--reasoning-parser", "gpt_oss"),
]


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("arguments", CLOSED, ids=" ".join)
def test_without_the_flag_nothing_is_patched(
    served: ServeCommand, table: object, arguments: tuple[str, ...]
) -> None:
    before = vars(parse_flags("MODEL", *arguments))
    host.install()
    assert vllm_mlx.cli.serve_command in [hook for _, _, hook in activation._hooks]
    assert vllm_mlx.cli.serve_command(parse_flags("MODEL", *arguments)) == "served"
    assert served.changed == []
    assert vars(served.calls[0]) == before
    assert not activation._hooks
    assert not contract.changes()


OPEN = [
    ("--tool-call-parser", "harmony"),
    ("--tool-call-parser=gpt-oss",),
    ("--tool-call-parser", "harmony", "--enable-auto-tool-choice", "--reasoning-parser", "harmony"),
]


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("arguments", OPEN, ids=" ".join)
def test_flag_alone_activates(
    served: ServeCommand,
    table: object,
    arguments: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    host.install()
    with caplog.at_level(logging.DEBUG):
        assert vllm_mlx.cli.serve_command(parse_flags("MODEL", *arguments)) == "served"
    (args,) = served.calls
    assert (args.enable_auto_tool_choice, args.reasoning_parser) == (True, "harmony")
    assert ("vllm_mlx.server", "_sanitize_log_text") in served.changed
    assert ("vllm_mlx.cli", "serve_command") not in served.changed
    (line,) = [
        record.getMessage() for record in caplog.records if "requirements" in record.getMessage()
    ]
    for expected in ("_sanitize_log_text", "POST /v1/chat/completions"):
        assert expected in line


def test_chosen_reasoning_parser_is_kept(served: ServeCommand, table: object) -> None:
    host.install()
    vllm_mlx.cli.serve_command(
        parse_flags("M", "--tool-call-parser=harmony", "--reasoning-parser=qwen3")
    )
    assert served.calls[0].reasoning_parser == "qwen3"


def test_other_models_keep_their_flags(served: ServeCommand, table: object) -> None:
    host.install()
    vllm_mlx.cli.serve_command(
        parse_flags("--models-config", "x.yaml", "--tool-call-parser=harmony")
    )
    (args,) = served.calls
    assert (args.enable_auto_tool_choice, args.reasoning_parser) == (False, None)
    assert contract.changes()


def test_second_install_changes_nothing(served: ServeCommand, table: object) -> None:
    host.install()
    first = vllm_mlx.cli.serve_command
    host.install()
    host.install(vars(vllm_mlx.cli))
    assert vllm_mlx.cli.serve_command is first
    assert first.__wrapped__ is served  # type: ignore[attr-defined]


def test_second_activation_changes_nothing(table: tuple[Requirement, ...]) -> None:
    contract.activate(ServerSettings.read())
    once, changes = snapshot(), contract.changes()
    contract.activate(ServerSettings.read(), "gpt-oss")
    assert (differences(once), contract.changes()) == ([], changes)
    contract.deactivate()
    contract.deactivate()
    assert contract.changes() == ()


def test_uninstall_removes_the_gate_and_all_patches(served: ServeCommand, table: object) -> None:
    host.install()
    vllm_mlx.cli.serve_command(parse_flags("MODEL", "--tool-call-parser", "harmony"))
    host.install()
    assert differences(served.before) != []
    host.uninstall()
    assert differences(served.before) == []
    assert vllm_mlx.cli.serve_command is served


def test_both_namespaces_of_python_m_are_gated(served: ServeCommand, table: object) -> None:
    main = {"serve_command": served}
    host.install(main)
    host.install()
    assert main["serve_command"](parse_flags("MODEL")) == "served"
    assert served.changed == []
    assert main["serve_command"] is served


def test_host_without_serve_command_is_rejected() -> None:
    with pytest.raises(HostError, match="serve_command"):
        host.install({})


def run_refused(capsys: pytest.CaptureFixture[str], args: argparse.Namespace | None = None) -> str:
    """Runs with the flag, which exits with 2; returns the line on standard error."""
    args = args or parse_flags("MODEL", "--tool-call-parser", "harmony")
    host.install()
    before = snapshot()
    with pytest.raises(SystemExit) as caught:
        vllm_mlx.cli.serve_command(args)
    assert caught.value.code == 2
    assert [
        name for name in differences(before) if name[:2] != ("vllm_mlx.cli", "serve_command")
    ] == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vllm-mlx-harmony: error: ")
    return line


@pytest.mark.parametrize(
    ("version", "works"),
    [
        ("0.6.0", True),
        ("0.6.17", True),
        ("0.6.1.post2", True),
        ("0.5.9", False),
        ("0.7.0", False),
        ("0.7.0rc1", False),
        ("1.6.0", False),
        ("0.60.0", False),
        ("unknown", False),
    ],
)
def test_supported_versions_are_recognized(
    monkeypatch: pytest.MonkeyPatch, version: str, works: bool
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    assert (contract.unsupported() is None) is works


def test_unsupported_host_is_rejected(
    served: ServeCommand,
    table: object,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(entry_points, "versions", lambda: {"vllm-mlx": "0.7.1"})
    assert "vllm-mlx 0.7.1 is not supported" in run_refused(capsys)
    assert served.calls == []


CHANGED = {
    "gone": lambda patch: patch.delattr(vllm_mlx.server, "_sanitize_log_text"),
    "other parameters": lambda patch: patch.setattr(
        vllm_mlx.server, "_sanitize_log_text", lambda text, length: text
    ),
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_changed_host_is_rejected_and_not_patched(
    served: ServeCommand,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[pytest.MonkeyPatch], None],
) -> None:
    rows = (
        patch("vllm_mlx.server:get_usage", lambda f: None),
        patch("vllm_mlx.server:_sanitize_log_text", shout, "value", "limit"),
    )
    monkeypatch.setattr(contract, "table", lambda *_, **__: rows)
    monkeypatch.setattr(contract, "find", lambda _: entry_points.Extensions(object, print, object))
    with monkeypatch.context() as changed:
        change(changed)
        assert "vllm_mlx.server:_sanitize_log_text" in run_refused(capsys)
    assert served.calls == []


def without_route(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = APP.router.routes
    path = "/v1/cache/stats"
    rest = [route for route in routes if getattr(route, "path", None) != path]
    monkeypatch.setattr(APP.router, "routes", rest)


def without_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    create = vllm_mlx.cli.create_parser

    def create_parser() -> argparse.ArgumentParser:
        parser = create()
        (commands,) = parser._subparsers._group_actions  # type: ignore[union-attr]
        serve: argparse.ArgumentParser = commands.choices["serve"]  # type: ignore[call-overload, index]
        serve._remove_action(serve._option_string_actions["--ssd-cache-dir"])
        return parser

    monkeypatch.setattr(vllm_mlx.cli, "create_parser", create_parser)


OPTIONAL = {
    "--ssd-cache-dir": without_flag,
    "warm_prefix_cache": lambda patch: patch.delattr("vllm_mlx.prompt_warmup.warm_prefix_cache"),
    "GET /v1/cache/stats": without_route,
}


@pytest.mark.parametrize(("name", "change"), OPTIONAL.items(), ids=OPTIONAL)
def test_misfitting_optional_row_is_one_warning(
    served: ServeCommand,
    caplog: pytest.LogCaptureFixture,
    name: str,
    change: Callable[[pytest.MonkeyPatch], None],
) -> None:
    with pytest.MonkeyPatch.context() as changed:
        change(changed)
        host.install()
        assert (
            vllm_mlx.cli.serve_command(parse_flags("MODEL", "--tool-call-parser=harmony"))
            == "served"
        )
        (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert name in warning.getMessage()
        applied = contract.changes()
        assert "POST /v1/chat/completions" in applied
        assert name not in applied
        host.uninstall()


@pytest.mark.parametrize(
    "name", ["vllm_mlx.engine.base.BaseEngine", "vllm_mlx.server.app", "mlx_lm.utils.load_model"]
)
def test_missing_required_name_is_rejected(
    served: ServeCommand,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    """Including names that our own modules import, and in a version without any other flag."""
    no_flags = argparse.Namespace(model="MODEL", tool_call_parser="harmony")
    with monkeypatch.context() as changed:
        changed.delattr(name)
        assert ":".join(name.rsplit(".", 1)) in run_refused(capsys)
        assert ":".join(name.rsplit(".", 1)) in run_refused(capsys, no_flags)
    assert served.calls == []


def test_part_that_fails_to_load_is_rejected(
    served: ServeCommand, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = metadata.EntryPoint("harmony", "no_such_module:Thing", entry_points.TOOL_PARSERS)
    monkeypatch.setattr(entry_points.metadata, "entry_points", lambda **_: [broken])
    assert "no_such_module:Thing" in run_refused(capsys)


def test_bug_in_a_patch_leaves_the_host_unpatched(
    served: ServeCommand,
    table: tuple[Requirement, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def bug(original: object) -> object:
        raise RuntimeError("a bug")

    rows = (*table, patch("vllm_mlx.server:get_usage", bug))
    monkeypatch.setattr(contract, "table", lambda *_, **__: rows)
    host.install()
    args = parse_flags("MODEL", "--tool-call-parser", "harmony")
    assert vllm_mlx.cli.serve_command(args) == "served"
    assert served.changed == []
    assert not args.enable_auto_tool_choice
    (line,) = capsys.readouterr().err.splitlines()
    assert "RuntimeError: a bug" in line


def test_failed_activation_leaves_nothing_running(
    served: ServeCommand,
    table: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def bug(*_: object, **__: object) -> None:
        assert resources.disk is not None and resources.cache_bytes() == 64 << 20
        raise RuntimeError("a bug")

    monkeypatch.setattr(startup_banner, "set_flags", bug)
    threads = set(threading.enumerate())
    host.install()
    sizes = ("--cache-memory-mb=64", "--max-num-seqs=3", f"--ssd-cache-dir={tmp_path}")
    args = parse_flags("MODEL", "--tool-call-parser=harmony", *sizes)
    assert vllm_mlx.cli.serve_command(args) == "served"
    assert "not active: RuntimeError: a bug" in capsys.readouterr().err
    assert served.changed == [] and not args.enable_auto_tool_choice
    assert resources.disk is None and resources.options == Options()
    left = {thread.name for thread in set(threading.enumerate()) - threads}
    assert left <= {"harmony-grammar"}  # it ends by itself


def test_removed_host_flag_is_reported(
    served: ServeCommand, table: object, capsys: pytest.CaptureFixture[str]
) -> None:
    host.install()
    args = argparse.Namespace(tool_call_parser="harmony")
    assert vllm_mlx.cli.serve_command(args) == "served"
    assert served.changed == []
    assert "reasoning_parser" in capsys.readouterr().err


def test_missing_openai_harmony_is_one_warning_with_a_fix(
    served: ServeCommand,
    table: object,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "openai_harmony", None)
    host.install()
    args = parse_flags("MODEL", "--tool-call-parser", "harmony")
    before = dict(vars(args))
    assert vllm_mlx.cli.serve_command(args) == "served"
    assert served.changed == []
    assert vars(args) == before
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install openai-harmony" in line


def test_other_model_is_rejected(
    served: ServeCommand,
    table: object,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def serve(args: argparse.Namespace) -> None:
        raise NotHarmonyModel("MODEL is not Harmony")

    monkeypatch.setattr(vllm_mlx.cli, "serve_command", serve)
    host.install()
    with pytest.raises(SystemExit) as caught:
        vllm_mlx.cli.serve_command(parse_flags("MODEL", "--tool-call-parser", "harmony"))
    assert caught.value.code == 2
    assert "MODEL is not Harmony" in capsys.readouterr().err


def test_unusable_store_is_rejected_at_startup(
    served: ServeCommand,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("VLLM_MLX_HARMONY_STORE", str(tmp_path))
    line = run_refused(capsys)
    assert str(tmp_path) in line
    assert line.endswith("unset VLLM_MLX_HARMONY_STORE")


def test_gate_imports_nothing_of_the_host() -> None:
    import subprocess

    source = (
        "from vllm_mlx_harmony import host; host.install({'serve_command': print});"
        "heavy = {'vllm_mlx', 'fastapi', 'starlette', 'mlx', 'openai_harmony', 'pydantic'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    root = str(Path(host.__file__).parents[2])
    completed = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r}); {source}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert completed.stdout == "[]\n"


# --- requirements ------------------------------------------------------------------------------


def test_applied_rows_take_effect_and_are_undone(
    table: tuple[Requirement, ...],
) -> None:
    before = snapshot()
    undos = patching.apply_all(table)
    assert vllm_mlx.server._sanitize_log_text("a") == "A"
    changed = differences(before)
    assert ("vllm_mlx.engine.simple", "SimpleEngine", "start") in changed
    assert ("parser", "new") in changed
    patching.undo_all(undos)
    assert differences(before) == []
    assert undos == []


def test_two_patches_of_one_name_are_undone_in_reverse() -> None:
    before = snapshot()
    rows = [patch("vllm_mlx.server:_sanitize_log_text", shout)] * 2
    patching.undo_all(patching.apply_all(rows))
    assert differences(before) == []


def test_undo_continues_after_a_foreign_change(
    table: tuple[Requirement, ...],
) -> None:
    before = snapshot()
    undos = patching.apply_all(table)
    routes = APP.router.routes
    routes.remove(next(route for route in routes if isinstance(route, mount.Mounted)))
    patching.undo_all(undos)
    assert differences(before) == []


def takes(one: int, two: int = 0) -> None:
    """A function with known parameters."""


@pytest.mark.parametrize(
    ("parameters", "fits"),
    [
        (None, True),
        ("one two", True),
        ("one", False),
        ("two one", False),
        ("one ...", True),
        ("one two ...", True),
        ("two ...", False),  # `one` has no default
        ("...", False),
        ("one three ...", False),
    ],
)
def test_parameters_are_compared(
    monkeypatch: pytest.MonkeyPatch, parameters: str | None, fits: bool
) -> None:
    monkeypatch.setattr(vllm_mlx.server, "get_usage", takes)
    assert (find_problem("vllm_mlx.server:get_usage", parameters) is None) is fits


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (Name("no_such_module_at_all:x", ""), "no_such_module_at_all"),
        (Name("vllm_mlx.server:no.such", ""), "vllm_mlx.server:no.such"),
        (patch("vllm_mlx.server:_no_such", shout), "_no_such"),
        (Name("vllm_mlx.server:__name__", "", ""), "not a function"),
        (route("/no/such", "GET", print), "no route"),
        (route("/v1/chat/completions", "PUT", print), "no route"),
        (route("/new", "GET", print, ("/no/such", "GET")), "no route GET /no/such"),
    ],
)
def test_problems_are_found_before_anything_is_changed(row: Requirement, expected: str) -> None:
    before = snapshot()
    first = patch("vllm_mlx.server:_sanitize_log_text", shout)
    with pytest.raises(HostError, match=re.escape(expected)):
        patching.apply_all([first, row])
    assert differences(before) == []


@pytest.mark.parametrize("name", ["no_app", "_metrics"])
def test_unextendable_application_is_rejected(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(mount, "APP", f"vllm_mlx.server:{name}")
    front_end = mount.front_end(VllmMlx(ServerSettings.read()))
    for row in (front_end, route("/v1/models", "GET", print)):
        with pytest.raises(HostError, match=name):
            patching.apply_all([row])


def test_replacement_may_be_a_name() -> None:
    undos = patching.apply_all([patch("vllm_mlx.server:get_usage", "builtins:repr")])
    assert vllm_mlx.server.get_usage.startswith("<function get_usage")
    patching.undo_all(undos)
    assert callable(vllm_mlx.server.get_usage)


# --- the real table ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", contract.FLAGS)
def test_real_table_fits_the_real_host(name: str) -> None:
    before = snapshot()
    contract.activate(ServerSettings.read(), name)
    assert entry_points.versions()["vllm-mlx"].startswith("0.6.")
    assert "POST /v1/chat/completions" in contract.changes()
    assert entry_points.in_use().sources[entry_points.PROMPT_RENDERERS]
    assert differences(before) != []
    contract.deactivate()
    assert differences(before) == []


@pytest.mark.parametrize("several", [False, True])
def test_tool_parsers_are_replaced_for_a_single_model(several: bool) -> None:
    parsers = vllm_mlx.tool_parsers.ToolParserManager
    theirs = {name: parsers.get_tool_parser(name) for name in parsers.list_registered()}
    contract.activate(ServerSettings.read(), several=several)
    ours = {name for name, parser in theirs.items() if parsers.get_tool_parser(name) is not parser}
    assert ours == (set() if several else set(contract.FLAGS))
    assert several or issubclass(parsers.get_tool_parser("harmony"), HarmonyToolParser)


def test_every_row_has_a_reason() -> None:
    assert all(row.why for row in contract.table(entry_points.in_use(), ServerSettings.read()))


class Setting:
    """A class with attributes of every kind."""

    annotated: int

    def __init__(self) -> None:
        self.plain = 1
        self.typed: int = 1
        self.one, self.two = 1, 2
        local = 3
        del local

    @property
    def counted(self) -> int:
        return 1


class Inheriting(Setting):
    def __init__(self) -> None:
        super().__init__()
        self.own = 1


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        *(
            (f"{__name__}:Inheriting.{name}", None)
            for name in ("annotated", "plain", "typed", "one", "two", "counted", "own")
        ),
        (f"{__name__}:Inheriting.local", "is missing"),
        ("vllm_mlx.engine.simple:SimpleEngine._generation_lock", None),
        ("vllm_mlx.scheduler:Scheduler.waiting", None),
        ("vllm_mlx.engine.simple:SimpleEngine._no_such_thing", "is missing"),
        ("vllm_mlx.engine.simple:NoSuchEngine._model", "is missing"),
        ("vllm_mlx.no_such_module:Engine._model", "is missing"),
    ],
)
def test_attribute_of_instances_is_found(
    target: str, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(Inheriting=Inheriting))
    found = Name(target, "a test").problem()
    assert found is None if problem is None else problem in (found or "")


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Names that one of our files imports from vllm-mlx and mlx-lm, each with its target."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            for alias in node.names:
                if module in HOSTS:  # a module
                    yield alias.name, f"{module}.{alias.name}"
                elif module.startswith(tuple(f"{host}." for host in HOSTS)):
                    yield alias.name, f"{module}:{alias.name}"


HOSTS = ("vllm_mlx", "mlx_lm")


def without_row(file: Path) -> Iterator[str]:
    """Imports and arguments in one of our files for which the table has no row."""
    rows = {row.target: row for row in contract.NAMES}
    tree = ast.parse(file.read_text())
    names = dict(imported(tree))
    for target in names.values():
        if not any(
            name == target or name.startswith((f"{target}.", f"{target}:")) for name in rows
        ):
            yield target
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).split(".")
            target = ":".join([names.get(called[0], ""), *called[1:]])
            if target in rows and (allowed := rows[target].parameters) is not None:
                unknown = {keyword.arg for keyword in node.keywords} - {None, *allowed.split()}
                if unknown or len(node.args) > len(set(allowed.split()) - {OTHERS}):
                    yield f"{target} with {ast.unparse(node)}"


def test_every_used_name_of_the_host_is_in_the_table() -> None:
    """Globals of its server are checked by mypy, which knows only those of the table."""
    for file in sorted([*PACKAGE.glob("host/*.py"), *PACKAGE.rglob("engine/**/*.py")]):
        assert list(without_row(file)) == [], file.name


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("from vllm_mlx.engine.base import GenerationOutput as a", None),
        ("from vllm_mlx.engine.base import NoRow", "vllm_mlx.engine.base:NoRow"),
        ("from vllm_mlx import server", None),
        ("from vllm_mlx import speculative", "vllm_mlx.speculative"),
        ("from mlx_lm import utils\nutils.load_model(path, lazy=x, **more)", None),
        (
            "from mlx_lm import utils\nutils.load_model(path, strict=x)",
            "mlx_lm.utils:load_model with",
        ),
        (
            "from vllm_mlx.engine.base import GenerationOutput\nGenerationOutput('', prompt=1)",
            "prompt",
        ),
        ("from vllm_mlx.cli import create_parser\ncreate_parser(1)", "create_parser(1)"),
    ],
)
def test_use_without_a_row_is_found(tmp_path: Path, source: str, problem: str | None) -> None:
    (tmp_path / "ours.py").write_text(source)
    found = list(without_row(tmp_path / "ours.py"))
    assert found == [] if problem is None else problem in "".join(found)


def test_every_global_in_the_table_is_used() -> None:
    sources = [file.read_text() for file in PACKAGE.glob("host/*.py")]
    rows = [row for row in server_globals.names() if row.target.startswith("vllm_mlx.server:")]
    assert len(rows) > 25
    for row in rows:
        name = row.target.rpartition(":")[2].rpartition(".")[2]
        assert sum(source.count(name) for source in sources) > 1, row


def test_names_and_patches_are_few() -> None:
    """Every name is one that a new version of the host may change."""
    changed = [row for row in contract.NAMES if isinstance(row, Patch)]
    assert len(changed) <= 8
    assert len(contract.NAMES) - len(changed) <= 85


PACKAGE = Path(host.__file__).parents[1]

CACHES_OF_LAYERS = ("layer", "own")
"""Variables of `engine/` that hold mlx-lm's caches. Its other objects are passed on untouched, and
those of vllm-mlx have types of `server_globals`, which adds their rows."""


def attributes_used(file: Path) -> Iterator[str]:
    """Attributes of mlx-lm's caches that one of our files reads."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            owner = node.value
            if isinstance(owner, ast.Name) and owner.id in CACHES_OF_LAYERS:
                yield node.attr


def test_every_attribute_of_a_host_object_is_in_the_table() -> None:
    names = {re.split(r"[.:]", row.target)[-1] for row in contract.NAMES}
    used = {name for file in PACKAGE.glob("engine/*.py") for name in attributes_used(file)}
    assert len(used) > 8
    assert used - names == set()


FLAG_READ = re.compile(r'\bargs(?:, "|\.)(\w+)|\b(?:flags\.get|of)\("(\w+)"')


def test_every_flag_that_is_read_is_in_the_table() -> None:
    files = [*PACKAGE.glob("host/*.py"), PACKAGE / "engine/resources.py"]
    found = {"".join(names) for file in files for names in FLAG_READ.findall(file.read_text())}
    assert found == {*flags.READ.split()}


def test_flags_are_choices_of_the_hosts_parser() -> None:
    for name in contract.FLAGS:
        assert parse_flags("MODEL", "--tool-call-parser", name).tool_call_parser == name
    assert parse_flags("MODEL", "--reasoning-parser", "harmony").reasoning_parser == "harmony"
