// All jobs of this host, those in trouble first.
import { html, useStore } from './dom.js';
import { t } from './words.js';
import { live, now } from './live.js';
import { useAnswer } from './api.js';
import { Age, Command, Loading, Problem, Sparkline, State, Table, word } from './parts.js';
import { inWords, signOf } from './sentence.js';
import { age, bytes, count, lagInWords, rate, span, UNKNOWN } from './formats.js';
import { link } from './routes.js';

const BY_STATE = { FAILED: 0, 'NO DRIVER': 1, RESTARTING: 2, INITIALIZING: 3 };
const BY_CODE = { 'checkpoints-failing': 4, stuck: 4, waiting: 4, memory: 4, 'checkpoint-waits': 5, 'storage-slow': 5, 'lag-grows': 6 };
const ENDED = ['FINISHED', 'CANCELED'];

/** Lower is worse. */
function trouble(job) {
  if (job.state in BY_STATE) return BY_STATE[job.state];
  if (ENDED.includes(job.state)) return 9;
  return BY_CODE[job.diagnosis?.code] ?? (job.diagnosis?.code === 'keeps-up' ? 8 : 7);
}

export function sorted(jobs) {
  return [...jobs].sort((a, b) => trouble(a) - trouble(b) || a.name.localeCompare(b.name));
}

export function Jobs({ search }) {
  const { figures, rates, changed } = useStore(live);
  const { data, error } = useAnswer('jobs/overview', changed);
  const told = figures?.jobs ?? data?.jobs.map((job) => ({ jid: job.jid, name: job.name, state: job.state, started_at: job['start-time'] }));
  if (!told) return error ? html`<${Problem} error=${error} />` : html`<${Loading} />`;
  const shown = sorted(told.filter((job) => job.name.toLowerCase().includes((search ?? '').toLowerCase())));
  const last = (row) => row.last_checkpoint;
  const columns = [
    { key: 'name', isText: true, head: t('job'), cell: (row) => row.name, sort: (row) => row.name },
    { key: 'state', isText: true, head: t('state'), cell: (row) => html`<${State} of=${row.state} />`, sort: (row) => row.state },
    { key: 'sentence', isText: true, head: t('sentence'), cell: (row) => html`<span class="job-sentence">${row.diagnosis ? `${signOf(row.diagnosis.code)} ${inWords(row.diagnosis)}` : UNKNOWN}</span>` },
    { key: 'in', head: t('in'), cell: (row) => rate(row.records_in_per_second), sort: (row) => row.records_in_per_second },
    { key: 'spark', isText: true, head: t('five.minutes'), cell: (row) => html`<${Sparkline} values=${rates[row.jid]} />` },
    { key: 'lag', head: t('lag'), cell: (row) => lagInWords(row.lag_records, row.lag_seconds === null ? null : row.lag_seconds * 1000), sort: (row) => row.lag_records },
    { key: 'checkpoint', head: t('last.checkpoint'), cell: (row) => (last(row)
      ? html`<${Age} at=${last(row).at} /> · ${span(last(row).duration_ms)} · ${bytes(last(row).new_bytes)}` : UNKNOWN), sort: (row) => last(row)?.at },
    { key: 'restarts', head: t('restarts'), cell: (row) => count(row.restarts), sort: (row) => row.restarts },
    { key: 'since', head: t('running.for'), cell: (row) => (row.started_at ? age(now() - row.started_at) : UNKNOWN), sort: (row) => -row.started_at },
    { key: 'guarantee', isText: true, head: t('guarantee'), cell: (row) => (row.guarantee ? word('guarantee', row.guarantee) : UNKNOWN) },
  ];
  return html`<h1>${t('jobs')}</h1>
    ${told.length === 0 ? html`<div class="empty"><p>${t('jobs.none')} <${Command}>stillframe run JOB.py<//></p></div>`
      : html`<section class="panel"><${Table} caption=${t('jobs')} columns=${columns} rows=${shown} rowKey=${(row) => row.jid}
        open=${(row) => link(row.name)} empty=${t('jobs.unfound')} /></section>`}`;
}
