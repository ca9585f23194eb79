// The page: its header, the view that its address names, and what is said when news stops.
import { html, render, classes, useEffect, useState, useStore } from './dom.js';
import { choices, choose, LANGUAGES, loadWords, t } from './words.js';
import { jobPath, token, useAnswer } from './api.js';
import { clock, follow, live, pause, retry } from './live.js';
import { link, route, VIEWS } from './routes.js';
import { Announcer, announce, Patterns, Problem, State, word } from './parts.js';
import { Actions, ACTIONS, openAction } from './actions.js';
import { Help, listenToKeys, openHelp } from './keyboard.js';
import { inWords } from './sentence.js';
import { age, time } from './formats.js';
import { Jobs } from './jobs.js';
import { Overview } from './overview.js';
import { Checkpoints } from './checkpoints.js';
import { Checkpoint } from './checkpoint.js';
import { Recovery } from './recovery.js';
import { StateView } from './state.js';
import { Logs } from './logs.js';
import { Settings } from './settings.js';
import { Playground, usePlayground } from './playground.js';

const ENDED = ['FINISHED', 'CANCELED', 'FAILED'];
const SHOWN = { overview: Overview, checkpoints: Checkpoints, checkpoint: Checkpoint, recovery: Recovery, state: StateView, logs: Logs, settings: Settings };
const SCHEMES = { system: 'light', light: 'dark', dark: 'system' };

function Freshness() {
  const { status, figures, hello, isPaused } = useStore(live);
  const { ms } = useStore(clock);
  if (isPaused) return html`<button type="button" class="live paused" onClick=${() => pause(false)}>❚❚ ${t('live.paused')}</button>`;
  if (status === 'stale') return html`<span class="live stale">○ ${t('live.stale')}</span>`;
  if (status === 'connecting') return html`<span class="live">◌ ${t('live.connecting')}</span>`;
  // Of one job alone: a list may have jobs with drivers beside it.
  if (hello?.run === 'files' && figures?.state) return html`<span class="live">◌ ${t('live.files')}</span>`;
  return html`<span class=${classes('live', status === 'quiet' && 'quiet')}><span class="dot" aria-hidden="true">●</span> ${t('live.ago', { span: age(figures ? ms - figures.at : 0) })}</span>`;
}

function Chosen() {
  const { language, zone, scheme } = useStore(choices);
  const other = language === 'en' ? 'zh' : 'en';
  return html`<div class="chosen" role="group" aria-label=${t('chosen')}>
    <button type="button" onClick=${() => choose('zone', zone === 'utc' ? 'local' : 'utc')} aria-label=${t('zone.switch')} aria-pressed=${zone === 'utc'}>${zone === 'utc' ? 'UTC' : t('zone.local')}</button>
    <button type="button" onClick=${() => choose('language', other)} lang=${other === 'zh' ? 'zh-Hans' : 'en'} aria-label=${other === 'zh' ? '切换为中文' : 'Switch to English'}>${LANGUAGES[other]}</button>
    <button type="button" onClick=${() => choose('scheme', SCHEMES[scheme])} aria-label=${t('scheme.switch', { scheme: t(`scheme.${scheme}`) })}>${{ system: '◐', light: '○', dark: '●' }[scheme]}</button>
    <button type="button" onClick=${openHelp} aria-label=${t('keys')}>?</button></div>`;
}

