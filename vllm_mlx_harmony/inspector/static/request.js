// One request: its prompt and its answer as Harmony messages, and both as the API has them.

import { api, copy, count, duration, h, percent, post, running, save, state, svg } from './dom.js';
import { isControl, isMessage, Reader } from './harmony.js';

const LONG = 400; // tokens of a message in a prompt that is folded
const FIRST = 160; // characters of it that are shown
const POINTS = 1500;
const ORIGINS = { m: 'masked', f: 'forced', c: 'copied' };

export class Request {
  constructor(id, failed) {
    Object.assign(this, { id, failed, reader: new Reader(), views: new Map(), spans: [], origins: {}, output: [], times: [], events: 0 });
    this.title = h('h1');
    this.facts = h('p', { className: 'facts' });
    this.did = h('ul', { className: 'did' });
    this.messages = h('div', { className: 'messages' });
    this.gaps = h('figure', { className: 'gaps', hidden: true });
    this.end = h('button', { textContent: 'End it', onclick: () => this.act(() => post(`requests/${id}/end`)) });
    this.now = h('button', { textContent: 'Answer now', onclick: () => this.act(() => post(`requests/${id}/answer`)) });
    this.redacted = h('input', { type: 'checkbox', id: 'redacted' });
    this.body = h('pre', { tabIndex: 0 });
    this.answer = h('pre', { tabIndex: 0 });
    const button = (textContent, action) => h('button', { textContent, onclick: () => this.act(action) });
    this.element = h(
      'section',
      { className: 'request' },
      this.title,
      this.facts,
      h(
        'div',
        { className: 'actions' },
        this.end,
        this.now,
        button('Copy as curl', () => copy(this.curl())),
        button('Save as a case', () => save(`case-${id}.json`, this.case())),
        h('label', { htmlFor: 'redacted' }, this.redacted, ' without texts'),
      ),
      this.did,
      this.gaps,
      h(
        'div',
        { className: 'columns' },
        h('div', {}, h('h2', { textContent: 'Prompt and answer, token by token' }), this.messages),
        h(
          'div',
          { className: 'wire' },
          h('details', { open: true }, h('summary', { textContent: 'Request' }), this.body),
          h('details', { open: true }, h('summary', { textContent: 'Answer' }), this.answer),
        ),
      ),
    );
    this.messages.onmouseover = ({ target }) => target.dataset.ids && (target.title = describe(target));
    this.load();
  }

  async act(action) {
    try {
      await action();
      this.element.dataset.done = 'yes';
    } catch (error) {
      this.failed(error);
    }
  }

  async load() {
    try {
      this.found = await api(`requests/${this.id}`);
      const { ids, texts } = this.found.prompt;
      this.cached = this.found.summary.cached;
      ids.forEach((id, at) => this.add(id, texts[at], at < this.cached ? 'cached' : ''));
      this.prompt = ids.length;
      this.fold();
      const { body } = this.found;
      this.body.textContent = body == null ? 'The body is too long to be kept.' : pretty(body);
      await this.follow();
    } catch (error) {
      this.failed(error);
    }
  }

  update(changed) {
    if (changed.some((row) => row.id === this.id)) this.follow();
  }

  // Fetches what is new, one fetch at a time.
  async follow() {
    if (!this.found) return;
    if (this.following) {
      this.again = true;
      return;
    }
    this.following = true;
    try {
      const new_ = await api(`requests/${this.id}/output?tokens=${this.output.length}&events=${this.events}`);
      this.row = new_.summary;
      const isResult = (at) => new_.results.some(([start, end]) => at >= start && at < end);
      const begin = this.output.length;
      new_.ids.forEach((id, at) => {
        if (isResult(begin + at)) this.add(id, new_.texts[at], 'served');
        else this.add(id, new_.texts[at], 'generated', new_.origins[at]);
      });
      this.output.push(...new_.ids);
      this.times.push(...new_.times);
      this.events += new_.events.length;
      this.answer.append(...(this.row.stream ? new_.events : new_.events.map(pretty)));
      if (new_.dropped) this.dropped = new_.dropped;
      this.shade();
      this.describe();
    } catch (error) {
      this.failed(error);
    } finally {
      this.following = false;
    }
    if (this.again) {
      this.again = false;
      this.follow();
    }
  }

