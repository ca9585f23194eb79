// Preact and htm, as all other files use them. Text is always set as text.
import { h, render, Fragment } from './vendor/preact.js';
import htm from './vendor/htm.js';
export { useState, useEffect, useMemo, useRef, useCallback } from './vendor/hooks.js';
import { useState, useEffect } from './vendor/hooks.js';

export const html = htm.bind(h);
export { render, Fragment };

/** A value that views are drawn from. `set` takes what changes. */
export function store(value) {
  const heard = new Set();
  return {
    get value() { return value; },
    set(changed) {
      value = { ...value, ...changed };
      for (const each of [...heard]) each();
    },
    listen(each) {
      heard.add(each);
      return () => heard.delete(each);
    },
  };
}

/** The store's value; what uses it is drawn again when it changes. */
export function useStore(of) {
  const [, draw] = useState(0);
  useEffect(() => of.listen(() => draw((n) => n + 1)), [of]);
  return of.value;
}

/** Class names, the false ones left out. */
export const classes = (...names) => names.filter(Boolean).join(' ');
