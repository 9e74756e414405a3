// The state of the server: requests, memory, cache, tokens of the last hour, the last errors.

import { api, bytes, clock, count, h, svg } from './dom.js';

const SECONDS = 2;

function shown(value, unit) {
  if (value == null) return '–';
  if (unit === 'bytes') return bytes(value);
  if (unit === 'share') return `${(100 * value).toFixed(1)} %`;
  return typeof value === 'number' ? count(value) : value;
}

export class Server {
  constructor(failed) {
    this.failed = failed;
    this.element = h('section', { className: 'server' }, h('p', { textContent: 'Loading …' }));
    this.timer = setInterval(() => this.load(), SECONDS * 1000);
    this.load();
  }

  close() {
    clearInterval(this.timer);
  }

  async load() {
    try {
      const found = await api('server');
      this.element.replaceChildren(
        h('div', { className: 'cards' }, ...found.sections.map(([title, rows]) => card(title, rows))),
        tokens(found.minutes),
        errors(found.errors),
      );
    } catch (error) {
      this.failed(error);
    }
  }
}

function card(title, rows) {
  const pairs = rows.flatMap(([name, value, unit]) => [
    h('dt', { textContent: name }),
    h('dd', { textContent: shown(value, unit) }),
  ]);
  return h('article', { className: 'card' }, h('h2', { textContent: title }), h('dl', {}, ...pairs));
}

function tokens(minutes) {
  const most = Math.max(...minutes, 1);
  const bars = minutes.map((value, at) =>
    svg(
      'rect',
      { x: at * 10, width: 8, y: 100 - (100 * value) / most, height: (100 * value) / most },
      Object.assign(svg('title'), { textContent: `${minutes.length - 1 - at} min ago: ${(value / 60).toFixed(1)} tokens/s` }),
    ),
  );
  const chart = svg('svg', { viewBox: '0 0 600 100', preserveAspectRatio: 'none', class: 'chart', role: 'img' }, ...bars);
  const label = `Generated tokens in each minute of the last hour, at most ${(most / 60).toFixed(1)} tokens/s`;
  chart.setAttribute('aria-label', label);
  return h('article', { className: 'card' }, h('h2', { textContent: label }), chart);
}

function errors(found) {
  const rows = found.map((each) =>
    h(
      'tr',
      {},
      h('td', { textContent: clock(each.at) }),
      h('td', { textContent: each.status || '' }),
      h('td', { textContent: each.what }),
      h('td', { textContent: each.message }),
    ),
  );
  const title = h('h2', { textContent: 'Last errors' });
  const none = h('p', { className: 'empty', textContent: 'None.' });
  return h('article', { className: 'card' }, title, rows.length ? h('table', {}, h('tbody', {}, ...rows)) : none);
}
