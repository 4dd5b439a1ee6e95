"""Where engines load from once the source of what is served is gone."""

from __future__ import annotations

from orchestrator.weights import acts, events
from tests.unit.orchestrator.weights.driver import Driver


def serving_v1() -> Driver:
    """A fleet that was updated to a version whose own source is gone since."""
    drive = Driver()
    drive.update()
    drive.run()
    drive.gone.add("v1")
    drive.done.clear()
    return drive


def restart(drive: Driver, *names: str) -> None:
    for name in names:
        drive.engines[name].end()
        drive.step(events.EngineEnded(name=name))
    for name in names:
        drive.boot(name)


def join(drive: Driver) -> None:
    drive.run(until=lambda: drive.coordinator.position.course is not None)
    drive.run()


def test_an_engine_loads_from_its_own_source_first_and_then_from_a_peer() -> None:
    drive = serving_v1()
    restart(drive, "decode-2")
    join(drive)
    assert drive.origins() == [("decode-2", ""), ("decode-2", "prefill-0")]
    assert [each.receiver for each in drive.sent(acts.Serve)] == ["prefill-0"]
    assert drive.holds() == {("v1", 2, False)}
    assert drive.said() == [
        "decode-2: untouched: no bytes; tried again",
        "decode-2 has loaded version v1 from prefill-0",
    ]


def test_a_source_that_is_there_is_preferred() -> None:
    drive = serving_v1()
    drive.gone.clear()
    restart(drive, "decode-2")
    join(drive)
    assert (drive.origins(), drive.sent(acts.Serve)) == ([("decode-2", "")], [])
    assert drive.said() == ["decode-2 has loaded version v1 from its own source"]


def test_several_engines_load_from_one_peer_that_serves_already() -> None:
    drive = serving_v1()
    restart(drive, "prefill-1", "decode-2")
    join(drive)
    restart(drive, "decode-3")
    join(drive)
    assert {peer for _, peer in drive.origins()} == {"", "prefill-0"}
    assert [each.receiver for each in drive.sent(acts.Serve)] == ["prefill-0"]
    assert drive.holds() == {("v1", 2, False)}


def test_a_peer_that_cannot_serve_is_passed_over() -> None:
    drive = serving_v1()
    drive.refusals["prefill-0", acts.Serve] = "its weights are not as the trainer sends them"
    restart(drive, "decode-2")
    join(drive)
    assert drive.origins() == [("decode-2", ""), ("decode-2", "prefill-1")]
    assert drive.holds() == {("v1", 2, False)}
    assert drive.restarted() == ["decode-2"]


def test_a_peer_whose_answer_is_lost_is_read_back() -> None:
    drive = serving_v1()
    drive.silent.add(("prefill-0", acts.Serve))
    restart(drive, "decode-2")
    join(drive)
    assert drive.origins()[-1] == ("decode-2", "prefill-0")
    assert len(drive.sent(acts.Serve)) == 1
    assert drive.holds() == {("v1", 2, False)}


def test_where_nobody_can_serve_the_own_source_is_tried_again_and_then_the_engine_is_restarted() -> None:
    drive = serving_v1()
    for name in drive.engines:
        drive.refusals[name, acts.Serve] = "no"
    restart(drive, "decode-2")
    drive.run(until=lambda: drive.restarted().count("decode-2") == 2)
    assert drive.origins() == [("decode-2", "")] * 2
    drive.gone.clear()
    drive.boot("decode-2")
    join(drive)
    assert drive.holds() == {("v1", 2, False)}


def test_an_engine_that_is_being_loaded_is_no_peer() -> None:
    """Going back: only who was never written to has the weights that the others need."""
    drive = serving_v1()
    drive.load_ends["prefill-1"] = "untouched"
    drive.update("v2")
    drive.run()
    assert drive.outcomes() == ["rolled_back"]
    assert {peer for _, peer in drive.origins()} == {"", "prefill-1"}
    assert {version for name, version in drive.loaded() if name == "prefill-1"} == {"v2"}
    assert drive.holds() == {("v1", 6, False)}


def test_a_new_version_has_its_source_alone() -> None:
    drive = Driver()
    drive.gone.add("v1")
    drive.update()
    drive.run()
    assert (drive.outcomes(), drive.sent(acts.Serve)) == (["called_off"], [])
