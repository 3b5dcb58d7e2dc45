// What the page remembers in this browser: the conversation and the settings. Never the key.

const CONVERSATION = "jserve.conversation";
const SETTINGS = "jserve.settings";

function read(name, fallback) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? fallback;
  } catch {
    return fallback;
  }
}

function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false; // full, or switched off
  }
}

export const loadSettings = () => read(SETTINGS, {});
export const saveSettings = (controls) => write(SETTINGS, controls);

export function loadConversation() {
  const found = read(CONVERSATION, []);
  return Array.isArray(found) ? found : [];
}

/** Keeps the conversation; without the tokens' probabilities where there is no room for them. */
export function saveConversation(entries) {
  if (!write(CONVERSATION, entries)) {
    write(CONVERSATION, entries.map(({ tokens, ...rest }) => rest));
  }
}
