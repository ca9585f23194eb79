// Every view and action by keyboard. Nothing is taken while somebody writes into a field.
import { html, store, useEffect, useRef, useStore } from './dom.js';
import { t } from './words.js';
import { live, pause } from './live.js';
import { go, link, route } from './routes.js';
import { openAction } from './actions.js';

const help = store({ isOpen: false });
const BY_LETTER = { o: 'overview', c: 'checkpoints', r: 'recovery', s: 'state', l: 'logs', t: 'settings' };
const ORDERS = { c: 'checkpoint', s: 'savepoint', r: 'rescale', x: 'stop' };
const KEYS = [
  ['?', 'help'], ['/', 'search'], ['g j', 'jobs'], ['g o', 'overview'], ['g c', 'checkpoints'], ['g r', 'recovery'], ['g s', 'state'], ['g l', 'logs'], ['g t', 'settings'],
  ['j k', 'rows'], ['Enter', 'open'], ['Esc', 'close'], ['[ ]', 'others'], ['← ↑ → ↓', 'walk'], ['.', 'pause'], ['Space', 'play'],
  ['a c', 'order.checkpoint'], ['a s', 'order.savepoint'], ['a r', 'order.rescale'], ['a x', 'order.stop'],
];
let prefix = '';
let forget = null;

const isWriting = (target) => document.querySelector('dialog[open]') !== null || Boolean(target.closest?.('input, select, textarea'));

function rows(step) {
  const all = [...document.querySelectorAll('tbody tr[data-open] a')];
  if (all.length === 0) return;
  const at = all.indexOf(document.activeElement);
  all[Math.max(0, Math.min(all.length - 1, at < 0 ? 0 : at + step))].focus();
}

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || isWriting(event.target)) return;
  const { job, view, id, task } = route.value;
  const before = prefix;
  prefix = '';
  clearTimeout(forget);
  const { key } = event;
  if (before === 'g') {
    if (key === 'j') go('#/');
    else if (BY_LETTER[key] && job) go(link(job, BY_LETTER[key]));
  } else if (before === 'a') {
    if (ORDERS[key] && job) openAction(ORDERS[key]);
  } else if (key === 'g' || key === 'a') {
    prefix = key;
    forget = setTimeout(() => { prefix = ''; }, 1500);
  } else if (key === '?') help.set({ isOpen: true });
  else if (key === '/') document.querySelector('#search')?.focus();
  else if (key === 'j') rows(1);
  else if (key === 'k') rows(-1);
  else if (key === '.') pause(!live.value.isPaused);
  else if (key === 'Escape' && task) go(link(job));
  else if (key === '[' && view === 'checkpoint') go(link(job, 'checkpoints', Math.max(1, id - 1)));
  else if (key === ']' && view === 'checkpoint') go(link(job, 'checkpoints', id + 1));
  else if (key === ' ' && view === 'checkpoint' && !event.target.closest('button, a, summary')) document.querySelector('[data-play]')?.click();
  else return;
  event.preventDefault();
}

export const listenToKeys = () => addEventListener('keydown', pressed);
export const openHelp = () => help.set({ isOpen: true });

export function Help() {
  const { isOpen } = useStore(help);
  const place = useRef(null);
  useEffect(() => { if (isOpen && !place.current.open) place.current.showModal(); }, [isOpen]);
  const close = () => { place.current?.close(); help.set({ isOpen: false }); };
  return isOpen && html`<dialog ref=${place} onClose=${close} aria-labelledby="help-title" class="help"><h2 id="help-title">${t('keys')}</h2>
    <dl>${KEYS.map(([keys, what]) => html`<div><dt>${keys.split(' ').map((each) => html`<kbd>${each}</kbd> `)}</dt><dd>${t(`key.${what}`)}</dd></div>`)}</dl>
    <p class="buttons"><button type="button" onClick=${close}>${t('close')}</button></p></dialog>`;
}
