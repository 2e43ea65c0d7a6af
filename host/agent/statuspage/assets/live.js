// Shows changes when they happen. The page is complete without this script: it has to be reloaded then.
"use strict";

const live = document.getElementById("live");
let busy = false;
let again = false;

// update fetches the page and replaces the parts that have changed.
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
        if (fresh && fresh.innerHTML !== part.innerHTML && !isSelected(part)) {
          part.replaceChildren(...fresh.childNodes);
        }
      }
      live.textContent = "Live: changes appear by themselves.";
    } catch {
      live.textContent = "The agent does not answer; what is shown may be old.";
    }
  }
  busy = false;
}

// isSelected reports whether a person has selected text of the part, to copy it.
function isSelected(part) {
  const selection = getSelection();
  return !selection.isCollapsed && selection.containsNode(part, true);
}

function follow() {
  const changes = new EventSource("events");
  changes.onmessage = update;
  changes.onerror = () => {
    live.textContent = "The agent does not answer; what is shown may be old.";
    if (changes.readyState === EventSource.CLOSED) { // it does not try again by itself
      setTimeout(follow, 10000);
    }
  };
}

follow();
