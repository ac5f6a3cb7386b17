"""What people see of the metrics: the table in docs/operations.md and every query of the Grafana dashboard, held to the live `/metrics`.

A name or a label that is misspelt in either, or that the server no longer has, fails here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.asks import CHAT
from e2e.promql import Query, read
from e2e.servers import Server
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
BOARD = json.loads((ROOT / "3rdparty" / "grafana" / "radixpd.json").read_text())
DOCS = ROOT / "docs" / "operations.md"
FROM_PROMETHEUS = {"instance", "job"}  # labels that a scrape adds
PARTS = ("_bucket", "_sum", "_count")


@pytest.fixture(scope="module")
def families(serve: Callable[..., Server]) -> dict[str, Any]:
    """Metric families of a server that has answered, refused and been asked for its health."""
    server = serve("--collect-tokens-histogram")
    server.generate(text="hello " * 20, sampling_params={"max_new_tokens": 4, "ignore_eos": True})
    server.generate(text="hello " * 20, sampling_params={"max_new_tokens": 4, "ignore_eos": True})
    assert server.post("/v1/chat/completions", {**CHAT, "max_tokens": 3}).status == 200
    assert server.post("/generate", {}).status == 400
    server.settled()
    text = server.get("/metrics").body.decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


@pytest.fixture(scope="module")
def series(families: dict[str, Any]) -> dict[str, set[str]]:
    """Series -> its labels."""
    found: dict[str, set[str]] = {}
    for family in families.values():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def rows() -> dict[str, tuple[str, set[str]]]:
    """The table of docs/operations.md: name -> (type, labels)."""
    section = DOCS.read_text().split("## 3. Metrics")[1].split("## 4.")[0]
    found = re.findall(r"^\| `(\w+)` \| (\w+) \|(.*?)\| (.+) \|$", section, re.MULTILINE)
    assert all(len(meaning) > 3 for *_, meaning in found)
    assert len(found) > 30
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in found}


def test_the_table_of_metrics_is_what_the_server_exposes(families: dict[str, Any]) -> None:
    live = {}
    for family in families.values():
        name = family.name.removeprefix("radixpd:") + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"model_name", "le"}
        assert family.name.startswith("radixpd:")
        assert all("model_name" in sample.labels for sample in family.samples), family.name
        live[name] = (family.type, labels)
    assert rows() == live


def queries() -> Iterator[tuple[str, str, str]]:
    """(where, expression, legend) of everything on the dashboard that asks Prometheus."""
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"], target["legendFormat"]
    for variable in BOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"], ""


def faults(expression: str, legend: str, series: dict[str, set[str]]) -> list[str]:
    """What a query asks for that is not there."""
    if expression.startswith("label_values("):
        expression, wanted = expression.removeprefix("label_values(").removesuffix(")").rsplit(",", 1)
        query = Query(read(expression).series, {wanted.strip()})
    else:
        query = read(expression)
    bad = [] if query.series else ["no series"]
    for name, matched in query.series:
        labels = series.get(name, set()) | FROM_PROMETHEUS
        if name not in series:
            bad.append(f"no series {name}")
        bad += [f"{name} has no label {label}" for label in sorted((matched | query.groups) - labels)]
    return bad + [
        f"the legend has no label {label}" for label in re.findall(r"\{\{(\w+)\}\}", legend) if label not in query.groups | FROM_PROMETHEUS
    ]


def test_every_query_of_the_dashboard_asks_for_what_there_is(series: dict[str, set[str]]) -> None:
    asked = list(queries())
    assert len(asked) > 40
    assert {where: found for where, expression, legend in asked if (found := faults(expression, legend, series))} == {}


def test_the_dashboard_shows_every_metric(series: dict[str, set[str]]) -> None:
    shown = {name for _, expression, _ in queries() for name, _ in read(expression).series}
    families = {name: re.sub("_(bucket|sum|count)$", "", name) for name in series}
    unseen = {family for family in families.values() if not shown & {name for name, of in families.items() if of == family}}
    assert unseen == set()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("rate(radixpd:cached_token_total[5m])", "no series radixpd:cached_token_total"),
        ("rate(radixpd:cached_tokens_total{model=~\"$m\"}[5m])", "radixpd:cached_tokens_total has no label model"),
        ("sum by (ownr) (radixpd:pages)", "radixpd:pages has no label ownr"),
        ("sum(radixpd:pages) by (ownr)", "radixpd:pages has no label ownr"),
        ("histogram_quantile(0.5, sum by (le) (rate(radixpd:queue_time_seconds[5m])))", "no series radixpd:queue_time_seconds"),
        ("sum by (le) (rate(radixpd:queue_time_seconds_sum[5m]))", "radixpd:queue_time_seconds_sum has no label le"),
        ("radixpd:token_usage / radixpd:nothing", "no series radixpd:nothing"),
        ("label_values(radixpd:pages, modelname)", "radixpd:pages has no label modelname"),
        ("1 + 2", "no series"),
    ],
)  # fmt: skip
def test_a_misspelt_query_is_caught(series: dict[str, set[str]], wrong: str, why: str) -> None:
    assert why in faults(wrong, "", series)


@pytest.mark.parametrize("wrong", ["rat(radixpd:pages[5m])", "sum(radixpd:pages", "sum by (owner (radixpd:pages)"])
def test_what_is_no_query_is_caught(wrong: str) -> None:
    with pytest.raises(ValueError):
        read(wrong)


def test_a_legend_without_its_label_is_caught(series: dict[str, set[str]]) -> None:
    assert faults("sum by (owner) (radixpd:pages)", "{{owner}} {{state}}", series) == ["the legend has no label state"]


def test_the_board_can_be_imported() -> None:
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels if panel["type"] != "row")
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
