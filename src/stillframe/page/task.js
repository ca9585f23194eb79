// One task in a drawer beside the graph: its subtasks, worst first.
import { html, useEffect, useRef, useStore } from './dom.js';
import { t } from './words.js';
import { live } from './live.js';
import { jobPath, useAnswer } from './api.js';
import { Problem, SHARES, SharesBar, Table, sharesInWords } from './parts.js';
import { watermarkLag } from './graph.js';
import { byteRate, bytes, count, lagInWords, percent, rate, span, UNKNOWN } from './formats.js';
import { go, link } from './routes.js';

const ROWS_MAX = 200;
const worst = (row) => Math.max(row.working ?? 0, row.backpressured ?? 0, row.held ?? 0);

/** Who sends how much to whom, and what waits on the way: measured while somebody looks. */
function Channels({ rows }) {
  const columns = [
    { key: 'from', isText: true, head: t('channel.from'), cell: (row) => `${row.from} ${row.source}`, sort: (row) => `${row.from} ${row.source}` },
    { key: 'to', head: t('subtask'), cell: (row) => row.subtask, sort: (row) => row.subtask },
    { key: 'rate', head: t('in'), cell: (row) => rate(row.records_per_second), sort: (row) => row.records_per_second },
    { key: 'queued', head: t('queued'), cell: (row) => bytes(row.queued_bytes), sort: (row) => row.queued_bytes },
    { key: 'held', isText: true, head: t('share.held'), cell: (row) => (row.held ? `◇ ${t('share.held')}` : ''), sort: (row) => row.held },
  ];
  return html`<section data-part="channels"><h3>${t('channels')}</h3><${Table} caption=${t('channels')} columns=${columns} rows=${rows} most=${ROWS_MAX}
    rowKey=${(row) => `${row.edge} ${row.source} ${row.subtask}`} /></section>`;
}

/** How long markers took from each source, since the attempt began. */
function Latencies({ rows }) {
  const most = (ms) => (ms === null ? t('latency.long') : `≤ ${span(ms)}`);
  const columns = [
    { key: 'from', isText: true, head: t('channel.from'), cell: (row) => row.source, sort: (row) => row.source },
    { key: 'to', head: t('subtask'), cell: (row) => row.subtask, sort: (row) => row.subtask },
    { key: 'half', head: 'p50', cell: (row) => most(row['p50-ms']), sort: (row) => row['p50-ms'] ?? Infinity },
    { key: 'most', head: 'p99', cell: (row) => most(row['p99-ms']), sort: (row) => row['p99-ms'] ?? Infinity },
    { key: 'count', head: t('latency.markers'), cell: (row) => count(row.count), sort: (row) => row.count },
  ];
  return html`<section data-part="latency"><h3>${t('latency')}</h3><${Table} caption=${t('latency')} columns=${columns} rows=${rows} most=${ROWS_MAX}
    rowKey=${(row) => `${row.source} ${row.subtask}`} /></section>`;
}

