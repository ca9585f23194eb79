// The one sentence of a job. In English it is the host's own, so that `stillframe status` says the
// same; in Chinese it is made from the code and its arguments, or the host's where it has no code.
import { html } from './dom.js';
import { t, hasWords, choices } from './words.js';
import { count, percent } from './formats.js';
import { link } from './routes.js';

const FINE = ['keeps-up', 'starting', 'ended'];
const BAD = ['given-up', 'no-driver', 'stuck', 'checkpoints-failing'];
const TOLD_BY_HOST = ['reason', 'what'];

export const signOf = (code) => (FINE.includes(code) ? '✓' : BAD.includes(code) ? '✕' : '▲');
const toneOf = (code) => (FINE.includes(code) ? 'fine' : BAD.includes(code) ? 'bad' : 'warn');

/** Of a checkpoint that waits it is sometimes known for whose barriers, and who holds event time back. */
function keyOf({ code, args }) {
  const known = 'senders' in args ? '.senders' : code === 'time-stands-still' && 'task' in args ? '.task' : '';
  return `diagnosis.${code}${known}`;
}

export function inWords(diagnosis) {
  const key = keyOf(diagnosis);
  if (choices.value.language === 'en' || !hasWords(key)) return diagnosis.sentence;
  const given = Object.fromEntries(Object.entries(diagnosis.args).map(([name, value]) => [
    name, name === 'working' ? percent(value) : typeof value === 'number' ? count(value) : value]));
  return t(key, given);
}

/** Where to look: the task it names, or the view it is about. */
function where(diagnosis, job, tasks) {
  const task = tasks?.find((each) => each.name === diagnosis.args.task);
  if (diagnosis.code.startsWith('checkpoint') || diagnosis.code === 'storage-slow') return link(job, 'checkpoints');
  if (task) return link(job, 'tasks', task.id);
  if (['restarting', 'given-up'].includes(diagnosis.code)) return link(job, 'recovery');
  return null;
}

export function Sentence({ diagnosis, job, tasks }) {
  if (!diagnosis) return html`<p class="sentence tone-none">${t('sentence.none')}</p>`;
  const to = where(diagnosis, job, tasks);
  const isOwn = choices.value.language !== 'en' && (!hasWords(keyOf(diagnosis))
    || TOLD_BY_HOST.some((name) => name in diagnosis.args));
  return html`<p class=${`sentence tone-${toneOf(diagnosis.code)}`} data-code=${diagnosis.code}>
    <span class="sign" aria-hidden="true">${signOf(diagnosis.code)}</span>
    <span lang=${isOwn ? 'en' : undefined}>${inWords(diagnosis)}</span>
    ${to && html` <a href=${to}>${t('sentence.show')} →</a>`}</p>`;
}
