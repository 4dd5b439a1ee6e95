// One job: what it is, how its parts stand, what has happened to it.

import { jobPath, Problem } from "./api.js";
import { h, morph, table } from "./dom.js";
import { showFeed } from "./feed.js";
import { badge, seconds } from "./format.js";
import { hint, problem } from "./hints.js";
import { pool } from "./pool.js";
import { topology } from "./topology.js";
import { updates } from "./updates.js";
import { watch } from "./watch.js";

/** Shows a job in `main` until the signal. */
export async function showJob(api, name, main, signal) {
  const seen = { status: null, traffic: null, weights: null, updates: null };
  const body = drawn(name, seen);
  const events = h("section", { class: "feed" });
  main.replaceChildren(h("div", { class: "columns" }, body, events));
  const look = (part, rest) =>
    watch(api, jobPath(name, rest), signal, (answer) => {
      seen[part] = answer;
      morph(body, drawn(name, seen));
    });
  await Promise.all([
    look("status", ""),
    look("traffic", "/traffic"),
    look("weights", "/weights"),
    look("updates", "/weights/updates"),
    showFeed(api, jobPath(name, "/events"), false, events, signal),
  ]);
}

function drawn(name, { status, traffic, weights, updates: history }) {
  if (status === null) return h("div", {}, title(name), hint("Loading the job."));
  if (status instanceof Problem) {
    const back = h("p", {}, h("a", { href: "#/" }, "All jobs"));
    return h("div", {}, title(name), problem(status), back);
  }
  return h(
    "div",
    {},
    title(name, badge(status.phase)),
    status.reason && h("div", { class: `callout ${status.phase === "failed" ? "bad" : "poor"}` }, status.reason),
    about(status),
    topology(status, traffic),
    pool(status),
    updates(name, weights, history),
    processes(name, status.units),
    status.warnings.length > 0 && warnings(status.warnings),
  );
}

function title(name, ...more) {
  return h("div", { class: "head" }, h("h1", { tabindex: "-1" }, name), more);
}

function about(status) {
  const weights = status.weights && `${status.weights.version}, epoch ${status.weights.epoch}`;
  const facts = [
    ["Model", status.model],
    ["Weights", weights ?? "none served yet"],
    ["Age", seconds(status.age_s)],
    ["Clients go to", h("code", {}, status.router.url)],
    ["Prometheus", status.prometheus_url && h("code", {}, status.prometheus_url)],
    ["Folder", h("code", {}, status.directory)],
  ].filter(([, value]) => value !== null);
  return h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

function processes(name, units) {
  const figures = ["PID", "Ready after"].map((each) => ({ name: each, class: "count" }));
  const rows = units.map((unit) =>
    h(
      "tr",
      { "data-key": unit.name },
      h("th", { scope: "row" }, unit.name),
      h("td", {}, badge(unit.state)),
      h("td", { class: "count" }, unit.pid === null ? "" : String(unit.pid)),
      h("td", { class: "count" }, unit.pid === null ? "" : seconds(unit.seconds)),
      h("td", { class: "text" }, unit.detail),
    ),
  );
  return h(
    "section",
    {},
    h("h2", {}, "Processes"),
    table("Processes", ["Process", "State", ...figures, "Probe"], h("tbody", {}, rows)),
    hint("A log: ", [`headrace logs ${name} ${units.at(-1)?.name ?? "PROCESS"}`]),
  );
}

function warnings(notes) {
  const items = notes.map(({ field, problem, mend }) =>
    h("li", {}, h("code", {}, field), ` ${problem}`, mend && `; ${mend}`),
  );
  const summary = notes.length === 1 ? "One warning of the plan" : `${notes.length} warnings of the plan`;
  return h("details", {}, h("summary", {}, summary), h("ul", {}, items));
}