export function TaskDrawer({ job, name, id }) {
  const { figures, changed } = useStore(live);
  const panel = useRef(null);
  const second = figures ? Math.floor(figures.at / 2000) : 0;
  const { data, error } = useAnswer(jobPath(name, 'figures'), `${second} ${changed}`);
  useEffect(() => { panel.current?.focus(); }, [id]);
  const task = job.vertices.find((each) => each.id === id);
  const close = () => go(link(name));
  const known = data?.tasks.find((each) => each.id === id);
  const counted = known?.subtasks ?? [];
  // Those of the task before, until the stream tells of this one, are none of its own.
  const measured = figures?.watched === id ? figures.subtasks : [];
  const rows = (measured.length ? measured : counted.map(({ subtask, slot }) => ({ subtask, slot }))).map((row) => {
    const own = counted.find((each) => each.subtask === row.subtask);
    const slot = data?.slots.find((each) => each.slot === row.slot);
    return { ...row, own, at: slot };
  }).sort((a, b) => worst(b) - worst(a));
  const lagOf = (row) => watermarkLag(row.watermark ?? row.own?.watermark);
  const columns = [
    { key: 'subtask', head: t('subtask'), cell: (row) => row.subtask, sort: (row) => row.subtask },
    { key: 'slot', head: t('slot'), cell: (row) => row.slot, sort: (row) => row.slot },
    { key: 'host', isText: true, head: t('host'), cell: (row) => row.at?.host ?? UNKNOWN, sort: (row) => row.at?.host },
    { key: 'pid', head: 'PID', cell: (row) => row.at?.pid ?? UNKNOWN },
    { key: 'in', head: t('in'), cell: (row) => rate(row.records_in_per_second), sort: (row) => row.records_in_per_second },
    { key: 'out', head: t('out'), cell: (row) => rate(row.records_out_per_second), sort: (row) => row.records_out_per_second },
    { key: 'bin', head: t('bytes.in'), cell: (row) => byteRate(row.bytes_in_per_second), sort: (row) => row.bytes_in_per_second },
    { key: 'bout', head: t('bytes.out'), cell: (row) => byteRate(row.bytes_out_per_second), sort: (row) => row.bytes_out_per_second },
    { key: 'time', isText: true, head: t('time'), cell: (row) => html`<${SharesBar} of=${row.working === undefined ? null : row} width="100" />
      <span class="hidden">${sharesInWords(row.working === undefined ? null : row)}</span>` },
    ...SHARES.map((key) => ({ key, head: t(`share.${key}`), cell: (row) => percent(row[key]), sort: (row) => row[key] })),
    { key: 'queued', head: t('queued'), cell: (row) => bytes(row.queued_bytes ?? row.own?.['queued-bytes']), sort: (row) => row.queued_bytes },
    { key: 'watermark', head: t('watermark'), cell: (row) => (lagOf(row) === null ? UNKNOWN : span(-lagOf(row))), sort: lagOf },
    { key: 'lag', head: t('lag'), cell: (row) => lagInWords(row.lag_records, row.lag_ms), sort: (row) => row.lag_records },
    { key: 'rows', head: t('state.rows'), cell: (row) => count(row.state_rows ?? row.own?.['state-rows']), sort: (row) => row.state_rows },
    { key: 'state', head: t('state.bytes'), cell: (row) => bytes(row.state_bytes ?? row.own?.['state-bytes']), sort: (row) => row.state_bytes },
    { key: 'late', head: t('late'), cell: (row) => count(row.records_late ?? row.own?.['records-late']) },
    { key: 'total', head: t('records.total'), cell: (row) => count(row.own?.['records-in']), sort: (row) => row.own?.['records-in'] },
    { key: 'step', head: t('longest.step'), cell: (row) => span(row.at?.['longest-step-ms']), sort: (row) => row.at?.['longest-step-ms'] },
    { key: 'memory', head: t('memory'), cell: (row) => bytes(row.at?.['memory-bytes']), sort: (row) => row.at?.['memory-bytes'] },
  ];
  const latencies = counted.flatMap(({ subtask, latency }) => (latency ?? []).map((each) => ({ ...each, subtask })));
  return html`<aside class="drawer" aria-label=${task?.name ?? id} tabindex="-1" ref=${panel}>
    <div class="panel-head"><h2>${task?.name ?? t('task.gone')}</h2><a class="button" href=${link(name)} onClick=${close}>${t('close')} <kbd>Esc</kbd></a></div>
    ${task && html`<p class="muted">${t('task.about', { subtasks: task.parallelism, keyGroups: task.maxParallelism })}</p>`}
    ${known && html`<ul class="operators" aria-label=${t('operators')}>${known.operators.map((each) => html`<li key=${each.uid}><code>${each.uid}</code> <code class="muted">${each.name}</code></li>`)}</ul>`}
    ${error && html`<${Problem} error=${error} />`}
    ${task && html`<${Table} caption=${t('subtasks')} columns=${columns} rows=${rows} most=${ROWS_MAX} rowKey=${(row) => row.subtask} empty=${t('task.unmeasured')} />`}
    ${figures?.watched === id && figures.channels.length > 0 && html`<${Channels} rows=${figures.channels} />`}
    ${latencies.length > 0 && html`<${Latencies} rows=${latencies} />`}
  </aside>`;
}
