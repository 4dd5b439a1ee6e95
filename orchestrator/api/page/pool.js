// The KV pool that a job's engines share: what it has, and how much of that is used.

import { bar, h } from "./dom.js";
import { bytes, number } from "./format.js";
import { hint } from "./hints.js";

export function pool(status) {
  return h("section", {}, h("h2", {}, "Pool"), status.pool === null ? none() : shown(status.pool));
}

function none() {
  return hint("The job has no pool. A role joins one by ", ['kv_offload.type = "mooncake"'], " in the job file.");
}

function shown({ use, use_unknown, capacity_bytes, master_address }) {
  const planned = [fact("Lent by the job", bytes(capacity_bytes)), fact("Master", h("code", {}, master_address))];
  if (use === null) return [hint(`Its use is not known: ${use_unknown}`), h("dl", { class: "facts" }, planned)];
  const percent = use.mounted_bytes > 0 ? Math.round((100 * use.used_bytes) / use.mounted_bytes) : 0;
  const words = `${bytes(use.used_bytes)} of ${bytes(use.mounted_bytes)} used, ${percent} %`;
  const told = [fact("Mounted", bytes(use.mounted_bytes)), fact("Used", words), fact("Keys", number(use.keys))];
  const drawn = h("div", { class: "wide" }, bar(use.used_bytes, use.mounted_bytes, words));
  return [drawn, h("dl", { class: "facts" }, told, planned)];
}

function fact(name, value) {
  return h("div", {}, h("dt", {}, name), h("dd", {}, value));
}
