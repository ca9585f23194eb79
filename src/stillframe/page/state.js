// What is in a job's state: the rows of a key, and what changed between two checkpoints.
import { html, useState, useStore } from './dom.js';
import { t } from './words.js';
import { live } from './live.js';
import { ask, jobPath, token, useAnswer } from './api.js';
import { Empty, Loading, Problem, Table, TokenForm } from './parts.js';
import { bytes, count, UNKNOWN } from './formats.js';
import { go, link } from './routes.js';

const POLL_MS = 200;
const CHANGES = ['added', 'changed', 'gone', 'same'];
const text = (value) => (value === null || value === undefined ? UNKNOWN : typeof value === 'object' ? JSON.stringify(value) : String(value));
const isRecord = (value) => value !== null && typeof value === 'object' && !Array.isArray(value);

/** A key and a value have columns of their own. */
const flat = (row) => Object.fromEntries(Object.entries(row).flatMap(([name, value]) => (isRecord(value)
  ? Object.entries(value).map(([inner, own]) => [name === 'key' ? inner : `${name}.${inner}`, own]) : [[name, value]])));

function Rows({ rows, caption }) {
  const flats = rows.map((row, at) => ({ at, row: flat(row) }));
  const names = [...new Set(flats.flatMap(({ row }) => Object.keys(row)))];
  const columns = names.map((name) => ({
    key: name, isText: true, head: html`<span lang="en">${name}</span>`, sort: ({ row }) => row[name],
    cell: ({ row }) => (name === 'change' ? t(`diff.${row[name]}`) : html`<code>${text(row[name])}</code>`),
  }));
  return html`<${Table} caption=${caption} columns=${columns} rows=${flats} rowKey=${({ at }) => at} />`;
}

const nameOf = ({ uid, state }) => JSON.stringify([uid, state]);

