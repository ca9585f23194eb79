// The graph of a job: laid out once per plan by dagre, drawn as SVG. On a narrow screen it is a
// column of cards instead. Both are links in the order in which records flow.
import { html, classes, useEffect, useMemo, useRef, useState } from './dom.js';
import { t, choices } from './words.js';
import { Graph as Layout, layout } from './vendor/dagre.js';
import { byteRate, bytes, percent, rate, span, UNKNOWN } from './formats.js';
import { SharesBar, sharesInWords } from './parts.js';
import { link, go } from './routes.js';
import { now } from './live.js';

const WIDE = 248;
const HIGH = 104;
const MARGIN = 12;
/** A plan with more tasks is laid out in a quicker way, in a window of its own with a search. */
const LARGE = 40;

/** Tasks, and who sends to whom, from GET /jobs/J. */
export function graphOf(job) {
  const tasks = job.vertices.map((vertex) => ({ id: vertex.id, name: vertex.name, parallelism: vertex.parallelism }));
  const pairs = new Map();
  for (const node of job.plan.nodes) {
    for (const input of node.inputs) {
      pairs.set(`${input.id}>${node.id}`, { key: `${input.id}>${node.id}`, from: input.id, to: node.id, how: input.ship_strategy });
    }
  }
  return { tasks, edges: [...pairs.values()] };
}

/** What flows on each edge now, by its key; several between the same two tasks are one here. */
function flows(figures, hello) {
  const found = new Map();
  for (const each of figures?.edges ?? []) {
    const key = `${hello?.tasks[each.source]?.id}>${hello?.tasks[each.target]?.id}`;
    found.set(key, [...(found.get(key) ?? []), each]);
  }
  return new Map([...found].map(([key, each]) => [key, together(each)]));
}

function together(found) {
  const sum = (name) => (found.every((each) => each[name] === null) ? null : found.reduce((all, each) => all + (each[name] ?? 0), 0));
  return {
    records: sum('records_per_second'), bytes: sum('bytes_per_second'), held: sum('held'), channels: sum('channels'),
    fill: found.every((each) => each.fill === null) ? null : Math.max(...found.map((each) => each.fill ?? 0)),
  };
}

function laidOut({ tasks, edges }) {
  const graph = new Layout({ multigraph: true });
  graph.setGraph({ rankdir: 'LR', ranker: tasks.length > LARGE ? 'longest-path' : 'network-simplex', nodesep: 28, ranksep: 44, edgesep: 20, marginx: MARGIN, marginy: MARGIN });
  graph.setDefaultEdgeLabel(() => ({}));
  for (const task of tasks) graph.setNode(task.id, { width: WIDE, height: HIGH });
  for (const edge of edges) graph.setEdge(edge.from, edge.to, { width: 132, height: 64, labelpos: 'c' }, edge.key);
  layout(graph);
  const { width, height } = graph.graph();
  return {
    width, height,
    node: Object.fromEntries(tasks.map((task) => [task.id, graph.node(task.id)])),
    edge: Object.fromEntries(edges.map((edge) => [edge.key, graph.edge(edge.from, edge.to, edge.key)])),
  };
}

/** A smooth way through the points that dagre gives. */
function way(points) {
  const [first, ...rest] = points;
  if (rest.length < 2) return `M${first.x},${first.y}L${rest.map((p) => `${p.x},${p.y}`).join('L')}`;
  let path = `M${first.x},${first.y}`;
  for (let at = 0; at < rest.length - 1; at += 1) {
    const end = at === rest.length - 2 ? rest[at + 1] : { x: (rest[at].x + rest[at + 1].x) / 2, y: (rest[at].y + rest[at + 1].y) / 2 };
    path += `Q${rest[at].x},${rest[at].y} ${end.x},${end.y}`;
  }
  return path;
}

