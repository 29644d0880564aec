// Questions to the server on this machine. While one is under way the next waits, and of those that wait only the latest counts.

async function answered(response) {
  let content;
  try {
    content = await response.json();
  } catch {
    throw new Error("The server's answer cannot be read.");
  }
  if (!response.ok) throw new Error(content.error || `The server answered with status ${response.status}.`);
  return content;
}

async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch {
    throw new Error("The explorer does not answer. Is lrrn explore still running?");
  }
}

export async function get(path) {
  return answered(await reach(path));
}

export async function post(path, content) {
  const options = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(content) };
  return answered(await reach(path, options));
}

// Rounded as far as the eye and the network care; it keeps requests small.
export const rounded = (pixels) => Array.from(pixels, (value) => Math.round(value * 1e6) / 1e6);

export class Latest {
  constructor(path, done, failed) {
    Object.assign(this, { path, done, failed, busy: false, waiting: null });
  }

  // `about` comes back to `done` with the answer.
  ask(content, about) {
    this.waiting = { content, about };
    if (!this.busy) this.next();
  }

  drop() {
    this.waiting = null;
  }

  async next() {
    this.busy = true;
    while (this.waiting) {
      const { content, about } = this.waiting;
      this.waiting = null;
      try {
        this.done(await post(this.path, content), about);
      } catch (error) {
        this.failed(error, about);
      }
    }
    this.busy = false;
  }
}
