// The page: who reads it, which of its two views is shown, and whether the API answers.

import { Api, TokenRefused } from "./api.js";
import { h } from "./dom.js";
import { moment } from "./format.js";
import { showJob } from "./job.js";
import { showJobs } from "./jobs.js";
import { showTokenForm } from "./token.js";

const KEPT_AS = "headrace-token";
const main = document.getElementById("main");
const path = document.getElementById("path");
const connection = document.getElementById("connection");
const leave = document.getElementById("leave");
const skip = document.getElementById("skip");
let view = new AbortController();
let goneSince = null;

function show() {
  view.abort();
  view = new AbortController();
  const token = sessionStorage.getItem(KEPT_AS);
  leave.hidden = token === null;
  if (token === null) ask("");
  else showView(new Api(token, tell), view.signal);
}

function showView(api, signal) {
  const name = jobNamed(location.hash);
  document.title = name === null ? "Headrace" : `${name} · Headrace`;
  path.replaceChildren();
  if (name !== null) path.append(h("a", { href: "#/" }, "Jobs"), h("span", { "aria-current": "page" }, name));
  const shown = name === null ? showJobs(api, main, signal) : showJob(api, name, main, signal);
  // Whoever follows a link by keyboard goes on where it leads.
  main.querySelector("h1").focus();
  shown.catch((error) => {
    if (signal.aborted) return;
    if (!(error instanceof TokenRefused)) throw error;
    sessionStorage.removeItem(KEPT_AS);
    view.abort();
    leave.hidden = true;
    ask("The control API does not know this token.");
  });
}

function ask(complaint) {
  path.replaceChildren();
  tell(true);
  showTokenForm(main, complaint, (token) => {
    sessionStorage.setItem(KEPT_AS, token);
    show();
  });
}

function jobNamed(hash) {
  try {
    return decodeURIComponent(/^#\/jobs\/([^/]+)$/.exec(hash)?.[1] ?? "") || null;
  } catch {
    return null;
  }
}

function tell(answers) {
  if (answers === (goneSince === null)) return;
  goneSince = answers ? null : Date.now() / 1000;
  main.classList.toggle("stale", !answers);
  connection.replaceChildren();
  if (answers) return;
  const meanwhile = ". Jobs run on meanwhile. Below is what it said last; it is asked again every few seconds.";
  connection.append("The control API has not answered since ", moment(goneSince), meanwhile);
}

leave.addEventListener("click", () => {
  sessionStorage.removeItem(KEPT_AS);
  show();
});
skip.addEventListener("click", (event) => {
  // Its target is no view.
  event.preventDefault();
  main.focus();
});
addEventListener("hashchange", show);
show();
