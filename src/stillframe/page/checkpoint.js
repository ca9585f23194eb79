// One checkpoint: where its time went, whom it waited for, and its barriers in slow motion.
import { html, useEffect, useMemo, useState, useStore } from './dom.js';
import { t, choices } from './words.js';
import { live } from './live.js';
import { ask, jobPath, useAnswer } from './api.js';
import { Age, Copied, Legend, Loading, Moment, PHASES, PhasesBar, Problem, Table } from './parts.js';
import { kindOf, Status } from './checkpoints.js';
import { endOf, modelOf } from './barriers.js';
import { Replay } from './replay.js';
import { bytes, count, span, UNKNOWN } from './formats.js';
import { link } from './routes.js';

/** What every task tells of its subtasks: a request for each, so of a large plan only where there are no barriers. */
function useParts(name, id, tasks, isWanted) {
  const [parts, setParts] = useState(null);
  const key = isWanted ? Object.keys(tasks).join() : '';
  useEffect(() => {
    if (!key) return undefined;
    let isGone = false;
    Promise.all(key.split(',').map(async (vertex) => ({ vertex, told: await ask(jobPath(name, 'checkpoints', 'details', id, 'subtasks', vertex)) })))
      .then((all) => { if (!isGone) setParts(all); }, () => { if (!isGone) setParts([]); });
    return () => { isGone = true; };
  }, [name, id, key]);
  return parts;
}

const ASKED_MAX = 20;
const BAR = 260;
const SEGMENTS = [['start', 'zero', 'first'], ['align', 'first', 'last'], ['sync', 'last', 'taken'], ['async', 'taken', 'durable'], ['store', 'durable', 'ack']];

function GanttBar({ of, end }) {
  const at = (ms) => (ms / end) * BAR;
  const told = { ...of, zero: 0 };
  const known = SEGMENTS.filter(([, from, to]) => Number.isFinite(told[from]) && Number.isFinite(told[to]) && told[to] > told[from]);
  return html`<svg class="gantt" width=${BAR} height="14" viewBox=${`0 0 ${BAR} 14`} role="img"
    aria-label=${known.map(([phase, from, to]) => `${t(`phase.${phase}`)} ${span(told[to] - told[from])}`).join(', ') || UNKNOWN}>
    <line class="gantt-line" x1="0" x2=${BAR} y1="13.5" y2="13.5" />
    ${known.map(([phase, from, to]) => html`<rect class=${`phase-${phase}`} x=${at(told[from])} y="2" width=${Math.max(1, at(told[to] - told[from]))} height="9" />`)}</svg>`;
}

function Gantt({ model }) {
  const end = endOf(model);
  const plus = (ms) => (Number.isFinite(ms) ? `+${span(ms)}` : UNKNOWN);
  const columns = [
    { key: 'who', isText: true, head: t('subtask'), cell: (row) => `${row.name} ${row.index}`, sort: (row) => `${row.name} ${row.index}` },
    ...(model.some((row) => row.slot !== undefined && row.slot !== null) ? [{ key: 'slot', head: t('slot'), cell: (row) => row.slot ?? UNKNOWN },
      { key: 'host', isText: true, head: t('host'), cell: (row) => row.host ?? UNKNOWN }, { key: 'pid', head: 'PID', cell: (row) => row.pid ?? UNKNOWN }] : []),
    { key: 'first', head: t('barrier.first'), cell: (row) => plus(row.first), sort: (row) => row.first },
    { key: 'last', head: t('barrier.last'), cell: (row) => plus(row.last), sort: (row) => row.last },
    { key: 'from', isText: true, head: t('barrier.from'), cell: (row) => (row.from ? row.from.join(' ') : UNKNOWN) },
    { key: 'taken', head: t('taken'), cell: (row) => plus(row.taken), sort: (row) => row.taken },
    { key: 'durable', head: t('durable'), cell: (row) => plus(row.durable), sort: (row) => row.durable },
    { key: 'ack', head: t('acknowledged'), cell: (row) => plus(row.ack), sort: (row) => row.ack },
    { key: 'new', head: t('bytes.new'), cell: (row) => bytes(row.written), sort: (row) => row.written },
    { key: 'full', head: t('bytes.full'), cell: (row) => bytes(row.full), sort: (row) => row.full },
    { key: 'bar', isText: true, head: t('gantt', { span: span(end) }), cell: (row) => html`<${GanttBar} of=${row} end=${end} />` },
  ];
  return html`<${Table} caption=${t('subtasks')} columns=${columns} rows=${model} rowKey=${(row) => `${row.vertex} ${row.index}`} />`;
}

