// The page: which view is shown, the key, and the changes of the list as they come.

import { api, h, LoggedOut, post } from './dom.js';
import { List } from './list.js';
import { Request } from './request.js';
import { Server } from './server.js';

const main = document.querySelector('main');
const status = document.querySelector('#state');
const logout = document.querySelector('#logout');
const rows = new Map();
const MOST = 200;
let view = null;
let source = null;

function show() {
  const [, page, id] = location.hash.split('/');
  view?.close?.();
  view = page === 'server' ? new Server(failed) : page === 'request' ? new Request(id, failed) : new List(rows);
  main.replaceChildren(view.element);
  for (const link of document.querySelectorAll('nav a')) {
    const current = page === 'server' ? '#/server' : '#/';
    link.toggleAttribute('aria-current', link.getAttribute('href') === current);
  }
  main.focus();
}

function failed(error) {
  if (error instanceof LoggedOut) login();
  else status.textContent = error.message;
}

function listen() {
  source?.close();
  source = new EventSource('harmony/inspector/events');
  source.onopen = () => (status.textContent = 'live');
  source.onerror = () => {
    status.textContent = 'no connection';
    if (source.readyState === EventSource.CLOSED) setTimeout(start, 2000);
  };
  source.addEventListener('all', (event) => {
    rows.clear();
    take(JSON.parse(event.data));
  });
  source.onmessage = (event) => take(JSON.parse(event.data));
}

function take(changed) {
  for (const row of changed) rows.set(row.id, row);
  for (const id of [...rows.keys()].slice(0, -MOST)) rows.delete(id);
  view?.update?.(changed);
}

function login() {
  source?.close();
  view?.close?.();
  view = null;
  const key = h('input', { type: 'password', autocomplete: 'current-password', required: true, id: 'key' });
  const problem = h('p', { className: 'problem', role: 'alert' });
  const form = h(
    'form',
    { className: 'login' },
    h('label', { htmlFor: 'key', textContent: 'API key of this server' }),
    key,
    h('button', { textContent: 'Log in' }),
    problem,
  );
  form.onsubmit = async (event) => {
    event.preventDefault();
    try {
      await post('login', { key: key.value });
      start();
    } catch (error) {
      problem.textContent = error.message;
    }
  };
  logout.hidden = true;
  status.textContent = '';
  main.replaceChildren(form);
  key.focus();
}

async function start() {
  try {
    const found = await api('requests');
    logout.hidden = !found.keyed;
    listen();
    show();
  } catch (error) {
    failed(error);
  }
}

logout.onclick = async () => {
  await post('logout');
  rows.clear();
  login();
};

addEventListener('hashchange', () => source && show());
addEventListener('keydown', (event) => {
  if (event.target.matches('input, textarea') || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === 'Escape') location.hash = '#/';
  else if (event.key === 's') location.hash = '#/server';
  else view?.key?.(event);
});
start();
