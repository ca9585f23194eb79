// What a person may order. Each says what will happen and what it costs, shows the command that does
// the same, and then what became of it. Asked twice under one number, a thing is done once.
import { html, store, useEffect, useRef, useState, useStore } from './dom.js';
import { t } from './words.js';
import { ask, jobPath, token } from './api.js';
import { Copied, TokenForm, announce } from './parts.js';
import { now } from './live.js';
import { span } from './formats.js';

const POLL_MS = 150;
const opened = store({ kind: null });
export const openAction = (kind) => opened.set({ kind });
const quoted = (text) => (/^[\w./:@+-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

/** A directory beside the job's checkpoints that is not there yet. */
function suggested(job) {
  const location = (job.stillframe['checkpoint-location'] ?? '/tmp').replace(/\/+$/, '');
  const above = location.includes('/') ? location.slice(0, location.lastIndexOf('/')) : '';
  const stamp = new Date(now()).toISOString().slice(0, 19).replace(/[:T]/g, '-');
  return `${above || ''}/savepoints/${job.name.replace(/[^\w-]+/g, '_')}-${stamp}`;
}

const KINDS = {
  checkpoint: { fields: () => ({}), command: (name) => `stillframe trigger ${quoted(name)}`,
    order: (triggerId) => ({ method: 'POST', path: ['checkpoints'], body: { triggerId } }), outcome: 'checkpoints' },
  savepoint: { fields: (job) => ({ directory: suggested(job) }), command: (name, { directory }) => `stillframe savepoint ${quoted(name)} ${quoted(directory)}`,
    order: (triggerId, { directory }) => ({ method: 'POST', path: ['savepoints'], body: { triggerId, 'target-directory': directory } }), outcome: 'savepoints' },
  rescale: { fields: (job) => ({ parallelism: String(job.stillframe.parallelism) }), command: (name, { parallelism }) => `stillframe rescale ${quoted(name)} ${parallelism}`,
    order: (triggerId, { parallelism }) => ({ method: 'PATCH', path: ['rescaling'], query: { parallelism, triggerId } }), outcome: 'rescaling' },
  stop: { fields: (job) => ({ directory: suggested(job) }), command: (name, { directory }) => `stillframe stop ${quoted(name)}${directory ? ` --savepoint ${quoted(directory)}` : ''}`,
    order: (triggerId, { directory }) => ({ method: 'POST', path: ['stop'], body: { triggerId, ...(directory ? { targetDirectory: directory } : {}) } }), outcome: 'savepoints' },
  cancel: { fields: () => ({ typed: '' }), command: (name) => `stillframe cancel ${quoted(name)}`,
    order: () => ({ method: 'PATCH', path: [], query: { mode: 'cancel' } }), outcome: null, mustType: true },
};
export const ACTIONS = Object.keys(KINDS);

function resultInWords(kind, operation) {
  const failed = operation?.failureCause ?? operation?.['failure-cause'];
  if (failed) return { isBad: true, text: failed['stack-trace'] };
  if (kind === 'rescale') return { text: t('done.rescale', { before: operation['parallelism-before'], after: operation.parallelism, span: span(operation['downtime-ms']) }) };
  if (kind === 'checkpoint') return { text: t('done.checkpoint', { id: operation.checkpointId }) };
  return { text: operation?.location ? t(`done.${kind}`, { location: operation.location }) : t('done.stop.bare') };
}

export function Actions({ job, name }) {
  const { kind } = useStore(opened);
  return kind && job ? html`<${Dialog} key=${kind} kind=${kind} job=${job} name=${name} />` : null;
}

function Dialog({ kind, job, name }) {
  const { text: given } = useStore(token);
  const of = KINDS[kind];
  const [fields, setFields] = useState(() => of.fields(job));
  const [progress, setProgress] = useState(null);
  const [asksToken, setAsksToken] = useState(!given);
  const place = useRef(null);
  const number = useRef(crypto.randomUUID().replaceAll('-', ''));
  useEffect(() => { if (!place.current.open) place.current.showModal(); }, []);
  useEffect(() => { if (given) setAsksToken(false); }, [given]);
  // What had the focus has gone with the form before.
  useEffect(() => { place.current.querySelector('input, button[type=submit]')?.focus(); }, [asksToken]);
  const close = () => { place.current?.close(); opened.set({ kind: null }); };
  const isWrong = of.mustType && fields.typed !== job.name;
  const isUnderWay = progress?.isLoading;
  const begin = async (event) => {
    event.preventDefault();
    if (isWrong || isUnderWay) return;
    const began = performance.now();
    setProgress({ isLoading: true });
    try {
      const order = of.order(number.current, fields);
      const asked = order.query ? `?${new URLSearchParams(order.query)}` : '';
      const answer = await ask(jobPath(name, ...order.path) + asked, { method: order.method, body: order.body });
      let operation = {};
      if (of.outcome) {
        let told;
        do {
          await new Promise((done) => setTimeout(done, POLL_MS));
          told = await ask(jobPath(name, of.outcome, answer['request-id']));
        } while (told.status.id !== 'COMPLETED');
        operation = told.operation;
      }
      const result = of.outcome ? resultInWords(kind, operation) : { text: t('done.cancel') };
      setProgress({ ...result, took: performance.now() - began });
      announce(result.text, result.isBad ? 'en' : undefined);
      if (result.isBad) number.current = crypto.randomUUID().replaceAll('-', '');
    } catch (error) {
      if (error.status === 401) { setAsksToken(true); setProgress(null); } else setProgress({ isBad: true, text: error.message || t('error.0') });
    }
  };
  const field = (key, more = {}) => html`<label class="field">${t(`field.${key}`)} <input value=${fields[key]} onInput=${(event) => setFields({ ...fields, [key]: event.target.value })} ...${more} /></label>`;
  return html`<dialog ref=${place} onClose=${close} aria-labelledby="action-title" class="action">
    <h2 id="action-title">${t(`action.${kind}`)}</h2><p>${t(`about.${kind}`, { slots: job.stillframe['slot-pids'].length, name: job.name })}</p>
    ${asksToken ? html`<${TokenForm} onGiven=${() => setAsksToken(false)} />` : html`<form onSubmit=${begin}>
      ${'directory' in fields && field('directory', { spellcheck: false, required: kind === 'savepoint' })}
      ${'parallelism' in fields && field('parallelism', { type: 'number', min: 1, max: job.maxParallelism, required: true })}
      ${'typed' in fields && field('typed', { autocomplete: 'off', spellcheck: false, placeholder: job.name })}
      <p class="muted">${t('same.command')}</p><${Copied} text=${of.command(job.name, fields)} label=${t('copy.command')} />
      ${progress && html`<p class=${progress.isBad ? 'problem' : 'result'} role="status" data-result=${progress.isLoading ? 'loading' : progress.isBad ? 'bad' : 'good'}>
        ${progress.isLoading ? t('underway') : html`<span aria-hidden="true">${progress.isBad ? '✕ ' : '✓ '}</span><span lang=${progress.isBad ? 'en' : undefined}>${progress.text}</span>${progress.took ? html` <span class="muted">${t('took.span', { span: span(progress.took) })}</span>` : ''}`}</p>`}
      <p class="buttons"><button type="button" onClick=${close}>${t('close')}</button>
        ${(!progress || progress.isBad || isUnderWay) && html`<button type="submit" class=${kind === 'cancel' ? 'danger' : 'primary'} disabled=${isWrong || isUnderWay}>${t(`action.${kind}`)}</button>`}</p></form>`}
  </dialog>`;
}
