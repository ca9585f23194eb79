// Log lines of the driver and of slots, newest last.
import { html, useEffect, useRef, useState, useStore } from './dom.js';
import { t } from './words.js';
import { live } from './live.js';
import { ask, jobPath, useAnswer } from './api.js';
import { Empty, Loading, Problem } from './parts.js';
import { moment, time, UNKNOWN } from './formats.js';
import { go, link } from './routes.js';

const LEVELS = ['INFO', 'WARNING', 'ERROR'];

export function Logs({ name, query }) {
  const { logs, changed } = useStore(live);
  const [older, setOlder] = useState([]);
  const [follows, setFollows] = useState(true);
  const level = query.level ?? '';
  const end = useRef(null);
  const asked = level ? `?level=${level}` : '';
  const { data, error } = useAnswer(`${jobPath(name, 'logs')}${asked}`, `${changed} ${logs.length}`);
  const lines = [...older, ...(data?.lines ?? [])];
  useEffect(() => { if (follows) end.current?.scrollIntoView?.({ block: 'nearest' }); }, [lines.length, follows]);
  const filter = (changes) => { setOlder([]); go(link(name, 'logs', '', { ...query, ...changes })); };
  const more = async () => {
    const before = await ask(`${jobPath(name, 'logs')}?before=${lines[0].number}${level ? `&level=${level}` : ''}`);
    setOlder([...before.lines, ...older]);
  };
  if (!data) return error ? html`<${Problem} error=${error} />` : html`<${Loading} />`;
  return html`<h1 class="hidden">${t('view.logs')}</h1><section class="panel">
    <form class="filters" onSubmit=${(event) => event.preventDefault()}>
      <label>${t('level')} <select value=${level} onChange=${(event) => filter({ level: event.target.value })}><option value="">${t('filter.all')}</option>
        ${LEVELS.map((each) => html`<option value=${each}>${each}</option>`)}</select></label>
      <label><input type="checkbox" checked=${follows} onChange=${(event) => setFollows(event.target.checked)} /> ${t('logs.follow')}</label>
      ${data.more && lines.length > 0 && html`<button type="button" onClick=${more}>${t('pages.older')}</button>`}</form>
    ${lines.length === 0 ? html`<${Empty}>${t('logs.none')}<//>` : html`<div class="table logs" role="region" aria-label=${t('view.logs')} tabindex="0"><table>
      <caption class="hidden">${t('view.logs')}</caption>
      <thead><tr><th scope="col">${t('when')}</th><th scope="col">${t('level')}</th><th scope="col">${t('who')}</th><th scope="col" class="number">${t('attempt')}</th><th scope="col" class="number">${t('kind.checkpoint')}</th><th scope="col">${t('text')}</th></tr></thead>
      <tbody>${lines.map((line) => html`<tr key=${line.number} class=${`level-${line.level}`}><td title=${moment(line.at)}>${time(line.at)}</td>
        <td lang="en">${line.level}</td><td>${line.slot === null ? t('driver') : t('slot.number', { slot: line.slot })}</td><td class="number">${line.attempt ?? UNKNOWN}</td>
        <td class="number">${line.checkpoint ?? UNKNOWN}</td><td class="log-text" lang="en">${line.text}</td></tr>`)}</tbody></table><span ref=${end}></span></div>`}
    <p class="muted">${t('logs.where')}</p></section>`;
}