function Facts({ of }) {
  const facts = [
    ['triggered', html`<${Moment} at=${of.trigger_timestamp} /> · <${Age} at=${of.trigger_timestamp} />`],
    ['took', span(of.end_to_end_duration)], ['acknowledged', `${of.num_acknowledged_subtasks}/${of.num_subtasks}`],
    ['bytes.new', bytes(of.checkpointed_size)], ['bytes.full', bytes(of.state_size)], ['in.flight', bytes(of.persisted_data)],
    ['kind', t(`kind.${kindOf(of)}`)], ['files', of.discarded ? t('files.gone') : of.status === 'COMPLETED' ? t('files.kept') : UNKNOWN],
  ];
  return html`<dl class="facts">${facts.map(([key, value]) => html`<div><dt>${t(key)}</dt><dd class="number" data-fact=${key}>${value}</dd></div>`)}</dl>`;
}

function Tasks({ of }) {
  const rows = Object.entries(of.tasks).map(([vertex, told]) => ({ vertex, ...told }));
  const columns = [
    { key: 'name', isText: true, head: t('task'), cell: (row) => row.name, sort: (row) => row.name },
    { key: 'status', isText: true, head: t('status'), cell: (row) => html`<${Status} of=${row.status} />` },
    { key: 'ack', head: t('acknowledged'), cell: (row) => `${row.num_acknowledged_subtasks}/${row.num_subtasks}` },
    { key: 'took', head: t('took'), cell: (row) => span(row.end_to_end_duration), sort: (row) => row.end_to_end_duration },
    { key: 'new', head: t('bytes.new'), cell: (row) => bytes(row.checkpointed_size), sort: (row) => row.checkpointed_size },
    { key: 'full', head: t('bytes.full'), cell: (row) => bytes(row.state_size), sort: (row) => row.state_size },
    { key: 'processed', head: t('bytes.processed'), cell: (row) => bytes(row.processed_data), sort: (row) => row.processed_data },
  ];
  return html`<${Table} caption=${t('tasks')} columns=${columns} rows=${rows} rowKey=${(row) => row.vertex} />`;
}

/** Where a source goes on: what its connector calls a position, as it is. */
function Positions({ of }) {
  if (of === null) return t('positions.many');
  if (of.length === 0) return UNKNOWN;
  return html`<details><summary>${t('positions.count', { count: count(of.length) })}</summary><ul class="positions">${of.map((each) => html`<li key=${each.id}><code>${each.id} ${JSON.stringify(each.position)}</code></li>`)}</ul></details>`;
}

/** What it holds, as long as the driver that took it remembers. */
function Held({ of }) {
  const columns = [
    { key: 'uid', isText: true, head: t('operator'), cell: (row) => html`<code>${row.uid}</code>`, sort: (row) => row.uid },
    { key: 'states', isText: true, head: t('states'), cell: (row) => (row.states.length ? html`<code>${row.states.join(', ')}</code>` : UNKNOWN) },
    { key: 'rows', head: t('state.rows'), cell: (row) => count(row.rows), sort: (row) => row.rows },
    { key: 'bytes', head: t('state.bytes'), cell: (row) => bytes(row.bytes), sort: (row) => row.bytes },
    { key: 'positions', isText: true, head: t('positions'), cell: (row) => html`<${Positions} of=${row.positions} />` },
    { key: 'commits', head: t('commits'), cell: (row) => count(row.commits), sort: (row) => row.commits },
  ];
  return html`<div data-part="held"><${Table} caption=${t('held')} columns=${columns} rows=${of} rowKey=${(row) => row.uid} /></div>`;
}

