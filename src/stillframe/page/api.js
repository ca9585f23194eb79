// Requests to the host of this page. The token lives in sessionStorage: a cookie would be sent to
// every other server on localhost.
import { store, useEffect, useState } from './dom.js';

const KEPT = 'stillframe-token';
const base = new URL('..', import.meta.url);
export const token = store({ text: sessionStorage.getItem(KEPT) ?? '' });

/** The token comes behind #token=, and leaves the address at once. */
function takeToken() {
  const found = /(?:^#|[&?])token=([^&]+)/.exec(location.hash);
  if (!found) return;
  setToken(decodeURIComponent(found[1]));
  const left = location.hash.replace(/[&?]?token=[^&]+/, '');
  history.replaceState(null, '', location.pathname + location.search + (left.length > 1 ? left : '#/'));
}

export function setToken(text) {
  sessionStorage.setItem(KEPT, text);
  token.set({ text });
}

// Before anybody else reads the address.
takeToken();
addEventListener('hashchange', takeToken);

export class Refused extends Error {
  constructor(status, sentence) {
    super(sentence);
    this.status = status;
  }
}

export const headers = (more = {}) => (token.value.text
  ? { Authorization: `Bearer ${token.value.text}`, ...more } : more);

export const address = (path) => new URL(path.replace(/^\//, ''), base);
export const jobPath = (job, ...rest) => ['jobs', job, ...rest].map((each) => encodeURIComponent(each)).join('/');

/** The answer's JSON; raises `Refused` with the host's own sentence. */
export async function ask(path, { method = 'GET', body, signal } = {}) {
  let answer;
  let told;
  try {
    answer = await fetch(address(path), {
      method, signal, headers: headers(), credentials: 'omit', cache: 'no-store',
      body: body === undefined ? undefined : JSON.stringify(body),
    });
    told = await answer.json();
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new Refused(answer && !answer.ok ? answer.status : 0, '');
  }
  if (!answer.ok) throw new Refused(answer.status, (told.errors ?? [`HTTP ${answer.status}`]).join(' '));
  return told;
}

/** What a path answers, asked again when `again` changes: {data, error, isLoading}. What was known
    stays while it is asked again. */
export function useAnswer(path, again = 0) {
  const [known, setKnown] = useState({ path: null, data: null, error: null });
  const { text } = token.value;
  useEffect(() => {
    if (path === null) return undefined;
    const stop = new AbortController();
    ask(path, { signal: stop.signal }).then(
      (data) => setKnown({ path, data, error: null }),
      (error) => {
        if (error.name === 'AbortError') return;
        setKnown((before) => ({ path, data: before.path === path ? before.data : null, error }));
      },
    );
    return () => stop.abort();
  }, [path, again, text]);
  const isThis = known.path === path;
  return { data: isThis ? known.data : null, error: isThis ? known.error : null, isLoading: !isThis };
}
