// Where the page is, behind the #: such an address collides with none of the API, works below any
// path, and brings back what somebody else saw.
import { store } from './dom.js';

export const VIEWS = ['overview', 'checkpoints', 'recovery', 'state', 'logs', 'settings'];

function parsed() {
  const [path, behind = ''] = location.hash.replace(/^#\/?/, '').split('?');
  const parts = path.split('/').filter(Boolean).map(decode);
  const query = Object.fromEntries(new URLSearchParams(behind));
  if (parts[0] === 'playground') return { view: 'playground', query };
  if (parts[0] !== 'jobs' || parts.length < 2) return { view: 'jobs', query };
  const [, job, section = 'overview', id] = parts;
  if (section === 'tasks') return { view: 'overview', job, task: id, query };
  if (section === 'checkpoints' && id) return { view: 'checkpoint', job, id: Number(id), query };
  return { view: VIEWS.includes(section) ? section : 'overview', job, query };
}

function decode(text) {
  try { return decodeURIComponent(text); } catch { return text; }
}

export const route = store(parsed());
addEventListener('hashchange', () => {
  const found = parsed();
  route.set({ job: undefined, task: undefined, id: undefined, ...found });
});

export function link(job, section = '', id = '', query = {}) {
  const parts = ['jobs', job, section === 'overview' ? '' : section, id].filter((each) => each !== '');
  const asked = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== '' && value !== undefined));
  const behind = asked.toString();
  return `#/${parts.map(encodeURIComponent).join('/')}${behind ? `?${behind}` : ''}`;
}

export const go = (hash) => { location.hash = hash; };
