// The weights: what the job serves, what is under way, and its updates as a timeline.

import { Problem } from "./api.js";
import { bar, h } from "./dom.js";
import { badge, moment, seconds } from "./format.js";
import { hint, problem } from "./hints.js";

const SHOWN = 30;
const GOING = {
  forward: "to",
  back: "back to the version before, from",
  off: "called off, from",
  join: "engines join",
};

/** Both answers are null before they came. */
export function updates(name, weights, history) {
  const content = [weights, history].includes(null)
    ? hint("Loading the weights.")
    : ([weights, history].find((answer) => answer instanceof Problem) ?? [position(weights), timeline(name, history)]);
  return h("section", {}, h("h2", {}, "Weights"), content instanceof Problem ? problem(content) : content);
}

function position({ served, course, to_purge: older }) {
  const now = served
    ? ["Served: ", h("strong", {}, served.version), `, epoch ${served.epoch}. `]
    : ["Nothing is served yet: the job has not come up. "];
  const moving = course && [
    badge("under way"),
    ` ${GOING[course.going]} `,
    h("strong", {}, course.version),
    `, ${course.phase.replaceAll("_", " ")}, epoch ${course.epoch}. ${course.why}`,
  ];
  const left = older.length > 0 && `Epochs whose keys are still in the pool: ${older.join(", ")}.`;
  return h("p", {}, now, moving, left);
}

function timeline(name, { updates: all, remarks }) {
  if (all.length + remarks.length === 0) {
    const push = [`headrace weights push ${name} FOLDER --version V`];
    return hint("No update yet. A job with ", ["[weights]"], " takes new ones: ", push);
  }
  const longest = Math.max(...all.map((update) => took(update) ?? 0));
  const items = [
    ...all.map((update) => ({ at: update.asked_at, item: () => updateItem(update, longest) })),
    ...remarks.map((remark) => ({ at: remark.at, item: () => remarkItem(remark) })),
  ];
  items.sort((one, other) => other.at - one.at);
  const newest = items.slice(0, SHOWN).map(({ item }) => item());
  return h("ol", { class: "timeline", "aria-label": "Updates, the newest first" }, newest);
}

function updateItem(update, longest) {
  const outcome = update.outcome ?? "under way";
  const time = took(update);
  return h(
    "li",
    { "data-key": `update-${update.number}`, class: outcome },
    moment(update.asked_at),
    h("strong", {}, update.version),
    badge(outcome),
    time !== null && h("span", { class: "took" }, bar(time, longest, `took ${seconds(time)}`), seconds(time)),
    h("span", { class: "how" }, `no. ${update.number}, ${update.strategy}, ${update.in_flight}, ${update.load_mode}`),
    update.why && h("p", {}, update.why),
  );
}

function remarkItem(remark) {
  return h("li", { class: "remark" }, moment(remark.at), h("span", {}, remark.text));
}

function took(update) {
  return update.ended_at === null ? null : update.ended_at - update.asked_at;
}
