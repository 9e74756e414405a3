"""The CI matrix, as data: what each leg is for, what is installed for it, what is run.

Read by `leg.py`, which runs a leg here, and by the GitHub workflow, which runs one per job.
"""

from __future__ import annotations

from dataclasses import dataclass

PYTEST = ("python", "-m", "pytest", "--durations=10", "--durations-min=2")
MARKDOWN = ("CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md", "docs")

# --- Environments

HOST = ("vllm-mlx", "vllm-mlx-harmony", "mlx", "mlx-lm", "fastapi")
HOST_PYTHON, FORK_PYTHON, NEWEST_PYTHON = "3.11", "3.12", "3.14"


@dataclass(frozen=True)
class Environment:
    """A virtual environment: extras and dependency groups of pyproject.toml, at the versions in
    uv.lock. What is ``absent`` is checked: it distinguishes the environment from the others.
    Packages in ``without`` are left out even if others depend on them. ``editable`` is false where
    the package is to be as users install it, ``project`` where it is not needed."""

    name: str
    extras: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    python: str = HOST_PYTHON
    editable: bool = True
    project: bool = True


HOSTED = Environment(
    "hosted",
    ("browser", "cpu", "test"),
    ("host", "frameworks", "node", "playwright", "uv", "xdist"),
)
"""The host and all of its clients."""
NO_HARMONY = Environment(
    "no-harmony", ("cpu", "test"), ("host",), without=("openai-harmony", "oss-harmony")
)
NO_CPU = Environment("no-cpu", ("test",), ("host",), absent=("mlx-cpu",))
INSTALLED = Environment("installed", ("cpu", "verify"), ("host", "uv"), editable=False)
"""The plugin as users install it."""

LIGHT = Environment(
    "light",
    ("browser", "mlx", "test", "tools"),
    ("newest-mlx-lm", "agents-sdk", "suites", "uv"),
    absent=("vllm-mlx", "fastapi", "torch", "torchvision", "gradio", "opencv-python"),
)
"""A model in its own process, on the newest mlx-lm, which vllm-mlx does not allow yet."""
DEMO = Environment("demo", ("mlx",), absent=("pytest", "vllm-mlx", "torch"), editable=False)
PEERS = Environment(
    "peers",
    ("mlx", "test", "verify"),
    ("newest-mlx-lm", "pages", "uv"),
    absent=("vllm-mlx", "fastapi", "torch"),
    python=FORK_PYTHON,  # mlx-beam requires it
)

FRONT_END = Environment("front-end", ("test",), ("newest-openai",), absent=HOST)
"""No optional package, but OpenAI's newest client: some frameworks do not allow it."""
FRONT_ENDS = Environment(
    "front-ends",
    ("browser", "fast", "redis", "test", "tools", "traces", "verify"),
    ("agents-sdk", "checkers", "node", "redis-server", "tokenizers", "traces", "uv", "xdist"),
    absent=HOST,
)
"""All optional packages, but for mlx."""
BELOW_HOST = {
    python: Environment(f"core-{python}", ("test",), absent=HOST, python=python)
    for python in ("3.11", "3.12", "3.13", "3.14", "3.15")
}
FORK = Environment(
    "oss-harmony", ("test",), ("fork",), HOST, without=("openai-harmony",), python=FORK_PYTHON
)
LINT = Environment("lint", ("test",), ("lint",), absent=HOST[:-1])  # mypy reads fastapi's types
YARDSTICK = Environment("yardstick", ("verify",), ("pages", "uv"), absent=HOST)
RELEASE = Environment("release", groups=("release",), python=FORK_PYTHON, project=False)

# --- Legs


@dataclass(frozen=True)
class Leg:
    """Commands that must succeed in an environment. A skipped test fails the leg.

    ``systems`` are those that it can run on, ``runners`` those that GitHub runs it on;
    ``variables`` are set for its commands. A leg that measures runs ``alone``. ``group`` is another
    name, for all legs of the group: those of `gate` run before a commit, those of `nightly` once a
    day, and `all` has both, the longest first.
    """

    name: str
    what: str
    environment: Environment
    commands: tuple[tuple[str, ...], ...]
    systems: tuple[str, ...] = ("Linux", "Darwin")
    runners: tuple[str, ...] = ("ubuntu-latest",)
    group: str = "nightly"
    variables: tuple[tuple[str, str], ...] = ()
    alone: bool = False


