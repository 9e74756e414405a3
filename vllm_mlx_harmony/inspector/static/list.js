// The list of requests, the newest first.

import { clock, count, duration, h, percent, state } from './dom.js';

const COLUMNS = ['Time', 'API', 'Model', 'State', 'Prompt', 'Output', 'Speed', 'Duration'];

export class List {
  constructor(rows) {
    this.rows = rows;
    this.shown = new Map();
    this.body = h('tbody');
    this.empty = h('p', { className: 'empty', textContent: 'No requests yet. They appear here as they come in.' });
    this.element = h(
      'section',
      { className: 'list' },
      h('table', {}, h('thead', {}, h('tr', {}, ...COLUMNS.map((name) => h('th', { textContent: name })))), this.body),
      this.empty,
    );
    this.update([...rows.values()]);
  }

  update(changed) {
    for (const row of changed) this.draw(row);
    for (const [id, element] of this.shown) {
      if (!this.rows.has(id)) {
        element.remove();
        this.shown.delete(id);
      }
    }
    this.empty.hidden = this.shown.size > 0;
  }

  draw(row) {
    let line = this.shown.get(row.id);
    if (!line) {
      const link = h('a', { href: `#/request/${row.id}`, textContent: clock(row.began) });
      line = h('tr', {}, h('td', {}, link), ...COLUMNS.slice(1).map((name) => h('td', { title: name })));
      line.onclick = () => (location.hash = `#/request/${row.id}`);
      this.shown.set(row.id, line);
      this.body.prepend(line);
    }
    line.dataset.state = row.state;
    const cached = row.cached ? ` (${percent(row.cached, row.prompt)} reused)` : '';
    const values = [
      row.api.replaceAll('_', ' '),
      row.model,
      state(row) + (row.failure ? `: ${row.failure}` : ''),
      `${count(row.prompt)}${cached}`,
      count(row.generated),
      row.speed ? `${row.speed.toFixed(1)} /s` : '',
      duration(row.seconds),
    ];
    values.forEach((value, at) => {
      const cell = line.children[at + 1];
      if (cell.textContent !== value) cell.textContent = value;
    });
  }

  key(event) {
    const step = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
    if (!step) return;
    const links = [...this.body.querySelectorAll('a')];
    const at = links.indexOf(document.activeElement);
    links[at < 0 ? 0 : Math.min(Math.max(at + step, 0), links.length - 1)]?.focus();
    event.preventDefault();
  }
}