export function Checkpoint({ job, name, id }) {
  const { changed } = useStore(live);
  useStore(choices);
  const tasks = job?.vertices ?? [];
  const { data, error } = useAnswer(jobPath(name, 'checkpoints', 'details', id), changed);
  const barriers = useAnswer(jobPath(name, 'checkpoints', 'details', id, 'barriers'), data?.status);
  const isHeld = data?.status === 'COMPLETED' && !data.is_savepoint;
  const held = useAnswer(isHeld ? jobPath(name, 'checkpoints', 'details', id, 'operators') : null, data?.status);
  const parts = useParts(name, id, data?.tasks ?? {}, barriers.error !== null || tasks.length <= ASKED_MAX);
  const model = useMemo(() => modelOf(barriers.data, parts, tasks), [barriers.data, parts, tasks.map((task) => task.id).join()]);
  const head = html`<div class="panel-head"><h1>${t('checkpoint.title', { id })}</h1>
    <nav class="steps" aria-label=${t('checkpoint.others')}><a class="button" href=${link(name, 'checkpoints', Math.max(1, id - 1))}><kbd>[</kbd> ${t('before')}</a>
    <a class="button" href=${link(name, 'checkpoints', id + 1)}>${t('after')} <kbd>]</kbd></a></nav></div>`;
  if (!data) return html`${head}${error ? html`<${Problem} error=${error} />` : html`<${Loading} />`}`;
  const phases = data.stillframe?.phases;
  const path = data.stillframe?.['critical-path'] ?? [];
  return html`${head}
    <p><${Status} of=${data.status} /></p>
    ${data.failure_message && html`<p class="sentence tone-bad"><span class="sign" aria-hidden="true">✕</span> <span lang="en">${data.failure_message}</span></p>`}
    <${Facts} of=${data} />
    ${phases && html`<section class="panel"><div class="panel-head"><h2>${t('phases')}</h2><${Legend} kind="phase" names=${PHASES} /></div>
      <${PhasesBar} of=${phases} most=${PHASES.reduce((sum, each) => sum + (phases[each] ?? 0), 0)} width="720" height="18" />
      <dl class="facts">${PHASES.map((each) => html`<div><dt>${t(`phase.${each}`)}</dt><dd class="number" data-phase=${each}>${span(phases[each])}</dd></div>`)}</dl>
      ${path.length > 1 && html`<p>${t('critical')} <strong>${path.map(([task, index]) => `${task} ${index}`).join(' → ')}</strong></p>`}</section>`}
    ${job && model.length > 0 && html`<${Replay} key=${id} job=${job} name=${name} model=${model} hasArrivals=${model.some((each) => each.arrivals.length > 0)} />`}
    <section class="panel"><h2>${t('subtasks')}</h2>${model.length ? html`<${Gantt} model=${model} />`
      : html`<p class="muted">${data.status === 'IN_PROGRESS' ? t('checkpoint.underway') : t('checkpoint.details.gone')}</p>`}</section>
    ${held.data && html`<section class="panel"><h2>${t('held')}</h2><${Held} of=${held.data.operators} /></section>`}
    <section class="panel"><h2>${t('tasks')}</h2><${Tasks} of=${data} />
      ${data.status === 'COMPLETED' && !data.discarded && !data.is_savepoint && html`<p><a data-states href=${link(name, 'state', '', { checkpoint: id })}>${t('checkpoint.states')} →</a></p>`}</section>
    ${data.external_path && html`<section class="panel"><h2>${t('restore.command')}</h2><${Copied} label=${t('restore.copy')}
      text=${`stillframe run --restore ${data.external_path} JOB.py`} />
      <p class="muted">${t('verify.command')}</p><${Copied} label=${t('verify.copy')} text=${`stillframe inspect ${data.external_path}`} /></section>`}`;
}
