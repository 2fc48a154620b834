"""The files of docs/deploy: they call programs and ask for metrics that there are, and Prometheus takes them."""

import json
import re
import shutil
import subprocess

import pytest

from compiled_llm.commands.serve import parser
from tests.docs.markdown import ROOT
from tests.server.conftest import Running

DEPLOY = ROOT / "docs" / "deploy"


def metrics(running: Running) -> set[str]:
    """The names of all samples, once a request was served."""
    assert running.http.post("/v1/completions", json={"prompt": "import", "max_tokens": 2}).status_code == 200
    lines = running.http.get("/metrics").text.splitlines()
    return {re.split("[{ ]", line)[0] for line in lines if not line.startswith("#")}


@pytest.mark.parametrize("name", ["grafana.json", "alerts.yml"])
def test_dashboard_and_alerts_ask_for_metrics_that_there_are(running: Running, name: str) -> None:
    text = (DEPLOY / name).read_text()
    asked = set(re.findall(r"\b(?:vllm|compiled_llm):\w+", text))
    assert len(asked) > 4
    assert asked <= metrics(running)


def test_the_dashboard_is_one() -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len({str(panel["gridPos"]) for panel in panels}) == len(panels)
    assert all(target["expr"].count("(") == target["expr"].count(")") for each in panels for target in each["targets"])
    assert {variable["name"] for variable in dashboard["templating"]["list"]} == {"datasource", "instance"}


def test_the_unit_and_the_image_call_programs_that_there_are() -> None:
    unit, image = (DEPLOY / "compiled-llm.service").read_text(), (DEPLOY / "Containerfile").read_text()
    (start,) = re.findall(r"^ExecStart=\S+/compiled-llm serve (.*)$", unit, re.MULTILINE)
    parser("serve").parse_args(start.split())
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", image, re.MULTILINE)
    assert json.loads(entry)[:2] == ["compiled-llm", "serve"]
    assert parser("serve").parse_args(json.loads(entry)[2:]).host == "0.0.0.0"
    for line in re.findall(r"^COPY (.*) \S+$", image, re.MULTILINE):
        assert all((ROOT / name).exists() for name in line.split()), line


@pytest.mark.battery
def test_promtool_takes_metrics_rules_and_configuration(running: Running) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool, of Debian's package prometheus")
    for kind, name in (("rules", "alerts.yml"), ("config", "prometheus.yml")):
        done = subprocess.run([promtool, "check", kind, DEPLOY / name], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    metrics(running)
    text = running.http.get("/metrics").text
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    told = [line for line in done.stderr.splitlines() if not line.endswith("should not contain ':'")]
    assert (done.returncode in (0, 3), told) == (True, []), "vLLM's names have colons; nothing else is wrong"