function Header({ job, state, name, view, search, setSearch }) {
  const { figures } = useStore(live);
  const isPlayground = usePlayground();
  const isOver = ENDED.includes(state);
  const attempt = figures?.attempt ?? job?.stillframe.attempts;
  return html`<header class="top">
    <div class="top-line"><a class="brand" href="#/">Stillframe</a>
      ${isPlayground && html`<a href="#/playground">${t('playground')}</a>`}
      ${name && html`<span class="slash" aria-hidden="true">/</span><strong class="job-name"><a href=${link(name)}>${job?.name ?? name}</a></strong>
        ${state && html`<${State} of=${state} />`}
        ${job && html`<span class="muted">${word('guarantee', job.stillframe.guarantee)}</span><span class="muted">${t('attempt.number', { attempt })}</span>`}`}
      ${!name && setSearch && html`<label class="search"><span class="hidden">${t('search')}</span><input id="search" type="search" placeholder=${`${t('search')}  /`} value=${search} onInput=${(event) => setSearch(event.target.value)} /></label>`}
      <span class="push"></span><${Freshness} /><${Chosen} /></div>
    ${name && html`<div class="top-line second"><nav aria-label=${t('views')}><ul class="tabs">${VIEWS.map((each) => {
      const isHere = view === each || (each === 'checkpoints' && view === 'checkpoint');
      return html`<li><a href=${link(name, each)} aria-current=${isHere ? 'page' : undefined}>${t(`view.${each}`)}</a></li>`;
    })}</ul></nav><span class="push"></span>
      ${job && !isOver && state !== 'NO DRIVER' && html`<div class="orders" role="group" aria-label=${t('actions')}>${ACTIONS.map((each) => html`<button type="button" data-action=${each} class=${each === 'cancel' ? 'danger' : ''}
        onClick=${() => openAction(each)}>${t(`action.${each}`)}</button>`)}</div>`}</div>`}
  </header>`;
}

function Stale() {
  const { status, since, sentence, hello } = useStore(live);
  if (status !== 'stale') return null;
  return html`<div class="banner" role="alert"><span aria-hidden="true">○ </span>${hello ? t('stale.since', { time: time(since, since) }) : t('stale.never')}
    ${sentence && html` <span lang="en">${sentence}</span>`} <button type="button" onClick=${retry}>${t('stale.retry')}</button></div>`;
}

function Job({ at }) {
  const { changed, figures } = useStore(live);
  const { data: job, error } = useAnswer(jobPath(at.job), `${changed} ${figures?.state} ${figures?.attempt}`);
  const state = figures?.state ?? job?.state;
  useEffect(() => { document.title = `${job?.name ?? at.job} · Stillframe`; }, [job?.name, at.job]);
  useEffect(() => { if (state) announce(t('announce.state', { name: job?.name ?? at.job, state: word('state', state) })); }, [state]);
  const code = figures?.diagnosis?.code;
  useEffect(() => { if (code) announce(inWords(figures.diagnosis)); }, [code]);
  const known = job && { ...job, state: state ?? job.state };
  const View = SHOWN[at.view];
  return html`<${Header} job=${known} state=${state} name=${at.job} view=${at.view} /><${Stale} />
    <main id="main" tabindex="-1">${error && !job ? html`<${Problem} error=${error} />`
      : html`<${View} key=${`${at.view} ${at.id ?? ''}`} job=${known} name=${at.job} query=${at.query} task=${at.task} id=${at.id} />`}</main>
    <${Actions} job=${known} name=${at.job} />`;
}

function AllJobs({ at }) {
  const [search, setSearch] = useState(at.query.search ?? '');
  useEffect(() => { document.title = 'Stillframe'; }, []);
  return html`<${Header} search=${search} setSearch=${setSearch} /><${Stale} /><main id="main" tabindex="-1"><${Jobs} search=${search} /></main>`;
}

function PlaygroundPage() {
  return html`<${Header} /><main id="main" tabindex="-1"><${Playground} /></main>`;
}

function Page() {
  useStore(choices);
  useStore(token);
  const at = useStore(route);
  const { status } = useStore(live);
  useEffect(() => follow(at.job ? `${jobPath(at.job)}/events` : 'events', at.task), [at.job, at.task]);
  const skip = (event) => { event.preventDefault(); document.querySelector('#main')?.focus(); };
  return html`<div class=${classes('page', status === 'stale' && 'is-stale', status === 'quiet' && 'is-quiet')}>
    <a class="skip" href="#main" onClick=${skip}>${t('skip')}</a><${Patterns} />
    ${at.job ? html`<${Job} key=${at.job} at=${at} />` : at.view === 'playground' ? html`<${PlaygroundPage} />` : html`<${AllJobs} at=${at} />`}<${Help} /><${Announcer} /></div>`;
}

await loadWords();
listenToKeys();
render(html`<${Page} />`, document.querySelector('#page'));
