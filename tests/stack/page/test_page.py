"""The web page in a real browser, over a real control plane, pool and router: by keyboard alone, in both themes."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

import pytest

from orchestrator.store.database import Database
from orchestrator.store.events import Event, EventStore
from tests.integration.orchestrator.serve_process import Serve
from tests.stack.page.fleet import ENDED_JOB, HOSTILE, JOB, SESSIONS, VIEWER, Fleet
from tests.stack.page.reader import Reader

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

Look = Callable[..., Reader]
SCHEMES = pytest.mark.parametrize("scheme", ["light", "dark"])


def page_of(serve: Serve) -> str:
    return f"{serve.client.base_url}/page/"


def figures(reader: Reader, row: str) -> list[str]:
    """The cells of a table's row."""
    return reader.page.get_by_role("row", name=re.compile(f"^{row} ")).first.get_by_role("cell").all_inner_texts()


@SCHEMES
def test_a_reader_finds_all_by_keyboard_and_nothing_is_hard_to_read(fleet: Fleet, reader: Look, scheme: str) -> None:
    read = reader(fleet.page, scheme=scheme)
    read.page.get_by_label("API token").wait_for()
    assert read.barriers() == []
    read.picture(f"{scheme}-token")
    read.sign_in(VIEWER)
    read.see(JOB)
    read.see("live")
    assert read.barriers() == []
    read.picture(f"{scheme}-jobs")
    read.tab_to(JOB)
    read.page.keyboard.press("Enter")
    read.see("Topology")
    read.see("step-200")
    assert read.focused() == JOB, "the heading of what the link leads to"
    read.see("live")
    assert read.barriers() == []
    read.picture(f"{scheme}-job")
    assert read.stops() == [
        "Replicas",
        "Processes",
        "One warning of the plan",
        "Filter the events",
        "Hold",
        "Events, the newest first",
    ]
    read.tab_to("Skip to the content")
    read.page.keyboard.press("Enter")
    assert read.page.evaluate("document.activeElement.id") == "main"
    read.tab_to("Jobs")
    read.page.keyboard.press("Enter")
    read.tab_to("Forget the token")
    read.page.keyboard.press("Enter")
    read.page.get_by_label("API token").wait_for()
    assert read.page.evaluate("sessionStorage.length") == 0


def test_a_job_is_shown_as_it_is(fleet: Fleet, reader: Look) -> None:
    read = reader(f"{fleet.page}#/jobs/{JOB}", token=VIEWER)
    read.see(f"{SESSIONS} sessions", ".flow")
    assert read.page.title() == f"{JOB} · Headrace"
    flow = read.page.locator(".flow li").all_inner_texts()
    assert [each.split()[0] for each in flow] == ["router", "prefill", "decode", "pool"]
    assert ["2 of 2 serve" in each for each in flow] == [False, True, True, False]
    assert "256 MiB" in flow[3]
    rows = [figures(read, f"{role}-{number}") for role in ("prefill", "decode") for number in range(2)]
    assert {(state, epoch) for state, epoch, *_ in rows} == {("serves", "3")}
    assert sum(int(sessions) for _, _, sessions, *_ in rows) == 2 * SESSIONS
    assert sum(int(requests) for *_, requests, _ in rows) == SESSIONS, "each is at its decode replica"
    updates = read.page.locator(".timeline li strong").all_inner_texts()
    assert updates == ["step-200", "step-100"]
    assert read.page.locator(".timeline").get_by_text("committed").count() == len(updates)


def test_what_happens_is_shown_without_asking_again(fleet: Fleet, reader: Look) -> None:
    read = reader(f"{fleet.page}#/jobs/{JOB}", token=VIEWER)
    read.see("live")
    read.page.get_by_role("button", name="Hold").click()
    fleet.store.events.note(JOB, Event(kind="remark", text="while it was held"))
    read.page.get_by_role("button", name="Go on (1)").click()
    read.see("while it was held", ".feed tbody")
    read.page.get_by_label("Filter the events").fill("nothing like it")
    read.see("Clear the filter")
    read.page.get_by_label("Filter the events").fill("while it was")
    assert read.page.locator(".feed tbody tr:visible").count() == 1
    read.see("while it was held", "#news")


def test_texts_of_jobs_stay_texts(fleet: Fleet, reader: Look) -> None:
    fleet.store.events.note(HOSTILE, Event(kind="remark", process=HOSTILE, text=HOSTILE, data={"phase": HOSTILE}))
    fleet.store.events.note(ENDED_JOB, Event(kind="remark", text=HOSTILE))
    read = reader(fleet.page, token=VIEWER)
    read.see(f"its engine said: {HOSTILE}")
    read.see(HOSTILE, ".feed tbody")
    read.page.get_by_role("link", name=ENDED_JOB).first.click()
    read.see(f"its engine said: {HOSTILE}", ".callout")
    read.see(HOSTILE, ".feed tbody")
    assert read.page.locator("main img, main script").count() == 0
    assert read.page.title() == f"{ENDED_JOB} · Headrace"


def test_an_unknown_token_is_said_and_another_one_taken(fleet: Fleet, reader: Look) -> None:
    read = reader(fleet.page, token="no such one")
    read.see("neither spaces nor")
    read.page.get_by_label("API token").fill("")
    read.sign_in("wrong")
    read.see("does not know this token")
    assert read.page.evaluate("sessionStorage.length") == 0
    read.sign_in(VIEWER)
    read.see(JOB)
    assert read.url == read.page.url
    # So browsers report any 401.
    assert all("401" in complaint for complaint in read.complaints)
    read.complaints.clear()


def test_a_job_that_is_not_there_is_said(fleet: Fleet, reader: Look) -> None:
    read = reader(f"{fleet.page}#/jobs/nobody", token=VIEWER)
    read.see("Unknown job")
    read.page.get_by_role("link", name="All jobs").click()
    read.see(JOB)
    assert all("404" in complaint for complaint in read.complaints)
    read.complaints.clear()


def test_a_control_api_that_is_gone_is_said_and_asked_again(empty: Serve, reader: Look) -> None:
    read = reader(page_of(empty), token=VIEWER)
    read.see("No job is on record. Start one with")
    read.see("Nothing has happened yet")
    read.see("live")
    empty.end(signal.SIGKILL)
    read.see("has not answered since", "#connection")
    EventStore(Database(empty.home)).note("any", Event(kind="remark", text="while nobody listened"))
    empty.start()
    read.see("while nobody listened", ".feed tbody")
    read.page.locator("#connection:empty").wait_for(state="attached")
    # So browsers report that nobody answers.
    assert all("ERR_" in complaint for complaint in read.complaints)
    read.complaints.clear()


@pytest.mark.parametrize("path", ["", f"#/jobs/{JOB}"])
def test_a_narrow_window_scrolls_one_way(fleet: Fleet, reader: Look, path: str) -> None:
    read = reader(fleet.page + path, token=VIEWER, width=360)
    read.see("live")
    read.see("Processes" if path else JOB)
    read.picture("narrow-job" if path else "narrow-jobs")
    assert read.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
