"""The demo: starts the job of deploy/examples/demo.toml, chats two turns with it, shows what the pool gave, stops it.

`make demo` runs it with the Python of `.venv`. It uses the command line and HTTP as any user does. KEEP=1 in the
environment leaves the job up.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[2]
HEADRACE = Path(sys.executable).parent / "headrace"
JOB, JOB_FILE = "demo", "deploy/examples/demo.toml"
ENDED = ("failed", "stopped")

TURNS = ("Name three large rivers of Europe. Say one thing about each.", "Which of the three is the longest?")
ANSWER_TOKENS = 64
ANSWER_TIMEOUT_S = 300.0
SETTLE_TIMEOUT_S = 30.0
QUIET_S = 2.0
HITS = "vllm:external_prefix_cache_hits_total"
RULE = "-" * 78

Json = dict[str, Any]


class DemoError(Exception):
    """The demo cannot go on. The text says why."""


class Terminated(KeyboardInterrupt):
    """SIGTERM; a terminal's Ctrl-C reaches our children by itself, this does not."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    text: str
    prompt_tokens: int
    cached_tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Urls:
    router: str
    prefill: str
    master_metrics: str


def main() -> int:
    signal.signal(signal.SIGTERM, _terminate)
    before = job_status()
    if before is not None and before["phase"] not in ENDED:
        say(f"demo: the job {JOB!r} is {before['phase']} already. Stop it with `.venv/bin/headrace down {JOB}`,")
        say(f"      or talk to it at {before['router']['url']}.")
        return 1
    keep = os.environ.get("KEEP", "") not in ("", "0")
    try:
        if headrace("up", JOB_FILE) != 0:
            raise DemoError("the job did not come up")
        status = job_status()
        if status is None:
            raise DemoError("`headrace status` does not know the job that has just come up")
        converse(status)
    except KeyboardInterrupt:
        say("\ndemo: stopped on request")
        stop()
        return 130
    except (DemoError, httpx.HTTPError) as error:
        say(f"\ndemo: failed: {error or type(error).__name__}")
        name_logs()
        stop()
        return 1
    if keep:
        say_what_is_up(status)
        return 0
    return stop()


# -- the conversation --------------------------------------------------------------------------------------------


def converse(status: Json) -> None:
    urls = read_urls(status)
    headers = {"x-session-id": f"demo-{os.getpid()}"}
    # Everything is on this machine: a proxy named in the environment would be in the way.
    with (
        httpx.Client(headers=headers, timeout=ANSWER_TIMEOUT_S, trust_env=False) as client,
        httpx.Client(headers=job_token(status), timeout=ANSWER_TIMEOUT_S, trust_env=False) as engines,
    ):
        say(f"{RULE}\nA conversation with {status['model']} at {urls.router}/v1/chat/completions\n{RULE}")
        messages = [{"role": "user", "content": TURNS[0]}]
        first = ask(client, urls.router, status["model"], messages)
        messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": TURNS[1]}]

        say("\n(clearing the prefill engine's own cache, so that what turn 2 finds can only come from the pool)\n")
        clear_local_cache(engines, urls.prefill)
        keys = wait_for_saves(client, urls.master_metrics)
        hits = metric(engines, f"{urls.prefill}/metrics", HITS)
        second = ask(client, urls.router, status["model"], messages)
        new_hits = wait_for_hits(engines, urls.prefill, hits, second.cached_tokens)
        held = metric(client, urls.master_metrics, "master_allocated_bytes")
    show_pool(status, second, hits, new_hits, keys, held)
    if new_hits == hits:
        raise DemoError("the pool gave nothing to turn 2")
    if new_hits - hits != second.cached_tokens:
        raise DemoError("the engine's counter and the reply's usage disagree")


def ask(client: httpx.Client, router: str, model: str, messages: list[dict[str, str]]) -> Answer:
    """One turn, shown as it arrives.

    Raises:
        DemoError: the answer is an error, or ends without its usage.
    """
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.monotonic()
    write(f"you:   {messages[-1]['content']}\nmodel: ")
    text, usage = "", None
    with client.stream("POST", f"{router}/v1/chat/completions", json=body) as reply:
        if reply.status_code != 200:
            raise DemoError(f"the router answered {reply.status_code}: {reply.read().decode(errors='replace')[:500]}")
        for line in reply.iter_lines():
            event = sse_event(line)
            for choice in event.get("choices", ()):
                piece = choice["delta"].get("content") or ""
                text += piece
                write(piece)
            usage = event.get("usage") or usage
    if usage is None:
        raise DemoError("the answer broke off before its end")
    seconds = time.monotonic() - began
    say(f"\n       ({usage['prompt_tokens']} prompt tokens, {usage['completion_tokens']} new, {seconds:.1f} s)")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(text=text, prompt_tokens=usage["prompt_tokens"], cached_tokens=cached, seconds=seconds)


def sse_event(line: str) -> Json:
    """The event in a line of a stream; empty where it holds none.

    Raises:
        DemoError: the event is an error.
    """
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == "[DONE]":
        return {}
    event: Json = json.loads(data)
    if "error" in event:
        raise DemoError(f"the answer broke off: {event['error']}")
    return event


