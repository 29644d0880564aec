// Pictures of numbers: grey values as ink on paper, signed values from blue over paper to red, in the colours of the theme.
// Images with three values a pixel, channel by channel, are red, green and blue; their signed values are shown around grey.

let colours = null;

function rgb(name) {
  const probe = document.createElement("canvas").getContext("2d");
  probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const hex = probe.fillStyle;
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

export const theme = () => colours ?? readTheme();

export function readTheme() {
  const dark = document.documentElement.dataset.theme === "dark";
  colours = {
    paper: rgb("--paper"), pen: rgb("--pen"), card: rgb("--card"), well: rgb("--well"), accent: rgb("--accent"), line: rgb("--line"), soft: rgb("--soft"),
    low: dark ? [88, 170, 232] : [28, 98, 165],
    high: dark ? [240, 130, 84] : [200, 66, 16],
  };
  return colours;
}

const mix = (from, to, share) => from.map((value, k) => value + (to[k] - value) * share);
const clip = (value) => Math.min(1, Math.max(0, value));

function put(data, at, colour) {
  data[4 * at] = colour[0];
  data[4 * at + 1] = colour[1];
  data[4 * at + 2] = colour[2];
  data[4 * at + 3] = 255;
}

const ink = (value) => mix(colours.paper, colours.pen, clip(value));
const signed = (value) => (value < 0 ? mix(colours.paper, colours.low, clip(-value)) : mix(colours.paper, colours.high, clip(value)));

const lit = (value) => (value < 0 ? mix(colours.paper, colours.high, clip(-value)) : mix(colours.paper, colours.accent, clip(value)));

const bright = (value) => 255 * clip(value);
const aroundGrey = (value) => 255 * clip(0.5 + value / 2);

// `one` gives the colour of a pixel with one value, `channel` the byte of a channel of a pixel with three.
function shade(data, values, size, one, channel) {
  const colour = values.length === size ? (at) => one(values[at]) : (at) => [0, 1, 2].map((k) => channel(values[at + k * size]));
  for (let at = 0; at < size; at++) put(data, at, colour(at));
}

export const largest = (values) => values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);

// Setting even the same size anew makes a canvas start over.
function sized(canvas, width, height) {
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
}

function fill(canvas, values, [rows, columns], one, channel) {
  theme();
  sized(canvas, columns, rows);
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows);
  shade(image.data, values, rows * columns, one, channel);
  context.putImageData(image, 0, 0);
}

export const image = (canvas, values, shape) => fill(canvas, values, shape, ink, bright);

// Values of size `scale` have the full colour.
export function difference(canvas, values, shape, scale) {
  const by = scale > 0 ? 1 / scale : 0;
  fill(canvas, values, shape, (value) => signed(value * by), (value) => aroundGrey(value * by));
}

// Units of a layer as cells, row by row; the size of an activation shows as colour.
export function units(canvas, values, columns, scale) {
  theme();
  const rows = Math.ceil(values.length / columns);
  const cell = 10, gap = 1;
  sized(canvas, columns * cell + gap, rows * cell + gap);
  const context = canvas.getContext("2d");
  context.fillStyle = `rgb(${colours.line})`;
  context.fillRect(0, 0, canvas.width, canvas.height);
  const by = scale > 0 ? 1 / scale : 0;
  for (let k = 0; k < rows * columns; k++) {
    const value = k < values.length ? values[k] * by : 0;
    context.fillStyle = k < values.length ? `rgb(${lit(value).map(Math.round)})` : `rgb(${colours.card})`;
    context.fillRect((k % columns) * cell + gap, Math.floor(k / columns) * cell + gap, cell - gap, cell - gap);
  }
}

// Many small signed images, in whole numbers up to 100, on one canvas; and samples, as ink, each with room around it.
export const sheet = (canvas, images, shape, across) =>
  tiles(canvas, images, shape, across, 0, (value) => signed(value / 100), (value) => aroundGrey(value / 100));
export const thumbnails = (canvas, images, shape, across) => tiles(canvas, images, shape, across, 1, ink, bright);

// Activations of a convolution, a map for each channel, in cells of some pixels and with a line between maps.
export const LINE = 2;
export const cellOf = (columns) => Math.max(1, Math.round(40 / columns));

export function maps(canvas, values, [rows, columns], across, scale) {
  theme();
  const by = scale > 0 ? 1 / scale : 0, size = rows * columns, cell = cellOf(columns);
  const [wide, high] = [columns * cell + LINE, rows * cell + LINE];
  sized(canvas, across * wide - LINE, Math.ceil(values.length / size / across) * high - LINE);
  const context = canvas.getContext("2d");
  context.fillStyle = `rgb(${colours.soft})`;
  context.fillRect(0, 0, canvas.width, canvas.height);
  for (let k = 0; k < values.length; k++) {
    const map = Math.floor(k / size), at = k % size;
    context.fillStyle = `rgb(${lit(values[k] * by).map(Math.round)})`;
    context.fillRect((map % across) * wide + (at % columns) * cell, Math.floor(map / across) * high + Math.floor(at / columns) * cell, cell, cell);
  }
}

function tiles(canvas, images, [rows, columns], across, border, one, channel) {
  theme();
  const gap = Math.max(1, Math.round(columns / 10));
  const lines = Math.max(1, Math.ceil(images.length / across));
  const [wide, high] = [columns + gap, rows + gap];
  const beyond = border ? 0 : gap;
  sized(canvas, across * wide - beyond, lines * high - beyond);
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  const tile = context.createImageData(columns, rows);
  images.forEach((values, k) => {
    shade(tile.data, values, rows * columns, one, channel);
    const shift = border ? gap / 2 : 0;
    context.putImageData(tile, (k % across) * wide + Math.floor(shift), Math.floor(k / across) * high + Math.floor(shift));
  });
}
