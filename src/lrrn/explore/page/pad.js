// The drawing pad: strokes as lines, kept as such so that they can be centred and scaled with a pen that stays as wide as it is.

import { theme } from "./paint.js";

const SIZE = 400, FAINT = 0.3;
const INK = "#ffffff", NONE = "#000000";

export class Pad {
  // `changed` is called with the time of the event after every change.
  constructor(canvas, [rows, columns], channels, changed) {
    Object.assign(this, { canvas, rows, columns, channels, changed, strokes: [], base: null, ghost: false, erasing: false, cursor: null, down: null });
    // pictures in colour are of anything, and stay where they are drawn
    Object.assign(this, { fit: channels === 1, ink: INK });
    const longer = Math.max(rows, columns);
    this.cell = SIZE / longer;
    Object.assign(canvas, { width: Math.round(columns * this.cell), height: Math.round(rows * this.cell) });
    this.fine = Math.max(4, Math.round(200 / longer));
    this.raster = document.createElement("canvas");
    Object.assign(this.raster, { width: columns * this.fine, height: rows * this.fine });
    this.listen();
    this.render();
  }

  get empty() {
    return this.base === null && this.strokes.length === 0;
  }

  // Small images are drawn with a pen of more than a pixel, like the digits of scikit-learn; larger ones like MNIST.
  get width() {
    return Math.max(1.5, 0.09 * Math.max(this.rows, this.columns));
  }

  clear(time) {
    Object.assign(this, { strokes: [], base: null, ghost: false });
    this.render();
    this.changed(time);
  }

  // A ghost is an example, shown faintly: the first stroke takes its place.
  show(pixels, time, ghost = false) {
    Object.assign(this, { strokes: [], base: Float64Array.from(pixels), ghost });
    this.render();
    this.changed(time);
  }

  // --- events ---

