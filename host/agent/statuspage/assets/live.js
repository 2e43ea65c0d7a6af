// Shows changes when they happen. Without this script the page is complete too, but has to be reloaded.
"use strict";

const live = document.getElementById("live");
let busy = false;
let again = false;
let changes; // the stream of messages

// update fetches the page and takes over what has changed.
async function update() {
  again = true;
  if (busy) {
    return;
  }
  busy = true;
  while (again) {
    again = false;
    try {
      const reply = await fetch(location.pathname);
      if (!reply.ok) {
        throw new Error(reply.statusText);
      }
      const next = new DOMParser().parseFromString(await reply.text(), "text/html");
      for (const part of document.querySelectorAll(".part")) {
        const fresh = next.getElementById(part.id);
        if (fresh && !isSelected(part)) {
          takeOver(part, fresh);
        }
      }
      say("Live: changes appear by themselves.");
    } catch {
      say("The agent does not answer; what is shown may be old.");
    }
  }
  busy = false;
}

// takeOver makes old like fresh. Nodes that are equal stay: a relative time changes no more than its text.
function takeOver(old, fresh) {
  const from = [...old.childNodes];
  const to = [...fresh.childNodes];
  if (old.isEqualNode(fresh)) {
    return;
  }
  if (!old.cloneNode().isEqualNode(fresh.cloneNode())) { // the text, or the name or attributes of an element
    old.replaceWith(fresh);
  } else if (from.length !== to.length) {
    old.replaceChildren(...to);
  } else {
    from.forEach((child, i) => takeOver(child, to[i]));
  }
}

// isSelected reports whether a person has selected text of the part, to copy it.
function isSelected(part) {
  const selection = getSelection();
  return !selection.isCollapsed && selection.containsNode(part, true);
}

// say shows the state of the page itself. Screen readers read it out when it changes.
function say(text) {
  if (live.textContent !== text) {
    live.textContent = text;
  }
}

// follow updates the page at each message, while a person can see it: a browser opens only six connections to a server,
// for all its tabs.
function follow() {
  changes?.close();
  if (document.hidden) {
    return;
  }
  changes = new EventSource("events");
  changes.onmessage = update;
  changes.onerror = () => {
    update(); // shows whether the agent answers
    if (changes.readyState === EventSource.CLOSED) { // it does not try again by itself, as after "too many browsers"
      setTimeout(follow, 10000);
    }
  };
}

document.addEventListener("visibilitychange", follow);
follow();
