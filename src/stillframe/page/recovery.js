// Attempts on one axis: how long the job was down, in which phase, what was read again.
import { html, useState, useStore } from './dom.js';
import { t } from './words.js';
import { live, now } from './live.js';
import { jobPath, useAnswer } from './api.js';
import { Empty, Loading, Moment, Problem, Table } from './parts.js';
import { count, span, time, UNKNOWN } from './formats.js';
import { link } from './routes.js';

const PHASES = ['heard', 'noticed', 'begun', 'slots', 'running', 'first_record', 'caught_up'];
const WIDE = 960;
const ROW = 30;
const AXIS = 22;

/** A scale of time; if it is folded, a stretch without news takes little room. */
export function scaleOf(times, wide, isFolded) {
  const at = [...new Set(times)].sort((a, b) => a - b);
  const gaps = at.slice(1).map((ms, n) => ms - at[n]);
  if (gaps.length === 0) return { place: () => 0, folds: [] };
  const usual = [...gaps].sort((a, b) => a - b)[Math.floor(gaps.length / 2)];
  const cap = isFolded ? Math.max(usual * 4, 1) : Infinity;
  const shown = gaps.map((gap) => Math.min(gap, cap));
  const total = shown.reduce((sum, each) => sum + each, 0) || 1;
  const xs = shown.reduce((list, each) => [...list, list.at(-1) + (each / total) * wide], [0]);
  const place = (ms) => {
    const n = Math.max(0, at.findIndex((each) => each >= ms));
    if (at[n] === ms || n === 0) return xs[n];
    return xs[n - 1] + ((ms - at[n - 1]) / (at[n] - at[n - 1])) * (xs[n] - xs[n - 1]);
  };
  return { place, folds: gaps.flatMap((gap, n) => (gap > cap * 1.5 ? [(xs[n] + xs[n + 1]) / 2] : [])) };
}

/** The phases of an attempt that are known, in their order: [[name, from, to]]. */
export function stretches(attempt) {
  const known = PHASES.filter((name) => attempt.phases[name]).map((name) => [name, attempt.phases[name]]);
  return known.slice(1).map(([name, ms], n) => [name, known[n][1], ms]);
}

const downFor = ({ phases }) => {
  const from = phases.heard ?? phases.noticed;
  return from && phases.running && from <= phases.running ? phases.running - from : null;
};