  listen() {
    const canvas = this.canvas;
    let box = null; // asked for once a stroke: asking makes the browser lay out whatever has changed
    const at = (event) => [((event.clientX - box.left) / box.width) * this.columns, ((event.clientY - box.top) / box.height) * this.rows];
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      this.down = event.pointerId;
      box = canvas.getBoundingClientRect();
      canvas.setPointerCapture(event.pointerId);
      this.cursor = null;
      if (this.ghost) Object.assign(this, { base: null, ghost: false });
      this.strokes.push({ erase: this.erasing, ink: this.ink, points: [at(event)] });
      this.after(event.timeStamp);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (this.down !== event.pointerId) return;
      const events = event.getCoalescedEvents?.() ?? [];
      for (const each of events.length ? events : [event]) this.strokes.at(-1).points.push(at(each));
      this.after(event.timeStamp);
    });
    for (const name of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(name, (event) => {
        if (this.down === event.pointerId) this.down = null;
      });
    }
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => {
      this.cursor = null;
      this.render();
    });
  }

  key(event) {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const step = steps[event.key];
    if (!step && event.key !== " " && event.key !== "Enter") return;
    event.preventDefault();
    const [row, column] = this.cursor ?? [this.rows >> 1, this.columns >> 1];
    if (step) {
      const inside = (value, size) => Math.min(size - 1, Math.max(0, value));
      this.cursor = this.cursor ? [inside(row + step[0], this.rows), inside(column + step[1], this.columns)] : [row, column];
      this.render();
      return;
    }
    this.cursor = [row, column];
    const pixels = this.pixels();
    for (let k = 0; k < this.channels; k++) {
      const value = parseInt(this.ink.slice(1 + 2 * k, 3 + 2 * k), 16) / 255;
      pixels[(k * this.rows + row) * this.columns + column] = this.erasing ? 0 : value;
    }
    this.show(pixels, event.timeStamp);
  }

  after(time) {
    this.render();
    this.changed(time);
  }

  // --- pictures ---

  render() {
    const context = this.canvas.getContext("2d");
    const { accent, ...themed } = theme();
    const { paper, pen } = this.channels === 1 ? themed : { paper: [0, 0, 0], pen: [255, 255, 255] };
    // a value for each channel, or one for all
    const shade = (...values) => `rgb(${paper.map((from, k) => Math.round(from + (pen[k] - from) * values[k % values.length]))})`;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.fillStyle = shade(0);
    context.fillRect(0, 0, this.canvas.width, this.canvas.height);
    context.setTransform(this.cell, 0, 0, this.cell, 0, 0);
    this.dots(context, (values) => shade(...values.map((value) => (this.ghost ? FAINT * value : value))), 1.02); // so that no seams show
    // what is going to be scaled anyway is drawn with a finer pen
    const inked = (ink) => (this.channels === 1 ? shade(1) : ink);
    this.lines(context, inked, shade(0), (point) => point, this.fit && !this.base ? 0.65 * this.width : this.width);
    if (this.cursor) {
      context.strokeStyle = `rgb(${accent})`;
      context.lineWidth = 0.12;
      context.strokeRect(this.cursor[1] + 0.06, this.cursor[0] + 0.06, 0.88, 0.88);
    }
  }

  // The pixels of the base that are not black, in the colours of their values.
  dots(context, colour, side) {
    const size = this.rows * this.columns;
    for (let at = 0; this.base && at < size; at++) {
      const values = Array.from({ length: this.channels }, (_, k) => this.base[at + k * size]);
      if (values.every((value) => value <= 0)) continue;
      context.fillStyle = colour(values);
      context.fillRect(at % this.columns, Math.floor(at / this.columns), side, side);
    }
  }

  lines(context, inked, none, place, width) {
    Object.assign(context, { lineCap: "round", lineJoin: "round", lineWidth: width });
    for (const { erase, ink, points } of this.strokes) {
      context.strokeStyle = erase ? none : inked(ink);
      context.beginPath();
      points.map(place).forEach(([x, y], k) => (k ? context.lineTo(x, y) : context.moveTo(x, y)));
      if (points.length === 1) context.lineTo(...place(points[0]));
      context.stroke();
    }
  }

  // --- what the network sees: values from 0 to 1, row by row, channel by channel ---

  pixels() {
    if (this.base || !this.fit) return this.rastered((point) => point);
    const place = this.placement();
    const pixels = this.rastered(place);
    if (Math.max(this.rows, this.columns) < 20) return pixels;
    // larger images are centred by mass, as MNIST is
    const [x, y] = centre(pixels, this.columns);
    const move = [this.columns / 2 - x, this.rows / 2 - y];
    return this.rastered((point) => place(point).map((value, k) => value + move[k]));
  }

  // Where strokes go so that they fill the image as those in the data do.
  placement() {
    const points = this.strokes.filter((stroke) => !stroke.erase).flatMap((stroke) => stroke.points);
    if (points.length === 0) return (point) => point;
    const [left, right] = range(points.map((point) => point[0]));
    const [top, bottom] = range(points.map((point) => point[1]));
    const { across, down } = box(this.rows, this.columns);
    const room = [across - this.width, down - this.width];
    const scale = Math.min(room[0] / Math.max(right - left, 1e-9), room[1] / Math.max(bottom - top, 1e-9), 6);
    // a dot stays a dot
    const by = Math.max(right - left, bottom - top) < 0.25 ? 1 : scale;
    return ([x, y]) => [(x - (left + right) / 2) * by + this.columns / 2, (y - (top + bottom) / 2) * by + this.rows / 2];
  }

  rastered(place) {
    const { raster, fine, rows, columns, channels } = this;
    const context = raster.getContext("2d", { willReadFrequently: true });
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.fillStyle = NONE;
    context.fillRect(0, 0, raster.width, raster.height);
    context.setTransform(fine, 0, 0, fine, 0, 0);
    if (this.base && this.strokes.length === 0) return Float64Array.from(this.base);
    this.dots(context, (values) => `rgb(${[0, 1, 2].map((k) => Math.round(255 * values[k % channels]))})`, 1);
    this.lines(context, (ink) => ink, NONE, place, this.width);
    const image = context.getImageData(0, 0, raster.width, raster.height);
    return stacked(Array.from({ length: channels }, (_, k) => averaged(image, rows, columns, (data, at) => data[at + k] / 255)));
  }
}

// How much of an image of the data's kind is filled: small ones to the top and bottom, larger ones 20 of 28 pixels.
export function box(rows, columns) {
  const share = Math.max(rows, columns) < 20 ? [0.8, 1] : [20 / 28, 20 / 28];
  return { across: columns * share[0], down: rows * share[1] };
}

export const range = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);

export function centre(pixels, columns) {
  let mass = 0, x = 0, y = 0;
  pixels.forEach((value, at) => {
    mass += value;
    x += value * ((at % columns) + 0.5);
    y += value * (Math.floor(at / columns) + 0.5);
  });
  return mass > 0 ? [x / mass, y / mass] : [columns / 2, pixels.length / columns / 2];
}

// Channels one after the other.
export function stacked(channels) {
  if (channels.length === 1) return channels[0];
  const all = new Float64Array(channels.length * channels[0].length);
  channels.forEach((values, k) => all.set(values, k * values.length));
  return all;
}

// Means over the cells of a grid; `value` reads the pixel whose red byte is at a position.
export function averaged({ data, width, height }, rows, columns, value) {
  const sums = new Float64Array(rows * columns);
  const counts = new Float64Array(rows * columns);
  for (let y = 0; y < height; y++) {
    const line = Math.min(rows - 1, Math.floor((y * rows) / height)) * columns;
    for (let x = 0; x < width; x++) {
      const cell = line + Math.min(columns - 1, Math.floor((x * columns) / width));
      sums[cell] += value(data, 4 * (y * width + x));
      counts[cell] += 1;
    }
  }
  return sums.map((sum, k) => (counts[k] ? sum / counts[k] : 0));
}
