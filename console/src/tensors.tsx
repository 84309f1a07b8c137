// Tensors as images, colour maps and waveforms.

import type { JSX } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";
import { picture, wave, type Tensor } from "./frame";

export function Picture({ tensor, name, large }: { tensor: Tensor; name: string; large?: boolean }): JSX.Element {
  const canvas = useRef<HTMLCanvasElement>(null);
  const found = picture(tensor)!;
  // Before the browser paints, so that an image never appears above the name of another row.
  useLayoutEffect(() => {
    // Keeps the canvas in memory: the pixels are written once and composited with the page.
    const context = canvas.current?.getContext("2d", { willReadFrequently: true });
    context?.putImageData(new ImageData(found.pixels, found.width, found.height), 0, 0);
  });
  return (
    <canvas
      ref={canvas}
      width={found.width}
      height={found.height}
      class={large ? "large" : ""}
      role="img"
      aria-label={`${name}, ${found.width} by ${found.height} pixels`}
    />
  );
}

const COLUMNS = 600;
const HEIGHT = 80;

/** A waveform: each column spans its minimum to its maximum. */
export function Wave({ tensor, name }: { tensor: Tensor; name: string }): JSX.Element {
  const columns = wave(tensor, COLUMNS) ?? [];
  const top = Math.max(...columns.map(({ low, high }) => Math.max(-low, high)), 1e-9);
  const y = (value: number): string => (HEIGHT / 2 - (value / top) * (HEIGHT / 2 - 1)).toFixed(1);
  const line = columns.map(({ low, high }, x) => `M${x},${y(high)}V${y(low)}`).join("");
  return (
    <svg viewBox={`0 0 ${columns.length} ${HEIGHT}`} preserveAspectRatio="none" class="wave" role="img" aria-label={`${name}, ${tensor.shape[0]} values`}>
      <path d={line} class="line" vector-effect="non-scaling-stroke" />
    </svg>
  );
}
