// The page at work: wait for the model, then answer every change of the image.

import { AnswerView } from "./answer.js";
import { get, Latest, rounded } from "./api.js";
import { AttackView } from "./attack.js";
import { ClampView } from "./clamp.js";
import { ModelView } from "./model.js";
import { Pad } from "./pad.js";
import { readTheme } from "./paint.js";
import { busy, figure, find } from "./text.js";
import { read } from "./upload.js";

const PAUSE = 350; // milliseconds without a change after which slower questions are asked
const FOLLOW = 120; // milliseconds after an answer in which the cards further down follow it
const POLL = 400;
const FIRST = 3; // the sample that is shown first
const KEPT_TIMINGS = 1000;

const wait = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

// --- theme ---

const dark = matchMedia("(prefers-color-scheme: dark)");

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  find("theme").textContent = name === "dark" ? "Light" : "Dark";
  find("theme").setAttribute("aria-label", `Switch to ${name === "dark" ? "light" : "dark"} colours`);
  readTheme();
  page?.redraw();
}

let page = null;
setTheme(dark.matches ? "dark" : "light");
dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
find("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));

// --- opening ---

async function opened() {
  for (;;) {
    const state = await get("api/state");
    if (state.phase === "failed") throw new Error(state.error);
    if (state.phase === "ready") return state;
    if (state.total > 0) {
      find("opening-title").textContent = "Training a small network";
      find("opening-text").textContent = `Handwritten digits, epoch ${state.done} of ${state.total}. Nothing is stored.`;
      Object.assign(find("opening-progress"), { max: state.total, value: state.done });
    }
    await wait(POLL);
  }
}

async function open() {
  try {
    let { version, refined } = await opened();
    page = new Page(await get("api/model"));
    find("opening").hidden = true;
    find("main").hidden = false;
    page.begin();
    while (!refined) {
      await wait(4 * POLL);
      const state = await get("api/state");
      if (state.version > version) page.refine(await get("api/model"));
      ({ version, refined } = state);
    }
  } catch (error) {
    if (page) return;
    find("opening-title").textContent = "The explorer could not start";
    find("opening-text").textContent = error.message;
    find("opening-progress").hidden = true;
  }
}

// --- the page ---

class Page {
  constructor(model) {
    Object.assign(this, { shape: model.shape, channels: model.channels });
    this.local = !model.obstacles.local;
    this.classes = model.classes;
    this.answerView = new AnswerView(model);
    this.attackView = new AttackView(model);
    this.clampView = new ClampView(model);
    this.modelView = new ModelView(model, (sample, time) => this.pick(sample, time), (message) => this.tell(message));
    this.asker = new Latest("api/analyse", (answer, about) => this.answered(answer, about), (error) => this.unanswered(error));
    this.slow = model.slow;
    this.prover = new Latest("api/prove", (found, about) => this.provenOnRequest(found, about), (error) => this.attackView.searched(error.message));
    this.tightener = new Latest("api/tighten", (found, about) => this.tightened(found, about), () => {});
    Object.assign(this, { scheduled: false, oldest: null, pixels: null, timer: 0, later: 0 });
    this.pad = new Pad(find("pad"), model.shape, model.channels, (time) => this.changed(time));
    find("pad").setAttribute("aria-label", `Drawing area of ${model.shape[0]} by ${model.shape[1]} pixels`);
    this.listen();
    if (this.channels === 3) this.colour();
  }

  // Pictures in colour: a pen of any colour, and uploads that are cropped but never turned around.
  colour() {
    find("colour-part").hidden = false;
    find("fit-text").textContent = "Crop uploads to fill the image";
    find("colour").addEventListener("input", () => {
      this.pad.ink = find("colour").value;
      find("pen").click();
    });
  }

  listen() {
    for (const input of document.querySelectorAll("input[name=tool]")) {
      input.addEventListener("change", () => (this.pad.erasing = input.value === "eraser" && input.checked));
    }
    find("clear").addEventListener("click", (event) => {
      this.tell(null);
      this.pad.clear(event.timeStamp);
    });
    find("fit").addEventListener("change", (event) => {
      if (this.channels === 3) return;
      this.pad.fit = find("fit").checked;
      this.changed(event.timeStamp);
    });
    find("upload").addEventListener("change", () => {
      this.upload(find("upload").files[0]);
      find("upload").value = "";
    });
    const frame = find("pad-frame");
    frame.addEventListener("dragover", (event) => {
      event.preventDefault();
      frame.classList.add("over");
    });
    frame.addEventListener("dragleave", () => frame.classList.remove("over"));
    frame.addEventListener("drop", (event) => {
      event.preventDefault();
      frame.classList.remove("over");
      this.upload(event.dataTransfer.files[0]);
    });
    find("search").addEventListener("click", () => this.search());
    addEventListener("paste", (event) => event.clipboardData.files.length && this.upload(event.clipboardData.files[0]));
  }

  // Something to look at from the start, if there is a sample.
  begin() {
    const { samples } = this.modelView.model;
    if (samples.length) this.pick(samples[Math.min(samples.length - 1, FIRST)], performance.now(), true);
    else this.pad.clear(performance.now());
  }

  // A sample as it is, with what is known about it; any change makes it an image of its own.
  pick(sample, time, ghost = false) {
    this.tell(null);
    this.pad.show(sample.pixels, time, ghost);
    this.attackView.about(sample);
  }

  async upload(file) {
    if (!file) return;
    const time = performance.now();
    try {
      this.pad.show(await read(file, this.shape, this.channels, find("fit").checked), time);
      this.tell(null);
    } catch (error) {
      this.tell(error.message);
    }
  }

  tell(message) {
    find("message").hidden = !message;
    find("message").textContent = message ?? "";
  }

  // Changes within a frame are one; while a question is under way only the latest image waits.
  changed(time) {
    find("pad-hint").hidden = !(this.pad.empty || this.pad.ghost);
    this.modelView?.choose(null);
    this.attackView.about(null);
    this.oldest ??= time;
    busy("answer-card", true);
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame(() => {
      this.scheduled = false;
      this.ask();
    });
  }

  ask() {
    const pixels = this.pad.pixels();
    this.pixels = pixels;
    const since = this.oldest;
    this.oldest = null;
    // a question that never went out hands its waiting time on
    const about = { pixels, since: Math.min(since, this.asker.waiting?.about.since ?? since) };
    this.asker.ask({ pixels: rounded(pixels) }, about);
    this.attackView.reset(this.pad.empty ? null : pixels);
    this.tightener.drop();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.paused(pixels), PAUSE);
  }

  answered(answer, { pixels, since }) {
    if (this.silent) this.tell(null);
    this.silent = false;
    Object.assign(this, { answer, about: pixels });
    this.answerView.show(answer, pixels);
    this.attackView.untouched(answer, pixels);
    this.later ||= setTimeout(() => this.follow(), FOLLOW);
    requestAnimationFrame(() => setTimeout(() => this.time(since)));
    this.settle();
  }

  settle() {
    busy("answer-card", this.scheduled || this.asker.waiting !== null);
  }

  // What is further down need not move with every answer.
  follow() {
    this.later = 0;
    this.clampView.show(this.answer, this.about);
    this.modelView.mark(this.answer);
  }

  unanswered(error) {
    this.silent = true;
    this.tell(error.message);
    this.settle();
  }

  // From the oldest change an answer covers to the frame that shows it; the browser's own clock keeps the list.
  time(since) {
    const { duration } = performance.measure("stroke to answer", { start: since, end: performance.now() });
    if (performance.getEntriesByName("stroke to answer").length > KEPT_TIMINGS) performance.clearMeasures("stroke to answer");
    find("timing").textContent = `Answered ${Math.round(duration)} ms after the stroke.`;
  }

  // Slower questions, once the pen rests.
  paused(pixels) {
    if (pixels !== this.pixels || this.pad.empty) return;
    if (this.asker.busy) {
      this.timer = setTimeout(() => this.paused(pixels), PAUSE);
      return;
    }
    if (this.slow) this.attackView.wait(this.answer.radius);
    else {
      if (this.local) this.tightener.ask({ pixels: rounded(pixels) }, pixels);
      else this.attackView.proven(this.answer.radius);
      this.attackView.ask(pixels);
    }
    this.say();
  }

  tightened({ radius }, pixels) {
    if (pixels === this.pixels) this.prove(radius, "proven, tight");
  }

  prove(radius, how) {
    this.answer.radius = radius;
    this.answerView.radius(radius, how);
    this.modelView.radius(radius);
    this.attackView.proven(radius);
  }

  // The proof first: seconds, then the attack that it is held against.
  search() {
    this.attackView.search("Proving");
    this.prover.ask({ pixels: rounded(this.pixels) }, this.pixels);
  }

  provenOnRequest({ radius }, pixels) {
    if (pixels !== this.pixels) return;
    this.prove(radius, "proven, shared");
    this.attackView.search("Looking for attacks");
    this.attackView.ask(pixels);
  }

  say() {
    const { prediction, radius, energy, margin } = this.answer;
    const label = this.classes.length ? `${this.classes[prediction]}, margin ${figure(margin)}, certified radius ${figure(radius)}, ` : "";
    find("live").textContent = `${label}energy ${figure(energy.value)}${energy.verdict ? `, ${energy.verdict}` : ""}.`;
  }

  refine(model) {
    this.modelView.update(model);
    if (this.answer) this.modelView.mark(this.answer);
  }

  redraw() {
    this.pad.render();
    this.answerView.redraw();
    this.attackView.redraw();
    this.clampView.redraw();
    this.modelView.redraw();
  }
}

open();