function Lookup({ name, query, kept }) {
  const [form, setForm] = useState({ checkpoint: query.checkpoint ?? '', of: query.uid ? nameOf(query) : '', key: query.key ?? '' });
  const there = useAnswer(`${jobPath(name, 'state')}${form.checkpoint ? `?checkpoint=${form.checkpoint}` : ''}`);
  const given = ['checkpoint', 'uid', 'state', 'key'].filter((each) => query[each]);
  const asked = query.uid ? new URLSearchParams(given.map((each) => [each, query[each]])) : null;
  const { data, error } = useAnswer(asked && `${jobPath(name, 'state')}?${asked}`);
  const set = (field) => (event) => setForm({ ...form, [field]: event.target.value });
  const states = there.data?.states ?? [];
  const chosen = states.find((each) => nameOf(each) === form.of) ?? states[0];
  const look = (event) => {
    event.preventDefault();
    if (chosen) go(link(name, 'state', '', { checkpoint: form.checkpoint, uid: chosen.uid, state: chosen.state, key: form.key }));
  };
  return html`<section class="panel"><h2>${t('lookup')}</h2><form class="filters" onSubmit=${look} id="lookup">
    <label>${t('kind.checkpoint')} <select value=${form.checkpoint} onChange=${set('checkpoint')}><option value="">${t('newest')}</option>
      ${kept.map((each) => html`<option value=${each.id}>#${each.id}</option>`)}</select></label>
    <label>${t('state.name')} <select value=${chosen ? nameOf(chosen) : ''} onChange=${set('of')}>${states.map((each) => html`<option value=${nameOf(each)}>
      ${`${each.uid} · ${each.state} (${t('lookup.size', { rows: count(each.rows), bytes: bytes(each.bytes) })})`}</option>`)}</select></label>
    <label>${t('key')} <input value=${form.key} onInput=${set('key')} placeholder=${t('lookup.first')} /></label>
    <button type="submit" disabled=${!chosen}>${t('lookup.go')}</button></form>
    ${there.error && html`<${Problem} error=${there.error} />`}
    ${there.data && states.length === 0 && html`<${Empty}>${t('state.empty')}<//>`}
    ${asked && (error ? html`<${Problem} error=${error} />` : !data ? html`<${Loading} />` : html`
      <p class="muted" data-found>${t('lookup.found', { checkpoint: data.checkpoint, uid: data.uid, state: data.state, rows: count(data.rows.length) })}
        ${data.key_group === null ? '' : t('lookup.group', { group: data.key_group, subtask: data.subtask ?? UNKNOWN })} ${data.more ? t('lookup.more') : ''}</p>
      ${data.rows.length === 0 ? html`<${Empty}>${t('lookup.none')}<//>` : html`<${Rows} rows=${data.rows} caption=${t('lookup')} />`}`)}
  </section>`;
}

function Difference({ name, kept }) {
  const [form, setForm] = useState({ a: '', b: '' });
  const [told, setTold] = useState(null);
  const set = (field) => (event) => setForm({ ...form, [field]: event.target.value });
  const a = Number(form.a || kept[1]?.id || 0);
  const b = Number(form.b || kept[0]?.id || 0);
  const compare = async (event) => {
    event.preventDefault();
    setTold({ isLoading: true });
    try {
      const { 'request-id': number } = await ask(jobPath(name, 'diffs'), { method: 'POST', body: { a, b } });
      let answer;
      do {
        await new Promise((done) => setTimeout(done, POLL_MS));
        answer = await ask(jobPath(name, 'diffs', number));
      } while (answer.status.id !== 'COMPLETED');
      const failed = answer.operation['failure-cause'];
      setTold(failed ? { error: { status: 500, message: failed['stack-trace'] } } : { states: answer.operation.states, a, b });
    } catch (error) { setTold({ error }); }
  };
  return html`<section class="panel"><h2>${t('diff')}</h2>
    ${kept.length < 2 ? html`<p class="muted">${t('diff.needs')}</p>` : html`<form class="filters" onSubmit=${compare} id="difference">
      ${[['a', a], ['b', b]].map(([side, value]) => html`<label>${t(`diff.${side}`)} <select value=${value} onChange=${set(side)}>
        ${kept.map((each) => html`<option value=${each.id}>#${each.id}</option>`)}</select></label>`)}
      <button type="submit" disabled=${told?.isLoading}>${t('diff.go')}</button></form>`}
    ${told?.isLoading && html`<${Loading} />`}${told?.error && html`<${Problem} error=${told.error} />`}
    ${told?.states?.map((each) => html`<article class="diff" data-diff=${each.uid}><h3>${`#${told.a} → #${told.b} · `}${each.uid} · <code>${each.state}</code></h3>
      <ul class="counts">${CHANGES.map((kind) => html`<li data-change=${kind}><strong class="number">${count(each[kind])}</strong> ${t(`diff.${kind}`)}</li>`)}</ul>
      ${each.examples.length > 0 && html`<${Rows} rows=${each.examples} caption=${t('diff')} />`}</article>`)}
    ${told?.states?.length === 0 && html`<${Empty}>${t('diff.none')}<//>`}</section>`;
}

export function StateView({ name, query }) {
  const { changed } = useStore(live);
  const { text: given } = useStore(token);
  const { data, error } = useAnswer(jobPath(name, 'checkpoints'), changed);
  if (!given) return html`<h1 class="hidden">${t('view.state')}</h1><section class="panel"><${TokenForm} /></section>`;
  if (!data) return error ? html`<${Problem} error=${error} />` : html`<${Loading} />`;
  const kept = data.history.filter((each) => each.status === 'COMPLETED' && !each.discarded && !each.is_savepoint);
  return html`<h1 class="hidden">${t('view.state')}</h1>
    ${kept.length === 0 ? html`<${Empty}>${t('state.none')}<//>`
      : html`<${Lookup} key=${JSON.stringify(query)} name=${name} query=${query} kept=${kept} /><${Difference} name=${name} kept=${kept} />`}`;
}
