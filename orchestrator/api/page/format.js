// Numbers, times and states as a person reads them.

import { h } from "./dom.js";

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const DAY_S = 86400;

export function bytes(count) {
  const power = count < 1 ? 0 : Math.min(UNITS.length - 1, Math.floor(Math.log2(count) / 10));
  const value = count / 1024 ** power;
  return `${power === 0 || value >= 100 ? Math.round(value) : +value.toFixed(1)} ${UNITS[power]}`;
}

export function number(count) {
  return count.toLocaleString("en");
}

export function counted(count, one, many = `${one}s`) {
  return `${number(count)} ${count === 1 ? one : many}`;
}

export function seconds(s) {
  if (s < 60) return `${s < 10 ? +s.toFixed(1) : Math.round(s)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
  if (s < DAY_S) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / DAY_S)} d ${Math.floor((s % DAY_S) / 3600)} h`;
}

/** A moment, given in Unix seconds: its time of day, with the date where that is another one than today's. */
export function moment(at) {
  const date = new Date(at * 1000);
  const day = [date.getFullYear(), two(date.getMonth() + 1), two(date.getDate())].join("-");
  const time = [date.getHours(), date.getMinutes(), date.getSeconds()].map(two).join(":");
  const isToday = date.toDateString() === new Date().toDateString();
  return h("time", { datetime: date.toISOString(), title: `${day} ${time}` }, isToday ? time : `${day} ${time}`);
}

function two(value) {
  return String(value).padStart(2, "0");
}

const TONES = {
  good: ["ready", "serves", "committed", "open", "process_ready", "version_committed", "engine_joined"],
  busy: ["starting", "waiting", "stopping", "under way", "joining", "draining", "on trial", "holding", "frozen"],
  poor: ["degraded", "rolled_back", "called_off", "cancelled", "process_restarted", "process_ended"],
  bad: ["failed", "abandoned", "dead", "failing", "unusable", "fenced", "refused", "process_given_up", "engine_fenced"],
};
const TONE_OF = Object.fromEntries(Object.entries(TONES).flatMap(([tone, words]) => words.map((word) => [word, tone])));

/** A state by its own word; its colour says nothing that the word does not. */
export function badge(state, tone = TONE_OF[state] ?? "plain") {
  return h("span", { class: `badge ${tone}` }, state.replaceAll("_", " "));
}
