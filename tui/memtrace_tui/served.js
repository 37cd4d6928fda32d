// The address of the socket is this page's own; keys go to the terminal without a click.
document.addEventListener("DOMContentLoaded", () => {
  const scheme = location.protocol === "https:" ? "wss://" : "ws://";
  document.getElementById("terminal").dataset.sessionWebsocketUrl = scheme + location.host + "/ws";
  const focus = () => {
    const keys = document.querySelector(".xterm-helper-textarea");
    const ready = document.body.classList.contains("-first-byte");
    if (ready && keys && document.activeElement !== keys) keys.focus();
  };
  new MutationObserver(focus).observe(document.body, {attributes: true, childList: true, subtree: true});
  window.addEventListener("focus", focus);
});
