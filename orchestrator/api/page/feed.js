// Live events: the newest first, those of all jobs or of one.

import { h, table } from "./dom.js";
import { badge, counted, moment } from "./format.js";
import { follow } from "./stream.js";
import { firstAnswer } from "./watch.js";

const SHOWN = 200;
const NEWS_AFTER_MS = 500;
const NEWS_EVERY_MS = 10_000;
const news = document.getElementById("news");

/** Follows the events of `path` and shows them in `section`; each with its job where they are those `ofAll`. */
export async function showFeed(api, path, ofAll, section, signal) {
  const feed = new Feed(section, ofAll);
  const page = await firstAnswer(api, `${path}?limit=${SHOWN}`, signal);
  if (page === null) return;
  feed.add(page.events);
  const announce = announcer(signal);
  const tell = (event) => {
    feed.add([event]);
    announce(event);
  };
  await follow(api, `${path}/stream`, page.next, signal, tell, (live) => feed.setLive(live));
}

/** Has events read out, several at once: a voice that reads out each leaves no room for anything else. */
function announcer(signal) {
  let fresh = [];
  let spokenAt = 0;
  const speak = () => {
    if (signal.aborted) return;
    news.textContent = inShort(fresh);
    fresh = [];
    spokenAt = Date.now();
  };
  return (event) => {
    fresh.push(event);
    if (fresh.length === 1) setTimeout(speak, Math.max(NEWS_AFTER_MS, spokenAt + NEWS_EVERY_MS - Date.now()));
  };
}

class Feed {
  #ofAll;
  #rows = h("tbody");
  #state = badge("connecting");
  #empty = h("p", { class: "hint" }, "Loading the events.");
  #filter = h("input", { type: "search", placeholder: "Filter", "aria-label": "Filter the events" });
  #hold = h("button", { type: "button", "aria-pressed": "false" }, "Hold");
  #held = [];

  constructor(section, ofAll) {
    this.#ofAll = ofAll;
    const columns = ["Time", ofAll && "Job", "Kind", "What happened"].filter(Boolean);
    section.replaceChildren(
      h("div", { class: "head" }, h("h2", {}, "Events"), this.#state, this.#filter, this.#hold),
      this.#empty,
      table("Events, the newest first", columns, this.#rows),
    );
    this.#filter.addEventListener("input", () => this.#sift());
    this.#hold.addEventListener("click", () => this.#toggle());
  }

  setLive(isLive) {
    const state = isLive ? badge("live", "good") : badge("connecting again", "busy");
    this.#state.replaceWith(state);
    this.#state = state;
  }

  /** In their order. */
  add(events) {
    if (this.#isHeld) this.#held = [...this.#held, ...events].slice(-SHOWN);
    else this.#insert(events);
    this.#hold.textContent = this.#held.length > 0 ? `Go on (${this.#held.length})` : this.#isHeld ? "Go on" : "Hold";
  }

  get #isHeld() {
    return this.#hold.getAttribute("aria-pressed") === "true";
  }

  #toggle() {
    this.#hold.setAttribute("aria-pressed", String(!this.#isHeld));
    const held = this.#held;
    this.#held = [];
    this.add(held);
  }

  #insert(events) {
    this.#rows.prepend(...events.map((event) => row(event, this.#ofAll)).reverse());
    while (this.#rows.rows.length > SHOWN) this.#rows.lastChild.remove();
    this.#sift();
  }

  #sift() {
    const wanted = this.#filter.value.trim().toLowerCase();
    const rows = [...this.#rows.rows];
    for (const each of rows) each.hidden = !each.textContent.toLowerCase().includes(wanted);
    const isEmpty = rows.every((each) => each.hidden);
    this.#empty.hidden = !isEmpty;
    this.#empty.textContent =
      rows.length === 0
        ? "Nothing has happened yet. What jobs do appears here by itself."
        : `None of the last ${counted(rows.length, "event")} has “${wanted}” in it. Clear the filter to see them.`;
  }
}

function row(event, ofAll) {
  const told = { job_phase: event.data.phase, update_ended: event.data.outcome };
  return h(
    "tr",
    {},
    h("td", { class: "time" }, moment(event.at)),
    // No link: two hundred of them would stand between a keyboard and what comes after.
    ofAll && h("td", {}, event.job),
    h("td", {}, badge(String(told[event.kind] ?? event.kind))),
    h("td", { class: "text" }, event.text),
  );
}

function inShort(events) {
  const last = events.at(-1);
  const text = `${last.job}: ${last.text}`;
  return events.length === 1 ? text : `${counted(events.length, "new event")}, the last of ${text}`;
}
