// Numbers and times as a person reads them. What is not known is –, which is not the same as 0.
import { choices } from './words.js';

export const UNKNOWN = '–';
const made = new Map();

function numbers(options) {
  const { language } = choices.value;
  const key = language + JSON.stringify(options);
  if (!made.has(key)) made.set(key, new Intl.NumberFormat(language, options));
  return made.get(key);
}

const isKnown = (value) => value !== null && value !== undefined && Number.isFinite(value);

/** In full. */
export const count = (value) => (isKnown(value) ? numbers({ maximumFractionDigits: 0 }).format(value) : UNKNOWN);

/** In three digits, such as 20.1K. */
export function brief(value) {
  if (!isKnown(value)) return UNKNOWN;
  if (Math.abs(value) < 1000) {
    return numbers({ maximumFractionDigits: Math.abs(value) < 10 ? 1 : 0 }).format(value);
  }
  return numbers({ notation: 'compact', maximumSignificantDigits: 3 }).format(value);
}

export const rate = (value) => (isKnown(value) ? `${brief(value)}/s` : UNKNOWN);
export const percent = (share) => (isKnown(share) ? numbers({ style: 'percent', maximumFractionDigits: 0 }).format(share) : UNKNOWN);

/** How far a source is behind: records, and milliseconds where it knows. */
export const lagInWords = (records, ms) => (isKnown(ms) ? `${brief(records)} · ${span(ms)}` : brief(records));

const UNITS = ['B', 'KB', 'MB', 'GB', 'TB', 'PB'];

export function bytes(value) {
  if (!isKnown(value)) return UNKNOWN;
  let at = 0;
  while (Math.abs(value) >= 1000 && at < UNITS.length - 1) { value /= 1000; at += 1; }
  const digits = at > 0 && Math.abs(value) < 10 ? 1 : 0;
  return `${numbers({ maximumFractionDigits: digits }).format(value)} ${UNITS[at]}`;
}

export const byteRate = (value) => (isKnown(value) ? `${bytes(value)}/s` : UNKNOWN);

/** A length of time, from milliseconds. */
export function span(ms) {
  if (!isKnown(ms)) return UNKNOWN;
  const sign = ms < 0 ? '−' : '';
  ms = Math.abs(ms);
  if (ms < 1000) return `${sign}${numbers({ maximumFractionDigits: ms < 10 ? 1 : 0 }).format(ms)} ms`;
  const seconds = ms / 1000;
  if (seconds < 60) return `${sign}${numbers({ maximumFractionDigits: seconds < 10 ? 1 : 0 }).format(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${sign}${minutes} min ${Math.floor(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${sign}${hours} h ${minutes % 60} min`;
  return `${sign}${numbers({}).format(Math.floor(hours / 24))} d ${hours % 24} h`;
}

/** Whole seconds and longer, for ages that would flicker otherwise. */
export const age = (ms) => (isKnown(ms) ? span(Math.max(0, Math.floor(ms / 1000) * 1000) || 0).replace(/^0 ms$/, '0 s') : UNKNOWN);

function clock(ms, options) {
  const { language, zone } = choices.value;
  const key = `${language} ${zone} ${JSON.stringify(options)}`;
  if (!made.has(key)) {
    const timeZone = zone === 'utc' ? 'UTC' : undefined;
    made.set(key, new Intl.DateTimeFormat(language, { hour12: false, timeZone, ...options }));
  }
  return made.get(key).format(ms);
}

const TIME = { hour: '2-digit', minute: '2-digit', second: '2-digit' };

export function time(ms, now = Date.now()) {
  if (!isKnown(ms) || ms <= 0) return UNKNOWN;
  const day = { month: 'short', day: 'numeric' };
  const isToday = Math.abs(now - ms) < 86400e3 && clock(ms, day) === clock(now, day);
  return isToday ? clock(ms, TIME) : clock(ms, { ...day, ...TIME });
}

/** To the millisecond, with the day: for a title that is looked at closely. */
export const moment = (ms) => (isKnown(ms) && ms > 0
  ? clock(ms, { year: 'numeric', month: 'short', day: 'numeric', ...TIME, fractionalSecondDigits: 3, timeZoneName: 'short' })
  : UNKNOWN);