BOTH_RUNNERS = ("ubuntu-latest", "macos-14")

GATE = ("-m", "not nightly")
"""The gate leaves out what is marked `nightly`: rows that cost much, and prove what the rows that
stay prove in part. The leg `rest` runs them."""
GATE_WITHOUT_SERVERS = ("-m", "not served and not nightly")
REST = ("-m", "nightly and not served")
EVERY_PYTHON = ("-m", "not served and not once and not hypothesis")
"""The tests whose result may depend on the version of Python."""

CI_TESTS = "tests/unit/ci"
CORE_TESTS = ("tests/unit/core", "tests/unit/protocols", "tests/unit/cli")
TOOL_TESTS = "tests/unit/server/tools"
SERVER_TESTS = ("tests/unit/server", f"--ignore={TOOL_TESTS}")
GATEWAY_TESTS = ("tests/unit/gateway", "tests/unit/verify")
DOCUMENTATION_TESTS = (
    *(f"tests/unit/cli/test_{name}.py" for name in ("connect", "demo", "readme")),
    *("tests/unit/gateway/test_readme.py", "tests/unit/protocols/test_api_page.py"),
    *(f"tests/unit/server/test_{name}.py" for name in ("api_examples", "endpoints", "settings")),
)
"""The tests below the host that read the documentation."""
FEW = (("EXAMPLES", "few"),)
"""Property tests with a tenth of their examples. The legs of `everything` draw all of them."""
SERVED_FEW = (("SERVED", "few"),)

ON_BOTH_SERVERS = tuple(
    f"tests/system/served/test_{name}.py"
    for name in ("chat_answers", "messages", "requests", "responses", "tools_served")
)
"""What the gate runs on vllm-mlx, too. `served-whole` runs everything there."""

COVERAGE = (
    (
        *(*PYTEST, "tests/unit/core", "tests/unit/protocols", *SERVER_TESTS, *EVERY_PYTHON),
        *("--cov-branch", "--cov-report="),
        *("--cov=vllm_mlx_harmony.core", "--cov=vllm_mlx_harmony.protocols"),
    ),
    ("coverage", "report", "--fail-under=98"),  # per cent of lines and branches
    (*PYTEST, CI_TESTS, "tests/unit/cli", *EVERY_PYTHON),
)

CLIENT_TESTS = tuple(
    f"tests/unit/protocols/test_{name}_client.py" for name in ("chat", "messages", "responses")
)
"""They use everything below the host."""

NOT_OF_MLX_LM = tuple(
    f"--ignore=tests/unit/engine/test_{name}.py"
    for name in (
        *("boundaries", "device", "disk", "drafts", "identity", "prefix_tree", "sampler"),
        "scheduler",
    )
)
"""The tests of what does not use mlx-lm. What is on disk is read in `test_prefix_cache.py`, too."""

