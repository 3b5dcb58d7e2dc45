// Server-sent events from the bytes of a response, cut anywhere: inside a character, a line end, a field.

/** Lines and fields of an event stream; `feed` gives the data of every event that is complete. */
export class EventParser {
  #rest = "";
  #data = [];
  #skipsNewline = false; // a CR ended the last line: an LF right behind it belongs to it

  feed(text) {
    const events = [];
    let start = 0;
    if (this.#skipsNewline && text) {
      if (text[0] === "\n") start = 1;
      this.#skipsNewline = false;
    }
    for (let at = start; at < text.length; at++) {
      const c = text[at];
      if (c !== "\n" && c !== "\r") continue;
      this.#line(this.#rest + text.slice(start, at), events);
      this.#rest = "";
      if (c === "\r" && text[at + 1] === "\n") at++;
      else if (c === "\r" && at + 1 === text.length) this.#skipsNewline = true;
      start = at + 1;
    }
    this.#rest += text.slice(start);
    return events;
  }

  #line(line, events) {
    if (line === "") {
      if (this.#data.length) events.push(this.#data.join("\n"));
      this.#data = [];
    } else if (line.startsWith("data:")) {
      this.#data.push(line.slice(line[5] === " " ? 6 : 5));
    } else if (line === "data") {
      this.#data.push("");
    } // comments (": keep-alive") and other fields mean nothing here
  }
}

/** The parsed JSON of every event up to "[DONE]". Throws when the stream ends before that. */
export async function* readEvents(stream) {
  const parser = new EventParser();
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new Error("The connection ended before the answer did.");
      for (const data of parser.feed(decoder.decode(value, { stream: true }))) {
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
