// The timeline of checkpoints, by uPlot: a stack of phases each. Idle stretches take no room, because
// checkpoints stand beside each other however long the job was down between them.
import { html, useEffect, useRef } from './dom.js';
import { t } from './words.js';
import uPlot from './vendor/uplot.js';
import { PHASES, useColours } from './parts.js';
import { span, time } from './formats.js';

const SHOWN_MAX = 400;

/** At most as many bars as can be told apart: of several that share one the slowest stands. */
function thinned(series) {
  const all = series.id.map((_, at) => at);
  if (all.length <= SHOWN_MAX) return all;
  const each = Math.ceil(all.length / SHOWN_MAX);
  const total = (at) => PHASES.reduce((sum, name) => sum + (series[name][at] ?? 0), 0);
  const kept = [];
  for (let at = 0; at < all.length; at += each) {
    kept.push(all.slice(at, at + each).reduce((most, next) => (total(next) > total(most) ? next : most)));
  }
  return kept;
}

export function Timeline({ series, open }) {
  const place = useRef(null);
  const scheme = useColours();
  const key = JSON.stringify(series);
  useEffect(() => {
    const element = place.current;
    if (series.id.length === 0) return undefined;
    const shown = thinned(series);
    const colour = (name) => {
      // As a property it is not yet one of two; as the colour of something it is.
      element.style.color = `var(${name})`;
      return getComputedStyle(element).color;
    };
    const sums = PHASES.map(() => []);
    for (const at of shown) {
      let sum = 0;
      PHASES.forEach((name, phase) => { sum += series[name][at] ?? 0; sums[phase].push(sum); });
    }
    const failed = shown.map((at, n) => (series.status[at] === 'f' ? Math.max(sums.at(-1)[n], 1) : null));
    const bars = uPlot.paths.bars({ size: [0.78, 28], gap: 0 });
    const axis = { stroke: colour('--muted'), grid: { stroke: colour('--line'), width: 1 }, ticks: { show: false }, font: '12px sans-serif' };
    const chart = new uPlot({
      width: element.clientWidth, height: 180, legend: { show: false },
      cursor: { y: false, drag: { x: true, y: false } },
      scales: { x: { time: false, range: (_, low, high) => [Math.min(low, high - 12) - 0.6, high + 0.6] }, y: { range: (_, low, high) => [0, Math.max(high, 1) * 1.15] } },
      axes: [
        { ...axis, grid: { show: false }, space: 90, values: (_, at) => at.map((n) => (Number.isInteger(n) && shown[n] !== undefined ? time(series.triggered[shown[n]]) : '')) },
        { ...axis, size: 60, values: (_, at) => at.map((n) => span(n)) },
      ],
      series: [{}, ...PHASES.map((name, phase) => ({ label: name, fill: colour(`--phase-${name}`), width: 0, paths: bars, points: { show: false } })).reverse(),
        { label: 'failed', stroke: colour('--failed'), paths: () => null, points: { show: false } }],
      hooks: {
        draw: [(u) => {
          u.ctx.fillStyle = colour('--failed');
          u.ctx.font = `${14 * devicePixelRatio}px sans-serif`;
          u.ctx.textAlign = 'center';
          failed.forEach((high, n) => {
            if (high !== null) u.ctx.fillText('✕', u.valToPos(n, 'x', true), u.valToPos(high, 'y', true) - 4 * devicePixelRatio);
          });
        }],
      },
    }, [shown.map((_, n) => n), ...[...sums].reverse(), failed], element);
    chart.over.addEventListener('click', () => {
      const at = shown[chart.cursor.idx];
      if (at !== undefined && chart.select.width === 0) open(series.id[at]);
    });
    const wide = new ResizeObserver(() => chart.setSize({ width: element.clientWidth, height: 180 }));
    wide.observe(element);
    return () => { wide.disconnect(); chart.destroy(); };
  }, [key, scheme]);
  return html`<div class="chart" ref=${place} role="img" aria-label=${t('timeline.about')}></div>`;
}
