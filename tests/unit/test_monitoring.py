"""Dashboard, alert rules and runbook of `k8s/monitoring/`: they fit what the server exports."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from deploy.http.metrics import RequestTracker, ServerMetrics, Work
from deploy.http.served_models import ServedModels
from engine.protocol.tokenizer_messages import TextDelta
from engine.scheduler.stats import SchedulerStats
from tests.support.fake_client import FakeEngineClient
from tests.support.source_files import ROOT

MONITORING = ROOT / "k8s/monitoring"
FUNCTIONS = {
    *("sum", "min", "rate", "increase", "deriv", "avg_over_time", "histogram_quantile"),
    *("by", "and"),
}


class Busy(FakeEngineClient):
    """Its engines have every statistic, and it has lost some."""

    @property
    def resumes(self) -> Mapping[str, int]:
        return {"engine": 1}

    async def stats(self) -> list[dict[str, Any]]:
        stats = dict.fromkeys(SchedulerStats.__struct_fields__, 1)
        return [{"replica": "r", **stats}]


@dataclass(frozen=True)
class Query:
    """A PromQL expression, and where it stands."""

    place: str
    text: str

    @property
    def metrics(self) -> set[str]:
        bare = re.sub(
            r'"[^"]*"|\[[^\]]*\]|\{[^}]*\}|\b(?:by|on|ignoring) \([^)]*\)', " ", self.text
        )
        return set(re.findall(r"\b[a-z_][a-z0-9_:]*\b", bare)) - FUNCTIONS

    @property
    def labels(self) -> set[str]:
        """Those that it selects or groups by, without `le`."""
        selected = re.findall(r"[{,]\s*([a-z_]+)\s*(?:=~|!~|!=|=)", self.text)
        grouped = ",".join(re.findall(r"\bby \(([^)]*)\)", self.text))
        named = {name.strip() for name in grouped.split(",")} - {""}
        return (named | set(selected)) - {"le"}


def exported() -> dict[str, set[str]]:
    """Labels by sample name, after one request of each kind."""
    metrics, client = ServerMetrics(), Busy()
    metrics.add_endpoint("completions")
    tracker = RequestTracker(metrics.unnamed, "completions", "alice")
    tracker.work = Work(time.perf_counter(), 1, [8])
    tracker.delta(0, TextDelta(1, "x", [1], 1, "stop", None, 3, 2))
    tracker.end(200)
    metrics.unnamed.in_flight.labels("completions").set(0)
    text = asyncio.run(metrics.render(lambda: ServedModels(client))).decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def dashboard() -> Any:
    return json.loads((MONITORING / "grafana-dashboard.json").read_text())


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> Iterable[Query]:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            yield Query(panel["title"], target["expr"])
    for rule in rules():
        yield Query(rule["alert"], rule["expr"])


@pytest.mark.parametrize("query", list(queries()), ids=lambda query: query.place)
def test_queries_ask_for_what_is_exported(query: Query) -> None:
    known = exported()
    assert query.metrics
    assert query.metrics <= set(known), query.metrics - set(known)
    for name in query.metrics:
        assert query.labels <= known[name], (name, query.labels - known[name])


def test_panels_have_places_titles_and_the_variables() -> None:
    board = dashboard()
    variables = [variable["name"] for variable in board["templating"]["list"]]
    assert variables == ["datasource", "model_name"]
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert panel["title"] and place["x"] + place["w"] <= 24 and not cells & taken
        taken |= cells
        for target in panel.get("targets", []):
            assert panel["datasource"]["uid"] == target["datasource"]["uid"] == "${datasource}"
            assert 'model_name=~"$model_name"' in target["expr"]
    (variable,) = board["templating"]["list"][1:]
    assert Query("", variable["definition"]).metrics <= {*exported(), "label_values", "model_name"}


def test_every_alert_has_its_chapter_and_its_test() -> None:
    runbook = (ROOT / "docs/runbook.md").read_text()
    chapters = re.findall(r"^## (\w+)$", runbook, re.MULTILINE)
    names = [rule["alert"] for rule in rules()]
    assert names == chapters
    for rule in rules():
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"
        assert rule["annotations"]["summary"] and rule["labels"]["severity"]
        chapter = runbook.partition(f"## {rule['alert']}\n")[2].partition("\n## ")[0]
        for part in ("**What it means.**", "**Look at.**", "**Do.**"):
            assert part in chapter, (rule["alert"], part)
    tests = yaml.safe_load((MONITORING / "alerts_test.yaml").read_text())["tests"]
    fired, quiet = set(), set()
    for test in tests:
        for case in test["alert_rule_test"]:
            (fired if case["exp_alerts"] else quiet).add(case["alertname"])
    assert fired == quiet == set(names)


def test_links_of_the_runbook_lead_somewhere() -> None:
    runbook = (ROOT / "docs/runbook.md").read_text()
    anchors = {name.lower() for name in re.findall(r"^## (\w+)$", runbook, re.MULTILINE)}
    links = re.findall(r"\]\(#([^)]*)\)", runbook)
    assert links and set(links) <= anchors
    panels = {panel["title"] for panel in dashboard()["panels"]}
    named = set(re.findall(r'"([A-Z][^"]*)"', runbook))
    assert named and named <= panels, named - panels


def test_the_metrics_page_names_every_metric() -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    named = set(re.findall(r"`((?:manta|vllm)[_:][a-z0-9_:]+)`", page))
    metrics, client = ServerMetrics("vllm"), Busy()
    text = asyncio.run(metrics.render(lambda: ServedModels(client))).decode()
    families = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    own = {name for name in families if not name.startswith("manta_engine_")}
    assert own - named == set()
    left_out = page.partition("What vLLM has beside these")[2].partition("## ")[0]
    missing = set(re.findall(r"`(vllm:[a-z0-9_:]+)`", left_out))
    assert missing and not missing & families
    assert {name for name in named if name.startswith("vllm:")} - missing <= families
    assert {name for name in named if not name.startswith("vllm:")} <= families
