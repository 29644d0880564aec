// Pictures from files: decoded by the browser, made grey, cropped and shrunk here; the server only ever sees the small result.

import { averaged, box, range } from "./pad.js";

export const LARGEST_FILE = 8 * 2 ** 20;
export const MOST_PIXELS = 32e6;
const WORK = 512;

const megabytes = (bytes) => `${(bytes / 2 ** 20).toFixed(1)} MB`;

// Return the grey values of a file, or throw an error that can be shown.
export async function read(file, [rows, columns], fit) {
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
    return pixelsOf(bitmap, rows, columns, fit);
  } finally {
    bitmap.close();
  }
}

function pixelsOf(bitmap, rows, columns, fit) {
  // as large as the work canvas allows; smaller pictures are not enlarged
  const shrink = Math.min(1, WORK / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width: Math.max(1, Math.round(bitmap.width * shrink)), height: Math.max(1, Math.round(bitmap.height * shrink)) });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "#ffffff"; // what is transparent counts as paper
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  const grey = greyOf(context.getImageData(0, 0, canvas.width, canvas.height));
  const crop = fit ? inkBox(grey) : { left: 0, top: 0, right: grey.width, bottom: grey.height };
  const target = fit && crop.found ? box(rows, columns) : { across: columns, down: rows };
  return resampled(grey, crop, rows, columns, target);
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
