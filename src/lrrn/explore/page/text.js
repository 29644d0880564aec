// Numbers and elements as text.

export const find = (id) => document.getElementById(id);

export function made(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

// About three digits that mean something.
export function figure(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e5) return value.toExponential(1).replace("e+", "e").replace("-", "−").replace("e−0", "e−");
  return value.toFixed(size < 0.1 ? 4 : size < 10 ? 3 : size < 100 ? 2 : 1).replace("-", "−");
}

export const percent = (share) => `${(100 * share).toFixed(1)} %`;

export function ordinal(layer, last) {
  return layer === last ? "output" : `layer ${layer}`;
}

// Whether a part of the page waits for an answer, for those who listen to it.
export const busy = (id, waits) => find(id).setAttribute("aria-busy", String(waits));

// Show a part of the page, or why it is not there.
export function offer(part, reason) {
  find(`${part}-obstacle`).hidden = !reason;
  find(`${part}-obstacle`).textContent = reason ?? "";
  find(`${part}-body`).hidden = Boolean(reason);
}
