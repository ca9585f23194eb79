// The barriers of a finished checkpoint over the graph, stretched so that an eye can follow: by the
// scrubber, step by step, or played. Who asked for less motion gets the steps as a list alone.
import { html, useEffect, useMemo, useRef, useState } from './dom.js';
import { t } from './words.js';
import { endOf, momentOf, stepsOf } from './barriers.js';
import { graphOf, JobGraph } from './graph.js';
import { brief, span } from './formats.js';

const PLAYED_MS = 1500;
const SHOWN_MAX = 200;

export function Replay({ job, name, model, hasArrivals }) {
  const end = endOf(model);
  const steps = useMemo(() => stepsOf(model), [model]);
  const [ms, setMs] = useState(end);
  const [isPlaying, setPlaying] = useState(false);
  const isCalm = matchMedia('(prefers-reduced-motion: reduce)').matches;
  const began = useRef(null);
  const stretched = Math.max(1, PLAYED_MS / end);
  const lasts = end * stretched;
  useEffect(() => {
    if (!isPlaying) return undefined;
    let frame = requestAnimationFrame(function draw(at) {
      began.current ??= at - (ms >= end ? 0 : ms * stretched);
      const next = (at - began.current) / stretched;
      setMs(Math.min(end, next));
      if (next < end) frame = requestAnimationFrame(draw);
      else setPlaying(false);
    });
    return () => { cancelAnimationFrame(frame); began.current = null; };
  }, [isPlaying]);
  const stop = (to) => { setPlaying(false); setMs(Math.max(0, Math.min(end, to))); };
  const nextStep = steps.find((step) => step.ms > ms + 1e-6);
  const lastStep = [...steps].reverse().find((step) => step.ms < ms - 1e-6);
  const shape = graphOf(job);
  // Of many steps those around this moment.
  const past = steps.findLastIndex((step) => step.ms <= ms + 1e-6) + 1;
  const from = Math.max(0, Math.min(steps.length - SHOWN_MAX, past - SHOWN_MAX / 2));
  return html`<section class="panel replay"><div class="panel-head"><h2>${t('replay')}</h2>
      <p class="muted">${t('replay.factor', { factor: brief(stretched), span: span(lasts) })}</p></div>
    <${JobGraph} job=${job} name=${name} barriers=${momentOf(model, shape.edges, ms, t)} />
    <p class="muted replay-signs">◆ ${t('replay.sign.moves')} · ◇ ${t('replay.sign.waits')} · ■ ${t('replay.sign.taken')} · ✓ ${t('replay.sign.acked')}</p>
    <div class="replay-controls">
      <button type="button" onClick=${() => stop(0)} aria-label=${t('replay.begin')}>|◀</button>
      <button type="button" onClick=${() => stop(lastStep?.ms ?? 0)} aria-label=${t('replay.back')}>◂</button>
      ${!isCalm && html`<button type="button" class="play" data-play onClick=${() => setPlaying(!isPlaying)}>${isPlaying ? `❚❚ ${t('replay.pause')}` : `▶ ${t('replay.play')}`} <kbd>Space</kbd></button>`}
      <button type="button" data-step onClick=${() => stop(nextStep?.ms ?? end)} aria-label=${t('replay.step')}>▸</button>
      <input type="range" min="0" max=${end} step="any" value=${ms} aria-label=${t('replay.scrub')} onInput=${(event) => stop(Number(event.target.value))} />
      <output class="number" data-at=${ms}>t + ${span(ms)}</output>
    </div>
    ${!hasArrivals && html`<p class="muted">${t('replay.coarse')}</p>`}
    <details open=${isCalm}><summary>${t('replay.steps', { count: steps.length })}</summary>
      <ol class="replay-steps" start=${from + 1}>${steps.slice(from, from + SHOWN_MAX).map((step) => html`<li class=${step.ms <= ms + 1e-6 ? 'past' : ''} data-step-kind=${step.kind}>
        <span class="number">+${span(step.ms)}</span> ${t(step.kind === 'last' && !step.from ? 'step.last.any' : `step.${step.kind}`, { who: `${step.name} ${step.index}`, from: step.from ?? '' })}</li>`)}</ol>
      ${steps.length > SHOWN_MAX && html`<p class="muted">${t('replay.around', { from: from + 1, to: from + SHOWN_MAX, count: steps.length })}</p>`}</details>
  </section>`;
}
