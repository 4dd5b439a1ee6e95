"""A real Prometheus, configured by us, answers every expression of the overview (field case A36).

A small exporter replays what a real engine and a real master exposed after a few requests; the router's
exposition is made from the catalogue.
"""

from __future__ import annotations

import math
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest

from monitoring.catalogue import METRICS, Metric
from monitoring.dashboards.overview import overview
from monitoring.dashboards.panels import expressions
from monitoring.rules import plan_rules
from monitoring.scrape import Target, TargetRole, engine_targets, prometheus_config
from monitoring.stack import prometheus_argv

RECORDED = Path(__file__).parents[2] / "golden" / "monitoring"
PROMETHEUS = shutil.which("prometheus")
JOB = "swe-rollouts"
SCRAPE_INTERVAL_S = 0.25
TOKEN = "the-job's-token"
RATE_WINDOW = "5s"
DEADLINE_S = 20

Replicas = Mapping[TargetRole, int]
SPLIT: Replicas = {"prefill": 1, "decode": 2}
COLOCATED: Replicas = {"colocated": 2}

pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed")


def replica_names(replicas: Replicas) -> dict[str, TargetRole]:
    return {f"{role}-{i}": role for role, count in replicas.items() for i in range(count)}


def label_sets(metric: Metric, replicas: Replicas) -> list[dict[str, str]]:
    """The label sets that a router of such a job has after a few requests that all went well."""
    if metric.name == "headrace_router_handoffs_total" and "prefill" not in replicas:
        return []
    if "replica" in metric.labels:
        return [{"replica": name, "role": role} for name, role in replica_names(replicas).items()]
    if "role" in metric.labels:
        return [{"role": role, "outcome": "ok"} for role in replicas]
    if "state" in metric.labels:
        return [{"state": "open"}]
    values = {"route": "/v1/completions", "code": "200", "outcome": "ok"}
    return [{label: values[label] for label in metric.labels}]


def router_exposition(replicas: Replicas) -> str:
    lines = []
    for metric in (metric for metric in METRICS if metric.source == "router"):
        lines.append(f"# TYPE {metric.name} {metric.type}")
        for labels in label_sets(metric, replicas):
            for series in metric.series():
                buckets = ({"le": "0.5"}, {"le": "+Inf"}) if series.endswith("_bucket") else ({},)
                for bucket in buckets:
                    inner = ",".join(f'{name}="{value}"' for name, value in (labels | bucket).items())
                    lines.append(f"{series}{{{inner}}} 1")
    return "\n".join(lines) + "\n"


def engine_exposition(role: TargetRole) -> str:
    text = (RECORDED / "vllm_engine.prom").read_text()
    if role == "colocated":
        return "".join(line for line in text.splitlines(keepends=True) if "vllm:nixl_" not in line)
    return text


def grown(text: str, factor: int) -> str:
    """The exposition with every counter and histogram `factor` times as far."""
    lines, grows = [], False
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            grows = line.endswith((" counter", " histogram"))
        elif line and not line.startswith("#") and grows:
            series, value = line.rsplit(" ", 1)
            line = f"{series} {float(value) * factor}"
        lines.append(line)
    return "\n".join(lines) + "\n"


