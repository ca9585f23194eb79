// The two catalogues, and what a person chose: language, zone, scheme. Nothing is glued from pieces.
import { store } from './dom.js';

export const LANGUAGES = { en: 'EN', zh: '中' };
const kept = (name, usual) => localStorage.getItem(`stillframe-${name}`) ?? usual;

export const choices = store({
  language: kept('language', navigator.language.startsWith('zh') ? 'zh' : 'en'),
  zone: kept('zone', 'local'),
  scheme: kept('scheme', 'system'),
});

const catalogues = {};

export async function loadWords() {
  await Promise.all(Object.keys(LANGUAGES).map(async (language) => {
    const answer = await fetch(new URL(`./${language}.json`, import.meta.url));
    catalogues[language] = await answer.json();
  }));
  wear();
}

export function choose(name, value) {
  localStorage.setItem(`stillframe-${name}`, value);
  choices.set({ [name]: value });
  wear();
}

function wear() {
  const { language, scheme } = choices.value;
  document.documentElement.lang = language === 'zh' ? 'zh-Hans' : 'en';
  if (scheme === 'system') delete document.documentElement.dataset.scheme;
  else document.documentElement.dataset.scheme = scheme;
}

/** The words of a key, with what stands in its braces. */
export function t(key, given = {}) {
  const words = catalogues[choices.value.language]?.[key];
  if (words === undefined) return key;
  return words.replace(/\{(\w+)\}/g, (all, name) => (name in given ? String(given[name]) : all));
}

export const hasWords = (key) => catalogues[choices.value.language]?.[key] !== undefined;
