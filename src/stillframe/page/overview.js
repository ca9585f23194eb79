// One job at a glance: the sentence, six figures, the graph, its tasks.
import { html, useStore } from './dom.js';
import { t } from './words.js';
import { live } from './live.js';
import { Age, Loading, Legend, SHARES, SharesBar, Table, sharesInWords, word } from './parts.js';
import { Sentence } from './sentence.js';
import { JobGraph, watermarkLag } from './graph.js';
import { TaskDrawer } from './task.js';
import { brief, bytes, count, percent, rate, span, time, UNKNOWN } from './formats.js';
import { link } from './routes.js';

const ROWS_MAX = 40;

const Tile = ({ name, value, more, to }) => html`<div class="tile" data-tile=${name}>
  <dt>${to ? html`<a href=${to}>${t(`tile.${name}`)}</a>` : t(`tile.${name}`)}</dt>
  <dd><span class="tile-value number">${value}</span><span class="tile-more">${more}</span></dd></div>`;

function Tiles({ told, name }) {
  const last = told?.last_checkpoint;
  return html`<dl class="tiles">
    <${Tile} name="in" value=${rate(told?.records_in_per_second)} more=${t('tile.records')} />
    <${Tile} name="out" value=${rate(told?.records_out_per_second)} more=${t('tile.records')} />
    <${Tile} name="lag" value=${brief(told?.lag_records)} more=${told?.lag_records === null ? t('tile.lag.none') : told?.lag_seconds === null || told?.lag_seconds === undefined
      ? t('tile.lag.unknown') : t('tile.lag.more', { span: span(told.lag_seconds * 1000) })} />
    <${Tile} name="watermark" value=${told?.watermark_lag_ms === null || told?.watermark_lag_ms === undefined ? UNKNOWN : span(-told.watermark_lag_ms)}
      more=${told?.watermark_lag_ms === null ? t('tile.watermark.none') : t('tile.watermark.more')} />
    <${Tile} name="checkpoint" to=${last ? link(name, 'checkpoints', last.id) : link(name, 'checkpoints')} value=${last ? `#${last.id}` : UNKNOWN}
      more=${last ? html`<${Age} at=${last.at} /> · ${span(last.duration_ms)} · ${bytes(last.new_bytes)}` : t('tile.checkpoint.none')} />
    <${Tile} name="state" value=${bytes(last?.full_bytes)} more=${t('tile.state.more')} />
  </dl>`;
}

function Tasks({ job, figures, name }) {
  const told = (row) => figures?.tasks?.[row.id];
  const share = (key) => ({ key, head: t(`share.${key}`), cell: (row) => percent(told(row)?.[key]), sort: (row) => told(row)?.[key] });
  const lagOf = (row) => watermarkLag(told(row)?.watermark);
  const columns = [
    { key: 'name', isText: true, head: t('task'), cell: (row) => row.name, sort: (row) => row.name },
    { key: 'subtasks', head: t('subtasks'), cell: (row) => count(row.parallelism), sort: (row) => row.parallelism },
    { key: 'in', head: t('in'), cell: (row) => rate(told(row)?.records_in_per_second), sort: (row) => told(row)?.records_in_per_second },
    { key: 'out', head: t('out'), cell: (row) => rate(told(row)?.records_out_per_second), sort: (row) => told(row)?.records_out_per_second },
    { key: 'time', isText: true, head: t('time'), cell: (row) => html`<${SharesBar} of=${told(row)} width="120" /><span class="hidden">${sharesInWords(told(row))}</span>` },
    ...SHARES.map(share),
    { key: 'queued', head: t('queued'), cell: (row) => bytes(told(row)?.queued_bytes), sort: (row) => told(row)?.queued_bytes },
    { key: 'watermark', head: t('watermark'), cell: (row) => (lagOf(row) === null ? UNKNOWN : span(-lagOf(row))), sort: lagOf },
    { key: 'rows', head: t('state.rows'), cell: (row) => count(told(row)?.state_rows), sort: (row) => told(row)?.state_rows },
    { key: 'state', head: t('state.bytes'), cell: (row) => bytes(told(row)?.state_bytes), sort: (row) => told(row)?.state_bytes },
    { key: 'late', head: t('late'), cell: (row) => count(told(row)?.records_late), sort: (row) => told(row)?.records_late },
  ];
  return html`<${Table} caption=${t('tasks')} columns=${columns} rows=${job.vertices} most=${ROWS_MAX} rowKey=${(row) => row.id} open=${(row) => link(name, 'tasks', row.id)} />`;
}

/** A discrete event in the language of the page. */
export function eventInWords(event) {
  const key = `event.${event.kind}.${event.event ?? event.status ?? event.operation ?? ''}`;
  const given = { id: event.id, attempt: event.attempt, reason: event.reason, before: event.before, after: event.after,
    operation: word('operation', event.operation), from: event.restored_from ?? UNKNOWN, ms: span(event.checkpoint?.end_to_end_duration) };
  const said = t(key, given);
  return said === key || /\{\w+\}/.test(said) ? { text: event.text, isOwn: true } : { text: said, isOwn: false };
}

function Happened({ events }) {
  if (events.length === 0) return null;
  return html`<section class="panel"><h2>${t('happened')}</h2><ol class="happened">${[...events].reverse().slice(0, 12).map((event) => {
    const { text, isOwn } = eventInWords(event);
    return html`<li key=${event.key} data-event=${event.key} class=${event.kind === 'failure' || event.event === 'failed' ? 'bad' : ''}>
      <time class="number muted">${time(event.at)}</time> <span lang=${isOwn ? 'en' : undefined}>${text}</span></li>`;
  })}</ol></section>`;
}

export function Overview({ job, name, task }) {
  const { figures, hello, happened } = useStore(live);
  if (!job) return html`<${Loading} />`;
  const isDown = job.state === 'RESTARTING' || job.state === 'INITIALIZING';
  const diagnosis = figures?.diagnosis;
  return html`<h1 class="hidden">${t('view.overview')}</h1>
    <${Sentence} diagnosis=${diagnosis} job=${name} tasks=${job.vertices} />
    <${Tiles} told=${figures?.job} name=${name} />
    <section class="panel">
      <div class="panel-head"><h2>${t('graph')}</h2><${Legend} kind="share" names=${SHARES} /></div>
      ${isDown && html`<p class="note"><span aria-hidden="true">◐ </span>${t('graph.down', { message: word('state', job.state) })}</p>`}
      ${job.plan.nodes.length === 0 && html`<p class="muted">${t('graph.unjoined')}</p>`}
      <${JobGraph} job=${job} name=${name} figures=${figures} hello=${hello} isGrey=${isDown} selected=${task}
        marked=${['bottleneck', 'skew'].includes(diagnosis?.code) ? diagnosis.args.task : null} />
    </section>
    <section class="panel"><h2>${t('tasks')}</h2><${Tasks} job=${job} figures=${figures} name=${name} /></section>
    <${Happened} events=${happened} />
    ${task && html`<${TaskDrawer} job=${job} name=${name} id=${task} />`}`;
}
