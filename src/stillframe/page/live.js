// The one stream of this page, and how old what it told is.
//
// Rules of this file
// 1. Nothing moves that is not true: while the stream is broken the clock of the page stands.
// 2. A stream goes on behind the last id it told. Another run, or a gap, is a reset: views load again.
// 3. A hidden tab holds no connection: browsers open six to a host, and a seventh tab must not hang.
import { store } from './dom.js';
import { address, headers, token } from './api.js';

const QUIET_MS = 3000;
const STALE_MS = 10000;
const WAITS_MS = [500, 1000, 2000, 5000];
const HAPPENED_MAX = 50;
const RATES_MAX = 300;
const DISCRETE = ['job', 'checkpoint', 'attempt', 'failure', 'operation', 'log'];

const NOTHING = {
  path: null, status: 'connecting', since: null, sentence: '', hello: null, figures: null,
  changed: 0, attempts: 0, happened: [], logs: [], rates: {}, isPaused: false,
};
export const live = store(NOTHING);
/** The host's time. It stands while nothing is heard. */
export const clock = store({ ms: Date.now() });

let stream = null;
let offset = Date.now() - performance.now();
let heardAt = performance.now();

const hostNow = () => performance.now() + offset;
export const now = () => clock.value.ms;

/** Follow this path, such as jobs/J/events, and no other. */
export function follow(path, watched = null) {
  const asked = watched ? `${path}?watch=${encodeURIComponent(watched)}` : path;
  if (stream?.asked === asked) return;
  const isSame = live.value.path === path;
  const lastId = isSame ? stream?.lastId : null;
  stream?.stop.abort();
  if (!isSame) live.set({ ...NOTHING, path, isPaused: live.value.isPaused });
  stream = { asked, watched, lastId, tried: 0, stop: new AbortController() };
  run(stream);
}

export function pause(isPaused) { live.set({ isPaused }); }

/** Connect at once, for somebody who does not want to wait. */
export function retry() {
  if (stream === null) return;
  const { asked, watched, lastId } = stream;
  stream.stop.abort();
  stream = { asked, watched, lastId, tried: 0, stop: new AbortController() };
  run(stream);
}

async function run(mine) {
  while (stream === mine) {
    if (document.hidden) {
      await new Promise((go) => document.addEventListener('visibilitychange', go, { once: true }));
      continue;
    }
    const sentence = await read(mine);
    if (stream !== mine) return;
    if (!document.hidden) becomeStale(sentence);
    const usual = WAITS_MS[Math.min(mine.tried, WAITS_MS.length - 1)];
    mine.tried += 1;
    await new Promise((go) => setTimeout(go, document.hidden ? 0 : usual * (0.7 + 0.6 * Math.random())));
  }
}

/** Until it ends, for whatever reason, which it answers. */
async function read(mine) {
  const given = mine.lastId ? { 'Last-Event-ID': mine.lastId } : {};
  const hide = () => { if (document.hidden) mine.reading?.abort(); };
  mine.reading = new AbortController();
  const stop = () => mine.reading.abort();
  mine.stop.signal.addEventListener('abort', stop);
  document.addEventListener('visibilitychange', hide);
  try {
    const answer = await fetch(address(mine.asked), {
      headers: headers({ Accept: 'text/event-stream', ...given }),
      signal: mine.reading.signal, credentials: 'omit', cache: 'no-store',
    });
    if (!answer.ok) {
      const told = await answer.json().catch(() => ({}));
      return (told.errors ?? [`HTTP ${answer.status}`]).join(' ');
    }
    await parse(answer.body.pipeThrough(new TextDecoderStream()).getReader(), mine);
  } catch {
    // Broken or closed by us; what follows is the same.
  } finally {
    mine.stop.signal.removeEventListener('abort', stop);
    document.removeEventListener('visibilitychange', hide);
    mine.reading.abort();
  }
  return '';
}

async function parse(reader, mine) {
  let rest = '';
  for (;;) {
    const { value, done } = await reader.read();
    if (done || stream !== mine) return;
    heard();
    const parts = (rest + value).split('\n\n');
    rest = parts.pop();
    for (const part of parts) {
      const event = { id: null, kind: '', data: '' };
      for (const line of part.split('\n')) {
        if (line.startsWith('id: ')) event.id = line.slice(4);
        else if (line.startsWith('event: ')) event.kind = line.slice(7);
        else if (line.startsWith('data: ')) event.data += line.slice(6);
      }
      if (event.kind) take(event.kind, event.id, JSON.parse(event.data), mine);
    }
  }
}

function heard() {
  heardAt = performance.now();
  if (live.value.status !== 'live') live.set({ status: 'live', since: null, sentence: '' });
}

function take(kind, id, data, mine) {
  if (id !== null) mine.lastId = id;
  if (kind === 'hello') {
    mine.tried = 0;
    // A host of files alone has no clock of its own.
    offset = (data.at || Date.now()) - performance.now();
    clock.set({ ms: hostNow() });
    const fresh = data.reset || live.value.hello?.run !== data.run;
    live.set({ hello: data, changed: live.value.changed + 1, ...(fresh ? { happened: [], logs: [], rates: {} } : {}) });
  } else if (kind === 'figures') {
    if (live.value.isPaused) return;
    live.set({ figures: { ...named(data), watched: mine.watched }, rates: withRates(data) });
  } else if (kind === 'log') {
    live.set({ logs: [...live.value.logs, { ...data, id }].slice(-500) });
  } else if (DISCRETE.includes(kind)) {
    const { changed, attempts, happened } = live.value;
    live.set({
      changed: changed + 1,
      attempts: attempts + (kind === 'attempt' || kind === 'failure' ? 1 : 0),
      happened: [...happened, { ...data, kind, key: id }].slice(-HAPPENED_MAX),
    });
  }
}

/** Rows with names instead of places; `hello` told them once. */
function named(data) {
  const { columns = {}, tasks = [], edges = [] } = live.value.hello ?? {};
  const rows = (kind) => (data[kind] ?? []).map((row) => Object.fromEntries((columns[kind] ?? []).map((name, at) => [name, row[at]])));
  return {
    ...data,
    tasks: Object.fromEntries(rows('tasks').map((row) => [tasks[row.task]?.id, row])),
    edges: rows('edges').map((row) => ({ ...edges[row.edge], ...row })),
    subtasks: rows('subtasks'),
    channels: rows('channels').map((row) => ({ ...row, from: tasks[edges[row.edge]?.source]?.name })),
  };
}

/** Records a second of the last five minutes, by job. */
function withRates(data) {
  const told = data.jobs ?? [{ jid: live.value.hello?.job?.jid, ...data.job }];
  const rates = { ...live.value.rates };
  for (const { jid, records_in_per_second: value } of told) {
    rates[jid] = [...(rates[jid] ?? []), value].slice(-RATES_MAX);
  }
  return rates;
}

function becomeStale(sentence = '') {
  if (live.value.status === 'stale') {
    if (sentence !== live.value.sentence) live.set({ sentence });
    return;
  }
  live.set({ status: 'stale', since: heardAt + offset, sentence });
}

setInterval(() => {
  const silent = performance.now() - heardAt;
  const { status, hello, isPaused } = live.value;
  if (status === 'stale' || hello === null) return;
  if (silent > STALE_MS) becomeStale();
  else if (silent > QUIET_MS && status === 'live') live.set({ status: 'quiet' });
  if (live.value.status !== 'stale' && !isPaused) clock.set({ ms: hostNow() });
}, 500);

// Another token may see more.
let known = token.value.text;
token.listen(() => {
  if (token.value.text !== known) { known = token.value.text; retry(); }
});