function Axis({ attempts, endedAt }) {
  const rows = attempts.map((attempt, n) => {
    const parts = stretches(attempt);
    const begun = parts.at(-1)?.[2] ?? attempt.phases.begun ?? attempt.phases.running;
    const next = attempts[n + 1];
    const until = attempt.ended?.at ?? next?.phases.heard ?? next?.phases.noticed ?? next?.phases.begun ?? endedAt;
    return { attempt, parts, begun, until: Math.max(until, begun ?? until) };
  }).filter((row) => row.begun);
  const [isFolded, setFolded] = useState(true);
  const times = rows.flatMap((row) => [row.begun, row.until, ...row.parts.flatMap(([, from, to]) => [from, to])]);
  const { place, folds } = scaleOf(times, WIDE - 60, isFolded);
  const x = (ms) => 40 + place(ms);
  const high = rows.length * ROW + AXIS;
  return html`<p class="filters"><label><input type="checkbox" data-fold checked=${isFolded} onChange=${(event) => setFolded(event.target.checked)} /> ${t('attempts.fold')}</label></p>
  <div class="axis" role="region" aria-label=${t('attempts.axis')} tabindex="0"><svg width=${WIDE} height=${high} viewBox=${`0 0 ${WIDE} ${high}`} role="img" aria-label=${t('attempts.axis')}>
    ${rows.map((row, n) => html`<g transform=${`translate(0,${n * ROW})`}>
      <text class="node-figure number" x="0" y="19">${row.attempt.attempt}</text>
      <rect class="attempt-runs" x=${x(row.begun)} y="8" width=${Math.max(2, x(row.until) - x(row.begun))} height="14" />
      ${row.parts.map(([name, from, to]) => html`<rect class=${`recovery-${name}`} x=${x(from)} y="8" width=${Math.max(1.5, x(to) - x(from))} height="14">
        <title>${t(`recovery.${name}`)} ${span(to - from)}</title></rect>`)}
      ${n < rows.length - 1 && html`<text class="attempt-end" x=${x(row.until) + 2} y="20">✕</text>`}</g>`)}
    ${folds.map((at) => html`<text class="fold" x=${40 + at} y=${high - 6} text-anchor="middle">//</text>`)}
    <text class="node-figure muted number" x="40" y=${high - 6}>${time(rows[0]?.parts[0]?.[1] ?? rows[0]?.begun)}</text>
    <text class="node-figure muted number" x=${WIDE - 20} y=${high - 6} text-anchor="end">${time(rows.at(-1)?.until)}</text>
  </svg></div>
  <ul class="legend">${PHASES.slice(1).map((name) => html`<li><svg width="14" height="10" aria-hidden="true"><rect class=${`recovery-${name}`} x="0.5" y="0.5" width="13" height="9" /></svg> ${t(`recovery.${name}`)}</li>`)}
    <li><svg width="14" height="10" aria-hidden="true"><rect class="attempt-runs" x="0.5" y="0.5" width="13" height="9" /></svg> ${t('recovery.runs')}</li></ul>`;
}

function Attempts({ attempts, name }) {
  const between = (row, phase) => {
    const found = stretches(row).find(([each]) => each === phase);
    return found ? span(found[2] - found[1]) : UNKNOWN;
  };
  const restored = (row) => row.restored?.id ?? null;
  const columns = [
    { key: 'attempt', head: t('attempt'), cell: (row) => row.attempt, sort: (row) => row.attempt },
    { key: 'began', head: t('began'), cell: (row) => html`<${Moment} at=${row.phases.begun ?? row.phases.running} />` },
    { key: 'from', isText: true, head: t('restored.from'), cell: (row) => (restored(row) === null ? UNKNOWN
      : html`<a href=${link(name, 'checkpoints', restored(row))}>${t('checkpoint.title', { id: restored(row) })}</a>`) },
    ...PHASES.slice(1).map((phase) => ({ key: phase, head: t(`recovery.${phase}`), cell: (row) => between(row, phase) })),
    { key: 'replayed', head: t('replayed'), cell: (row) => count(row.replayed), sort: (row) => row.replayed },
    { key: 'down', head: t('down.for'), cell: (row) => span(downFor(row)), sort: downFor },
    { key: 'cause', isText: true, head: t('ended.by'), cell: (row) => html`<span class="why" lang="en">${row.ended?.reason ?? UNKNOWN}</span>` },
  ];
  return html`<${Table} caption=${t('attempts')} columns=${columns} rows=${[...attempts].reverse()} rowKey=${(row) => row.attempt} />`;
}

function Failures({ failures, name }) {
  return html`<ol class="failures">${failures.map((each) => html`<li data-failure=${each.attempt}>
    <p><${Moment} at=${each.timestamp} /> <strong>${t('failure.of', { attempt: each.attempt })}</strong> <span lang="en">${each.stacktrace}</span></p>
    <p class="muted">${each['recovered-by-attempt'] ? t('failure.recovered', { attempt: each['recovered-by-attempt'], span: span(each['recovered-at'] - each.timestamp) })
      : each['given-up'] ? t('failure.given.up') : t('failure.open')}
      ${each['recovered-from'] && html` <a href=${link(name, 'checkpoints', each['recovered-from'].id)}>${t('checkpoint.title', { id: each['recovered-from'].id })}</a>`}</p>
    ${(each.operator || each.record || each.traceback) && html`<details><summary>${t('failure.code')}</summary>
      ${each.operator && html`<p>${t('operator')} <code>${each.operator}</code> ${each.function && html`<code>${each.function}</code>`}</p>`}
      ${each.record && html`<pre>${each.record}</pre>`}${each.traceback && html`<pre>${each.traceback}</pre>`}</details>`}</li>`)}</ol>`;
}

export function Recovery({ job, name }) {
  const { changed } = useStore(live);
  const attempts = useAnswer(jobPath(name, 'attempts'), changed);
  const exceptions = useAnswer(jobPath(name, 'exceptions'), changed);
  if (!exceptions.data) return exceptions.error ? html`<${Problem} error=${exceptions.error} />` : html`<${Loading} />`;
  const failures = exceptions.data.exceptionHistory.entries;
  const all = [...(attempts.data ?? [])].sort((a, b) => a.attempt - b.attempt);
  const down = all.reduce((sum, each) => sum + (downFor(each) ?? 0), 0);
  const replayed = all.reduce((sum, each) => sum + (each.replayed ?? 0), 0);
  const endedAt = job && job['end-time'] > 0 ? job['end-time'] : now();
  return html`<h1 class="hidden">${t('view.recovery')}</h1>
    ${all.length > 0 && html`<ul class="counts"><li data-count="attempts"><strong class="number">${count(all.length)}</strong> ${t('attempts')}</li>
      <li data-count="down"><strong class="number">${span(down)}</strong> ${t('down.all')}</li><li data-count="replayed"><strong class="number">${count(replayed)}</strong> ${t('replayed.all')}</li></ul>`}
    ${attempts.error && html`<${Problem} error=${attempts.error} />`}
    ${all.length > 0 && html`<section class="panel"><h2>${t('attempts')}</h2><${Axis} attempts=${all} endedAt=${endedAt} /><${Attempts} attempts=${all} name=${name} /></section>`}
    ${failures.length === 0 ? html`<${Empty}><span aria-hidden="true">✓ </span>${t('recovery.none')}<//>`
      : html`<section class="panel"><h2>${t('failures')}</h2><${Failures} failures=${failures} name=${name} /></section>`}`;
}