LEGS: tuple[Leg, ...] = (
    # The first four need different environments: none waits for another's. Two of them wait for
    # servers half of the time.
    Leg(
        "served",
        "the plugin in the real vllm-mlx: what only that has, and some of all the rest",
        HOSTED,
        (
            (*PYTEST, "tests/system/served", "-m", "of_vllm_mlx and not nightly"),
            (*PYTEST, *ON_BOTH_SERVERS, "-m", "not of_vllm_mlx and not nightly"),
        ),
        runners=BOTH_RUNNERS,
        group="gate",
        variables=SERVED_FEW,
    ),
    Leg(
        "light",
        "the server without vllm-mlx and torch: official clients, a real process",
        LIGHT,
        (
            (*PYTEST, "tests/system/light", *GATE),
            (*PYTEST, "tests/system/served", "-m", "not of_vllm_mlx and not nightly"),
        ),
        runners=BOTH_RUNNERS,
        group="gate",
        variables=SERVED_FEW,
    ),
    Leg(
        "core",
        "everything below the host, on one Python",
        FRONT_END,
        ((*PYTEST, *CORE_TESTS, *GATE_WITHOUT_SERVERS),),
        group="gate",
        variables=FEW,
    ),
    Leg(
        "gateway",
        "the gateway over fake engines on real sockets: every kind, every fault, its process",
        FRONT_ENDS,
        ((*PYTEST, "-n", "2", *GATEWAY_TESTS, *GATE),),  # half is waiting
        runners=BOTH_RUNNERS,
        group="gate",
    ),
    Leg(
        "engine",
        "our engine by itself, and the model without weights",
        HOSTED,
        # Separate processes: the host binds mlx's default stream to a thread of its own for good.
        ((*PYTEST, "tests/unit/engine", *GATE), (*PYTEST, "tests/unit/standin", *GATE)),
        runners=BOTH_RUNNERS,
        group="gate",
    ),
    Leg(
        "commands",
        "the command line over the real server, and a reduced attack suite",
        HOSTED,
        ((*PYTEST, "tests/unit/cli", "tests/system/attack", "-m", "served"),),
        runners=BOTH_RUNNERS,
    ),
    Leg(
        "host",
        "the plugin inside the host's own objects: no sockets",
        HOSTED,
        ((*PYTEST, "tests/unit/host", *GATE),),
        runners=BOTH_RUNNERS,
        group="gate",
    ),
    Leg(
        "served-whole",
        "the plugin in the real vllm-mlx: more rows, and all tests of both servers",
        HOSTED,
        ((*PYTEST, "tests/system/served"),),
        runners=BOTH_RUNNERS,
    ),
    Leg(
        "light-whole",
        "the light server: more rows, and all tests of both servers",
        LIGHT,
        (
            (*PYTEST, "tests/system/light"),
            (*PYTEST, "tests/system/served", "-m", "not of_vllm_mlx"),
        ),
        runners=BOTH_RUNNERS,
    ),
    Leg(
        "rest",
        "the rows that the gate leaves out: engine, stand-in, host, and all below the host",
        HOSTED,
        (
            (*PYTEST, "tests/unit/engine", *REST),
            (*PYTEST, "tests/unit/standin", *REST),
            (*PYTEST, "tests/unit/host", *REST),
            (*PYTEST, *CORE_TESTS, CI_TESTS, *SERVER_TESTS, *REST),
        ),
    ),
    Leg(
        "gateway-whole",
        "the rows that the gate leaves out of the gateway, verify, and tools of the server",
        FRONT_ENDS,
        ((*PYTEST, "-n", "3", *GATEWAY_TESTS, TOOL_TESTS, *REST),),
        runners=BOTH_RUNNERS,
    ),
    Leg(
        "coverage",
        "coverage of core and protocols",
        BELOW_HOST["3.13"],
        COVERAGE,
        variables=FEW,
    ),
    Leg(
        f"core-{NEWEST_PYTHON}",
        "everything below the host, on the newest Python",
        BELOW_HOST[NEWEST_PYTHON],
        ((*PYTEST, *CORE_TESTS, CI_TESTS, *EVERY_PYTHON),),
        variables=FEW,
    ),
    Leg(
        "front-end",
        "the three APIs over a fake engine, in an environment without vllm-mlx and mlx",
        FRONT_END,
        ((*PYTEST, *SERVER_TESTS, *GATE),),
        group="gate",
    ),
    Leg(
        "several",
        "several servers behind one address, over a real Redis",
        FRONT_ENDS,
        ((*PYTEST, "tests/system/several"),),
    ),
    Leg(
        "frameworks",
        "structured outputs and forced calls, through frameworks for Python and JavaScript",
        HOSTED,
        ((*PYTEST, "tests/system/frameworks"),),
    ),
    Leg(
        "engine-mlx-lm-0.32",
        "our engine by itself on the newest mlx-lm, which vllm-mlx does not allow yet",
        LIGHT,
        ((*PYTEST, "tests/unit/engine", "-m", "not once", *NOT_OF_MLX_LM),),
    ),
    Leg(
        "browser",
        "the inspector in a Chromium from npm (0.3 GB), over the real server and a gateway",
        HOSTED,
        ((*PYTEST, "tests/system/browser"),),
        systems=("Linux",),
    ),
    Leg(
        "packaging",
        "wheel, editable and tool installs: active, and gone when uninstalled",
        HOSTED,
        ((*PYTEST, "tests/system/packaging"),),
        runners=BOTH_RUNNERS,
    ),
    Leg(
        "oss-harmony",
        "vocabulary, prompts, parsing and commands with the fork of openai-harmony",
        FORK,
        (
            (
                *(*PYTEST, "tests/unit/core", "tests/unit/cli", *CLIENT_TESTS),
                *("-m", "not served and not once"),
            ),
        ),
        variables=FEW,
    ),
    Leg(
        "tools",
        "tools that the server runs, over a real MCP server",
        FRONT_ENDS,
        ((*PYTEST, TOOL_TESTS, *GATE),),
        group="gate",
    ),
    Leg(
        "no-harmony",
        "no openai-harmony: a warning, and the host's own path",
        NO_HARMONY,
        ((*PYTEST, "tests/system/no_harmony"),),
    ),
    Leg(
        "demo",
        "the demo, on the light server alone",
        DEMO,
        (("vllm-mlx-harmony", "demo"),),
        runners=BOTH_RUNNERS,
    ),
    Leg(
        "no-cpu",
        "Linux without the extra `cpu`: everything that needs no mlx works, the rest says why",
        NO_CPU,
        ((*PYTEST, "tests/system/no_cpu"),),
        systems=("Linux",),
    ),
    Leg(
        "lint",
        "style, types, who may import whom, and these scripts",
        LINT,
        (
            ("ruff", "check", "."),
            ("ruff", "format", "--check", "."),
            ("mdformat", "--check", *MARKDOWN),
            ("mypy", "vllm_mlx_harmony", "benchmarks", "ci"),
            ("lint-imports",),
            (*PYTEST, CI_TESTS, *GATE),
        ),
        group="gate",
    ),
    Leg(
        "pages",
        "the documentation: for a change of it alone; other legs of the gate run these tests, too",
        FRONT_END,
        ((*PYTEST, *DOCUMENTATION_TESTS, *GATE_WITHOUT_SERVERS),),
        group="",
    ),
    # The others are in no run of several: they take long, or measure.
    Leg(
        "vllm",
        "a real vLLM on processors (4 GB): random below the three APIs, and playing scripts",
        FRONT_ENDS,
        ((*PYTEST, "tests/system/vllm"),),
        systems=("Linux",),
        group="",
    ),
    Leg(
        "agents",
        "eighteen coding agents from npm and PyPI (7 GB) through a gateway over a fake engine",
        FRONT_ENDS,
        ((*PYTEST, "tests/system/agents"),),
        group="",
    ),
    Leg(
        "clients",
        "every example of docs/clients.md, its client in an environment of its own (3 GB)",
        FRONT_ENDS,
        ((*PYTEST, "tests/system/clients"),),
        group="",
    ),
    Leg(
        "yardstick",
        "verify on the newest versions of other servers, each installed from PyPI (10 GB)",
        YARDSTICK,
        (("python", "benchmarks/yardstick.py"),),
        systems=("Linux",),
        group="",
        alone=True,
    ),
    Leg(
        "peers",
        "speed beside the MLX servers of PyPI, each in an environment of its own (8 GB)",
        PEERS,
        (("python", "benchmarks/bench_peers.py", "--page"),),
        systems=("Linux",),
        group="",
        alone=True,
    ),
    Leg(
        "suites",
        "canitoolcall's fixtures and GuideLLM (6 GB)",
        LIGHT,
        ((*PYTEST, "tests/system/suites"),),
        group="",
    ),
    Leg(
        "bench-gateway",
        "what the gateway costs per request, token and stream, beside its engine asked alone",
        FRONT_ENDS,
        (("python", "benchmarks/bench_gateway.py"),),
        systems=("Linux",),
        group="",
        alone=True,
    ),
    Leg(
        "bench-start",
        "the start and idle memory of the light server and the plugin, beside their bases",
        LIGHT,
        (("python", "benchmarks/bench_start.py"),),
        group="",
        alone=True,
    ),
    Leg(
        "release",
        "all distributions are built and checked, below dist",
        RELEASE,
        (("python", "ci/release.py"),),
        group="",
    ),
    Leg(
        "grammar",
        "500 random outputs of every kind, held to what was asked for",
        HOSTED,
        ((*PYTEST, "-n", "2", "-rP", "tests/unit/host/test_enforcement.py"),),
        variables=(("GRAMMAR_SEEDS", "500"),),
        group="",
    ),
    Leg(
        "attack",
        "load, kill -9, mutated requests, the web, stalled readers, random ids, event loop",
        HOSTED,
        ((*PYTEST, "tests/system/attack"),),
        variables=(("ATTACK", "full"),),
        group="",
        alone=True,
    ),
    Leg(
        "bench",
        "cost per token, of a prompt, the disk and the start of Python, against the host's own",
        INSTALLED,
        (
            *(
                ("python", f"benchmarks/{name}.py")
                for name in (
                    *("bench", "bench_render", "bench_grammar", "bench_reuse", "bench_decode"),
                    *("bench_engine", "bench_disk"),
                )
            ),
            # No seconds: the BLAS of mlx's package for Linux is slow at wide steps.
            ("python", "benchmarks/bench_speculate.py", "--timed", "0"),
        ),
        group="",
        alone=True,
    ),
    *(
        Leg(
            f"whole-{environment.name.removeprefix('core-')}",
            f"everything below the host, all examples, on Python {environment.python}",
            environment,
            ((*PYTEST, *CORE_TESTS, "-m", "not served"),),
            group="everything",
        )
        for environment in (*BELOW_HOST.values(), FORK)
    ),
)

