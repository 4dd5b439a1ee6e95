"""Layout, ids and the JSON model's frame."""

from __future__ import annotations

import pytest

from monitoring.dashboards.panels import Graph, Query, Row, dashboard, expressions


def graph(title: str, columns: int) -> Graph:
    queries = (Query(expression=f"{title}_1", legend="one"), Query(expression=f"{title}_2", legend="two"))
    return Graph(title=title, description="d", unit="short", queries=queries, columns=columns)


def model(key: str = "k", job: str = "j") -> dict:
    rows = [
        Row(title="first", panels=(graph("a", 12), graph("b", 12), graph("c", 8))),
        Row(title="second", panels=(graph("d", 24),)),
    ]
    return dashboard(key, job, "t", rows, 10)


def test_rows_wrap_and_follow_each_other() -> None:
    places = {p["title"]: tuple(p["gridPos"][side] for side in "xywh") for p in model()["panels"]}
    assert places == {
        "first": (0, 0, 24, 1),
        "a": (0, 1, 12, 8),
        "b": (12, 1, 12, 8),
        "c": (0, 9, 8, 8),
        "second": (0, 17, 24, 1),
        "d": (0, 18, 24, 8),
    }


def test_ids_are_unique() -> None:
    ids = [panel["id"] for panel in model()["panels"]]
    assert ids == sorted(set(ids))


def test_expressions_in_the_order_of_the_panels() -> None:
    assert expressions(model()) == [f"{title}_{i}" for title in "abcd" for i in (1, 2)]


def test_equal_input_gives_an_equal_model() -> None:
    assert model() == model()


@pytest.mark.parametrize("other", [model(key="other"), model(job="other")], ids=["key", "job"])
def test_another_dashboard_has_another_uid(other: dict) -> None:
    assert other["uid"] != model()["uid"]
    assert len(model()["uid"]) <= 40


def test_every_query_uses_the_chosen_data_source() -> None:
    (variable,) = model()["templating"]["list"]
    assert (variable["name"], variable["type"], variable["query"]) == ("datasource", "datasource", "prometheus")
    for panel in model()["panels"]:
        for user in (panel, *panel.get("targets", [])) if panel["type"] != "row" else ():
            assert user["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
