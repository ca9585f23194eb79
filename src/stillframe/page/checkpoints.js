// All checkpoints: how many, how long each took and where the time went, and a table.
import { html, useState, useStore } from './dom.js';
import { t } from './words.js';
import { live, now } from './live.js';
import { jobPath, useAnswer } from './api.js';
import { Age, Empty, Legend, Loading, Moment, PHASES, PhasesBar, Problem, SIGNS, Table, word } from './parts.js';
import { Timeline } from './chart.js';
import { bytes, count, span, UNKNOWN } from './formats.js';
import { go, link } from './routes.js';

const PAGE = 50;
const HOUR_MS = 3600e3;
export const kindOf = (checkpoint) => (checkpoint.is_savepoint ? 'savepoint' : checkpoint.checkpoint_type === 'UNALIGNED_CHECKPOINT' ? 'unaligned' : 'checkpoint');

export const Status = ({ of }) => html`<span class=${`status status-${of}`}><span aria-hidden="true">${SIGNS[of]}</span> ${word('status', of)}</span>`;

/** Who took longest, where, and for whom it waited. */
function slowest({ stillframe }) {
  const found = stillframe?.slowest;
  if (!found) return UNKNOWN;
  const where = [found.slot !== null && found.slot !== undefined && t('slot.number', { slot: found.slot }), found.host].filter(Boolean).join(' · ');
  const waited = found['waited-for'] ? t('waited.for', { who: found['waited-for'].join(' ') }) : '';
  return [`${found.task} ${found.subtask}`, where, waited].filter(Boolean).join(' · ');
}

function Counts({ counts, config }) {
  const parts = ['completed', 'failed', 'in_progress', 'restored'].map((name) => html`<li data-count=${name}><strong class="number">${count(counts[name])}</strong> ${t(`count.${name}`)}</li>`);
  return html`<ul class="counts">${parts}
    <li class="muted">${config?.interval ? t('checkpoints.every', { span: span(config.interval) }) : ''}</li></ul>`;
}

