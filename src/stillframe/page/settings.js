// What a job promises and why, what it was told, and where everything is.
import { html, useStore } from './dom.js';
import { t } from './words.js';
import { live } from './live.js';
import { address, jobPath, useAnswer } from './api.js';
import { Loading, Problem, Table, word } from './parts.js';
import { count, UNKNOWN } from './formats.js';

export function Settings({ job, name }) {
  const { changed } = useStore(live);
  const { data, error } = useAnswer(jobPath(name, 'config'), changed);
  if (!job || !(data || error)) return error ? html`<${Problem} error=${error} />` : html`<${Loading} />`;
  const own = job.stillframe;
  const config = data?.['execution-config'];
  const rows = Object.entries(config?.['user-config'] ?? {}).map(([option, value]) => ({ option, value }));
  const columns = [
    { key: 'option', isText: true, head: t('option'), cell: (row) => html`<code>${row.option}</code>`, sort: (row) => row.option },
    { key: 'value', isText: true, head: t('value'), cell: (row) => html`<code>${row.value}</code>` },
  ];
  const places = [
    ['checkpoint.location', own['checkpoint-location'] ?? UNKNOWN], ['job.id', job.jid], ['run.id', own['run-id'] || UNKNOWN],
    ...Object.entries(data?.versions ?? {}).map(([of, version]) => [`version.${of}`, version]),
    ...(config ? [['parallelism', count(own.parallelism)], ['max.parallelism', count(job.maxParallelism)], ['restart.strategy', config['restart-strategy']]] : []),
  ];
  return html`<h1 class="hidden">${t('view.settings')}</h1>
    <section class="panel"><h2>${t('guarantee')}</h2><p class="big">${own.guarantee ? word('guarantee', own.guarantee) : UNKNOWN}</p>
      ${own['guarantee-reasons'].length > 0 && html`<ul lang="en">${own['guarantee-reasons'].map((each) => html`<li>${each}</li>`)}</ul>`}</section>
    <section class="panel"><h2>${t('where')}</h2><dl class="facts wide">${places.map(([key, value]) => html`<div><dt>${t(key)}</dt><dd><code>${value}</code></dd></div>`)}
      <div><dt>${t('metrics')}</dt><dd><a href=${address('metrics').href}>/metrics</a></dd></div>
      <div><dt>${t('api')}</dt><dd><a href=${address('openapi.json').href}>/openapi.json</a></dd></div></dl></section>
    <section class="panel"><h2>${t('options')}</h2>${config ? html`<${Table} caption=${t('options')} columns=${columns} rows=${rows} rowKey=${(row) => row.option} />`
      : html`<${Problem} error=${error} />`}</section>`;
}
