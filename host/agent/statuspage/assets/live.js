// Shows changes within about three seconds. Without this script the page is complete too, but has to be reloaded.
"use strict";

const live = document.getElementById("live");
let busy = false;

// update fetches the page, if a person can see it, and takes over what has changed.
async function update() {
  if (busy || document.hidden) {
    return;
  }
  busy = true;
  try {
    const reply = await fetch(location.pathname, {signal: AbortSignal.timeout(10000)});
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

setInterval(update, 2000);
document.addEventListener("visibilitychange", update);
update();
