"""The job's own Prometheus and Grafana: command line and provisioning files, as data.

`scrape.py`, `rules.py` and `dashboards/` make what the two programs read. The plan starts Prometheus as one of the
job's processes where it is installed. Grafana is started by nobody yet: its files are for one that the user runs.
"""

from __future__ import annotations

import yaml

DATASOURCE_UID = "headrace-prometheus"


def prometheus_argv(
    binary: str, config_path: str, data_dir: str, host: str, port: int, retention: str
) -> tuple[str, ...]:
    """The command line of Prometheus. `retention` is in Prometheus's own style, e.g. "7d".

    The lifecycle and admin routes stay off: they would let anyone who reaches the port end the process
    or delete series. A changed configuration is taken over with SIGHUP.
    """
    return (
        binary,
        f"--config.file={config_path}",
        f"--storage.tsdb.path={data_dir}",
        f"--storage.tsdb.retention.time={retention}",
        f"--web.listen-address={host}:{port}",
    )


def grafana_provisioning(prometheus_url: str, dashboards_dir: str, scrape_interval_s: float) -> dict[str, str]:
    """Files for Grafana's provisioning folder: path relative to it -> text."""
    return {
        "datasources/headrace.yaml": _dump(_datasource(prometheus_url, scrape_interval_s)),
        "dashboards/headrace.yaml": _dump(_dashboard_provider(dashboards_dir)),
    }


def _datasource(prometheus_url: str, scrape_interval_s: float) -> dict[str, object]:
    source = {
        "name": "Headrace",
        "uid": DATASOURCE_UID,
        "type": "prometheus",
        "access": "proxy",
        "url": prometheus_url,
        "isDefault": True,
        "editable": False,
        # Grafana derives $__rate_interval from it and otherwise assumes 15 s.
        "jsonData": {"httpMethod": "POST", "timeInterval": f"{round(scrape_interval_s * 1000)}ms"},
    }
    return {"apiVersion": 1, "datasources": [source]}


def _dashboard_provider(dashboards_dir: str) -> dict[str, object]:
    provider = {
        "name": "headrace",
        "type": "file",
        "folder": "Headrace",
        "disableDeletion": True,
        # The files are generated; an edit made in the browser would be lost at the next start.
        "allowUiUpdates": False,
        "options": {"path": dashboards_dir},
    }
    return {"apiVersion": 1, "providers": [provider]}


def _dump(document: dict[str, object]) -> str:
    return yaml.safe_dump(document, sort_keys=False, default_flow_style=False, allow_unicode=True, width=120)
