// What is in a job's state: the rows of a key, and what changed between two checkpoints.
import { html, useEffect, useState, useStore } from './dom.js';
import { t } from './words.js';
import { live } from './live.js';
import { ask, jobPath, token, useAnswer } from './api.js';
import { Empty, Loading, Problem, Table, TokenForm } from './parts.js';
import { count, UNKNOWN } from './formats.js';
import { go, link } from './routes.js';

const POLL_MS = 200;
const text = (value) => (value === null || value === undefined ? UNKNOWN : typeof value === 'object' ? JSON.stringify(value) : String(value));

function Rows({ rows, caption }) {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row)))];
  const columns = names.map((name) => ({ key: name, isText: true, head: name, cell: (row) => html`<code>${text(row[name])}</code>`, sort: (row) => text(row[name]) }));
  return html`<${Table} caption=${caption} columns=${columns} rows=${rows.map((row, at) => ({ ...row, [Symbol.for('at')]: at }))} rowKey=${(row) => row[Symbol.for('at')]} />`;
}

function Lookup({ name, query, kept, uids }) {
  const [form, setForm] = useState({ checkpoint: query.checkpoint ?? '', uid: query.uid ?? '', state: query.state ?? '', key: query.key ?? '' });
  const filled = { ...form, uid: form.uid || uids[0] || '' };
  const asked = query.uid ? new URLSearchParams(Object.entries({ checkpoint: query.checkpoint, uid: query.uid, state: query.state, key: query.key }).filter(([, value]) => value)) : null;
  const { data, error, isLoading } = useAnswer(asked && `${jobPath(name, 'state')}?${asked}`);
  const set = (field) => (event) => setForm({ ...form, [field]: event.target.value });
  const look = (event) => { event.preventDefault(); go(link(name, 'state', '', filled)); };
  return html`<section class="panel"><h2>${t('lookup')}</h2><form class="filters" onSubmit=${look} id="lookup">
    <label>${t('kind.checkpoint')} <select value=${form.checkpoint} onChange=${set('checkpoint')}><option value="">${t('newest')}</option>
      ${kept.map((each) => html`<option value=${each.id}>#${each.id}</option>`)}</select></label>
    <label>${t('operator')} <input list="uids" value=${filled.uid} onInput=${set('uid')} required /></label><datalist id="uids">${uids.map((uid) => html`<option value=${uid} />`)}</datalist>
    <label>${t('state.name')} <input value=${form.state} onInput=${set('state')} placeholder=${t('optional')} /></label>
    <label>${t('key')} <input value=${form.key} onInput=${set('key')} placeholder=${t('lookup.first')} /></label>
    <button type="submit">${t('lookup.go')}</button></form>
    ${asked && (error ? html`<${Problem} error=${error} />` : isLoading || !data ? html`<${Loading} />` : html`
      <p class="muted">${t('lookup.found', { checkpoint: data.checkpoint, uid: data.uid, state: data.state ?? UNKNOWN, rows: count(data.rows.length) })}
        ${data.key_group !== null && data.key_group !== undefined ? t('lookup.group', { group: data.key_group, subtask: data.subtask ?? UNKNOWN }) : ''} ${data.more ? t('lookup.more') : ''}</p>
      ${data.rows.length === 0 ? html`<${Empty}>${t('lookup.none')}<//>` : html`<${Rows} rows=${data.rows} caption=${t('lookup')} />`}`)}
  </section>`;
}

function Examples({ kind, of }) {
  const rows = (of[kind] ?? []).map((each) => (each && typeof each === 'object' && !Array.isArray(each) ? flat(each) : { [t('value')]: each }));
  return rows.length > 0 && html`<h4>${t(`diff.${kind}`)}</h4><${Rows} rows=${rows} caption=${t(`diff.${kind}`)} />`;
}

/** A changed row has an older and a newer self. */
const flat = (row) => Object.fromEntries(Object.entries(row).flatMap(([name, value]) => (value && typeof value === 'object' && !Array.isArray(value)
  ? Object.entries(value).map(([inner, own]) => [`${name}.${inner}`, own]) : [[name, value]])));

function Difference({ name, kept, uids }) {
  const [form, setForm] = useState({ a: '', b: '', uid: '' });
  const [told, setTold] = useState(null);
  const set = (field) => (event) => setForm({ ...form, [field]: event.target.value });
  const a = Number(form.a || kept[1]?.id || 0);
  const b = Number(form.b || kept[0]?.id || 0);
  const compare = async (event) => {
    event.preventDefault();
    setTold({ isLoading: true });
    try {
      const { 'request-id': number } = await ask(jobPath(name, 'diffs'), { method: 'POST', body: { a, b, ...(form.uid ? { uid: form.uid } : {}) } });
      let answer;
      do {
        await new Promise((done) => setTimeout(done, POLL_MS));
        answer = await ask(jobPath(name, 'diffs', number));
      } while (answer.status.id !== 'COMPLETED');
      setTold({ data: answer.operation });
    } catch (error) { setTold({ error }); }
  };
  const failed = told?.data?.['failure-cause'];
  return html`<section class="panel"><h2>${t('diff')}</h2>
    ${kept.length < 2 ? html`<p class="muted">${t('diff.needs')}</p>` : html`<form class="filters" onSubmit=${compare} id="difference">
      ${['a', 'b'].map((side) => html`<label>${t(`diff.${side}`)} <select value=${side === 'a' ? a : b} onChange=${set(side)}>${kept.map((each) => html`<option value=${each.id}>#${each.id}</option>`)}</select></label>`)}
      <label>${t('operator')} <select value=${form.uid} onChange=${set('uid')}><option value="">${t('filter.all')}</option>${uids.map((uid) => html`<option value=${uid}>${uid}</option>`)}</select></label>
      <button type="submit">${t('diff.go')}</button></form>
    ${told?.isLoading && html`<${Loading} />`}${told?.error && html`<${Problem} error=${told.error} />`}
    ${failed && html`<p class="problem" lang="en">${failed['stack-trace']}</p>`}
    ${told?.data && !failed && (told.data.states ?? []).map((each) => html`<article class="diff" data-diff=${each.uid ?? each.operator}><h3>${each.uid ?? each.operator ?? UNKNOWN} · <code>${each.state ?? each.name ?? UNKNOWN}</code></h3>
      <ul class="counts">${['added', 'changed', 'removed', 'gone', 'unchanged', 'same'].filter((kind) => kind in each || kind in (each.counts ?? {})).map((kind) => {
        const value = each.counts?.[kind] ?? each[kind];
        return html`<li><strong class="number">${count(Array.isArray(value) ? value.length : value)}</strong> ${t(`diff.${kind}`)}</li>`;
      })}</ul>
      ${['added', 'changed', 'removed', 'gone'].map((kind) => html`<${Examples} kind=${kind} of=${each.examples ?? each} />`)}</article>`)}
    ${told?.data && !failed && (told.data.states ?? []).length === 0 && html`<${Empty}>${t('diff.same')}<//>`}`}</section>`;
}

export function StateView({ job, name, query }) {
  const { changed } = useStore(live);
  const { text: given } = useStore(token);
  const { data, error } = useAnswer(jobPath(name, 'checkpoints'), changed);
  const [uids, setUids] = useState([]);
  const names = job?.vertices.map((each) => each.name).join('\n') ?? '';
  // A chain's name is its operators' names; a uid among them can be looked up.
  useEffect(() => setUids([...new Set(names.split('\n').flatMap((each) => each.split(/ -> | → |, /)).filter(Boolean))]), [names]);
  if (!data) return error ? html`<${Problem} error=${error} />` : html`<${Loading} />`;
  const kept = data.history.filter((each) => each.status === 'COMPLETED' && !each.discarded);
  if (!given) return html`<h1 class="hidden">${t('view.state')}</h1><section class="panel"><${TokenForm} /></section>`;
  return html`<h1 class="hidden">${t('view.state')}</h1>
    ${kept.length === 0 ? html`<${Empty}>${t('state.none')}<//>` : html`<${Lookup} key=${JSON.stringify(query)} name=${name} query=${query} kept=${kept} uids=${uids} />
    <${Difference} name=${name} kept=${kept.filter((each) => !each.is_savepoint)} uids=${uids} />`}`;
}
