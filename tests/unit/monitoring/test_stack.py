"""What Prometheus and Grafana are started with."""

from __future__ import annotations

import yaml

from monitoring.stack import grafana_provisioning, prometheus_argv


def test_prometheus_command_line() -> None:
    assert prometheus_argv("prometheus", "/run/j/prometheus.yml", "/data/j", "127.0.0.1", 9090, "7d") == (
        "prometheus",
        "--config.file=/run/j/prometheus.yml",
        "--storage.tsdb.path=/data/j",
        "--storage.tsdb.retention.time=7d",
        "--web.listen-address=127.0.0.1:9090",
    )


def test_grafana_finds_the_datasource_and_the_dashboards() -> None:
    files = grafana_provisioning("http://127.0.0.1:9090", "/run/j/dashboards", 5)
    assert files.keys() == {"datasources/headrace.yaml", "dashboards/headrace.yaml"}
    (datasource,) = yaml.safe_load(files["datasources/headrace.yaml"])["datasources"]
    assert (datasource["type"], datasource["url"]) == ("prometheus", "http://127.0.0.1:9090")
    assert datasource["jsonData"]["timeInterval"] == "5000ms"
    (provider,) = yaml.safe_load(files["dashboards/headrace.yaml"])["providers"]
    assert (provider["type"], provider["options"]) == ("file", {"path": "/run/j/dashboards"})
