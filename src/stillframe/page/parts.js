// What views are made of. A meaning never hangs on colour alone: signs, patterns and words say it too.
import { html, classes, useStore, useState, useEffect, useRef, store } from './dom.js';
import { t, hasWords, choices } from './words.js';
import { clock } from './live.js';
import { setToken } from './api.js';
import { age, moment, percent, time, count, UNKNOWN } from './formats.js';

export const SIGNS = {
  RUNNING: '●', INITIALIZING: '◌', RESTARTING: '◐', FAILED: '✕', FINISHED: '✓', CANCELED: '■',
  'NO DRIVER': '○', COMPLETED: '✓', IN_PROGRESS: '◐',
};
export const SHARES = ['working', 'turn', 'backpressured', 'held', 'idle'];
export const PHASES = ['start', 'align', 'sync', 'async', 'store', 'commit'];

/** A word of the API in the language of the page; as it is where there is none. */
export const word = (kind, value) => (hasWords(`${kind}.${value}`) ? t(`${kind}.${value}`) : String(value));

export const State = ({ of }) => html`<span class=${`state state-${String(of).replace(' ', '-')}`}>
  <span aria-hidden="true">${SIGNS[of] ?? '○'}</span> ${word('state', of)}</span>`;

/** How long ago; it stands while the page is stale. */
export function Age({ at }) {
  const { ms } = useStore(clock);
  return html`<span class="age" title=${moment(at)}>${at > 0 ? t('ago', { span: age(Math.max(0, ms - at)) }) : UNKNOWN}</span>`;
}

export const Moment = ({ at }) => html`<time class="number" title=${moment(at)}
  datetime=${at > 0 ? new Date(at).toISOString() : ''}>${time(at, clock.value.ms)}</time>`;

export const Loading = () => html`<p class="muted" role="status">${t('loading')}</p>`;

export const Empty = ({ children }) => html`<div class="empty"><p>${children}</p></div>`;

export const Command = ({ children }) => html`<code class="command" tabindex="0">${children}</code>`;

export function Copied({ text, label }) {
  const [isDone, setDone] = useState(false);
  const place = useRef(null);
  useEffect(() => setDone(false), [text]);
  // Only a page of this machine, or one by HTTPS, may write there: elsewhere the text is marked.
  const copy = () => (navigator.clipboard ? navigator.clipboard.writeText(text).then(() => setDone(true)) : Promise.reject(new Error()))
    .catch(() => getSelection().selectAllChildren(place.current.querySelector('code')));
  return html`<div class="copied" ref=${place}><${Command}>${text}<//>
    <button type="button" onClick=${copy} aria-label=${label}>${isDone ? `✓ ${t('copy.done')}` : t('copy')}</button></div>`;
}

/** Why a view cannot show what it is for; a missing token can be given right here. */
export function Problem({ error }) {
  if (error.status === 401) return html`<${TokenForm} />`;
  const what = error.status === 404 ? t('error.404') : error.status === 0 ? t('error.0') : t('error.other', { status: error.status });
  return html`<div class="problem" role="alert"><p><span aria-hidden="true">✕ </span>${what}</p>
    ${error.message && html`<p class="muted" lang="en">${error.message}</p>`}</div>`;
}

export function TokenForm({ onGiven }) {
  const field = useRef(null);
  const give = (event) => {
    event.preventDefault();
    if (field.current.value.trim() === '') return;
    setToken(field.current.value.trim());
    onGiven?.();
  };
  return html`<form class="token" onSubmit=${give}>
    <p>${t('token.why')}</p>
    <label>${t('token.label')} <input ref=${field} type="password" autocomplete="off" spellcheck=${false} /></label>
    <button type="submit">${t('token.give')}</button>
    <p class="muted">${t('token.where')} <${Command}>stillframe open JOB<//></p>
  </form>`;
}

/** Five shares of time in one bar, with patterns. */
export function SharesBar({ of, width = 160, height = 10 }) {
  if (!of) return html`<svg class="shares" width=${width} height=${height} aria-hidden="true">
    <rect class="share-idle" x="0.5" y="0.5" width=${width - 1} height=${height - 1} /></svg>`;
  let at = 0;
  const pieces = SHARES.map((name) => {
    const wide = Math.max(0, Math.min(1, of[name] ?? 0)) * width;
    at += wide;
    return wide > 0.3 && name !== 'idle' && html`<rect class=${`share-${name}`} x=${at - wide} y="0" width=${wide} height=${height} />`;
  });
  return html`<svg class="shares" width=${width} height=${height} viewBox=${`0 0 ${width} ${height}`} aria-hidden="true">
    <rect class="share-idle" x="0.5" y="0.5" width=${width - 1} height=${height - 1} />${pieces}</svg>`;
}

export const sharesInWords = (of) => (of
  ? SHARES.map((name) => `${t(`share.${name}`)} ${percent(of[name])}`).join(', ') : t('unmeasured'));

/** The phases of a checkpoint in one bar; `most` is the length of the longest in its table. */
export function PhasesBar({ of, most, width = 120, height = 10 }) {
  const total = Math.max(most || 0, 0.001);
  let at = 0;
  return html`<svg class="phases" width=${width} height=${height} viewBox=${`0 0 ${width} ${height}`} role="img"
    aria-label=${PHASES.filter((name) => of[name] > 0).map((name) => `${t(`phase.${name}`)} ${count(of[name])} ms`).join(', ') || UNKNOWN}>
    ${PHASES.map((name) => {
      const wide = ((of[name] || 0) / total) * width;
      at += wide;
      return wide > 0 && html`<rect class=${`phase-${name}`} x=${at - wide} y="0" width=${Math.max(wide, 0.6)} height=${height} />`;
    })}</svg>`;
}

