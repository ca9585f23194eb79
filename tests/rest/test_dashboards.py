"""What is in `deploy/` names no metric that a driver does not tell."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file())


@pytest.fixture
def told(quiet):
    """The names of all samples, and of those that come when there is something to tell."""
    driver, _ = quiet
    families = list(text_string_to_metric_families(driver.client.ask("GET", "/metrics").text))
    names = {sample.name for family in families for sample in family.samples}
    counters = {f"{family.name}_total" for family in families if family.type == "counter"}
    return names | counters | {family.name for family in families}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_metric_that_is_named_is_told(path, told):
    named = set(re.findall(r"stillframe_\w+", path.read_text()))

    assert named
    assert named <= told


def test_rules_have_names_and_expressions():
    for path in DEPLOY.glob("prometheus/*.yml"):
        [group] = yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]:
            assert rule["expr"]
            assert "alert" in rule or "record" in rule
            assert "record" in rule or rule["annotations"]["summary"]


def test_the_dashboard_has_a_query_in_every_panel():
    dashboard = json.loads((DEPLOY / "grafana/stillframe.json").read_text())

    assert len(dashboard["panels"]) == len({each["title"] for each in dashboard["panels"]})
    assert all(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
