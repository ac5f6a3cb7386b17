// Asking for a key where the balancer wants one. It stays in this tab.

import { keepKey } from "./api.js";
import { byId } from "./elements.js";

/** Ask, and go on with `again` once there is a key. */
export function askKey(reason, again) {
  const dialog = byId("key-dialog");
  if (dialog.open) return;
  byId("key-reason").textContent = reason;
  byId("key").value = "";
  dialog.onclose = () => {
    const key = byId("key").value;
    byId("key").value = "";
    if (dialog.returnValue !== "key" || !key) return;
    keepKey("api", key);
    again();
  };
  dialog.returnValue = "";
  dialog.showModal();
}

byId("key-cancel").addEventListener("click", () => byId("key-dialog").close(""));
