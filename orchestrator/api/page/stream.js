// Follows a stream of Server-Sent Events. Not by EventSource, which cannot send a token.

import { isPassing } from "./api.js";
import { pause, untilVisible } from "./watch.js";

const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 10_000;
const SILENT_MS = 40_000; // The API sends something every 15 s.

/**
 * Gives each event behind the cursor `since` to `tell`, and connects again where the stream breaks off. `setLive` hears
 * whether it is connected. A hidden page is not connected: browsers open few connections to one host, for all its tabs.
 */
export async function follow(api, path, since, signal, tell, setLive) {
  let cursor = since;
  let wait = FIRST_PAUSE_MS;
  let connection = new AbortController();
  document.addEventListener("visibilitychange", () => document.hidden && connection.abort(), { signal });
  while (!signal.aborted) {
    await untilVisible(signal);
    connection = new AbortController();
    const until = AbortSignal.any([signal, connection.signal]);
    let silence = setTimeout(() => connection.abort(), SILENT_MS);
    const heard = () => {
      clearTimeout(silence);
      silence = setTimeout(() => connection.abort(), SILENT_MS);
      wait = FIRST_PAUSE_MS;
    };
    try {
      const body = await api.open(`${path}?since=${cursor}`, until);
      setLive(true);
      for await (const event of events(body, heard)) {
        cursor = event.seq;
        tell(event);
      }
    } catch (error) {
      if (!until.aborted && !isPassing(error)) throw error;
    } finally {
      clearTimeout(silence);
    }
    if (signal.aborted) return;
    setLive(false);
    await pause(wait, signal);
    wait = Math.min(2 * wait, LONGEST_PAUSE_MS);
  }
}

async function* events(body, heard) {
  let rest = "";
  for await (const text of texts(body)) {
    heard();
    const blocks = (rest + text).split(/\r?\n\r?\n/);
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      if (data.length > 0) yield JSON.parse(data.map((line) => line.slice(5)).join("\n"));
    }
  }
}

/** What comes, until it ends or breaks off. */
async function* texts(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read().catch(() => ({ done: true }));
    if (done) return;
    yield value;
  }
}
