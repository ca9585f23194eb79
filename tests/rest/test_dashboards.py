"""What is in `deploy/` names no metric that a driver does not tell."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from of_debian import unpacked
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from stillframe.testing.fetched import NotFetched

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus/alerts.yml"
FIRED = Path(__file__).parent / "alerts_fire.yml"
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


@pytest.fixture(scope="session")
def promtool():
    """What comes with Prometheus to test its rules: this machine's, or Debian's."""
    try:
        return shutil.which("promtool") or str(unpacked("prometheus") / "usr/bin/promtool")
    except NotFetched as error:
        pytest.skip(str(error))


def fires(promtool, rules, directory):
    """Whether the alerts of these rules fire as the file says."""
    tests = directory / "tests.yml"
    tests.write_text(FIRED.read_text().replace("RULES", str(rules)))
    command = [promtool, "test", "rules", str(tests)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_alert_fires_from_recorded_values_and_not_before(promtool, tmp_path):
    ran = fires(promtool, ALERTS, tmp_path)

    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_no_alert_is_left_out_and_none_can_be_weakened_unseen(promtool, tmp_path):
    """Each is seen to fire, and the file notices when it does not."""
    asked = [
        each
        for test in yaml.safe_load(FIRED.read_text())["tests"]
        for each in test["alert_rule_test"]
    ]
    [group] = yaml.safe_load(ALERTS.read_text())["groups"]
    names = {rule["alert"] for rule in group["rules"]}
    assert {each["alertname"] for each in asked if each["exp_alerts"]} == names
    assert {each["alertname"] for each in asked if not each["exp_alerts"]} == names
    for rule in group["rules"]:
        rule["expr"] = f"({rule['expr']}) and vector(0) > 1"
    weak = tmp_path / "weak.yml"
    weak.write_text(yaml.safe_dump({"groups": [group]}))

    ran = fires(promtool, weak, tmp_path)

    assert ran.returncode != 0
    assert {name for name in names if f"alertname: {name}" in ran.stdout + ran.stderr} == names


def test_what_the_alerts_are_tried_with_is_what_a_driver_tells(quiet):
    """The same names with the same labels, of those that this job has something to tell of."""
    driver, _ = quiet
    families = text_string_to_metric_families(driver.client.ask("GET", "/metrics").text)
    told = {
        (sample.name, tuple(sorted(sample.labels)))
        for family in families
        for sample in family.samples
    }
    tried = {
        series["series"]
        for test in yaml.safe_load(FIRED.read_text())["tests"]
        for series in test["input_series"]
    }
    names = {name for name, _ in told}
    found = {named(series) for series in tried if series.partition("{")[0] in names}
    assert len(found) >= 8
    assert found <= told


def named(series):
    name, _, labels = series.partition("{")
    return name, tuple(sorted(re.findall(r"(\w+)=", labels)))