/** The place on an edge after this share of its way. */
function along(points, share) {
  const lengths = points.slice(1).map((point, at) => Math.hypot(point.x - points[at].x, point.y - points[at].y));
  let left = lengths.reduce((all, each) => all + each, 0) * Math.max(0, Math.min(1, share));
  for (let at = 0; at < lengths.length; at += 1) {
    if (left <= lengths[at] || at === lengths.length - 1) {
      const part = lengths[at] ? left / lengths[at] : 0;
      return { x: points[at].x + (points[at + 1].x - points[at].x) * part, y: points[at].y + (points[at + 1].y - points[at].y) * part };
    }
    left -= lengths[at];
  }
  return points[0];
}

function shortened(text, most) {
  let wide = 0;
  for (let at = 0; at < text.length; at += 1) {
    wide += text.charCodeAt(at) > 0x2e80 ? 2 : 1;
    if (wide > most) return `${text.slice(0, at)}…`;
  }
  return text;
}

export const watermarkLag = (watermark) => (watermark === null || watermark === undefined ? null : now() - watermark);

function inWords(task, told) {
  if (!told) return `${task.name} ×${task.parallelism}, ${t('unmeasured')}`;
  return `${task.name} ×${task.parallelism}, ${t('in')} ${rate(told.records_in_per_second)}, ${t('out')} ${rate(told.records_out_per_second)}, ${sharesInWords(told)}`;
}

/** The alignment of one of its subtasks that has lasted longest, in words. */
function waitsFor(aligning) {
  const { subtask, since, missing } = aligning;
  const who = missing.map((each) => each.join(' ')).slice(0, 2).join(', ');
  return t('aligning', { subtask, who, span: span(Math.max(0, now() - since)) });
}

/** `isFar`: of a large graph, out of its window. It is there to be found and gone to, and no more. */
function Node({ task, place, told, job, mark, isSelected, barrier, aligning, isFar }) {
  const lag = watermarkLag(told?.watermark);
  return html`<a class=${classes('node', mark && 'node-marked', isSelected && 'node-selected')} href=${link(job, 'tasks', task.id)}
    aria-label=${inWords(task, told)} data-task=${task.id} transform=${`translate(${place.x - WIDE / 2},${place.y - HIGH / 2})`}>
    <rect class="node-box" width=${WIDE} height=${HIGH} rx="8" />
    <text class="node-name" x="12" y="24">${mark ? '▲ ' : ''}${shortened(task.name, mark ? 23 : 26)}</text>
    ${!isFar && html`<title>${task.name}</title>
    <text class="node-times number" x=${WIDE - 12} y="24" text-anchor="end">×${task.parallelism}</text>
    ${barrier ? html`<text class="node-barrier" x="12" y="56">${barrier.sign} ${barrier.text}</text>
      <text class="node-figure muted" x="12" y="82">${shortened(barrier.more, 34)}</text>` : html`
    <g transform="translate(12,36)"><${SharesBar} of=${told} width=${WIDE - 24} height="12" /></g>
    <text class="node-figure" x="12" y="68">${t('share.working')} ${percent(told?.working)}</text>
    <text class="node-figure" x=${WIDE - 12} y="68" text-anchor="end">${t('share.back')} ${percent(told?.backpressured)}</text>
    ${aligning ? html`<text class="node-figure node-aligning" x="12" y="90">${shortened(`◇ ${waitsFor(aligning)}`, 38)}<title>${waitsFor(aligning)}</title></text>`
      : html`<text class="node-figure muted" x="12" y="90">${t('watermark')} ${lag === null ? UNKNOWN : span(-lag)}</text>
    <text class="node-figure muted" x=${WIDE - 12} y="90" text-anchor="end">${told ? bytes(told.queued_bytes) : UNKNOWN} ${t('queued')}</text>`}`}`}
  </a>`;
}

