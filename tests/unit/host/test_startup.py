"""The import hook: one finder that waits for one module, in every way that the module is run.

Each row runs a fresh interpreter with a host of a few lines in the shape of the real one's command
line; `test_contract` and `tests/system/packaging` do the same with the real one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3]
STARTUP = PACKAGE / "packaging/vllm-mlx-harmony/startup"

CLI = '''\
"""The host's command line."""
import argparse
from . import NAME

def serve_command(args):
    import sys
    shown = sys.modules[__name__].serve_command
    print("serve", args.tool_call_parser, "gate" if hasattr(shown, "__wrapped__") else "original")

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tool-call-parser")
    serve_command(parser.parse_args())

if __name__ == "__main__":
    main()
'''

# Stands in for vllm_mlx_harmony.host: prints that it was called, and with which namespace.
HOST = """\
def install(namespace):
    import functools, sys
    original = namespace["serve_command"]
    @functools.wraps(original)
    def gated(args):
        print("gated", namespace["__name__"])
        namespace["serve_command"] = original
        return original(args)
    namespace["serve_command"] = gated
"""

ARM = "import vllm_mlx_harmony._startup as s; s.register(); "
RUN = "import sys; sys.argv = ['x']; "


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A directory with the host and with this package, whose `host` is the one above."""
    host = tmp_path / "vllm_mlx"
    host.mkdir()
    (host / "__init__.py").write_text("NAME = 'vllm_mlx'\n")
    (host / "cli.py").write_text(CLI)
    (host / "data.txt").write_text("a resource")
    ours = tmp_path / "vllm_mlx_harmony"
    (ours / "host").mkdir(parents=True)
    (ours / "host" / "__init__.py").write_text(HOST)
    for name in ("__init__.py", "_startup.py", "_import_hook.py"):
        (ours / name).write_bytes((PACKAGE / "vllm_mlx_harmony" / name).read_bytes())
    return tmp_path


def run(site: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(site), "VLLM_MLX_HARMONY": "", **environment},
        cwd=site,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def printed_lines(site: Path, source: str, **environment: str) -> list[str]:
    """The lines that a program prints. -S: the package may be installed where the tests run."""
    result = run(site, "-S", "-c", source, **environment)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout.splitlines()


SERVED = ["gated vllm_mlx.cli", "serve None original"]
PLAIN = ["serve None original"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        pytest.param(RUN + "from vllm_mlx.cli import main; main()", PLAIN, id="not registered"),
        pytest.param(ARM + RUN + "from vllm_mlx.cli import main; main()", SERVED, id="script"),
        pytest.param(ARM + RUN + "import vllm_mlx.cli; vllm_mlx.cli.main()", SERVED, id="import"),
        pytest.param(
            RUN + "import vllm_mlx.cli as c; " + ARM + "c.main()", SERVED, id="registered too late"
        ),
        pytest.param(
            ARM + RUN + "s.register(); s.register(); import vllm_mlx.cli as c; c.main()",
            SERVED,
            id="registered three times",
        ),
        pytest.param(
            ARM + RUN + "import importlib.util as u; u.find_spec('vllm_mlx.cli'); "
            "import vllm_mlx.cli as c; c.main()",
            SERVED,
            id="probed before",
        ),
        pytest.param(
            ARM + RUN + "import importlib.util as u; p = u.find_spec('vllm_mlx.cli'); "
            "m = u.module_from_spec(p); p.loader.exec_module(m); sys.modules[p.name] = m; m.main()",
            SERVED,
            id="loaded by hand",
        ),
        pytest.param(
            ARM + RUN + "import importlib, vllm_mlx.cli as c; importlib.reload(c); c.main()",
            SERVED,
            id="reloaded",
        ),
        pytest.param(
            ARM + RUN + "import vllm_mlx.cli as c; c.main(); del sys.modules[c.__name__]; "
            "import vllm_mlx.cli; sys.modules['vllm_mlx.cli'].main()",
            SERVED * 2,
            id="imported again",
        ),
        pytest.param(
            ARM + RUN + "import runpy; runpy.run_module('vllm_mlx.cli', run_name='__main__', "
            "alter_sys=True)",
            ["gated __main__", "serve None original"],
            id="runpy as main",
        ),
    ],
)
def test_host_is_gated_once_however_it_is_loaded(
    site: Path, source: str, expected: list[str]
) -> None:
    assert printed_lines(site, source) == expected


def test_host_run_with_m_is_gated(site: Path) -> None:
    (site / "sitecustomize.py").write_text(ARM)
    result = run(site, "-m", "vllm_mlx.cli", "--tool-call-parser", "harmony")
    assert result.stdout.splitlines() == ["gated __main__", "serve harmony original"]
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "warns"),
    [
        (["--tool-call-parser", "harmony"], True),
        (["--port", "1", "--tool-call-parser=gpt-oss"], True),
        (["--tool-call-parser", "qwen"], False),
        ([], False),
    ],
)
def test_server_module_warns_that_it_is_not_gated(
    site: Path, arguments: list[str], warns: bool
) -> None:
    """It has its own command line, and patches would not reach it, since it runs as `__main__`."""
    (site / "vllm_mlx" / "server.py").write_text("print('served', __name__)\n")
    (site / "sitecustomize.py").write_text(ARM)
    result = run(site, "-m", "vllm_mlx.server", *arguments)
    assert result.stdout == "served __main__\n"
    assert ("use `vllm-mlx serve`" in result.stderr) is warns
    assert len(result.stderr.splitlines()) == warns
    imported = "import sys, vllm_mlx.server"
    assert run(site, "-c", imported, "--tool-call-parser", "harmony").stderr == ""


def test_spawned_children_are_gated(site: Path) -> None:
    (site / "sitecustomize.py").write_text(ARM)
    (site / "job.py").write_text(
        "def job():\n    import sys; sys.argv = ['x']\n    from vllm_mlx.cli import main; main()\n"
    )
    (site / "parent.py").write_text(
        "import multiprocessing, job\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=job.job)\n"
        "    child.start(); child.join(); assert child.exitcode == 0\n"
    )
    assert run(site, "parent.py").stdout.splitlines() == SERVED


def test_traceback_with_m_has_the_lines_of_the_source(site: Path) -> None:
    (site / "sitecustomize.py").write_text(ARM)
    result = run(site, "-m", "vllm_mlx.cli", "--no-such-flag")
    (site / "vllm_mlx" / "cli.py").write_text(CLI.replace('    print("serve"', "    1 / 0  #"))
    broken = run(site, "-m", "vllm_mlx.cli")
    line = CLI.splitlines().index(next(text for text in CLI.splitlines() if "print(" in text)) + 1
    assert result.returncode == 2
    assert f'cli.py", line {line}, in serve_command' in broken.stderr
    assert "ZeroDivisionError" in broken.stderr


@pytest.mark.parametrize("value", ["0", "false", "no", "OFF", " 0 "])
def test_switch_turns_the_gate_off(site: Path, value: str) -> None:
    source = ARM + RUN + "from vllm_mlx.cli import main; main(); print(s.registered())"
    assert printed_lines(site, source, VLLM_MLX_HARMONY=value) == [*PLAIN, "False"]


@pytest.mark.parametrize("value", ["", "1", "on"])
def test_other_values_leave_the_gate_on(site: Path, value: str) -> None:
    source = ARM + RUN + "from vllm_mlx.cli import main; main(); print(s.registered())"
    assert printed_lines(site, source, VLLM_MLX_HARMONY=value) == [*SERVED, "True"]


def test_switch_works_after_registration(site: Path) -> None:
    source = ARM + RUN + "import os; os.environ['VLLM_MLX_HARMONY'] = '0'; "
    assert printed_lines(site, source + "from vllm_mlx.cli import main; main()") == PLAIN


@pytest.mark.parametrize(
    "broken",
    [
        "raise RuntimeError('no')",
        "def install(namespace): raise RuntimeError('no')",
        "syntax error",
    ],
)
@pytest.mark.parametrize(
    "way", [("-m", "vllm_mlx.cli"), ("-c", "from vllm_mlx.cli import *; main()")]
)
def test_failed_install_is_one_line_and_the_host_runs(
    site: Path, broken: str, way: tuple[str, str]
) -> None:
    (site / "sitecustomize.py").write_text(ARM)
    (site / "vllm_mlx_harmony" / "host" / "__init__.py").write_text(broken)
    result = run(site, *way)
    assert (result.returncode, result.stdout.splitlines()) == (0, PLAIN)
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("vllm-mlx-harmony: not installed (")


def test_half_removed_package_does_not_stop_python(site: Path) -> None:
    (site / "vllm_mlx_harmony" / "_import_hook.py").unlink()
    assert printed_lines(site, ARM + "print('fine')") == ["fine"]


@pytest.mark.parametrize(
    "changed",
    ["def main(): print('other')\nmain()\n", "import sys\nsys.stdout.write('other\\n')\n"],
)
def test_other_command_line_with_m_runs_unchanged(site: Path, changed: str) -> None:
    (site / "sitecustomize.py").write_text(ARM)
    (site / "vllm_mlx" / "cli.py").write_text(changed)
    result = run(site, "-m", "vllm_mlx.cli")
    assert (result.stdout, result.stderr) == ("other\n", "")


def test_import_error_of_the_host_is_unchanged(site: Path) -> None:
    (site / "vllm_mlx" / "cli.py").write_text("raise ImportError('no mlx here')")
    result = run(site, "-c", ARM + "import vllm_mlx.cli")
    assert "ImportError: no mlx here" in result.stderr
    assert "vllm-mlx-harmony" not in result.stderr


def test_missing_host_is_the_usual_error(site: Path) -> None:
    (site / "vllm_mlx").rename(site / "elsewhere")
    # -S: the real host may be installed where the tests run
    result = run(site, "-S", "-c", ARM + "import vllm_mlx.cli")
    assert "No module named 'vllm_mlx'" in result.stderr
    assert "vllm-mlx-harmony" not in result.stderr


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("spec.origin == spec.loader.get_filename('vllm_mlx.cli')", "True"),
        ("'def serve_command' in spec.loader.get_source('vllm_mlx.cli')", "True"),
        ("spec.loader.is_package('vllm_mlx.cli')", "False"),
        ("type(spec.loader.get_code('vllm_mlx.cli')).__name__", "code"),
        ("spec.loader.get_data(spec.origin)[:3]", 'b\'"""\''),
        ("spec.has_location, spec.parent", "True vllm_mlx"),
        ("__import__('copy').copy(spec.loader).name", "vllm_mlx.cli"),
        ("hasattr(spec.loader, 'no_such_thing')", "False"),
    ],
)
def test_loader_behaves_like_the_real_one(site: Path, expression: str, expected: str) -> None:
    source = "import importlib.util as u; spec = u.find_spec('vllm_mlx.cli'); "
    assert printed_lines(site, ARM + source + f"print({expression})") == [expected]


def test_loaded_module_has_the_real_loader(site: Path) -> None:
    source = (
        "import vllm_mlx.cli as c, inspect, importlib.resources as r; "
        "print(type(c.__loader__).__name__, c.__loader__ is c.__spec__.loader, "
        "'def main' in inspect.getsource(c), r.files('vllm_mlx').joinpath('data.txt').read_text())"
    )
    assert printed_lines(site, ARM + source) == ["SourceFileLoader True True a resource"]


def test_recursive_finder_makes_no_infinite_loop(site: Path) -> None:
    source = (
        ARM + RUN + "import importlib.util\n"
        "class Asking:\n"
        "    asked = []\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'vllm_mlx.cli' and not self.asked:\n"
        "            self.asked.append(name)\n"
        "            return importlib.util.find_spec(name)\n"
        "sys.meta_path.insert(1, Asking())\n"
        "from vllm_mlx.cli import main; main()"
    )
    assert printed_lines(site, source) == SERVED


def test_registration_imports_nothing(site: Path) -> None:
    source = (
        f"import os, sys; before = set(sys.modules); {ARM}print(*sorted(set(sys.modules) - before))"
    )
    assert printed_lines(site, source) == ["vllm_mlx_harmony vllm_mlx_harmony._startup"]


def test_startup_files_register_the_finder() -> None:
    (line,) = (STARTUP / "vllm_mlx_harmony_startup.pth").read_text().splitlines()
    assert line == "import vllm_mlx_harmony._startup; vllm_mlx_harmony._startup.register()"
    (start,) = (STARTUP / "vllm_mlx_harmony_startup.start").read_text().splitlines()
    assert start == "vllm_mlx_harmony._startup:register"
