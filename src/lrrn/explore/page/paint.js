// Pictures of numbers: grey values as ink on paper, signed values from blue over paper to red, in the colours of the theme.

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
    paper: rgb("--paper"), pen: rgb("--pen"), card: rgb("--card"), well: rgb("--well"), accent: rgb("--accent"), line: rgb("--line"),
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

// Setting even the same size anew makes a canvas start over.
function sized(canvas, width, height) {
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
}

function fill(canvas, values, [rows, columns], colour) {
  theme();
  sized(canvas, columns, rows);
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows);
  for (let at = 0; at < values.length; at++) put(image.data, at, colour(values[at]));
  context.putImageData(image, 0, 0);
}

export const image = (canvas, values, shape) => fill(canvas, values, shape, ink);

// Values of size `scale` have the full colour.
export function difference(canvas, values, shape, scale) {
  const by = scale > 0 ? 1 / scale : 0;
  fill(canvas, values, shape, (value) => signed(value * by));
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
    const colour = value < 0 ? mix(colours.paper, colours.high, clip(-value)) : mix(colours.paper, colours.accent, clip(value));
    context.fillStyle = k < values.length ? `rgb(${colour.map(Math.round)})` : `rgb(${colours.card})`;
    context.fillRect((k % columns) * cell + gap, Math.floor(k / columns) * cell + gap, cell - gap, cell - gap);
  }
}

// Many small signed images, in whole numbers up to 100, on one canvas; and samples, as ink, each with room around it.
export const sheet = (canvas, images, shape, across) => tiles(canvas, images, shape, across, 0, (value) => signed(value / 100));
export const thumbnails = (canvas, images, shape, across) => tiles(canvas, images, shape, across, 1, ink);

function tiles(canvas, images, [rows, columns], across, border, colour) {
  theme();
  const gap = Math.max(1, Math.round(columns / 10));
  const lines = Math.max(1, Math.ceil(images.length / across));
  const [wide, high] = [columns + gap, rows + gap];
  const beyond = border ? 0 : gap;
  Object.assign(canvas, { width: across * wide - beyond, height: lines * high - beyond });
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  const tile = context.createImageData(columns, rows);
  images.forEach((values, k) => {
    for (let at = 0; at < values.length; at++) put(tile.data, at, colour(values[at]));
    const shift = border ? gap / 2 : 0;
    context.putImageData(tile, (k % across) * wide + Math.floor(shift), Math.floor(k / across) * high + Math.floor(shift));
  });
}
