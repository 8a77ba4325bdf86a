// When what happened to one answer, as far as this page can tell, and a drawing of it over time.

export class Timings {
  constructor() {
    this.sent = performance.now();
    /** When the server began to answer. */
    this.accepted = null;
    /** Arrival of each piece of text. */
    this.text = [];
    /** Arrival of each piece of audio. */
    this.audio = [];
    /** Pairs: stretches of playback without a gap. */
    this.played = [];
    /** When the last byte had arrived, or the answer was given up. */
    this.ended = null;
    this.audioSeconds = 0;
  }

  /** Seconds from the request to `time`. */
  since(time) {
    return (time - this.sent) / 1000;
  }

  markAccepted() {
    this.accepted = performance.now();
  }

  markText() {
    this.text.push(performance.now());
  }

  markAudio(seconds) {
    this.audio.push(performance.now());
    this.audioSeconds += seconds;
  }

  markEnded() {
    this.ended ??= performance.now();
  }
}

export function formatSeconds(seconds) {
  return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}

/** What is shown until the first audio, `seconds` after the request. */
export function preparing(seconds) {
  return `Preparing speech, ${Math.floor(seconds)} s`;
}

const SVG = "http://www.w3.org/2000/svg";
const STEPS_S = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60];
const MAX_MARKS = 6;
const LANE_HEIGHT = 14;

/** Fills `figure` with one lane per stage and an axis in seconds. */
export function drawTimeline(figure, timings) {
  const now = performance.now();
  const lanes = lanesOf(timings, now);
  const end = Math.max(...lanes.flatMap(({ bars }) => bars.map(([, to]) => to)), 0.1);
  const marks = marksUpTo(end);
  figure.replaceChildren(...lanes.map((lane) => laneRow(lane, end, marks)), axisRow(end, marks));
  figure.setAttribute("aria-label", describe(lanes));
}

/** Bars are `[from, to]`, ticks are times, `pale` is a bar of waiting; all in seconds from the request. */
function lanesOf(timings, now) {
  const seconds = (time) => timings.since(time);
  const arrivals = (times) => (times.length > 0 ? [[seconds(times[0]), seconds(times.at(-1))]] : []);
  const accepted = seconds(timings.accepted ?? timings.ended ?? now);
  const answered = seconds(
    Math.min(timings.text[0] ?? Infinity, timings.audio[0] ?? Infinity, timings.ended ?? now),
  );
  const lanes = [
    { name: "Request", className: "request", bars: [[0, accepted]], pale: [accepted, answered], ticks: [] },
    { name: "Text", className: "text", bars: arrivals(timings.text), ticks: timings.text.map(seconds) },
  ];
  if (timings.audio.length > 0) {
    const played = timings.played.map(([from, to]) => [seconds(from), seconds(to)]);
    lanes.push({
      name: "Speech",
      className: "audio",
      bars: arrivals(timings.audio),
      ticks: timings.audio.map(seconds),
    });
    lanes.push({ name: "Playback", className: "played", bars: played, ticks: [] });
  }
  return lanes;
}

function marksUpTo(end) {
  const step = STEPS_S.find((step) => end / step < MAX_MARKS) ?? STEPS_S.at(-1);
  return Array.from({ length: Math.floor(end / step) + 1 }, (_, i) => Number((i * step).toFixed(1)));
}

function laneRow({ name, className, bars, pale, ticks }, end, marks) {
  const svg = drawing(LANE_HEIGHT);
  const x = (time) => percent(time / end);
  for (const mark of marks)
    svg.append(shape("line", { class: "grid", x1: x(mark), x2: x(mark), y1: 0, y2: LANE_HEIGHT }));
  const bar = (className, [from, to]) =>
    svg.append(
      shape("rect", {
        class: className,
        x: x(from),
        width: x(Math.max(0, to - from)),
        y: 3,
        height: LANE_HEIGHT - 6,
        rx: 2,
      }),
    );
  if (pale) bar("pale", pale);
  for (const span of bars) bar("span", span);
  for (const tick of ticks)
    svg.append(shape("rect", { class: "tick", x: x(tick), width: 1.5, y: 2, height: LANE_HEIGHT - 4 }));
  return row(name, svg, className);
}

function axisRow(end, marks) {
  const svg = drawing(16);
  for (const mark of marks) {
    const anchor = mark === 0 ? "start" : mark / end > 0.93 ? "end" : "middle";
    const label = shape("text", { x: percent(mark / end), y: 12, "text-anchor": anchor });
    label.textContent = mark === 0 ? "0 s" : String(mark);
    svg.append(label);
  }
  return row("", svg, "axis");
}

function row(name, svg, className) {
  const row = document.createElement("div");
  row.className = `lane ${className}`;
  const label = document.createElement("span");
  label.textContent = name;
  row.append(label, svg);
  return row;
}

function drawing(height) {
  return shape("svg", { height, "aria-hidden": "true" });
}

function shape(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

function percent(share) {
  return `${(100 * share).toFixed(3)}%`;
}

function describe(lanes) {
  const parts = lanes
    .filter(({ bars }) => bars.length > 0)
    .map(({ name, bars }) => `${name} from ${formatSeconds(bars[0][0])} to ${formatSeconds(bars.at(-1)[1])}`);
  return `Timeline: ${parts.join("; ")}.`;
}