function Edge({ edge, place, told, barrier, isFar }) {
  const { points, x, y } = place;
  if (isFar) return html`<g class="edge"><path class="edge-way" d=${way(points)} marker-end="url(#arrow)" /></g>`;
  const marks = barrier?.map(({ share, sign }) => ({ ...along(points, share), sign })) ?? [];
  return html`<g class="edge">
    <path class=${classes('edge-way', told?.held > 0 && 'edge-held')} d=${way(points)} marker-end="url(#arrow)" />
    ${!barrier && html`<text class="edge-figure number" x=${x} y=${y - 22} text-anchor="middle">${told ? rate(told.records) : UNKNOWN}</text>
    <text class="edge-figure muted number" x=${x} y=${y - 8} text-anchor="middle">${told ? byteRate(told.bytes) : ''}</text>`}
    ${told?.fill !== null && told?.fill !== undefined && html`
      <rect class="edge-room" x=${x - 32} y=${y + 8} width="64" height="6" rx="1" />
      <rect class="edge-fill" x=${x - 32} y=${y + 8} width=${64 * told.fill} height="6" rx="1" />
      <text class="edge-figure muted" x=${x} y=${y + 28} text-anchor="middle">${t('edge.full', { share: percent(told.fill) })}${told.held > 0
        ? ` · ${t('edge.held', { held: told.held, channels: told.channels ?? UNKNOWN })}` : ''}</text>`}
    ${marks.map((mark) => html`<text class="barrier" x=${mark.x} y=${mark.y + 6} text-anchor="middle">${mark.sign}</text>`)}
  </g>`;
}

/** Arrows walk along edges, up and down to the neighbour. */
function walk(event, shape) {
  const here = event.target.closest('[data-task]')?.dataset.task;
  if (!here) return;
  const next = {
    ArrowRight: () => shape.edges.find((edge) => edge.from === here)?.to,
    ArrowLeft: () => shape.edges.find((edge) => edge.to === here)?.from,
    ArrowDown: () => shape.tasks[shape.tasks.findIndex((task) => task.id === here) + 1]?.id,
    ArrowUp: () => shape.tasks[shape.tasks.findIndex((task) => task.id === here) - 1]?.id,
  }[event.key]?.();
  if (next === undefined) {
    if (event.key === 'Enter') go(event.target.closest('a').getAttribute('href'));
    return;
  }
  event.preventDefault();
  event.currentTarget.querySelector(`[data-task="${CSS.escape(next)}"]`)?.focus();
}

/** What of a large graph is in its window: [left, top, right, bottom], with some room around it. */
function useWindow(place, isLarge) {
  const [seen, setSeen] = useState([0, 0, 2000, 1200]);
  useEffect(() => {
    const look = () => {
      const at = place.current;
      setSeen([at.scrollLeft - WIDE, at.scrollTop - HIGH, at.scrollLeft + at.clientWidth + WIDE, at.scrollTop + at.clientHeight + HIGH]);
    };
    if (!isLarge) return undefined;
    look();
    const resized = new ResizeObserver(look);
    resized.observe(place.current);
    place.current.addEventListener('scroll', look, { passive: true });
    return () => resized.disconnect();
  }, [isLarge]);
  return isLarge ? seen : null;
}

const isIn = (seen, places) => seen === null || (Math.max(...places.map(({ x }) => x)) > seen[0] && Math.min(...places.map(({ x }) => x)) < seen[2]
  && Math.max(...places.map(({ y }) => y)) > seen[1] && Math.min(...places.map(({ y }) => y)) < seen[3]);

function Find({ tasks, jump }) {
  const find = (event) => {
    const asked = event.target.value.toLowerCase();
    const found = asked && (tasks.find((task) => task.name.toLowerCase() === asked) ?? tasks.find((task) => task.name.toLowerCase().includes(asked)));
    if (found) jump(found.id, event.type === 'change');
  };
  return html`<label class="filters">${t('graph.find')} <input type="search" list="task-names" onInput=${find} onChange=${find} data-find />
    <datalist id="task-names">${tasks.map((task) => html`<option value=${task.name} />`)}</datalist></label>`;
}

/** What it looks like, and where all of it is; the same until the plan of the job is another. */
function useDrawn({ vertices, plan }) {
  const shape = useMemo(() => graphOf({ vertices, plan }), [vertices, plan]);
  const key = useMemo(() => JSON.stringify(shape), [shape]);
  const drawn = useMemo(() => laidOut(shape), [key]);
  return { shape, key, drawn };
}

