// A parser for XML documents of S3: elements and text. DOMParser is not used, because the content security policy of the
// page forbids turning text into markup.

export class XmlElement {
  readonly children: XmlElement[] = [];
  content = "";

  constructor(readonly name: string) {}

  all(name: string): XmlElement[] {
    return this.children.filter((child) => child.name === name);
  }

  text(name: string): string {
    return this.children.find((child) => child.name === name)?.content ?? "";
  }

  number(name: string): number {
    return Number(this.text(name));
  }
}

const ENTITIES: Record<string, string> = { lt: "<", gt: ">", amp: "&", quot: '"', apos: "'" };

function decode(text: string): string {
  return text.replace(/&(?:#x([0-9a-f]+)|#([0-9]+)|([a-z]+));/gi, (whole, hex, decimal, name) => {
    if (hex) return String.fromCodePoint(parseInt(hex, 16));
    if (decimal) return String.fromCodePoint(parseInt(decimal, 10));
    return ENTITIES[name as string] ?? whole;
  });
}

/** Returns the root of a document. Throws Error for other text. */
export function parseXml(text: string): XmlElement {
  const top = new XmlElement("");
  const open = [top];
  for (const match of text.matchAll(/<\?[^>]*\?>|<(\/?)([\w:.-]+)[^>]*?(\/?)>|([^<]+)/g)) {
    const [, closing, name, empty, content] = match;
    const parent = open[open.length - 1]!;
    if (content !== undefined) parent.content += decode(content);
    else if (closing) {
      if (parent.name !== name) throw new Error(`</${name}> closes <${parent.name}>`);
      open.pop();
    } else if (name) {
      const element = new XmlElement(name);
      parent.children.push(element);
      if (!empty) open.push(element);
    }
  }
  const root = top.children[0];
  if (!root || open.length !== 1) throw new Error("the node's XML response is incomplete; load the page again");
  return root;
}
