// Where requests go: the router, its roles and their replicas, with what each has to do now.

import { Problem } from "./api.js";
import { bar, h, table } from "./dom.js";
import { badge, bytes, counted, number } from "./format.js";
import { hint } from "./hints.js";

const COLUMNS = [
  "Replica",
  "State",
  { name: "Epoch", class: "count" },
  { name: "Sessions", class: "count" },
  { name: "Requests", class: "count" },
  { name: "Tokens in flight", class: "count" },
];

/** `traffic` is null before its first answer. */
export function topology(status, traffic) {
  const router = traffic instanceof Problem ? null : (traffic?.router ?? null);
  const loads = new Map((router?.replicas ?? []).map((replica) => [replica.name, replica]));
  const replicas = status.engines.map((engine) => ({ ...engine, load: loads.get(engine.name) ?? null }));
  const roles = [...new Set(replicas.map((replica) => replica.role))];
  return h(
    "section",
    {},
    h("h2", {}, "Topology"),
    h(
      "ol",
      { class: "flow" },
      routerTile(status, router),
      roles.map((role) => roleTile(role, replicas.filter((replica) => replica.role === role))),
      poolTile(status.pool),
    ),
    unknown(traffic),
    table("Replicas", COLUMNS, roles.map((role) => body(role, replicas, status.weights?.epoch ?? null))),
  );
}

function routerTile(status, router) {
  if (router === null) {
    const process = status.units.find((unit) => unit.name === "router");
    return tile("router", badge(process?.state ?? "waiting"));
  }
  const running = `${number(router.admitted)} running, ${number(router.waiting)} waiting`;
  return tile("router", badge(router.gate), counted(router.sessions, "session"), running);
}

function roleTile(role, replicas) {
  const serving = replicas.filter((replica) => ["serves", "ready"].includes(stateOf(replica)));
  const requests = replicas.reduce((sum, replica) => sum + (replica.load?.legs_in_flight ?? 0), 0);
  const verb = replicas.some((replica) => replica.load) ? "serve" : "ready";
  const share = h("strong", {}, `${serving.length} of ${replicas.length} ${verb}`);
  return tile(role, share, counted(requests, "request"));
}

function poolTile(pool) {
  if (pool === null) return tile("pool", h("strong", {}, "none"));
  if (pool.use === null) return tile("pool", h("strong", {}, "not known"));
  const used = `${bytes(pool.use.used_bytes)} used`;
  return tile("pool", h("strong", {}, used), `of ${bytes(pool.use.mounted_bytes)}`, counted(pool.use.keys, "key"));
}

function tile(name, value, ...lines) {
  return h("li", {}, h("span", { class: "name" }, name), value, lines.map((line) => h("span", {}, line)));
}

function unknown(traffic) {
  if (traffic === null) return hint("Asking the router for sessions and load.");
  const why = traffic instanceof Problem ? traffic.message : traffic.router_unknown;
  return why !== "" && hint(`Sessions and load are not known: ${why}`);
}

function body(role, replicas, epoch) {
  const most = Math.max(...replicas.map((replica) => replica.load?.tokens_in_flight ?? 0));
  const rows = replicas.filter((replica) => replica.role === role).map((replica) => row(replica, epoch, most));
  const group = h("th", { class: "group", scope: "rowgroup", colspan: COLUMNS.length }, role);
  return h("tbody", {}, h("tr", {}, group), rows);
}

function row(replica, epoch, most) {
  const load = replica.load;
  const tokens = load?.tokens_in_flight ?? 0;
  const cell = (value) => h("td", { class: "count" }, value);
  const figures = load
    ? [
        cell(load.epoch === null ? "none" : load.epoch === epoch ? String(load.epoch) : `${load.epoch} of ${epoch}`),
        cell(number(load.active_sessions)),
        cell(number(load.legs_in_flight)),
        cell([number(tokens), bar(tokens, most, `${number(tokens)} tokens`)]),
      ]
    : ["", "", "", ""].map(cell);
  const remark = load?.handoffs_failed ? ` ${counted(load.handoffs_failed, "failed handoff")} in a row` : "";
  return h(
    "tr",
    { "data-key": replica.name },
    h("th", { scope: "row" }, replica.name),
    h("td", {}, badge(stateOf(replica)), remark),
    figures,
  );
}

/** Of its process, and of what the router says where that runs. */
function stateOf({ state, load }) {
  if (state !== "ready" || load === null) return state;
  if (load.is_draining) return "draining";
  if (load.breaker !== "closed") return load.breaker === "open" ? "failing" : "on trial";
  if (load.epoch === null) return "joining";
  return load.is_usable ? "serves" : "unusable";
}
