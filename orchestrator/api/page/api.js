// Calls of the control API with the reader's token, and what can come of them.

const ROOT = new URL("..", import.meta.url);
const PATIENCE_MS = 30_000;

/** The API does not know the token. */
export class TokenRefused extends Error {}

/** Nobody answers. */
export class Unreachable extends Error {}

/** The API answers that something is wrong (RFC 9457). */
export class Problem extends Error {
  constructor(title, detail) {
    super(detail);
    this.title = title;
  }
}

export class Api {
  #token;
  #tell;

  /** `tell` hears after each call whether the API answers. */
  constructor(token, tell) {
    this.#token = token;
    this.#tell = tell;
  }

  /** The answer to a GET. Throws one of the above. */
  async get(path, signal) {
    const until = AbortSignal.any([signal, AbortSignal.timeout(PATIENCE_MS)]);
    return this.#heard(signal, async () => (await this.#reply(path, until)).json());
  }

  /** The same, piece by piece as it comes. Where it breaks off, it ends. */
  async open(path, signal) {
    return this.#heard(signal, async () => (await this.#reply(path, signal)).body);
  }

  async #reply(path, signal) {
    const headers = { authorization: `Bearer ${this.#token}` };
    const reply = await fetch(new URL(path, ROOT), { headers, signal, cache: "no-store", credentials: "omit" });
    if (reply.ok) return reply;
    if (reply.status === 401) throw new TokenRefused();
    const problem = await reply.json().catch(() => ({}));
    throw new Problem(problem.title ?? `Status ${reply.status}`, problem.detail ?? "The answer does not say more.");
  }

  async #heard(signal, ask) {
    try {
      const answer = await ask();
      this.#tell(true);
      return answer;
    } catch (error) {
      signal.throwIfAborted();
      const isAnswer = error instanceof TokenRefused || error instanceof Problem;
      this.#tell(isAnswer);
      throw isAnswer ? error : new Unreachable(String(error));
    }
  }
}

/** Whether it may be otherwise the next time. */
export function isPassing(error) {
  return error instanceof Problem || error instanceof Unreachable;
}

/** The path of a job, with what is under it. */
export function jobPath(name, rest = "") {
  return `jobs/${encodeURIComponent(name)}${rest}`;
}
