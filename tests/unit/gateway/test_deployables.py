"""What examples/ deploys: image, Compose, Kubernetes, Prometheus' rules and Grafana's dashboard."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

import httpx
import yaml
from app_server import run_server
from fake_engines import FakeEngine
from gateway_in_process import MODEL
from prometheus_client.parser import text_string_to_metric_families

from vllm_mlx_harmony import __version__
from vllm_mlx_harmony.gateway.app import gateway
from vllm_mlx_harmony.gateway.engines.detection import Spec
from vllm_mlx_harmony.gateway.limits import digest
from vllm_mlx_harmony.gateway.settings import GatewaySettings, Key, load

compose_spec = pytest.importorskip("compose_spec")
kubernetes_validate = pytest.importorskip("kubernetes_validate")
promql_parser = pytest.importorskip("promql_parser")

EXAMPLES = Path(__file__).parents[3] / "examples"
COMPOSE = yaml.safe_load((EXAMPLES / "compose/compose.yaml").read_text())
DOCKERFILE = EXAMPLES / "compose/Dockerfile"
KUBERNETES = list(yaml.safe_load_all((EXAMPLES / "kubernetes/gateway.yaml").read_text()))
RULES = yaml.safe_load((EXAMPLES / "monitoring/rules.yml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((EXAMPLES / "monitoring/dashboard.json").read_text())


def of_kind(kind: str, name: str = "gateway") -> dict[str, Any]:
    (manifest,) = [
        document
        for document in KUBERNETES
        if document["kind"] == kind and document["metadata"]["name"] == name
    ]
    return dict(manifest)


# --- Image and Compose


def test_dockerfile_passes_the_linter() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    linted = subprocess.run([linter, DOCKERFILE], capture_output=True, text=True, check=False)
    assert (linted.returncode, linted.stdout) == (0, "")
    text = DOCKERFILE.read_text()
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"python:3.12.12-slim-bookworm"}
    assert re.search(r"^USER [1-9]\d+$", text, re.MULTILINE)


def test_compose_is_valid_and_pinned() -> None:
    text = (EXAMPLES / "compose/compose.yaml").read_text()
    compose_spec.PyCompose(re.sub(r"\$\{\w+:\?\}", "x", text))
    images = {name: definition["image"] for name, definition in COMPOSE["services"].items()}
    for name, image in images.items():
        assert re.search(r":v?\d+\.\d+", image), f"{name} is not pinned: {image}"
    assert images["gateway"] == f"vllm-mlx-harmony-server:{__version__}"
    folder = EXAMPLES / "compose"
    for service in COMPOSE["services"].values():
        for mount in service.get("volumes", ()):
            source = mount.partition(":")[0]
            there = (folder / source).exists() if source[0] == "." else source in COMPOSE["volumes"]
            assert there, mount


def test_gateway_of_compose_can_read_its_file() -> None:
    service = COMPOSE["services"]["gateway"]
    environment = {
        name: value.replace("${ENGINE_KEY:?}", "key-of-engine")
        for name, value in service["environment"].items()
    }
    (mount,) = service["volumes"]
    source, _, target = mount.partition(":")
    inside = environment["VLLM_MLX_HARMONY_GATEWAY_CONFIG"]
    file = EXAMPLES / "compose" / source / Path(inside).relative_to(target)
    settings = load({}, environment, str(file))
    engines = [name for name in COMPOSE["services"] if name.startswith("engine")]
    assert [spec.url for spec in settings.engines] == [f"http://{name}:8000" for name in engines]
    assert {spec.key for spec in settings.engines} == {"key-of-engine"}
    assert "--api-key=${ENGINE_KEY:?}" in COMPOSE["services"]["engine-1"]["command"]
    assert int(service["stop_grace_period"].rstrip("s")) > settings.shutdown_grace
    assert settings.limits().tokens_per_minute and settings.metrics_by_key


def test_nginx_follows_recreated_gateways() -> None:
    """And retries with another one where nothing has run yet."""
    text = (EXAMPLES / "compose/nginx.conf").read_text()
    assert re.search(r"^\s*resolver 127\.0\.0\.11 valid=\d+s", text, re.MULTILINE)
    upstream = re.search(r"upstream gateways \{(.*?)\}", text, re.DOTALL)
    assert upstream is not None and "zone gateways" in upstream[1]
    assert re.search(r"server gateway:8000 resolve\b", upstream[1])
    assert "proxy_next_upstream error http_503 non_idempotent;" in text
    assert "proxy_buffering off;" in text
    assert COMPOSE["services"]["proxy"]["ports"] == ["8080:8080"] and "listen 8080;" in text


# --- Kubernetes


@pytest.mark.parametrize("version", ["1.31", "1.34"])
def test_manifests_are_valid(version: str) -> None:
    for document in KUBERNETES:
        kubernetes_validate.validate(document, version, strict=True)


def test_wrong_manifest_is_found() -> None:
    wrong = json.loads(json.dumps(of_kind("Deployment")).replace("httpGet", "httpget"))
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.34", strict=True)


def test_pod_ends_after_its_answers(tmp_path: Path) -> None:
    pod = of_kind("Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    file = tmp_path / "gateway.toml"
    file.write_text(of_kind("Secret")["stringData"]["gateway.toml"])
    settings = load({}, {}, str(file))
    _, wait = container["lifecycle"]["preStop"]["exec"]["command"]
    assert pod["terminationGracePeriodSeconds"] > settings.shutdown_grace + int(wait)
    assert container["image"].endswith(f"vllm-mlx-harmony-server:{__version__}")
    assert f"USER {pod['securityContext']['runAsUser']}\n" in DOCKERFILE.read_text()
    paths = [container[f"{name}Probe"]["httpGet"]["path"] for name in ("liveness", "readiness")]
    assert paths == ["/health", "/ready"]
    assert settings.keys == (Key("alice", digest("secret")),)  # as the comment has it


def test_labels_and_ports_match() -> None:
    for name, kind in (("gateway", "Deployment"), ("gateway-redis", "StatefulSet")):
        template = of_kind(kind, name)["spec"]["template"]
        (container,) = template["spec"]["containers"]
        service = of_kind("Service", name)["spec"]
        labels = template["metadata"]["labels"]
        assert (
            service["selector"] == labels == of_kind(kind, name)["spec"]["selector"]["matchLabels"]
        )
        assert service["ports"][0]["targetPort"] == container["ports"][0]["name"]
    budget, deployment = of_kind("PodDisruptionBudget")["spec"], of_kind("Deployment")["spec"]
    assert budget["selector"] == deployment["selector"]
    assert 1 <= budget["minAvailable"] < deployment["replicas"]


# --- Prometheus and Grafana


@pytest.fixture(scope="module")
def scraped() -> dict[str, dict[str, set[str]]]:
    """The samples of a gateway that has served one request and rejected another: labels, values."""
    scripts = {"Hello": "<|channel|>final<|message|>Hi.<|return|>"}
    with ExitStack() as stack:
        url = stack.enter_context(run_server(FakeEngine("vllm", scripts).app))
        settings = GatewaySettings(
            engines=(Spec(url),),
            model=MODEL,
            keys=(Key("alice", digest("key-of-alice")),),
            metrics_by_key=True,
        )
        base = stack.enter_context(run_server(gateway(settings)))
        for key in ("key-of-alice", "wrong"):
            body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
            header = {"Authorization": f"Bearer {key}"}
            httpx.post(f"{base}/v1/chat/completions", json=body, headers=header, timeout=180)
        text = httpx.get(f"{base}/metrics", timeout=180).text
    samples: dict[str, dict[str, set[str]]] = {"up": {"job": {"gateway"}}}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = samples.setdefault(sample.name, {})
            for name, value in {**sample.labels, "job": "gateway"}.items():
                labels.setdefault(name, set()).add(value)
    return samples


RESULTS = {"success", "error", "timeout", "client_closed"}
"""The results of `server.host.Tracker`."""

GENERIC = {"$__rate_interval": "5m"}

EXPRESSIONS = {
    **{rule["alert"]: rule["expr"] for rule in RULES},
    **{
        f"{panel['title']}, {target['refId']}": target["expr"]
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    },
}


def nodes(node: Any) -> Iterator[Any]:
    """An expression and all its parts."""
    yield node
    for name in ("expr", "lhs", "rhs", "vector_selector", "vs", "param"):
        if (part := getattr(node, name, None)) is not None:
            yield from nodes(part)
    for part in getattr(node, "args", ()) or ():
        yield from nodes(part)


@pytest.mark.parametrize("expression", EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_expression_finds_series(expression: str, scraped: dict[str, dict[str, set[str]]]) -> None:
    for variable, value in GENERIC.items():
        expression = expression.replace(variable, value)
    parts = list(nodes(promql_parser.parse(expression)))
    selectors = [node for node in parts if isinstance(node, promql_parser.VectorSelector)]
    assert len({vector.name for vector in selectors}) == len(
        set(re.findall(r"\b(?:up|vllm_mlx_harmony_\w+)\b", expression))
    )
    known_labels: set[str] = set()
    for selector in selectors:
        assert selector.name in scraped, f"no metric {selector.name}"
        labels = scraped[selector.name]
        known_labels |= labels.keys()
        for matcher in selector.matchers.matchers:
            values = RESULTS if matcher.name == "result" else labels[matcher.name]
            wanted = set(matcher.value.split("|"))
            assert wanted <= values, f"{selector.name} has no {matcher.name} of {wanted}"
    for part in parts:
        if isinstance(part, promql_parser.Call) and part.func.name in ("rate", "increase"):
            (counter,) = [node for node in nodes(part.args[0]) if hasattr(node, "matchers")]
            assert counter.name.endswith(("_total", "_bucket"))
        if isinstance(part, promql_parser.AggregateExpr) and part.modifier is not None:
            assert set(part.modifier.labels) <= known_labels, f"no label of {part.modifier.labels}"


@pytest.mark.parametrize(
    "wrong", ["vllm_mlx_harmony_requests", 'up{job="other"}', "sum by (x) (up)"]
)
def test_expression_without_series_is_found(
    wrong: str, scraped: dict[str, dict[str, set[str]]]
) -> None:
    with pytest.raises(AssertionError):
        test_expression_finds_series(wrong, scraped)


def test_rules_have_severity_and_action() -> None:
    assert {rule["labels"]["severity"] for rule in RULES} == {"page", "ticket"}
    for rule in RULES:
        assert rule["annotations"].keys() == {"summary", "action"}, rule["alert"]
        used = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        assert all(f"by ({label})" in rule["expr"] for label in used), rule["alert"]
    config = yaml.safe_load((EXAMPLES / "monitoring/prometheus.yml").read_text())
    assert config["rule_files"] == ["rules.yml"]
    (job,) = config["scrape_configs"]
    (gateways,) = job["dns_sd_configs"]
    assert job["job_name"] == "gateway" and set(gateways["names"]) <= COMPOSE["services"].keys()


@pytest.mark.parametrize("name", ["dashboard", "server"])
def test_panels_of_dashboard_fit_together(name: str) -> None:
    dashboard = json.loads((EXAMPLES / f"monitoring/{name}.json").read_text())
    panels = dashboard["panels"]
    occupied: set[tuple[int, int]] = set()
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & occupied and at["x"] + at["w"] <= 24, panel["title"]
        occupied |= cells
    sources = yaml.safe_load((EXAMPLES / "monitoring/grafana.yaml").read_text())["datasources"]
    (variable,) = dashboard["templating"]["list"]  # its Prometheus has any name in other Grafanas
    assert (variable["type"], variable["query"]) == ("datasource", sources[0]["type"])
    for panel in panels:
        for element in (panel, *panel["targets"]):
            assert element["datasource"]["uid"] == f"${{{variable['name']}}}"
    assert sources[0]["url"].removeprefix("http://").partition(":")[0] in COMPOSE["services"]
