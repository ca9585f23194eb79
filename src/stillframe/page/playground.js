// The playground's panel: the board beside the truth, what can be broken, and the tour. Only the
// host of `stillframe playground` answers here; elsewhere nothing of it is shown.
import { html, classes, store, useEffect, useState, useStore } from './dom.js';
import { t } from './words.js';
import { ask, token } from './api.js';
import { Command, Problem, TokenForm, announce } from './parts.js';
import { count } from './formats.js';
import { link } from './routes.js';

const LOOK_MS = 1000;
const KEPT = 'stillframe-playground';
const known = store({ isHere: sessionStorage.getItem(KEPT) !== null, state: null, error: null });

async function look() {
  try {
    known.set({ isHere: true, state: await ask('playground'), error: null });
    sessionStorage.setItem(KEPT, 'here');
  } catch (error) {
    known.set({ error });
  }
}

/** Whether this host is a playground: its own address leads there, so no other host is asked. */
export const usePlayground = () => useStore(known).isHere;

const signed = (number) => `${number > 0 ? '+' : ''}${count(number)}`;

function Verdict({ isRight, children }) {
  return html`<span class=${classes('verdict', isRight ? 'good' : 'bad')}>${children} <span aria-hidden="true">${isRight ? '✓' : '✕'}</span></span>`;
}

