// The KV pool that a job's engines share: what it has, and how much of that is used.

import { bar, h } from "./dom.js";
import { bytes, number } from "./format.js";
import { hint } from "./hints.js";

export function pool(status) {
  return h("section", {}, h("h2", {}, "Pool"), status.pool === null ? none() : shown(status.pool));
}

function none() {
  return hint("The job has no pool. Give its roles ", ['kv_offload.type = "mooncake"'], " and memory to lend, and start it again.");
}

function shown({ use, use_unknown: why, capacity_bytes: capacity, master_address: master }) {
  const of = h("dl", { class: "facts" }, fact("Lent by the job", bytes(capacity)), fact("Master", h("code", {}, master)));
  if (use === null) return [hint(`Its use is not known: ${why}`), of];
  const percent = use.mounted_bytes > 0 ? Math.round((100 * use.used_bytes) / use.mounted_bytes) : 0;
  const words = `${bytes(use.used_bytes)} of ${bytes(use.mounted_bytes)} used, ${percent} %`;
  of.prepend(fact("Mounted", bytes(use.mounted_bytes)), fact("Used", words), fact("Keys", number(use.keys)));
  return [h("div", { class: "wide" }, bar(use.used_bytes, use.mounted_bytes, words)), of];
}

function fact(name, value) {
  return h("div", {}, h("dt", {}, name), h("dd", {}, value));
}