PACKAGES = {
    "bench/": ("gateway",),
    "cli/": ("core", "gateway", "host"),
    "core/": ("core", "front-end"),
    "core/grammar/": ("host",),
    "data/": ("core",),
    "engine/": ("engine", "host", "light"),
    "engine_api/": ("engine", "front-end", "gateway"),
    "gateway/": ("gateway",),
    "gateway/local.py": ("light",),
    "gateway/shared_limit.py": ("several",),
    "host/": ("host", "served"),
    "inspector/": ("front-end", "gateway", "browser"),
    "protocols/": ("core", "front-end"),
    # Not `served`: `light` runs the same tests over sockets, but for what only vllm-mlx has.
    "server/": ("front-end", "host", "light"),
    "server/peers/": ("several",),
    "server/tools/": ("tools",),
    "standin/": ("engine", "served"),
    "verify/": ("gateway",),
}
"""Where the behaviour of each package is proved, which is not everywhere that it is imported."""

TESTED_BY: dict[str, tuple[str, ...]] = {
    **{f"vllm_mlx_harmony/{path}": legs for path, legs in PACKAGES.items()},
    **dict.fromkeys(MARKDOWN, ("pages",)),
    "docs/architecture.md": ("host",),
    "docs/gateway.md": ("several",),
    **dict.fromkeys((".github/", "benchmarks/", "ci/", "tests/unit/ci/"), ("lint",)),
    **dict.fromkeys(("packaging/", "tests/system/packaging/"), ("packaging",)),
    **dict.fromkeys(CORE_TESTS, ("core",)),
    **dict.fromkeys((*GATEWAY_TESTS, "examples/"), ("gateway",)),
    **dict.fromkeys(("tests/unit/engine/", "tests/unit/standin/"), ("engine",)),
    "tests/unit/host/": ("host",),
    "tests/unit/server/": ("front-end",),
    "tests/unit/server/tools/": ("tools",),
    "tests/system/attack/": ("commands",),
    "tests/system/served/": ("light", "served"),
    **{
        f"tests/system/{leg.replace('-', '_')}/": (leg,)
        for leg in ("browser", "frameworks", "light", "no-cpu", "no-harmony", "several")
    },
}
"""The legs that test files whose paths begin with these (``leg.py --changed``), but for `lint`,
which tests every change. Every entry with which a path begins counts."""