export function Checkpoints({ name, query }) {
  const { changed } = useStore(live);
  const [before, setBefore] = useState(null);
  const status = query.status ?? '';
  const asked = new URLSearchParams({ limit: PAGE, ...(before ? { before } : {}), ...(status ? { status } : {}) });
  const { data, error } = useAnswer(`${jobPath(name, 'checkpoints')}?${asked}`, changed);
  const hours = Number(query.hours ?? 0);
  // To the minute: the same address is asked for again.
  const from = Math.floor((now() - hours * HOUR_MS) / 60e3) * 60e3;
  const series = useAnswer(jobPath(name, 'checkpoints', 'series') + (hours ? `?from=${from}` : ''), changed);
  const config = useAnswer(jobPath(name, 'checkpoints', 'config'));
  if (!data) return error ? html`<${Problem} error=${error} />` : html`<${Loading} />`;
  const kind = query.kind ?? '';
  const atLeast = Number(query.ms ?? 0);
  const rows = data.history.filter((row) => (!kind || kindOf(row) === kind) && (!query.attempt || row.stillframe?.attempt === Number(query.attempt)) && row.end_to_end_duration >= atLeast && (!status || row.status === status.toUpperCase()));
  const most = Math.max(...rows.map((row) => row.end_to_end_duration + (row.stillframe?.phases.commit ?? 0)), 0);
  const filter = (changes) => { setBefore(null); go(link(name, 'checkpoints', '', { ...query, ...changes })); };
  const columns = [
    { key: 'id', head: t('number'), cell: (row) => `#${row.id}`, sort: (row) => row.id },
    { key: 'status', isText: true, head: t('status'), cell: (row) => html`<${Status} of=${row.status} />`, sort: (row) => row.status },
    { key: 'kind', isText: true, head: t('kind'), cell: (row) => t(`kind.${kindOf(row)}`), sort: kindOf },
    { key: 'ack', head: t('acknowledged'), cell: (row) => `${row.num_acknowledged_subtasks}/${row.num_subtasks}`, sort: (row) => row.num_acknowledged_subtasks },
    { key: 'attempt', head: t('attempt'), cell: (row) => row.stillframe?.attempt ?? UNKNOWN, sort: (row) => row.stillframe?.attempt },
    { key: 'at', head: t('triggered'), cell: (row) => html`<${Moment} at=${row.trigger_timestamp} />`, sort: (row) => row.trigger_timestamp },
    { key: 'age', head: t('age'), cell: (row) => html`<${Age} at=${row.trigger_timestamp} />` },
    { key: 'took', head: t('took'), cell: (row) => span(row.end_to_end_duration), sort: (row) => row.end_to_end_duration },
    { key: 'phases', isText: true, head: t('phases'), cell: (row) => (row.stillframe ? html`<${PhasesBar} of=${row.stillframe.phases} most=${most} />` : UNKNOWN) },
    { key: 'new', head: t('bytes.new'), cell: (row) => bytes(row.checkpointed_size), sort: (row) => row.checkpointed_size },
    { key: 'full', head: t('bytes.full'), cell: (row) => bytes(row.state_size), sort: (row) => row.state_size },
    { key: 'flight', head: t('in.flight'), cell: (row) => bytes(row.persisted_data), sort: (row) => row.persisted_data },
    { key: 'slowest', isText: true, head: t('slowest'), cell: slowest },
    { key: 'why', isText: true, head: t('why'), cell: (row) => html`<span class="why" lang="en">${row.failure_message ?? ''}</span>` },
  ];
  const due = config.data?.interval;
  const isEmpty = data.counts.total === 0 && data.history.length === 0;
  return html`<h1 class="hidden">${t('view.checkpoints')}</h1>
    <${Counts} counts=${data.counts} config=${config.data} />
    ${(data.stillframe?.unreadable ?? []).map((each) => html`<p class="problem" lang="en">${each}</p>`)}
    ${isEmpty ? html`<${Empty}>${config.data && due === null ? t('checkpoints.off') : t('checkpoints.none', { span: due ? span(due) : UNKNOWN })}<//>` : html`
    <section class="panel"><div class="panel-head"><h2>${t('timeline')}</h2><${Legend} kind="phase" names=${PHASES} />
      <span class="orders" role="group" aria-label=${t('period')}>${[1, 24, 0].map((each) => html`<button type="button" data-hours=${each} aria-pressed=${hours === each}
        onClick=${() => filter({ hours: each || '' })}>${each ? t('hours', { hours: each }) : t('filter.all')}</button>`)}</span></div>
      ${series.data ? html`<${Timeline} series=${series.data} open=${(id) => go(link(name, 'checkpoints', id))} />`
        : series.error ? html`<${Problem} error=${series.error} />` : html`<${Loading} />`}</section>
    <section class="panel"><div class="panel-head"><h2>${t('view.checkpoints')}</h2><form class="filters" onSubmit=${(event) => event.preventDefault()}>
      <label>${t('status')} <select value=${status} onChange=${(event) => filter({ status: event.target.value })}>
        <option value="">${t('filter.all')}</option>${['completed', 'failed', 'in_progress'].map((each) => html`<option value=${each}>${word('status', each.toUpperCase())}</option>`)}</select></label>
      <label>${t('kind')} <select value=${kind} onChange=${(event) => filter({ kind: event.target.value })}>
        <option value="">${t('filter.all')}</option>${['checkpoint', 'unaligned', 'savepoint'].map((each) => html`<option value=${each}>${t(`kind.${each}`)}</option>`)}</select></label>
      <label>${t('attempt')} <input type="number" min="1" size="6" value=${query.attempt ?? ''} onChange=${(event) => filter({ attempt: event.target.value })} /></label>
      <label>${t('filter.longer')} <input type="number" min="0" step="10" size="6" value=${query.ms ?? ''} onChange=${(event) => filter({ ms: event.target.value })} /> ms</label>
    </form></div>
    <${Table} caption=${t('view.checkpoints')} columns=${columns} rows=${rows} rowKey=${(row) => row.id} open=${(row) => link(name, 'checkpoints', row.id)} empty=${t('checkpoints.unfound')} />
    <p class="pages">${before && html`<button type="button" onClick=${() => setBefore(null)}>${t('pages.newest')}</button>`}
      ${data.history.length >= PAGE && html`<button type="button" onClick=${() => setBefore(data.history.at(-1).id)}>${t('pages.older')}</button>`}</p></section>`}`;
}
