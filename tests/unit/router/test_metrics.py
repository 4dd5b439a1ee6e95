from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from monitoring.catalogue import METRICS, ROUTER_PREFIX
from router.core.commands import CountChoice, CountClientGone, CountHandoff, CountLeg, CountReadmitted, CountRetry
from router.io.metrics import Counts, Metrics, add_up, render
from tests.unit.router.dispatchers import Room

ROUTER_METRICS = [metric for metric in METRICS if metric.source == "router"]
COMMANDS = (
    CountLeg(role="decode", outcome="ok"),
    CountChoice(role="decode", reason="moved_wait"),
    CountHandoff(outcome="sent"),
    CountRetry(),
    CountClientGone(),
    CountReadmitted(),
)


def used() -> Metrics:
    metrics = Metrics()
    metrics.request_done("/v1/completions", 200, 0.5)
    metrics.first_byte("/v1/completions", 0.1)
    for command in COMMANDS:
        metrics.counted[command] += 1
    return metrics


def samples_of(counts: Counts, room: Room) -> dict[tuple[str, ...], float]:
    return {
        (sample.name.removeprefix(ROUTER_PREFIX), *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(render(counts, room.dispatcher).decode())
        for sample in family.samples
    }


def busy_room() -> Room:
    """One request at a decode replica, one in line, one replica without an epoch."""
    room = Room(prefill=2, decode=1)
    room.granted(1, handoff_epoch=1, tokens=9)
    room.fleet.confirm("prefill-1", None)
    room.gate.set("holding")
    assert room.ask(2) is None
    return room


def test_each_declared_metric_is_exposed_with_its_labels() -> None:
    counts = used().counts()
    text = render(counts, busy_room().dispatcher).decode()
    labels = {
        sample.name: tuple(sorted(sample.labels.keys() - {"le"}))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert labels == {name: tuple(sorted(metric.labels)) for metric in ROUTER_METRICS for name in metric.series()}


def test_what_was_counted_is_exposed() -> None:
    samples = samples_of(used().counts(), busy_room())
    assert samples["requests_total", "/v1/completions", "200"] == 1
    assert samples["request_seconds_count", "/v1/completions"] == 1
    assert samples["first_byte_seconds_sum", "/v1/completions"] == 0.1
    assert samples["legs_total", "decode", "ok"] == 1
    assert samples["choices_total", "decode", "moved_wait"] == 1
    assert samples["handoffs_total", "sent"] == 1
    assert samples["handoffs_total", "unused"] == 0
    assert samples["retries_total",] == samples["client_gone_total",] == samples["readmitted_total",] == 1


def test_gauges_are_read_from_the_dispatcher() -> None:
    samples = samples_of(Metrics().counts(), busy_room())
    gauges = ("legs_in_flight", "active_sessions", "tokens_in_flight", "replica_up", "replica_epoch")
    assert [samples[name, "decode", "decode-0"] for name in gauges] == [1, 1, 9, 1, 1]
    assert [samples[name, "prefill", "prefill-1"] for name in gauges] == [0, 0, 0, 0, -1]
    assert [samples["gate", state] for state in ("open", "holding", "frozen")] == [0, 1, 0]
    assert (samples["requests_admitted",], samples["requests_waiting",]) == (1, 1)


def test_a_fresh_router_exposes_exactly_the_catalogue() -> None:
    text = render(Metrics().counts(), Room(prefill=1, decode=1).dispatcher).decode()
    exposed = [(each.name, each.type, each.documentation) for each in text_string_to_metric_families(text)]
    assert exposed == [
        (metric.name.removesuffix("_total") if metric.type == "counter" else metric.name, metric.type, metric.help)
        for metric in ROUTER_METRICS
    ]


def test_a38_what_several_processes_counted_is_one_sum() -> None:
    room, one, other = Room(colocated=1), used(), used()
    other.request_done("/v1/completions", 503, 400.0)
    other.first_byte("/v1/models", 0.2)
    samples = samples_of(add_up([one.counts(), other.counts(), Metrics().counts()]), room)
    assert samples["requests_total", "/v1/completions", "200"] == 2
    assert samples["requests_total", "/v1/completions", "503"] == 1
    assert samples["request_seconds_count", "/v1/completions"] == 3
    assert samples["request_seconds_sum", "/v1/completions"] == 401.0
    assert samples["request_seconds_bucket", "/v1/completions", "0.5"] == 2
    assert samples["request_seconds_bucket", "+Inf", "/v1/completions"] == 3
    assert samples["first_byte_seconds_count", "/v1/models"] == 1
    assert samples["retries_total",] == 2
    assert add_up([]).counters == {}


def test_adding_up_changes_no_ones_own_counts() -> None:
    one = used().counts()
    add_up([one, used().counts()])
    assert samples_of(one, Room(colocated=1))["request_seconds_count", "/v1/completions"] == 1


def test_a_copy_of_the_counts_does_not_go_on_counting() -> None:
    metrics = used()
    before = metrics.counts()
    metrics.request_done("/v1/completions", 200, 0.5)
    metrics.counted[CountRetry()] += 1
    samples = samples_of(before, Room(colocated=1))
    assert (samples["request_seconds_count", "/v1/completions"], samples["retries_total",]) == (1, 1)


def test_a37_sessions_and_requests_add_no_series() -> None:
    room = Room(prefill=2, decode=2)
    before = len(samples_of(used().counts(), room))
    metrics = used()
    for number in range(1000):
        grant = room.granted(number, session=f"session-{number}", handoff_epoch=1)
        metrics.counted[CountChoice(role=grant.role, reason=grant.reason)] += 1
        metrics.request_done("/v1/completions", 200, number / 10)
        room.done(number, grant)
    added = samples_of(metrics.counts(), room).keys() - samples_of(used().counts(), Room(prefill=2, decode=2)).keys()
    assert len(added) < 50
    assert len(samples_of(metrics.counts(), room)) - before < 50
    assert not any("session-" in part for series in samples_of(metrics.counts(), room) for part in series)
