// Messages of a sequence of tokens, as they come. https://cookbook.openai.com/articles/openai-harmony

const START = 200006, END = 200007, MESSAGE = 200008, CALL = 200012, RETURN = 200002;
const ENDS = [END, CALL, RETURN, 199999];
const CONTROL = 199998; // and all ids after it

// Headers as the model was trained to write them. Any other one was repaired by the server's parser.
const NAME = '[A-Za-z0-9_.-]+';
const TYPE = '(?: ?<\\|constrain\\|>\\w+| json| code)?';
const PROPER = new RegExp(
  `^<\\|start\\|>assistant(?: to=${NAME})?<\\|channel\\|>(?:analysis|commentary|final)(?: to=${NAME})?${TYPE}<\\|message\\|>$`,
);

export const isControl = (id) => id >= CONTROL;

export const isMessage = (id) => id === MESSAGE;

export class Message {
  constructor() {
    this.header = '';
    this.inBody = false;
    this.ended = false;
  }

  get role() {
    return /^(?:<\|start\|>)?([^\s<]+)/.exec(this.header)?.[1] ?? '';
  }

  get channel() {
    return /.*<\|channel\|>\s*([a-z]+)/.exec(this.header)?.[1] ?? '';
  }

  get recipient() {
    return /to=([^\s<]+)/.exec(this.header)?.[1] ?? '';
  }

  get repaired() {
    return this.inBody && !PROPER.test(this.header);
  }

  get kind() {
    if (['system', 'developer', 'user'].includes(this.role)) return this.role;
    if (this.role && this.role !== 'assistant') return 'tool';
    return this.recipient && this.channel !== 'analysis' ? 'call' : this.channel || 'assistant';
  }
}

export class Reader {
  constructor() {
    this.message = null;
  }

  // The message that the next token belongs to.
  read(id, text) {
    if (!this.message || id === START || (this.message.ended && !ENDS.includes(id))) this.message = new Message();
    const message = this.message;
    if (!message.inBody) message.header += text;
    if (id === MESSAGE) message.inBody = true;
    if (ENDS.includes(id)) message.ended = true;
    return message;
  }
}
