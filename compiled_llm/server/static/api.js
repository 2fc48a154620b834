// Requests to the server that the page came from, with the key, and what went wrong in words.

let key = sessionStorage.getItem("key") ?? "";

export function useKey(given) {
  key = given;
  sessionStorage.setItem("key", given);
}

export const hasKey = () => key !== "";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;  // 0: there was no answer
  }
}

// The answer to a GET, or with a body to a POST. ApiError: it has another status than 200, or there is none.
export async function ask(path, body, signal) {
  const headers = {...(key && {Authorization: `Bearer ${key}`}), ...(body && {"Content-Type": "application/json"})};
  let answer;
  try {
    answer = await fetch(path, {method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal});
  } catch (error) {
    throw error.name === "AbortError" ? error : new ApiError(0, "The server does not answer. Does it still run?");
  }
  if (answer.ok) return answer;
  const text = await answer.text();
  const wait = answer.headers.get("retry-after");
  throw new ApiError(answer.status, messageOf(text, answer.status) + (wait ? ` (again in ${wait} s)` : ""));
}

function messageOf(text, status) {
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `The server answers with status ${status}.`;
  }
}

// The values of a stream's events, until [DONE]. ApiError: as ask, or the stream has an error, or breaks off.
export async function* events(path, body, signal) {
  const answer = await ask(path, body, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const {value, done} = await reader.read();
      if (done) throw new ApiError(0, "The server broke off its answer.");
      const parts = (text + value).split("\n\n");
      text = parts.pop();
      for (const part of parts.filter(one => one.startsWith("data: "))) {
        const content = part.slice("data: ".length);
        if (content === "[DONE]") return;
        const event = JSON.parse(content);
        if (event.error) throw new ApiError(event.error.code, event.error.message);
        yield event;
      }
    }
  } catch (error) {
    throw error instanceof TypeError ? new ApiError(0, "The connection to the server broke.") : error;
  } finally {
    reader.cancel().catch(() => {});
  }
}