def clear_local_cache(client: httpx.Client, prefill: str) -> None:
    """Refused by the engine while blocks are held, which they are until they have been saved and handed on."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        reply = client.post(f"{prefill}/reset_prefix_cache")
        if reply.status_code == 200 and reply.json().get("success") is True:
            return
        if time.monotonic() > deadline:
            raise DemoError(f"the prefill engine did not clear its cache: {reply.status_code} {reply.text[:200]}")
        time.sleep(0.5)


def wait_for_saves(client: httpx.Client, master_metrics: str) -> float:
    """The pool's key count, once nothing has been added for a while: the decode engine saves behind its answer."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    keys = metric(client, master_metrics, "master_key_count")
    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < QUIET_S and time.monotonic() < deadline:
        time.sleep(0.25)
        now = metric(client, master_metrics, "master_key_count")
        if now != keys:
            keys, quiet_since = now, time.monotonic()
    return keys


def wait_for_hits(client: httpx.Client, prefill: str, before: float, expected: int) -> float:
    """The hit counter after a turn. The engine's metrics follow its steps a moment later."""
    deadline = time.monotonic() + 5.0
    while True:
        hits = metric(client, f"{prefill}/metrics", HITS)
        if hits - before == expected or time.monotonic() > deadline:
            return hits
        time.sleep(0.25)


def metric(client: httpx.Client, url: str, name: str) -> float:
    """The sum of a metric over its labels; 0 where nothing has been counted yet."""
    families = text_string_to_metric_families(client.get(url).raise_for_status().text)
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


# -- what is shown -----------------------------------------------------------------------------------------------


def show_pool(status: Json, turn: Answer, before: float, after: float, keys: float, held: float) -> None:
    share = f"{after - before:.0f} of the {turn.prompt_tokens} prompt tokens"
    say(f"\n{RULE}\nWhat came from the pool: turn 2 took {share} from it, and computed the rest.")
    say("(In whole blocks, as far as the text of turn 1 becomes the same tokens again.)")
    say(f"  prefill engine   {HITS}  {before:.0f} -> {after:.0f}")
    say(f"  turn 2's reply   usage.prompt_tokens_details.cached_tokens  {turn.cached_tokens}")
    capacity = status["pool"]["capacity_bytes"] / 2**20
    say(f"  pool             {keys:.0f} blocks before turn 2; {held / 2**20:.1f} of {capacity:.0f} MiB used after it")
    say(RULE)


def say_what_is_up(status: Json) -> None:
    urls = read_urls(status)
    dashboard = Path(status["directory"]) / "monitoring" / "dashboards" / "overview.json"
    say(f"The job stays up (KEEP=1):\n  router       {urls.router}   (OpenAI routes; model {status['model']!r})")
    for engine in status["engines"]:
        say(f"  {engine['name']:<12} {engine['url']}")
    say(f"  prometheus   {status['prometheus_url'] or 'not running: no prometheus is installed'}")
    say(f"  dashboard    {dashboard}   (import it into Grafana)")
    say(f"  look         .venv/bin/headrace status {JOB}; .venv/bin/headrace logs {JOB} PROCESS --follow")
    say(f"  stop         .venv/bin/headrace down {JOB}")


def name_logs() -> None:
    status = job_status()
    if status is None:
        return
    started = [unit for unit in status["units"] if unit["log"]]
    for folder in sorted({Path(unit["log"]).parent for unit in started}):
        say(f"demo: logs are in {folder}")
    for unit in started:
        if unit["state"] == "dead":
            say(f"demo: {unit['name']} is not running: {unit['log']}")


def say(text: str) -> None:
    write(f"{text}\n")


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


# -- the command line --------------------------------------------------------------------------------------------


def headrace(*arguments: str) -> int:
    """Run it on this terminal. When interrupted, it gets the time to end what it started."""
    process = subprocess.Popen([HEADRACE, *arguments], cwd=ROOT)
    try:
        return process.wait()
    except KeyboardInterrupt as interrupt:
        if isinstance(interrupt, Terminated):
            process.terminate()
        process.wait()
        raise


def job_status() -> Json | None:
    """The demo job as `headrace status --json` tells; None where there is none."""
    told = subprocess.run(
        [HEADRACE, "status", JOB, "--json"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
    )
    try:
        status = json.loads(told.stdout)
    except ValueError:
        return None
    return status if isinstance(status, dict) and "phase" in status else None


def stop() -> int:
    status = job_status()
    if status is None or status["phase"] in ENDED:
        return 0
    return headrace("down", JOB)


def read_urls(status: Json) -> Urls:
    prefill = next(engine["url"] for engine in status["engines"] if engine["role"] == "prefill")
    return Urls(router=status["router"]["url"], prefill=prefill, master_metrics=status["pool"]["metrics_url"])


def job_token(status: Json) -> dict[str, str]:
    """The header that every route of an engine asks for."""
    try:
        token = Path(status["directory"], "token").read_text(encoding="ascii").strip()
    except OSError as error:
        raise DemoError(f"the job's token cannot be read: {error}") from error
    return {"authorization": f"Bearer {token}"}


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise Terminated


if __name__ == "__main__":
    sys.exit(main())
