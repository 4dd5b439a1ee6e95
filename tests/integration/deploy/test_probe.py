"""Probes against real sockets and real HTTP servers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from deploy.probe import ProbeResult, check
from deploy.unit import HttpProbe, ListenProbe, MetricProbe

METRICS = """\
# TYPE master_total_capacity_bytes gauge
master_total_capacity_bytes{segment="a"} 268435456
master_total_capacity_bytes{segment="b"} 268435456
"""


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status = {"/health": 200, "/metrics": 200, "/garbage": 200}.get(self.path, 503)
        if self.path == "/fenced":
            status = 200 if self.headers["authorization"] == "Bearer secret" else 401
        body = {"/metrics": METRICS, "/garbage": "{not metrics"}.get(self.path, "").encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


def capacity(url: str, at_least: float) -> MetricProbe:
    return MetricProbe(url=url, metric="master_total_capacity_bytes", at_least=at_least)


def test_listen_probe_counts_only_the_unit_itself(workshop, free_port):
    waiting = ProbeResult(ready=False, detail=f"port {free_port} not yet listening")
    record = workshop.start("--child", "plain")
    probe = ListenProbe(port=free_port)
    members = workshop.backend.poll(workshop.run, [record])["decode-0"].members
    assert check(probe, members) == waiting
    outsider = workshop.start_outsider("--listen", str(free_port), label="outsider")
    assert check(probe, members) == waiting
    assert check(probe, (*members, outsider)) == ProbeResult(ready=True, detail=f"port {free_port} listening")


def test_http_probe(server, free_port, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port}")
    assert check(HttpProbe(url=f"{server}/health"), ()) == ProbeResult(ready=True, detail="GET /health: 200")
    assert check(HttpProbe(url=f"{server}/other"), ()) == ProbeResult(ready=False, detail="GET /other: 503")
    refused = ProbeResult(ready=False, detail="GET /health: connection refused")
    assert check(HttpProbe(url=f"http://127.0.0.1:{free_port}/health"), ()) == refused


def test_http_probe_of_a_unit_that_asks_for_a_token(server, tmp_path):
    token = tmp_path / "token"
    token.write_text("secret\n")
    url = f"{server}/fenced"
    assert check(HttpProbe(url=url), ()) == ProbeResult(ready=False, detail="GET /fenced: 401")
    assert check(HttpProbe(url=url, token_file=token), ()) == ProbeResult(ready=True, detail="GET /fenced: 200")
    token.unlink()
    without = check(HttpProbe(url=url, token_file=token), ())
    assert not without.ready
    assert without.detail.startswith("GET /fenced: the token to send cannot be read: ")


def test_http_probe_gives_up_on_a_server_that_does_not_answer(workshop, free_port):
    workshop.start_outsider("--listen", str(free_port), label="outsider")
    result = check(HttpProbe(url=f"http://127.0.0.1:{free_port}/health"), ())
    assert result == ProbeResult(ready=False, detail="GET /health: no answer within 2 s")


def test_metric_probe_sums_the_samples(server):
    enough, short = "536870912 of 536870912", "536870912 of 805306368"
    name = "master_total_capacity_bytes"
    url = f"{server}/metrics"
    assert check(capacity(url, 536870912), ()) == ProbeResult(ready=True, detail=f"{name} {enough}")
    assert check(capacity(url, 805306368), ()) == ProbeResult(ready=False, detail=f"{name} {short}")


def test_metric_probe_says_what_is_in_the_way(server, free_port):
    absent = MetricProbe(url=f"{server}/metrics", metric="absent", at_least=1)
    assert check(absent, ()) == ProbeResult(ready=False, detail="absent not yet reported")
    assert check(capacity(f"{server}/other", 1), ()).detail == "GET /other: 503"
    assert check(capacity(f"{server}/garbage", 1), ()).detail.startswith("GET /garbage: no Prometheus text")
    refused = check(capacity(f"http://127.0.0.1:{free_port}/metrics", 1), ())
    assert refused == ProbeResult(ready=False, detail="GET /metrics: connection refused")
