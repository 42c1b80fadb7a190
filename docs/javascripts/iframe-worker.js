// The search of the theme runs in a web worker, which browsers refuse for pages that are opened from files.
// For these the worker is a hidden frame of the same page, with the part of the interface that the theme uses.
if (location.protocol === "file:") {
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super()
      // What is posted before the script of the worker has been loaded waits here.
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.inner = frame.contentWindow
      const page = frame.contentDocument
      page.open()
      page.write("<!doctype html><html><body></body></html>")
      page.close()
      this.inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      this.inner.importScripts = (...urls) =>
        urls.reduce((before, each) => before.then(() => this.load(each)), Promise.resolve())
      this.load(url).then(() => {
        const posted = this.waiting
        this.waiting = undefined
        posted.forEach((data) => this.postMessage(data))
      })
    }

    load(url) {
      return new Promise((done, failed) => {
        const script = this.inner.document.createElement("script")
        script.src = url
        script.onload = done
        script.onerror = () => failed(new Error(`${url} cannot be loaded`))
        this.inner.document.body.appendChild(script)
      })
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data)
      else this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data }))
    }
  }
  // The script of the worker looks for this name to find its own folder.
  window.IFrameWorker = window.Worker = IFrameWorker
}
