// The list of all jobs.

import { Problem } from "./api.js";
import { h, morph, table } from "./dom.js";
import { showFeed } from "./feed.js";
import { badge, seconds } from "./format.js";
import { hint, problem } from "./hints.js";
import { watch } from "./watch.js";

const ENDED = ["failed", "stopped"];

/** Shows the jobs in `main` until the signal. */
export async function showJobs(api, main, signal) {
  const list = drawn(hint("Loading the jobs."));
  const events = h("section", { class: "feed" });
  main.replaceChildren(h("div", { class: "columns" }, list, events));
  await Promise.all([
    watch(api, "jobs", signal, (answer) => morph(list, drawn(content(answer)))),
    showFeed(api, "events", true, events, signal),
  ]);
}

function drawn(...parts) {
  return h("section", {}, h("h1", { tabindex: "-1" }, "Jobs"), parts);
}

function content(answer) {
  if (answer instanceof Problem) return problem(answer);
  if (answer.jobs.length === 0) {
    const ways = [["headrace up JOB.toml"], ", or send a job file to ", ["POST /jobs"]];
    return hint("No job is on record. Start one with ", ...ways, ".");
  }
  const isEnded = (job) => ENDED.includes(job.phase);
  const sorted = [...answer.jobs.filter((job) => !isEnded(job)), ...answer.jobs.filter(isEnded)];
  const figures = ["Alive", "Age"].map((each) => ({ name: each, class: "count" }));
  return table("Jobs", ["Job", "State", ...figures, "Remark"], h("tbody", {}, sorted.map(row)));
}

function row(job) {
  return h(
    "tr",
    { "data-key": job.name },
    h("th", { scope: "row" }, h("a", { href: `#/jobs/${encodeURIComponent(job.name)}` }, job.name)),
    h("td", {}, badge(job.phase)),
    h("td", { class: "count" }, `${job.alive} of ${job.processes}`),
    h("td", { class: "count" }, seconds(job.age_s)),
    h("td", { class: "text" }, job.reason),
  );
}
