// Elements, numbers as text, and the server's data. Text is only ever set as textContent.

export function h(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children.filter((child) => child != null));
  return element;
}

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export class LoggedOut extends Error {}

export async function api(path, options = {}) {
  const response = await fetch(`harmony/inspector/${path}`, options);
  if (response.status === 401 && path !== 'login') throw new LoggedOut();
  const document = await response.json();
  if (!response.ok) throw new Error(document.error ?? `HTTP ${response.status}`);
  return document;
}

export const post = (path, body = {}) =>
  api(path, { method: 'POST', body: JSON.stringify(body), headers: { 'Content-Type': 'application/json' } });

export const count = (value) => value.toLocaleString('en');

export const percent = (part, whole) => `${Math.floor((100 * part) / (whole || 1))} %`;

export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString();

export function duration(seconds) {
  if (seconds == null) return '';
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  return seconds < 100 ? `${seconds.toFixed(1)} s` : `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}

export function bytes(value) {
  const units = ['bytes', 'KiB', 'MiB', 'GiB', 'TiB'];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) [value, unit] = [value / 1024, unit + 1];
  return `${unit ? value.toFixed(1) : value} ${units[unit]}`;
}

export function state(row) {
  const names = { success: 'done', client_closed: 'closed', answer: 'answering' };
  if (row.state === 'waiting') return row.place ? `waiting, place ${row.place}` : 'waiting';
  if (row.state === 'prompt') return `prompt ${percent(row.processed, row.prompt)}`;
  return names[row.state] ?? row.state;
}

export const running = (row) => ['waiting', 'prompt', 'answer'].includes(row.state);

export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = h('textarea', { value: text }); // not a secure context
  document.body.append(area);
  area.select();
  document.execCommand('copy');
  area.remove();
}

export function save(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: 'application/json' }));
  h('a', { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
