// The search runs in a worker, which browsers refuse to pages opened from a folder (file://). There it runs in a
// hidden frame instead. The theme knows this stand-in by the name IFrameWorker.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.inside = frame.contentWindow;
      window.addEventListener("message", event => {
        if (event.source === this.inside) this.dispatchEvent(new MessageEvent("message", { data: event.data }));
      });
      const load = (page, source) => new Promise((resolve, reject) => {
        const script = page.createElement("script");
        Object.assign(script, { src: source, onload: resolve, onerror: reject });
        page.body.appendChild(script);
      });
      const page = frame.contentDocument;
      this.inside.postMessage = data => window.dispatchEvent(new MessageEvent("message", { data, source: this.inside }));
      this.inside.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(page, source)), Promise.resolve());
      this.ready = load(page, url);
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
  window.Worker = window.IFrameWorker;
}