export const Legend = ({ kind, names }) => html`<ul class="legend">${names.map((name) => html`<li>
  <svg width="14" height="10" aria-hidden="true"><rect class=${`${kind}-${name}`} x="0.5" y="0.5" width="13" height="9" /></svg>
  ${t(`${kind}.${name}`)}</li>`)}</ul>`;

/** columns: [{key, head, cell(row), sort(row)?, isText?}]. Without `sort` a column cannot be sorted by.
    Of more than `most` rows the first are shown until all are asked for. */
export function Table({ columns, rows, caption, rowKey, open, empty, most = Infinity }) {
  const [order, setOrder] = useState(null);
  const [all, setAll] = useState(false);
  const by = order && columns.find((column) => column.key === order.key);
  const sorted = by ? [...rows].sort((a, b) => compare(by.sort(a), by.sort(b)) * order.sign) : rows;
  const turn = (key) => setOrder((was) => (was?.key !== key ? { key, sign: -1 } : was.sign < 0 ? { key, sign: 1 } : null));
  return html`<div class="table" role="region" aria-label=${caption} tabindex="0"><table><caption class="hidden">${caption}</caption>
    <thead><tr>${columns.map((column) => html`<th scope="col" class=${classes(!column.isText && 'number')}
      aria-sort=${order?.key === column.key ? (order.sign < 0 ? 'descending' : 'ascending') : undefined}>
      ${column.sort ? html`<button type="button" class="sort" onClick=${() => turn(column.key)}>${column.head}
        <span aria-hidden="true">${order?.key === column.key ? (order.sign < 0 ? ' ↓' : ' ↑') : ''}</span></button>` : column.head}</th>`)}</tr></thead>
    <tbody>${(all ? sorted : sorted.slice(0, most)).map((row) => html`<tr key=${rowKey(row)} data-row=${rowKey(row)} data-open=${open?.(row)} class=${row.class}>
      ${columns.map((column, at) => (at === 0
        ? html`<th scope="row" class=${classes(!column.isText && 'number')}>${open ? html`<a href=${open(row)}>${column.cell(row)}</a>` : column.cell(row)}</th>`
        : html`<td class=${classes(!column.isText && 'number')}>${column.cell(row)}</td>`))}</tr>`)}</tbody>
  </table>${rows.length === 0 && empty && html`<${Empty}>${empty}<//>`}
  ${!all && rows.length > most && html`<button type="button" onClick=${() => setAll(true)}>${t('rows.all', { count: count(rows.length) })}</button>`}</div>`;
}

function compare(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return -1;
  if (b === null || b === undefined) return 1;
  return typeof a === 'string' ? a.localeCompare(b) : a - b;
}

/** A line of the last values, without axes: for its shape. */
export function Sparkline({ values, width = 96, height = 24 }) {
  const known = (values ?? []).filter((value) => value !== null && value !== undefined);
  if (known.length < 2) return html`<span class="muted">${UNKNOWN}</span>`;
  const most = Math.max(...known, 1e-9);
  const step = width / (known.length - 1);
  const points = known.map((value, at) => `${(at * step).toFixed(1)},${(height - 2 - (value / most) * (height - 4)).toFixed(1)}`);
  return html`<svg class="sparkline" width=${width} height=${height} aria-hidden="true"><polyline points=${points.join(' ')} /></svg>`;
}

/** The patterns that all bars of the page refer to. */
export const Patterns = () => html`<svg class="patterns" width="0" height="0" aria-hidden="true"><defs>
  <pattern id="hatched" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
    <rect class="under-held" width="5" height="5" /><rect class="over-held" width="2.4" height="5" /></pattern>
  <pattern id="dotted" width="4" height="4" patternUnits="userSpaceOnUse">
    <rect class="under-back" width="4" height="4" /><circle class="over-back" cx="2" cy="2" r="1.3" /></pattern>
  <pattern id="barred" width="4" height="4" patternUnits="userSpaceOnUse">
    <rect class="under-turn" width="4" height="4" /><rect class="over-turn" width="1.4" height="4" /></pattern>
  <pattern id="waiting" width="4" height="4" patternUnits="userSpaceOnUse">
    <rect class="under-start" width="4" height="4" /><circle class="over-start" cx="1.5" cy="1.5" r="0.8" /></pattern>
</defs></svg>`;

/** What is read out, politely: one sentence at a time, at most one each five seconds. `lang`: of a
    sentence that is not in the language of the page. */
const spoken = store({ text: '', lang: undefined });
let next = 0;
let waiting = null;
export function announce(text, lang) {
  clearTimeout(waiting);
  const wait = Math.max(0, next - Date.now());
  waiting = setTimeout(() => { next = Date.now() + 5000; spoken.set({ text, lang }); }, wait);
}
export function Announcer() {
  const { text, lang } = useStore(spoken);
  return html`<p class="hidden" aria-live="polite" lang=${lang}>${text}</p>`;
}

/** The colours in force, for what is drawn on a canvas. */
export function useColours() {
  useStore(choices);
  const [, draw] = useState(0);
  useEffect(() => {
    const dark = matchMedia('(prefers-color-scheme: dark)');
    const again = () => draw((n) => n + 1);
    dark.addEventListener('change', again);
    return () => dark.removeEventListener('change', again);
  }, []);
  return choices.value.scheme === 'system' ? (matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light') : choices.value.scheme;
}
