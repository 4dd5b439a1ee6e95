from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, get_args

import pytest

from connectors.engine_env import KEEP_ALIVE_S
from router.core.fleet import Layout, ReplicaLost, not_ready_reason
from router.core.gate import Gate
from router.settings import EngineRole, PolicyName, RoundRobin, RouterSettings, StickyLeastLoaded

if TYPE_CHECKING:
    from tests.unit.router.conftest import FleetMaker


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a11_serial_sessions_are_even_also_around_a_drain(make_fleet: FleetMaker, role: EngineRole) -> None:
    fleet = make_fleet(**{role: 4})
    chosen: Counter[str] = Counter()
    for number in range(8):
        if number == 3:
            for _ in range(3):
                fleet.probe_failed(f"{role}-2", "refused", 0.0)
        if number == 5:
            fleet.probe_passed(f"{role}-2")
        session = fleet.begin_request(f"s{number}")
        leg = fleet.place(session, role, tokens=10)
        assert leg is not None
        chosen[leg.replica] += 1
        fleet.release(leg)
        fleet.end_request(session, 0.0)
        fleet.finish_session(f"s{number}")
    assert max(chosen.values()) - min(chosen.values()) <= 1
    assert len(chosen) == 4


def test_a_burst_spreads_because_the_choice_reserves(make_fleet: FleetMaker) -> None:
    fleet = make_fleet(decode=4)
    for _ in range(8):
        assert fleet.place(fleet.begin_request(None), "decode", tokens=1) is not None
    assert [view.active_sessions for view in fleet.views()] == [2, 2, 2, 2]
    assert [view.legs_in_flight for view in fleet.views()] == [2, 2, 2, 2]


def test_prefill_and_decode_are_pinned_independently(make_fleet: FleetMaker) -> None:
    fleet = make_fleet(prefill=2, decode=2)
    session = fleet.begin_request("s")
    prefill, decode = (fleet.place(session, role, tokens=1) for role in ("prefill", "decode"))
    assert prefill is not None
    assert decode is not None
    fleet.leg_failed(prefill.replica, "unreachable")
    moved, stays = (fleet.place(session, role, tokens=1) for role in ("prefill", "decode"))
    assert moved is not None
    assert stays is not None
    assert moved.replica != prefill.replica
    assert stays.replica == decode.replica


def test_a12_a_lost_replica_keeps_no_session_and_its_legs_end_well(make_fleet: FleetMaker) -> None:
    fleet = make_fleet(decode=2)
    session = fleet.begin_request("s")
    leg = fleet.place(session, "decode", tokens=7)
    assert leg is not None
    fleet.leg_failed(leg.replica, "unreachable")
    lost = fleet.load["decode"][leg.replica]
    assert (lost.sessions, lost.legs, lost.tokens) == (0, 1, 7)
    fleet.release(leg)
    fleet.end_request(session, 0.0)
    assert (lost.sessions, lost.legs, lost.tokens) == (0, 0, 0)


def test_a_loss_is_reported_and_a_busy_replica_keeps_its_streams(make_fleet: FleetMaker) -> None:
    fleet = make_fleet(decode=1, probe_failures=2, probe_interval_s=1.0, probe_timeout_s=5.0)
    told: list[ReplicaLost] = []
    fleet.report_losses(told.append)
    fleet.byte_seen("decode-0", 10.0)
    for now in (11.0, 12.0, 17.0):
        fleet.probe_failed("decode-0", "refused", now)
    assert told == [ReplicaLost(replica="decode-0", silent=False), ReplicaLost(replica="decode-0", silent=True)]
    fleet.probe_passed("decode-0")
    fleet.leg_failed("decode-0", "unreachable")
    assert told[2:] == [ReplicaLost(replica="decode-0", silent=False)]