  add(id, text, className, origin) {
    const message = this.reader.read(id, text);
    let view = this.views.get(message);
    if (!view) {
      view = { message, header: h('div', { className: 'header' }), body: h('div', { className: 'body' }), size: 0 };
      view.element = h('article', { className: 'message' }, view.header, view.body);
      this.views.set(message, view);
      this.messages.append(view.element);
    }
    const last = this.spans.at(-1);
    let span;
    if (last && last.textContent === '' && last.parentElement) {
      span = last; // an id that only began a character
      span.textContent = text;
      span.dataset.ids += ` ${id}`;
    } else {
      span = h('span', { className: isControl(id) ? `control ${className}` : className, textContent: text });
      span.dataset.ids = id;
      (message.inBody && !isMessage(id) ? view.body : view.header).append(span);
    }
    if (origin) this.origins[origin] = (this.origins[origin] ?? 0) + 1;
    if (origin in ORIGINS) span.classList.add(ORIGINS[origin]);
    span.dataset.at = this.spans.length;
    this.spans.push(span);
    view.size += 1;
    view.element.dataset.kind = message.kind;
    view.generated ||= className === 'generated';
  }

  // Folds long messages of the prompt: their tokens are put in when they are opened.
  fold() {
    for (const { message, body, element } of this.views.values()) {
      const tokens = [...body.children];
      if (tokens.length <= LONG) continue;
      const text = body.textContent.slice(0, FIRST);
      const summary = h('summary', { textContent: `${text} … ${count(tokens.length)} tokens` });
      const inner = h('div', { className: 'body' });
      const folded = h('details', {}, summary, inner);
      body.remove();
      folded.ontoggle = () => inner.replaceChildren(...(folded.open ? tokens : []));
      element.append(folded);
      this.views.get(message).body = inner;
    }
  }

  // More of the prompt may turn out to be reused once the engine begins with it.
  shade() {
    const { cached } = this.row;
    if (cached === this.cached) return;
    this.spans.slice(0, this.prompt).forEach((span, at) => span.classList.toggle('cached', at < cached));
    this.cached = cached;
  }

  describe() {
    const { row } = this;
    this.title.textContent = `${row.api.replaceAll('_', ' ')} · ${row.model}`;
    this.end.hidden = this.now.hidden = !running(row);
    const facts = [
      state(row),
      `${count(row.prompt)} prompt tokens`,
      `${count(row.generated)} generated`,
      row.first == null ? null : `first token after ${duration(row.first)}`,
      row.speed ? `${row.speed.toFixed(1)} tokens/s` : null,
      duration(row.seconds),
    ];
    this.facts.textContent = facts.filter(Boolean).join(' · ');
    this.facts.dataset.state = row.state;
    this.did.replaceChildren(...this.notes().map(([textContent, className = '']) => h('li', {}, h('span', { textContent, className }))));
    this.draw();
  }

  // What the server did, as far as it knows, with the class of the tokens that are marked for it.
  notes() {
    const { row } = this;
    const notes = [];
    if (row.cached) notes.push([`Reused ${count(row.cached)} of ${count(row.prompt)} prompt tokens (${percent(row.cached, row.prompt)}).`, 'cached']);
    if (row.grammar) notes.push([`A grammar restricted what the model could write.${this.origins['?'] ? ' The engine does not report where.' : ''}`]);
    if (row.reasoning_ended_by) notes.push([`Ended the reasoning (${row.reasoning_ended_by}).`]);
    if (this.origins.m) notes.push([`Masked the model's first choice before ${tokens(this.origins.m)}.`, 'masked']);
    if (this.origins.f) notes.push([`Forced ${tokens(this.origins.f)}: nothing else was permitted.`, 'forced']);
    if (this.origins.c) notes.push([`Guessed ${tokens(this.origins.c)}, which the model confirmed in one step.`, 'copied']);
    const repaired = [...this.views.values()].filter(({ generated, message }) => generated && message.repaired);
    for (const { element } of repaired) element.classList.add('repaired');
    if (repaired.length) notes.push([`Read ${repaired.length} header(s) that are not as Harmony has them; they are underlined.`]);
    if (row.tools) notes.push([`Ran ${row.tools} tool call(s).`, 'served']);
    if (row.finish === 'length') notes.push(['Ended the answer at the maximum number of tokens.']);
    if (row.failure) notes.push([`Failed: ${row.failure}`]);
    if (this.dropped) notes.push([`${count(this.dropped)} events of the answer were too many to be kept.`]);
    return notes;
  }

