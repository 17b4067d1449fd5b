"""What examples/ says to Kubernetes, compose and Ray Serve is what the server offers."""

import json
import re
import runpy
import urllib.request
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

import dualinfer
from dualinfer.cli.main import app as cli
from dualinfer.serving.http.beside import served

EXAMPLES = Path(__file__).parents[1] / "examples"
DEPLOYMENT, SERVICE, POOL = yaml.safe_load_all((EXAMPLES / "deploy/kubernetes.yaml").read_text())
COMPOSE = yaml.safe_load((EXAMPLES / "deploy/compose.yaml").read_text())["services"]["dualinfer"]
POD = DEPLOYMENT["spec"]["template"]
CONTAINER = POD["spec"]["containers"][0]
# What the endpoint picker of Gateway API's inference extension reads of a server: its proposal 003,
# by the names of vLLM, which it takes where nothing else is said.
PICKER = {"vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"}


@pytest.fixture(scope="module")
def url():
    """The address of the server that the example for Ray Serve makes."""
    make = runpy.run_path(str(EXAMPLES / "deploy" / "ray_serve.py"))["server"]
    with served(make(str(dualinfer.embedded_model()), "torch")) as url:
        yield url


def ask(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    head = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, head), timeout=60) as said:
        return said.read().decode()


def options_of(command):
    name, action, *arguments = [re.sub(r"\$\{MODEL:-(.+)\}", r"\1", word) for word in command]
    assert (name, action) == ("dualinfer", "serve")
    known = get_command(cli).commands["serve"]
    return known.make_context("serve", arguments).params


@pytest.mark.parametrize(
    "command", [CONTAINER["command"], COMPOSE["command"]], ids=["pod", "compose"]
)
def test_the_command_is_one_that_the_command_line_takes(command):
    said = options_of(command)
    assert said["host"] == "0.0.0.0" and said["port"] == 8000 and "/" in said["model"]


def test_a_pod_may_drain_and_its_ports_agree():
    said = options_of(CONTAINER["command"])
    assert POD["spec"]["terminationGracePeriodSeconds"] > said["grace"]
    assert int(COMPOSE["stop_grace_period"][:-1]) > options_of(COMPOSE["command"])["grace"]
    (port,) = CONTAINER["ports"]
    assert port["containerPort"] == said["port"] == POOL["spec"]["targetPorts"][0]["number"]
    assert SERVICE["spec"]["ports"][0]["targetPort"] == port["name"]
    for labels in (SERVICE["spec"]["selector"], POOL["spec"]["selector"]["matchLabels"]):
        assert labels.items() <= POD["metadata"]["labels"].items()
    assert COMPOSE["ports"] == ["127.0.0.1:8000:8000"]
    volumes = {volume["name"] for volume in POD["spec"]["volumes"]}
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == volumes


def test_probes_and_metrics_are_routes_that_answer(url):
    probes = {name: CONTAINER[name]["httpGet"] for name in CONTAINER if name.endswith("Probe")}
    assert len(probes) == 3
    paths = {probe["path"] for probe in probes.values()}
    paths |= set(re.findall(r"8000(/\w+)", str(COMPOSE["healthcheck"]["test"])))
    assert paths == {"/health", "/ready"}
    assert all(ask(url + path) for path in paths)
    metrics = ask(url + POD["metadata"]["annotations"]["prometheus.io/path"])
    gauges = set(re.findall(r"# TYPE (\S+) gauge", metrics))
    assert gauges >= PICKER


def test_ray_serves_routes_that_answer(url):
    body = {"model": str(dualinfer.embedded_model()), "prompt": "def f(", "max_tokens": 2}
    said = json.loads(ask(url + "/v1/completions", body))
    assert said["usage"]["completion_tokens"] == 2