def test_a15_slow_probes_of_a_sending_replica_report_no_loss(make_fleet: FleetMaker) -> None:
    fleet = make_fleet(decode=1, probe_failures=1, probe_interval_s=1.0, probe_timeout_s=5.0)
    told: list[ReplicaLost] = []
    fleet.report_losses(told.append)
    fleet.byte_seen("decode-0", 10.0)
    fleet.probe_failed("decode-0", "slow", 12.0)
    assert told == []
    fleet.probe_failed("decode-0", "slow", 17.0)
    assert told == [ReplicaLost(replica="decode-0", silent=True)]


def test_layouts(make_fleet: FleetMaker) -> None:
    mixed = make_fleet(prefill=1, decode=1, colocated=1)
    assert mixed.layout() == Layout(kind="split", missing=None)
    mixed.leg_failed("decode-0", "unreachable")
    assert mixed.layout() == Layout(kind="single", missing=None)
    mixed.leg_failed("colocated-0", "unreachable")
    assert mixed.layout() == Layout(kind="split", missing="decode")
    mixed.leg_failed("prefill-0", "unreachable")
    assert mixed.layout() == Layout(kind="split", missing="prefill")
    assert make_fleet().layout() == Layout(kind="single", missing="colocated")


def test_readiness_names_the_reason(make_fleet: FleetMaker) -> None:
    gate = Gate()
    fleet = make_fleet(prefill=1, decode=1)
    assert "frozen" in str(not_ready_reason(fleet, gate))
    gate.set("open")
    assert not_ready_reason(fleet, gate) is None
    fleet.leg_failed("decode-0", "unreachable")
    assert not_ready_reason(fleet, gate) == "no usable decode replica"


def test_round_robin_moves_a_session_with_its_requests(make_fleet: FleetMaker) -> None:
    fleet = make_fleet(decode=2, policy={"type": "round_robin"})
    seen = []
    for _ in range(4):
        session = fleet.begin_request("s")
        leg = fleet.place(session, "decode", tokens=1)
        assert leg is not None
        seen.append(leg.replica)
        fleet.release(leg)
        fleet.end_request(session, 0.0)
    assert seen == ["decode-0", "decode-1"] * 2
    assert [view.active_sessions for view in fleet.views()] == [0, 0]


def test_settings_refuse_what_can_not_work(make_fleet: FleetMaker) -> None:
    twice = [{"name": "a", "role": "decode", "url": "http://a"}] * 2
    with pytest.raises(ValueError, match="engines: names must be unique, a"):
        make_fleet.settings(engines=twice)
    with pytest.raises(ValueError, match="handoff_margin_s"):
        make_fleet.settings(handoff_margin_s=30.0)
    assert isinstance(make_fleet.settings(), RouterSettings)


def test_a39_connecting_and_the_margin_fit_into_the_lease_together(make_fleet: FleetMaker) -> None:
    times = {"handoff_margin_s": 2.0, "connect_timeout_s": 4.0}
    assert make_fleet.settings(**times, handoff_lease_s=6.0).connect_timeout_s == 4.0
    with pytest.raises(ValueError, match=r"connect_timeout_s \(4\.0\) and handoff_margin_s \(2\.0\)"):
        make_fleet.settings(**times, handoff_lease_s=5.9)


def test_a16_idle_connections_are_dropped_before_the_engines_drop_them(make_fleet: FleetMaker) -> None:
    assert make_fleet.settings(keepalive_s=4.0, engine_keepalive_s=4.1).keepalive_s == 4.0
    with pytest.raises(ValueError, match=r"keepalive_s \(5\.0\) must be below engine_keepalive_s \(5\.0\)"):
        make_fleet.settings(keepalive_s=5.0, engine_keepalive_s=5.0)


def test_a16_the_engines_are_started_with_the_keep_alive_that_the_router_reckons_with(make_fleet: FleetMaker) -> None:
    assert make_fleet.settings().engine_keepalive_s == KEEP_ALIVE_S


def test_every_policy_has_a_name() -> None:
    assert {each.model_fields["type"].default for each in (StickyLeastLoaded, RoundRobin)} == set(get_args(PolicyName))
