// The search of pages that are opened from a disk. Browsers start no worker from a file, so the one
// of the search runs in a hidden frame, and gets its messages there. The theme knows this by the name
// IFrameWorker, and the plugin "offline" by the name of this file.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.scope = frame.contentWindow;
      this.scope.document.open(); // or Firefox would replace the document later
      this.scope.document.write("<head></head>");
      this.scope.document.close();
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.scope.importScripts = async (...urls) => {
        for (const each of urls) await this.load(each);
      };
      this.ready = this.load(url);
    }

    load(url) {
      const script = this.scope.document.createElement("script");
      script.src = url;
      this.scope.document.head.append(script);
      return new Promise((resolve, reject) => Object.assign(script, { onload: resolve, onerror: reject }));
    }

    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new this.scope.MessageEvent("message", { data })));
    }
  };
}
