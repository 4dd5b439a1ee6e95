// Looks at a path again and again while the reader looks at the page.

import { isPassing, Problem } from "./api.js";

const EVERY_MS = 2000;

/** Gives each answer to `show`, or the `Problem` that was answered. Ends with the signal; throws `TokenRefused`. */
export async function watch(api, path, signal, show) {
  while (!signal.aborted) {
    try {
      show(await api.get(path, signal));
    } catch (error) {
      if (signal.aborted) return;
      if (!isPassing(error)) throw error;
      if (error instanceof Problem) show(error);
    }
    await pause(EVERY_MS, signal);
    await untilVisible(signal);
  }
}

/** The first answer that can be had; null where the signal comes before it. */
export async function firstAnswer(api, path, signal) {
  while (!signal.aborted) {
    try {
      return await api.get(path, signal);
    } catch (error) {
      if (!signal.aborted && !isPassing(error)) throw error;
    }
    await pause(EVERY_MS, signal);
  }
  return null;
}

export function pause(ms, signal) {
  return new Promise((resolve) => {
    const end = () => {
      clearTimeout(timer);
      signal.removeEventListener("abort", end);
      resolve();
    };
    const timer = setTimeout(end, ms);
    signal.addEventListener("abort", end);
  });
}

export function untilVisible(signal) {
  return new Promise((resolve) => {
    const look = () => {
      if (document.hidden && !signal.aborted) return;
      document.removeEventListener("visibilitychange", look);
      signal.removeEventListener("abort", look);
      resolve();
    };
    document.addEventListener("visibilitychange", look);
    signal.addEventListener("abort", look);
    look();
  });
}
