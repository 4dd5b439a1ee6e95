// What stands where there is nothing to show, and what to do about it.

import { h } from "./dom.js";

/** A sentence; parts that are lists of one text are code. */
export function hint(...parts) {
  return h("p", { class: "hint" }, parts.map((part) => (Array.isArray(part) ? h("code", {}, part) : part)));
}

/** What the API has answered that is wrong. */
export function problem(answer) {
  return h("div", { class: "callout bad", role: "alert" }, h("strong", {}, answer.title), h("p", {}, answer.message));
}