  draw() {
    const gaps = this.times.slice(1).map((time, at) => time - this.times[at]);
    this.gaps.hidden = gaps.length < 2;
    if (this.gaps.hidden) return;
    const sorted = [...gaps].sort((a, b) => a - b);
    const most = sorted.at(-1);
    const size = Math.ceil(gaps.length / POINTS);
    const points = [];
    for (let at = 0; at < gaps.length; at += size) {
      const x = (1000 * at) / gaps.length;
      points.push(`${x.toFixed(1)},${(60 - (58 * Math.max(...gaps.slice(at, at + size))) / (most || 1)).toFixed(1)}`);
    }
    const label =
      `Time between tokens: median ${duration(sorted[sorted.length >> 1])}, ` +
      `longest ${duration(most)} before token ${count(gaps.indexOf(most) + 2)}`;
    this.gaps.replaceChildren(
      svg(
        'svg',
        { viewBox: '0 0 1000 60', preserveAspectRatio: 'none', role: 'img', 'aria-label': label },
        svg('polyline', { points: points.join(' ') }),
      ),
      h('figcaption', { textContent: label }),
    );
  }

  curl() {
    const quoted = `'${(this.found.body ?? '').replaceAll("'", "'\\''")}'`;
    const keyed = document.querySelector('#logout').hidden ? '' : ' -H "Authorization: Bearer $API_KEY"';
    const url = new URL(this.found.path, location.href).href;
    return `curl -N ${url} -H 'Content-Type: application/json'${keyed} -d ${quoted}`;
  }

  // What reproduces the request. Without texts: the same structure, with x for each letter.
  case() {
    const { found, row } = this;
    const hidden = this.redacted.checked;
    const messages = [...this.views.values()].map(({ message, size }) => ({
      kind: message.kind,
      tokens: size,
    }));
    let body = found.body;
    try {
      body = JSON.parse(body);
    } catch {
      // as it came
    }
    const made = {
      case: 1,
      api: row.api,
      path: found.path,
      body: hidden ? redact(body) : body,
      summary: hidden ? { ...row, failure: '' } : row,
      messages,
    };
    if (!hidden) {
      made.prompt_ids = found.prompt.ids;
      made.output_ids = this.output;
      made.answer = this.answer.textContent;
    }
    return JSON.stringify(made, null, 1);
  }
}

const KEPT = ['type', 'role', 'model', 'effort', 'reasoning_effort', 'tool_choice', 'status', 'phase', 'include'];

function redact(value, name) {
  if (typeof value === 'string') return KEPT.includes(name) ? value : value.replace(/\p{L}/gu, 'x').replace(/\p{N}/gu, '0');
  if (Array.isArray(value)) return value.map((each) => redact(each, name));
  if (value && typeof value === 'object') {
    return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, redact(each, key)]));
  }
  return value;
}

const tokens = (number) => (number === 1 ? '1 token' : `${count(number)} tokens`);

function describe(span) {
  const why = {
    cached: 'reused',
    served: 'result of a tool',
    masked: 'not the first choice of the model',
    forced: 'forced',
    copied: 'copied',
  };
  const also = Object.keys(why).filter((name) => span.classList.contains(name)).map((name) => why[name]);
  return [`id ${span.dataset.ids}`, `token ${count(Number(span.dataset.at) + 1)}`, ...also].join(' · ');
}

function pretty(body) {
  try {
    return JSON.stringify(JSON.parse(body), null, 2);
  } catch {
    return body;
  }
}
