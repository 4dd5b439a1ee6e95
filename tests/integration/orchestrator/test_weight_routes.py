"""The control API's weight routes behind a real server, over a supervised job on model engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.api import routes_rlhf
from orchestrator.api.access import Access
from orchestrator.api.server import build_app
from orchestrator.errors import UpdateRefused
from orchestrator.weight_service import WeightService
from orchestrator.weights.journal import PushRecord
from tests.fakes.fake_launch import FakeFleet
from tests.integration.orchestrator.kept_fleet import signed_in, supervised, until

TOKEN = "the-token"
LIMITS = {"grace": 0.05, "again": 0.02, "tries": 1}
AS_JSON = {"content-type": "application/json"}
SOURCE = {"transport": "path", "version": "step-1", "path": "/checkpoints/1"}
NEXT = {"transport": "path", "version": "step-2", "path": "/checkpoints/2"}


@pytest.fixture
def fleet(tmp_path: Path) -> FakeFleet:
    return FakeFleet(tmp_path)


@pytest.fixture
def api(fleet: FakeFleet, serve: Callable[[Any], httpx.Client]) -> Iterator[httpx.Client]:
    """Of a control plane that supervises a job which serves."""
    fleet.record(fleet.plan(weights={"limits": LIMITS}))
    fleet.supervision().open(fleet.bring_up())
    with supervised(fleet), signed_in(serve(build_app(fleet.service(), Access({TOKEN: "admin"}))), TOKEN) as client:
        yield client


def message(reply: httpx.Response, status: int) -> str:
    assert reply.status_code == status, reply.text
    return str(reply.json()["detail"])


def test_a_push_and_what_is_told_of_it(fleet: FakeFleet, api: httpx.Client) -> None:
    reply = api.post("/jobs/demo/weights", json={"source": SOURCE, "in_flight": "wait"})
    assert reply.status_code == 202
    assert (reply.json()["number"], reply.json()["version"], reply.json()["in_flight"]) == (1, "step-1", "wait")
    fleet.weights().wait("demo", 1, 10)
    update = api.get("/jobs/demo/weights/updates/1").json()
    assert (update["outcome"], update["why"]) == ("committed", "")
    assert api.get("/jobs/demo/weights/updates").json()["updates"] == [update]
    fleet.weights().wait("demo", api.post("/jobs/demo/weights", json={"source": NEXT}).json()["number"], 10)
    newest = api.get("/jobs/demo/weights/updates", params={"limit": 1}).json()["updates"]
    assert [each["version"] for each in newest] == ["step-2"]
    assert api.get("/jobs/demo/weights/updates", params={"limit": 1001}).status_code == 422
    served = api.get("/jobs/demo/weights").json()["served"]
    assert served == {"version": "step-2", "epoch": 3, "source": NEXT}


def test_a28_a_failed_update_names_the_engine_and_leaves_the_version(fleet: FakeFleet, api: httpx.Client) -> None:
    fleet.receivers.load_ends = {"decode-0": "untouched"}
    api.post("/jobs/demo/weights", json={"source": SOURCE})
    assert fleet.weights().wait("demo", 1, 10).outcome == "rolled_back"
    shown = api.get("/jobs/demo/weights").json()
    assert shown["served"]["version"] == "initial"
    assert "decode-0: untouched" in shown["last"]["why"]


def test_a_cancelled_update_is_told_of_and_may_be_cancelled_again(fleet: FakeFleet, api: httpx.Client) -> None:
    fleet.receivers.silent = {"prefill-0"}
    api.post("/jobs/demo/weights", json={"source": SOURCE})
    for _ in range(2):
        reply = api.delete("/jobs/demo/weights/updates/1")
        assert (reply.status_code, reply.json()["is_cancelled"]) == (202, True)
    fleet.receivers.silent = set()
    assert fleet.weights().wait("demo", 1, 10).outcome == "cancelled"
    told = api.delete("/jobs/demo/weights/updates/1").json()
    assert (told["outcome"], told["why"]) == ("cancelled", "by request")
    assert api.get("/jobs/demo/weights/updates").json()["updates"] == [told]
    assert message(api.delete("/jobs/demo/weights/updates/2"), 404) == "job 'demo' has no update 2"


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/jobs/nobody/weights", {"source": SOURCE}, 404, "no job is called"),
        ("/jobs/demo/weights", {}, 422, "source"),
        ("/jobs/demo/weights", {"source": SOURCE, "strategie": "rolling"}, 422, "strategie"),
        ("/jobs/demo/weights", {"source": SOURCE, "strategy": "rolling"}, 409, "rolling needs a second pair"),
        ("/jobs/demo/weights", {"source": {**SOURCE, "version": "initial"}}, 409, "names other weights already"),
    ],
)
def test_pushes_that_cannot_be(api: httpx.Client, path: str, body: dict[str, Any], status: int, says: str) -> None:
    assert says in message(api.post(path, json=body), status)
    assert message(api.get("/jobs/demo/weights/updates/1"), 404) == "job 'demo' has no update 1"


def rlhf(api: httpx.Client, call: str, body: dict[str, Any] | None = None) -> httpx.Response:
    """As `HTTPVLLMWeightSyncClient` sends it: its token is the password of its URL."""
    url = api.base_url.copy_with(username="trainer", password=TOKEN, path=f"/jobs/demo/rlhf/{call}")
    return httpx.post(url, json=body, timeout=30, trust_env=False)


@pytest.mark.parametrize(("given", "named"), [(None, "step-1"), ("step-1", "step-1")])
def test_vllms_four_calls_are_one_update(fleet: FakeFleet, api: httpx.Client, given: str | None, named: str) -> None:
    assert rlhf(api, "init_weight_transfer_engine", {"init_info": {}}).status_code == 200
    assert rlhf(api, "start_weight_update").status_code == 200
    assert rlhf(api, "update_weights", {"update_info": {"source": SOURCE}}).status_code == 200
    body = {"weight_version": given} if given else None
    assert rlhf(api, "finish_weight_update", body).json()["weight_version"] == named
    assert api.get("/jobs/demo/rlhf/weight_info").json() == {"weight_version": named}
    assert {engine.weights for engine in fleet.receivers.engines.values()} == {named}


def test_a_version_without_a_name_gets_one(api: httpx.Client) -> None:
    rlhf(api, "start_weight_update")
    rlhf(api, "update_weights", {"update_info": [{"source": {"transport": "path", "path": "/x"}}]})
    version = rlhf(api, "finish_weight_update").json()["weight_version"]
    assert version.startswith("update-")
    assert api.get("/jobs/demo/weights").json()["served"]["version"] == version


def test_a28_vllms_client_is_told_of_a_failure(fleet: FakeFleet, api: httpx.Client) -> None:
    fleet.receivers.load_ends = {"prefill-0": "untouched"}
    rlhf(api, "start_weight_update")
    rlhf(api, "update_weights", {"update_info": {"source": SOURCE}})
    assert "prefill-0: untouched" in message(rlhf(api, "finish_weight_update"), 500)


def test_vllms_client_is_told_of_an_update_that_takes_too_long(
    fleet: FakeFleet, api: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes_rlhf, "ANSWERS_WITHIN_S", 0.1)
    fleet.receivers.silent = {"prefill-0"}
    rlhf(api, "start_weight_update")
    rlhf(api, "update_weights", {"update_info": {"source": SOURCE}})
    assert "/jobs/demo/weights/updates/1 says how it ends" in message(rlhf(api, "finish_weight_update"), 504)
    fleet.receivers.silent = set()
    assert fleet.weights().wait("demo", 1, 20).outcome == "committed"


def test_an_update_ends_with_its_job_and_whoever_waits_is_told(fleet: FakeFleet, api: httpx.Client) -> None:
    fleet.receivers.silent = {"prefill-0"}
    rlhf(api, "start_weight_update")
    rlhf(api, "update_weights", {"update_info": {"source": SOURCE}})
    with ThreadPoolExecutor(1) as beside:
        finishing = beside.submit(rlhf, api, "finish_weight_update")
        until(lambda: (newest := fleet.weights().newest("demo")) is not None and newest.begun_at is not None)
        fleet.service().stop("demo")
        assert "was cancelled: the job has stopped" in message(finishing.result(), 500)
    update = api.get("/jobs/demo/weights/updates/1").json()
    assert (update["outcome"], update["why"]) == ("cancelled", "the job has stopped")
    assert api.get(f"/operations/{update['operation']}").json()["state"] == "cancelled"


@dataclass(frozen=True, kw_only=True)
class Interleaved(WeightService):
    """Something else happens just after each push."""

    then: Callable[[], object]

    def push(self, *given: Any) -> PushRecord:
        record = super().push(*given)
        self.then()
        return record


@pytest.mark.parametrize("call", ["start", "end"])
def test_what_comes_while_a_trainer_finishes_is_not_undone(fleet: FakeFleet, api: httpx.Client, call: str) -> None:
    weights = Interleaved(**vars(fleet.weights()), then=lambda: getattr(sessions, call)("demo"))
    sessions = routes_rlhf.RlhfSessions(weights)
    sessions.start("demo")
    sessions.update("demo", {"source": SOURCE})
    assert sessions.push("demo", None).number == 1
    with pytest.raises(UpdateRefused, match="no source was named" if call == "start" else "was started here"):
        sessions.push("demo", None)


@pytest.mark.parametrize(
    ("field", "status", "says"),
    [(b'"a": 1', 409, "need none, and got ['a']"), (b'"\\ud800": 1', 422, "not valid text")],
)
def test_a_field_of_an_init_that_is_none_is_named(api: httpx.Client, field: bytes, status: int, says: str) -> None:
    body = b'{"init_info": {%s}}' % field
    reply = api.post("/jobs/demo/rlhf/init_weight_transfer_engine", content=body, headers=AS_JSON)
    assert says in message(reply, status)


def test_calls_out_of_turn(api: httpx.Client) -> None:
    assert "need none" in message(rlhf(api, "init_weight_transfer_engine", {"init_info": {"master_port": 1}}), 409)
    assert "start_weight_update first" in message(rlhf(api, "update_weights", {"update_info": {"source": SOURCE}}), 409)
    rlhf(api, "start_weight_update")
    assert "no source was named" in message(rlhf(api, "finish_weight_update"), 409)
    assert "one per version" in message(rlhf(api, "update_weights", {"update_info": {"names": ["w"]}}), 409)
    assert rlhf(api, "shutdown_weight_transfer_engine").status_code == 200
    assert "start_weight_update first" in message(rlhf(api, "finish_weight_update"), 409)


@pytest.mark.parametrize("authorization", ["", "Basic !", "Basic dHJhaW5lcjp3cm9uZw==", "Bearer wrong", TOKEN])
def test_a_wrong_token_is_refused(api: httpx.Client, authorization: str) -> None:
    reply = api.get("/jobs/demo/rlhf/weight_info", headers={"authorization": authorization})
    assert reply.status_code == 401
