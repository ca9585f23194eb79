// What a checkpoint's barriers did, as one model: for the bars of each subtask and for the replay.
// Times are milliseconds after the trigger.

/** From GET …/barriers and what each task tells of its subtasks; from that alone where there are none. */
export function modelOf(barriers, parts, tasks) {
  const known = new Map((parts ?? []).flatMap(({ vertex, told }) => told.subtasks.map((each) => [`${vertex} ${each.index}`, each])));
  const nameOf = new Map(tasks.map((task) => [task.id, task.name]));
  const order = new Map(tasks.map((task, at) => [task.id, at]));
  const found = barriers ? barriers.subtasks.map((each) => ({
    vertex: each.vertex, index: each.index, first: each.first, last: each.last ?? each.first, from: each.last_from ?? null,
    taken: each.taken, durable: each.durable, ack: each.ack, arrivals: each.arrivals ?? [],
  })) : (parts ?? []).flatMap(({ vertex, told }) => told.subtasks.filter((each) => each.status === 'completed').map((each) => {
    const last = each.start_delay + each.alignment.duration;
    const taken = last + each.checkpoint.sync;
    return { vertex, index: each.index, first: each.start_delay, last, from: each.stillframe?.last_from ?? null, taken, durable: taken + each.checkpoint.async, ack: each.end_to_end_duration, arrivals: [] };
  }));
  return found.map((each) => {
    const own = known.get(`${each.vertex} ${each.index}`);
    return { ...each, ...own?.stillframe, written: own?.checkpointed_size, full: own?.state_size, name: nameOf.get(each.vertex) ?? each.vertex };
  })
    .sort((a, b) => (order.get(a.vertex) ?? 0) - (order.get(b.vertex) ?? 0) || (b.ack ?? Infinity) - (a.ack ?? Infinity));
}

export const endOf = (model) => Math.max(1, ...model.flatMap((each) => [each.ack, each.durable, each.taken, each.last]).filter((ms) => Number.isFinite(ms)));

/** Everything that happened, in its order: {ms, kind, name, index, from?}. */
export function stepsOf(model) {
  const steps = [];
  for (const each of model) {
    const { name, index, vertex } = each;
    if (each.arrivals.length) {
      for (const [source, sourceIndex, ms] of each.arrivals) steps.push({ ms, kind: 'arrived', name, index, vertex, from: `${source} ${sourceIndex}` });
    } else if (Number.isFinite(each.first)) {
      steps.push({ ms: each.first, kind: 'first', name, index, vertex });
      if (each.last > each.first) steps.push({ ms: each.last, kind: 'last', name, index, vertex, from: each.from ? each.from.join(' ') : null });
    }
    if (Number.isFinite(each.taken)) steps.push({ ms: each.taken, kind: 'taken', name, index, vertex });
    if (Number.isFinite(each.ack)) steps.push({ ms: each.ack, kind: 'ack', name, index, vertex });
  }
  return steps.sort((a, b) => a.ms - b.ms);
}

const least = (values) => (values.length ? Math.min(...values) : null);
const most = (values) => (values.length ? Math.max(...values) : null);

/** What stands where after this long: barriers on edges, and in each task what it waits for. */
export function momentOf(model, edges, ms, words) {
  const of = (vertex) => model.filter((each) => each.vertex === vertex);
  const onEdges = {};
  for (const { key, from, to } of edges) {
    const left = least(of(from).map((each) => each.taken).filter(Number.isFinite));
    const first = least(of(to).map((each) => each.first).filter(Number.isFinite));
    const last = most(of(to).map((each) => each.last).filter(Number.isFinite));
    onEdges[key] = [];
    if (left === null || ms < left || last === null) continue;
    const taken = most(of(to).map((each) => each.taken).filter(Number.isFinite));
    if (taken !== null && ms >= taken) continue;
    const way = (arrived) => (arrived <= left ? 1 : Math.min(1, (ms - left) / (arrived - left)));
    onEdges[key].push({ share: 0.08 + 0.8 * way(last), sign: way(last) >= 1 ? '◇' : '◆' });
    if (last - first > 0.5 && way(first) > way(last)) onEdges[key].push({ share: 0.08 + 0.8 * way(first), sign: way(first) >= 1 ? '◇' : '◆' });
  }
  const inTasks = {};
  for (const vertex of new Set(model.map((each) => each.vertex))) {
    const all = of(vertex);
    const count = (name) => all.filter((each) => Number.isFinite(each[name]) && each[name] <= ms).length;
    const total = all.length;
    const waits = all.find((each) => each.first <= ms && each.last > ms);
    const sign = count('ack') === total ? '✓' : count('taken') === total ? '■' : count('first') ? '◇' : '·';
    inTasks[vertex] = {
      sign,
      text: count('ack') === total ? words('replay.acked', { total }) : count('taken') ? words('replay.taken', { count: count('taken'), total })
        : count('first') ? words('replay.aligning', { count: count('last'), total }) : words('replay.before'),
      more: waits ? words('replay.waits', { who: waits.from ? waits.from.join(' ') : '…' }) : '',
    };
  }
  return { edges: onEdges, tasks: inTasks };
}

