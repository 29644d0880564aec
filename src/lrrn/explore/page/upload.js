// Pictures from files: decoded by the browser, cropped, shrunk and, for most models, made grey here; the server only ever sees
// the small result.

import { averaged, box, range, stacked } from "./pad.js";

export const LARGEST_FILE = 8 * 2 ** 20;
export const MOST_PIXELS = 32e6;
const WORK = 512;

const megabytes = (bytes) => `${(bytes / 2 ** 20).toFixed(1)} MB`;

// Return the values of a file's pixels, grey or in colour, or throw an error that can be shown.
export async function read(file, [rows, columns], channels, fit) {
  if (file.size > LARGEST_FILE) {
    throw new Error(`“${file.name}” has ${megabytes(file.size)}; choose an image of at most ${megabytes(LARGEST_FILE)}.`);
  }
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`“${file.name}” cannot be read as an image. Choose a PNG, JPEG, WebP, GIF or BMP file.`);
  }
  try {
    if (bitmap.width * bitmap.height > MOST_PIXELS) {
      const size = `${bitmap.width} by ${bitmap.height}`;
      throw new Error(`“${file.name}” has ${size} pixels; choose an image of at most ${MOST_PIXELS / 1e6} million.`);
    }
    return channels === 1 ? pixelsOf(bitmap, rows, columns, fit) : coloursOf(bitmap, rows, columns, fit);
  } finally {
    bitmap.close();
  }
}

function pixelsOf(bitmap, rows, columns, fit) {
  const grey = greyOf(drawn(bitmap, "#ffffff")); // what is transparent counts as paper
  const crop = fit ? inkBox(grey) : { left: 0, top: 0, right: grey.width, bottom: grey.height };
  const target = fit && crop.found ? box(rows, columns) : { across: columns, down: rows };
  return resampled(grey, crop, rows, columns, target);
}

// Colours stay as they are. To fit is to take the largest part of the image's proportions; otherwise black fills the rest.
function coloursOf(bitmap, rows, columns, fit) {
  const { data, width, height } = drawn(bitmap, "#000000");
  const crop = fit ? middle(width, height, rows, columns) : { left: 0, top: 0, right: width, bottom: height };
  const channel = (k) => ({ values: Float64Array.from({ length: width * height }, (_, at) => data[4 * at + k] / 255), width });
  return stacked([0, 1, 2].map((k) => resampled(channel(k), crop, rows, columns, { across: columns, down: rows })));
}

function middle(width, height, rows, columns) {
  const across = Math.max(1, Math.round(Math.min(width, (height * columns) / rows)));
  const down = Math.max(1, Math.round(Math.min(height, (width * rows) / columns)));
  const [left, top] = [(width - across) >> 1, (height - down) >> 1];
  return { left, top, right: left + across, bottom: top + down };
}

function drawn(bitmap, ground) {
  // as large as the work canvas allows; smaller pictures are not enlarged
  const shrink = Math.min(1, WORK / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width: Math.max(1, Math.round(bitmap.width * shrink)), height: Math.max(1, Math.round(bitmap.height * shrink)) });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = ground;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return context.getImageData(0, 0, canvas.width, canvas.height);
}

// Ink is what differs from the border: dark on light is turned around, since the data is light on dark.
function greyOf({ data, width, height }) {
  const values = new Float64Array(width * height);
  for (let at = 0; at < values.length; at++) {
    values[at] = (0.299 * data[4 * at] + 0.587 * data[4 * at + 1] + 0.114 * data[4 * at + 2]) / 255;
  }
  const border = [];
  for (let x = 0; x < width; x++) border.push(values[x], values[(height - 1) * width + x]);
  for (let y = 0; y < height; y++) border.push(values[y * width], values[y * width + width - 1]);
  border.sort((a, b) => a - b);
  const light = border[border.length >> 1] > 0.5;
  return { values: light ? values.map((value) => 1 - value) : values, width, height };
}

function inkBox({ values, width, height }) {
  const inked = [];
  values.forEach((value, at) => {
    if (value > 0.35) inked.push([at % width, Math.floor(at / width)]);
  });
  if (inked.length === 0) return { left: 0, top: 0, right: width, bottom: height, found: false };
  const [left, right] = range(inked.map((point) => point[0]));
  const [top, bottom] = range(inked.map((point) => point[1]));
  return { left, top, right: right + 1, bottom: bottom + 1, found: true };
}

// Draw a part of a picture into the middle of the image, its shape kept, and average over pixels.
function resampled({ values, width }, { left, top, right, bottom }, rows, columns, { across, down }) {
  const fine = Math.max(4, Math.round(160 / Math.max(rows, columns)));
  const scale = Math.min((across * fine) / (right - left), (down * fine) / (bottom - top));
  const size = { width: columns * fine, height: rows * fine };
  const data = new Float64Array(4 * size.width * size.height);
  const [x0, y0] = [(size.width - (right - left) * scale) / 2, (size.height - (bottom - top) * scale) / 2];
  for (let y = 0; y < size.height; y++) {
    for (let x = 0; x < size.width; x++) {
      const from = [Math.floor((x + 0.5 - x0) / scale) + left, Math.floor((y + 0.5 - y0) / scale) + top];
      const inside = from[0] >= left && from[0] < right && from[1] >= top && from[1] < bottom;
      data[4 * (y * size.width + x)] = inside ? values[from[1] * width + from[0]] : 0;
    }
  }
  return averaged({ data, ...size }, rows, columns, (all, at) => all[at]);
}