/** `barriers`: of a replay, what stands on each edge and in each task. */
export function JobGraph({ job, name, figures, hello, marked, selected, barriers, isGrey }) {
  const { shape, key: plan, drawn } = useDrawn(job);
  const place = useRef(null);
  const isLarge = shape.tasks.length > LARGE;
  const seen = useWindow(place, isLarge);
  // What is out of sight is drawn once, in little, and in full when it comes into sight.
  const kept = useMemo(() => new Map(), [plan, choices.value.language, marked, selected, isLarge && Boolean(barriers)]);
  const drawnOnce = (key, places, draw) => {
    const isFar = !isIn(seen, places);
    if (!isFar || !kept.get(key)?.isFar) kept.set(key, { isFar, drawn: draw(isFar) });
    return kept.get(key).drawn;
  };
  const flow = flows(figures, hello);
  const told = (task) => figures?.tasks?.[task.id];
  const aligning = (task) => (figures?.aligning ?? []).filter((each) => hello?.tasks[each.task]?.id === task.id)
    .reduce((first, each) => (first && first.since <= each.since ? first : each), null);
  const jump = (id, focuses) => {
    const { x, y } = drawn.node[id];
    place.current.scrollTo(x - place.current.clientWidth / 2, y - place.current.clientHeight / 2);
    if (focuses) place.current.querySelector(`[data-task="${CSS.escape(id)}"]`)?.focus({ preventScroll: true });
  };
  // A large one begins where something is the matter, or at its first task.
  useEffect(() => {
    if (isLarge) jump((shape.tasks.find((task) => task.name === marked) ?? shape.tasks[0]).id);
  }, [plan, isLarge, marked]);
  return html`<div class=${classes('graph', isGrey && 'grey')} onKeyDown=${(event) => walk(event, shape)}>
    ${isLarge && html`<${Find} tasks=${shape.tasks} jump=${jump} />`}
    <div class=${classes('graph-wide', isLarge && 'graph-large')} role="region" aria-label=${t('graph')} tabindex="0" ref=${place}>
      <svg width=${drawn.width} height=${drawn.height} viewBox=${`0 0 ${drawn.width} ${drawn.height}`}>
        <defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
          <path class="arrow" d="M0,0.5L8,4L0,7.5z" /></marker></defs>
        ${shape.edges.map((edge) => drawnOnce(edge.key, drawn.edge[edge.key].points, (isFar) => html`<${Edge} key=${edge.key} edge=${edge} isFar=${isFar}
          place=${drawn.edge[edge.key]} told=${flow.get(edge.key)} barrier=${barriers?.edges[edge.key]} />`))}
        ${shape.tasks.map((task) => drawnOnce(task.id, [drawn.node[task.id]], (isFar) => html`<${Node} key=${task.id} task=${task} isFar=${isFar}
          place=${drawn.node[task.id]} told=${told(task)} job=${name} mark=${marked === task.name} isSelected=${selected === task.id}
          barrier=${barriers?.tasks[task.id]} aligning=${aligning(task)} />`))}
      </svg></div>
    <ol class="graph-narrow">${matchMedia('(max-width: 640px)').matches && shape.tasks.map((task) => html`<li key=${task.id}>
      <a class=${classes('card', marked === task.name && 'node-marked')} href=${link(name, 'tasks', task.id)} data-task=${task.id}>
        <strong>${marked === task.name ? '▲ ' : ''}${task.name}</strong> ×${task.parallelism}
        ${!barriers && html`<${SharesBar} of=${told(task)} width=${240} height="12" />`}
        <span>${barriers?.tasks[task.id] ? `${barriers.tasks[task.id].sign} ${barriers.tasks[task.id].text}`
          : `${t('share.working')} ${percent(told(task)?.working)} · ${t('share.back')} ${percent(told(task)?.backpressured)}`}</span></a>
      ${!barriers && shape.edges.filter((edge) => edge.from === task.id).map((edge) => {
        const here = flow.get(edge.key);
        return html`<p class="muted number">↓ ${here ? `${rate(here.records)} · ${byteRate(here.bytes)}` : UNKNOWN}</p>`;
      })}</li>`)}</ol>
  </div>`;
}
