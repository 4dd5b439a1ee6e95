from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from monitoring.catalogue import METRICS, ROUTER_PREFIX
from router.core.commands import CountClientGone, CountHandoff, CountLeg, CountRetry
from router.core.gate import Gate
from router.io.metrics import Metrics

if TYPE_CHECKING:
    from tests.unit.router.conftest import FleetMaker

ROUTER_METRICS = [metric for metric in METRICS if metric.source == "router"]


def test_each_declared_metric_is_exposed_with_its_labels(make_fleet: FleetMaker) -> None:
    metrics, fleet, gate = Metrics(), make_fleet(prefill=1, decode=1), Gate()
    session = fleet.begin_request("s")
    fleet.place(session, "decode", tokens=9)
    metrics.request_done("/v1/completions", 200, 0.5)
    metrics.first_byte("/v1/completions", 0.1)
    for command in (
        CountLeg(role="decode", outcome="ok"),
        CountHandoff(outcome="sent"),
        CountRetry(),
        CountClientGone(),
    ):
        metrics.count(command)
    text = metrics.render(fleet, gate).decode()
    samples = {
        (sample.name.removeprefix(ROUTER_PREFIX), *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["requests_total", "/v1/completions", "200"] == 1
    assert samples["request_seconds_count", "/v1/completions"] == 1
    assert samples["first_byte_seconds_sum", "/v1/completions"] == 0.1
    assert samples["legs_total", "decode", "ok"] == 1
    assert samples["handoffs_total", "sent"] == 1
    assert samples["handoffs_total", "unused"] == 0
    assert samples["retries_total",] == samples["client_gone_total",] == 1
    decode = {name: samples[name, "decode", "decode-0"] for name in ("legs_in_flight", "active_sessions", "replica_up")}
    assert decode == {"legs_in_flight": 1, "active_sessions": 1, "replica_up": 1}
    assert samples["tokens_in_flight", "decode", "decode-0"] == 9
    assert (samples["gate", "frozen"], samples["gate", "open"]) == (1, 0)
    labels = {
        sample.name: tuple(sorted(sample.labels.keys() - {"le"}))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert labels == {name: tuple(sorted(metric.labels)) for metric in ROUTER_METRICS for name in metric.series()}


def test_a_fresh_router_exposes_exactly_the_catalogue(make_fleet: FleetMaker) -> None:
    text = Metrics().render(make_fleet(prefill=1, decode=1), Gate()).decode()
    exposed = [(each.name, each.type, each.documentation) for each in text_string_to_metric_families(text)]
    assert exposed == [
        (metric.name.removesuffix("_total") if metric.type == "counter" else metric.name, metric.type, metric.help)
        for metric in ROUTER_METRICS
    ]