class Exporter(ThreadingHTTPServer):
    """Serves one exposition per path; while `busy`, each scrape finds the counters further on.

    Engines want the job's token, and nobody else may be sent it.
    """

    daemon_threads = True

    def __init__(self, pages: Mapping[str, str]) -> None:
        super().__init__(("127.0.0.1", 0), ExpositionHandler)
        self.pages = pages
        self.factors = dict.fromkeys(pages, 1)
        self.busy = False

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class ExpositionHandler(BaseHTTPRequestHandler):
    server: Exporter

    def do_GET(self) -> None:
        wanted = None if self.path in ("/master/metrics", "/router-0/metrics") else f"Bearer {TOKEN}"
        if self.headers["authorization"] != wanted:
            self.send_error(401)
            return
        if self.server.busy:
            self.server.factors[self.path] += 1
        body = grown(self.server.pages[self.path], self.server.factors[self.path]).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def exporting(replicas: Replicas) -> Iterator[Exporter]:
    pages = {f"/{name}/metrics": engine_exposition(role) for name, role in replica_names(replicas).items()}
    pages["/master/metrics"] = (RECORDED / "mooncake_master.prom").read_text()
    pages["/router-0/metrics"] = router_exposition(replicas)
    with Exporter(pages) as exporter:
        thread = Thread(target=exporter.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield exporter
        finally:
            exporter.shutdown()
            thread.join()


def targets(replicas: Replicas, address: str) -> list[Target]:
    roles: dict[str, TargetRole] = {**replica_names(replicas), "master": "master", "router-0": "router"}
    return [
        Target(name=name, role=role, node="n1", address=address, metrics_path=f"/{name}/metrics")
        for name, role in roles.items()
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def prometheus(folder: Path, config: str, rules: str) -> Iterator[httpx.Client]:
    (folder / "prometheus.yml").write_text(config)
    (folder / "plan.rules.yml").write_text(rules)
    (folder / "token").write_text(f"{TOKEN}\n")
    port = free_port()
    argv = prometheus_argv(
        str(PROMETHEUS), str(folder / "prometheus.yml"), str(folder / "data"), "127.0.0.1", port, "1h"
    )
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            wait_until(lambda: is_ready(client), lambda: (folder / "log").read_text())
            yield client
    finally:
        process.kill()
        process.wait()


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False


def wait_until(done: Callable[[], bool], story: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < deadline, story()
        time.sleep(0.1)


def values(client: httpx.Client, expression: str) -> list[float]:
    query = expression.replace("$__rate_interval", RATE_WINDOW)
    reply = client.post("/api/v1/query", data={"query": query}).json()
    assert reply["status"] == "success", reply
    return [float(sample["value"][1]) for sample in reply["data"]["result"]]


@dataclass(frozen=True, kw_only=True)
class Monitored:
    """A replayed job and the Prometheus that scrapes it."""

    replicas: Replicas
    exporter: Exporter
    client: httpx.Client


@pytest.fixture(scope="module", params=[SPLIT, COLOCATED], ids=["split", "colocated"])
def monitored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    replicas = request.param
    with exporting(replicas) as exporter:
        folder = tmp_path_factory.mktemp("prometheus")
        scraped = targets(replicas, exporter.address)
        (folder / "engines.json").write_text(engine_targets(JOB, scraped))
        config = prometheus_config(
            JOB,
            scraped,
            ["plan.rules.yml"],
            SCRAPE_INTERVAL_S,
            engines_file="engines.json",
            engine_token_file="token",
        )
        with prometheus(folder, config, plan_rules(JOB, 1 << 30)) as client:
            yield Monitored(replicas=replicas, exporter=exporter, client=client)


def test_every_expression_is_answered(monitored: Monitored) -> None:
    asked = expressions(overview(JOB))

    def unanswered() -> list[str]:
        return [expression for expression in asked if not values(monitored.client, expression)]

    def without_number() -> list[str]:
        return [expression for expression in asked if any(map(math.isnan, values(monitored.client, expression)))]

    # Used and idle: a sample everywhere, though a quantile or a share of nothing is not a number.
    wait_until(lambda: not unanswered(), unanswered)
    monitored.exporter.busy = True
    wait_until(lambda: not without_number(), without_number)
    assert not unanswered()


def test_wanted_stands_beside_seen(monitored: Monitored) -> None:
    up, planned = (e for e in expressions(overview(JOB)) if re.search("replica_up|plan_replicas", e))

    def counts() -> list[list[float]]:
        return [sorted(values(monitored.client, expression)) for expression in (up, planned)]

    wait_until(lambda: counts() == [sorted(monitored.replicas.values())] * 2, counts)


def test_no_label_of_a_source_is_pushed_aside(monitored: Monitored) -> None:
    def scraped() -> list[float]:
        return values(monitored.client, "sum(scrape_samples_scraped > bool 0)")

    wait_until(lambda: scraped() == [sum(monitored.replicas.values()) + 2], scraped)
    assert values(monitored.client, 'count({exported_role!=""} or {exported_replica!=""})') == []


def test_the_stand_in_zero_is_alone(monitored: Monitored) -> None:
    (handoffs,) = (e for e in expressions(overview(JOB)) if "handoffs_total" in e)

    def lines() -> int:
        return len(values(monitored.client, handoffs))

    wait_until(lambda: lines() > 0, lines)
    assert lines() == 1