function Board({ score }) {
  if (!score) return html`<p class="muted">${t('playground.board.none')}</p>`;
  const surplus = Object.entries(score.surplus);
  return html`<div class="board"><dl>
    <dt>${t('playground.ours')}</dt><dd data-figure="ours">${count(score.ours.rows)} <${Verdict} isRight=${score.ours.exact}>${score.ours.exact ? t('playground.exact')
      : t('playground.wrong', { lost: count(score.ours.lost), doubled: count(score.ours.doubled) })}<//></dd>
    <dt>${t('playground.naive')}</dt><dd data-figure="naive">${count(score.naive.rows)} <${Verdict} isRight=${score.naive.doubled === 0 && score.naive.lost === 0}>${t('playground.wrong', { lost: count(score.naive.lost), doubled: count(score.naive.doubled) })}<//></dd>
    <dt>${t('playground.state')}</dt><dd data-figure="state"><${Verdict} isRight=${surplus.length === 0}>${surplus.length === 0 ? t('playground.exact')
      : surplus.map(([app, by]) => `${app} ${signed(by)}`).join(', ')}<//></dd></dl>
    <ul class="apps">${Object.entries(score.apps).map(([app, { state, truth }]) => html`<li key=${app}>${app} ${count(state)} <${Verdict} isRight=${state === truth}>${state === truth ? '=' : signed(state - truth)}<//></li>`)}</ul>
    <p class="muted">${t('playground.upto', { checkpoint: score.checkpoint, attempt: score.attempt })}</p></div>`;
}

function Prediction({ of }) {
  if (!of) return null;
  const counts = Object.entries(of.counts).map(([app, by]) => `${app} ${signed(by)}`).join(', ');
  return html`<div class="prediction" role="note"><strong>${t('playground.prediction')}</strong> ${t('playground.predicted', { checkpoint: of.checkpoint, ours: count(of.ours), naive: count(of.naive), counts: counts || t('playground.none') })}</div>`;
}

function buttons(state) {
  const pid = (slot) => state.slots[slot] ?? 'PID';
  const aligned = state.settings.mode === 'exactly-once';
  const mode = aligned ? 'at-least-once' : 'exactly-once';
  const parallelism = state.settings.parallelism === 3 ? 2 : 3;
  const kills = state.slots.map((_, slot) => ({ key: `slot-${slot}`, words: t('playground.kill_slot', { slot }), body: { action: 'kill_slot', slot }, command: `kill -9 ${pid(slot)}` }));
  return [
    ...kills,
    { key: 'executor', words: t('playground.kill_executor'), body: { action: 'kill_executor' }, command: 'kill -9 EXECUTOR', off: state.executor_off },
    { key: 'freeze', words: t('playground.freeze', { slot: 1, seconds: 8 }), body: { action: 'freeze_slot', slot: 1, seconds: 8 }, command: `kill -STOP ${pid(1)}; sleep 8; kill -CONT ${pid(1)}` },
    { key: 'driver', words: t('playground.kill_driver'), body: { action: 'kill_driver' }, command: `kill -9 ${state.driver ?? 'DRIVER'}` },
    { key: 'slow', words: t('playground.slow'), body: { action: 'slow_channel' }, command: 'faults.json: {"delay": {"source": 0, "target": 1, "seconds": 3}}' },
    { key: 'poison', words: t('playground.poison'), body: { action: 'poison' }, command: 'faults.json: {"poison": …}' },
    { key: 'disk', words: t('playground.full_disk'), body: { action: 'full_disk' }, command: 'faults.json: {"full_disk": true}' },
    { key: 'heal', words: t('playground.heal'), body: { action: 'heal' }, command: 'faults.json: {}' },
    { key: 'flip', words: t('playground.flip'), body: { action: 'flip_byte' } },
    { key: 'back', words: t('playground.flip_back'), body: { action: 'flip_back' } },
    { key: 'mode', words: aligned ? t('playground.unalign') : t('playground.align'), body: { action: 'mode', mode }, command: `--set checkpointMode=${mode}` },
    { key: 'rescale', words: t('playground.rescale', { parallelism }), body: { action: 'rescale', parallelism }, command: `stillframe rescale ${state.job} ${parallelism}` },
    { key: 'upgrade', words: t('playground.upgrade'), body: { action: 'upgrade' }, command: `stillframe stop ${state.job} --savepoint …`, off: state.settings.version === 2 ? t('playground.upgraded') : null },
  ];
}

function Steps({ tour, run, isBusy }) {
  return html`<ol class="tour">${tour.steps.map((step) => html`<li key=${step.number} data-step=${step.number} class=${classes(tour.at === step.number && 'here')}>
    <button type="button" disabled=${isBusy || step.off} title=${step.off ?? step.does} onClick=${() => run({ step: step.number })}>${step.number}</button>
    <strong>${t(`playground.step.${step.number}`)}</strong>
    ${tour.at === step.number && html`<span role="status">${t('playground.runs')} <span lang="en" class="muted">${tour.waits_long ?? tour.waits_for ?? ''}</span></span>`}
    ${step.off && html` <span class="muted" lang="en">${step.off}</span>`}
    ${step.result && html`<div class=${step.result.is_right ? 'result' : 'problem'}><${Verdict} isRight=${step.result.is_right}>${step.result.is_right ? t('playground.as_predicted') : t('playground.otherwise')}<//> ${step.result.seconds} s
      <p lang="en"><span class="muted">${t('playground.predicted.word')}</span> ${step.result.predicted}</p>
      <p lang="en"><span class="muted">${t('playground.observed.word')}</span> ${step.result.observed}</p>
      ${step.result.by_hand.map((line) => html`<${Command} key=${line}>${line}<//>`)}</div>`}</li>`)}</ol>`;
}

export function Playground() {
  const { state, error } = useStore(known);
  const { text: given } = useStore(token);
  const [refusal, setRefusal] = useState(null);
  useEffect(() => {
    document.title = `${t('playground')} · Stillframe`;
    look();
    const again = setInterval(() => { if (!document.hidden) look(); }, LOOK_MS);
    return () => clearInterval(again);
  }, []);
  useEffect(() => { if (state?.last) announce(state.last.text, 'en'); }, [state?.last?.text]);
  if (!state) return error ? html`<${Problem} error=${error} />` : null;
  const send = (path) => async (body) => {
    setRefusal(null);
    try { await ask(path, { method: 'POST', body }); } catch (refused) { setRefusal(refused); }
    await look();
  };
  const act = send('playground/actions');
  const run = send('playground/tour');
  const isBusy = state.busy !== null;
  return html`<h1>${t('playground')} <a href=${link(state.job)}>${state.job}</a></h1>
    ${!given && html`<${TokenForm} />`}
    <section class="panel" aria-label=${t('playground.board')}><h2>${t('playground.board')}</h2><${Board} score=${state.score} /><${Prediction} of=${state.prediction} /></section>
    <section class="panel" aria-label=${t('playground.break')}><h2>${t('playground.break')}</h2>
      <ul class="breaks">${buttons(state).map((each) => html`<li key=${each.key}><button type="button" data-break=${each.key} disabled=${isBusy || !given || Boolean(each.off)} onClick=${() => act(each.body)}>${each.words}</button>
        ${each.command && html`<${Command}>${each.command}<//>`}${each.off && html`<span class="muted" lang="en">${each.off}</span>`}</li>`)}</ul>
      ${isBusy && html`<p role="status">${t('playground.busy', { what: state.busy })}</p>`}
      ${state.last && html`<p lang="en" class=${classes(state.last.failed && 'problem')}>${state.last.action}: ${state.last.text}</p>`}
      ${refusal && html`<${Problem} error=${refusal} />`}
      ${state.failure && html`<p lang="en" class="muted">${state.failure}</p>`}</section>
    <section class="panel" aria-label=${t('playground.tour')}><h2>${t('playground.tour')}</h2>
      <button type="button" class="primary" data-tour="all" disabled=${isBusy || !given} onClick=${() => run({ from: 1 })}>${t('playground.all')}</button>
      <${Steps} tour=${state.tour} run=${run} isBusy=${isBusy || !given} /></section>`;
}
